"""The summary: its numbers are the session's, they add up, and they fit a terminal."""

from __future__ import annotations

import re
import time
from collections import Counter
from pathlib import Path
from random import Random

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings

from llamacpp_instr.base.terminal import counted
from llamacpp_instr.converters.analyses import summary
from llamacpp_instr.converters.analyses.summary import ALL_LAYERS, compute_summary
from llamacpp_instr.log import schema as s
from llamacpp_instr.log.graph.ops import BLOCKS
from llamacpp_instr.log.session import load_session
from llamacpp_instr.report.render import render_text
from llamacpp_instr.report.report import Report
from tests.kit.in_process import json_reports, printed
from tests.kit.made_log import make_log
from tests.kit.reports import by_title, column, rows, session_of
from tests.kit.sketched_log import Sketch
from tests.kit.steady_log import write
from tests.kit.strategies import logs, unclosed_logs

EVENTS = make_log(Random(2).randint, n_contexts=2, level="detailed")
DIALECTS = Path(__file__).parent.parent / "fixtures" / "dialects"


BLOCK_OF = {
    "Qcur": "attention", "attn_out": "attention", "ffn_up": "feed-forward",
    "ffn_out": "feed-forward", "result_output": "output",
}  # fmt: skip
"""where the model's own names say that a node is"""


def sections(directory: Path, events: list[s.Event]) -> dict[str, Report]:
    return by_title(compute_summary(session_of(directory / "session.log", events)))


def notes(found: dict[str, Report]) -> str:
    return " ".join(note for report in found.values() for note in report.notes)


def warm_up_at(t: int) -> list[s.Event]:
    """The marks of a warm-up that begins then."""
    begin = s.Mark(t=t, mark=90, name="warm-up", phase="begin")
    return [begin, msgspec.structs.replace(begin, t=t + 1, phase="end")]


def durations(events: list[s.Event], phase: str) -> list[int]:
    begins = {e.step: e for e in events if isinstance(e, s.StepBegin) and e.phase == phase}
    return [e.t - begins[e.step].t for e in events if isinstance(e, s.StepEnd) and e.step in begins]


@given(events=logs())
@settings(max_examples=12)
def test_the_time_adds_up_to_the_steps(events, tmp_path_factory):
    found = sections(tmp_path_factory.mktemp("log"), events)
    for phase in ("prefill", "decode"):
        total = sum(durations(events, phase))
        if total:
            assert sum(column(found["Where the time went"], phase)) == total
            assert sum(column(found["Where the time went"], f"of {phase}")) == pytest.approx(1)
            assert all(ns >= 0 for ns in column(found["Where the time went"], phase))


def test_speed_is_tokens_by_the_steps_own_time(tmp_path):
    speed = sections(tmp_path, EVENTS)["Speed"]
    rates = 1e9 / np.array(durations(EVENTS, "decode"))
    (decode,) = [row for row in speed.rows if row[0] == "decode"]
    assert decode[1:5] == [len(rates), 0, len(rates), sum(durations(EVENTS, "decode"))]
    assert decode[5:] == pytest.approx(np.quantile(rates, [0.5, 0.1, 0.9]))


def test_layers_and_ops_are_those_of_the_log(tmp_path):
    found = sections(tmp_path, EVENTS)
    ops = [e for e in EVENTS if isinstance(e, s.Ops)]
    assert sum(column(found["Top ops"], "calls")) == sum(len(e.dur) for e in ops)
    assert sum(column(found["Top ops"], "time")) == sum(sum(e.dur) for e in ops)
    layers = [e for e in EVENTS if isinstance(e, s.Layers)]
    total = sum(column(found["Layers"], "prefill")) + sum(column(found["Layers"], "decode"))
    assert total == sum(sum(e.dur) for e in layers)


def test_where_the_time_went_is_what_the_events_say(tmp_path):
    events = [msgspec.structs.replace(e, recorder=3 + e.step) if isinstance(e, s.StepEnd) else e
              for e in EVENTS]  # fmt: skip
    phase = {e.step: e.phase for e in events if isinstance(e, s.StepBegin)}
    graphs = {e.graph: e for e in events if isinstance(e, s.Graph)}
    plans = {e.plan: e for e in events if isinstance(e, s.Plan)}
    computes = {e.compute: e for e in events if isinstance(e, s.Compute)}
    wanted: dict[str, dict[str, int]] = {"prefill": Counter(), "decode": Counter()}
    for end in (e for e in events if isinstance(e, s.StepEnd)):
        wanted[phase[end.step]]["the recorder"] += end.recorder
    for compute in computes.values():
        of_phase = wanted[phase[compute.step]]
        of_phase["KV slots"] += compute.apply
        of_phase["graph build"] += compute.build + compute.alloc
        of_phase["between ops"] += compute.dur
    least = {phase: Counter() for phase in wanted}
    in_ops = Counter()
    for ops in (e for e in events if isinstance(e, s.Ops)):
        of = phase[computes[ops.compute].step]
        wanted[of]["between ops"] -= sum(ops.dur)
        in_ops[of] += sum(ops.dur)
        nodes = graphs[plans[ops.plan].graph].nodes
        for first, dur in zip(plans[ops.plan].node, ops.dur, strict=True):
            least[of][BLOCK_OF.get(nodes.name[first].partition("-")[0], "other")] += dur
    found = sections(tmp_path, events)["Where the time went"]
    for of, names in wanted.items():
        spent = dict(zip(column(found, "Block"), column(found, of), strict=True))
        assert {name: spent[name] for name in names} == names
        of_blocks = {block: spent.get(block, 0) for block in BLOCKS}
        assert sum(of_blocks.values()) == in_ops[of]
        assert all(of_blocks[block] >= least[of][block] > 0 for block in BLOCK_OF.values())


def test_the_speed_of_prompts_and_of_sampling(tmp_path):
    begins = {e.step: e for e in EVENTS if isinstance(e, s.StepBegin)}
    ends = {e.step: e.t for e in EVENTS if isinstance(e, s.StepEnd)}
    prompts = [e for e in begins.values() if e.n_tokens > 1]
    speed = sections(tmp_path, EVENTS)["Speed"]
    (prefill,) = [row for row in speed.rows if row[0] == "prefill"]
    rates = [e.n_tokens / (ends[e.step] - e.t) * 1e9 for e in prompts]
    assert prefill[1:4] == [len(prompts), sum(e.n_tokens for e in prompts), len(prompts)]
    assert prefill[5:] == pytest.approx(np.quantile(rates, [0.5, 0.1, 0.9]))
    durs = [e.dur * (1 + e.index) for e in EVENTS if isinstance(e, s.Token)]
    slower = [msgspec.structs.replace(e, dur=e.dur * (1 + e.index)) if isinstance(e, s.Token) else e
              for e in EVENTS]  # fmt: skip
    figures = sections(tmp_path, slower)["Speed"].figures
    assert figures["sampling, each"] == (pytest.approx(sum(durs) / len(durs)), "ns")
    computes = [e for e in EVENTS if isinstance(e, s.Compute)]
    assert figures["graphs reused"] == (sum(e.reused for e in computes), "count")
    assert figures["graphs built"] == (sum(not e.reused for e in computes), "count")
    faults = [e.minflt + e.majflt for e in EVENTS if isinstance(e, s.StepEnd)]
    assert figures["faults of later steps, mean"][0] == pytest.approx(np.mean(faults[1:]))


def test_the_top_ops_by_hand(tmp_path):
    """MUL_MAT: 2 * 4 * 8 FLOPs, and 64 + 16 + 32 bytes; ADD: 8 FLOPs."""
    log = Sketch()
    for i in range(4):
        log.step(1000, sampled=1, ops=([100 * (i + 1), 150], [0, 0]))
    matmul, add = rows(sections(tmp_path, log.events)["Top ops"])
    assert (matmul["Op"], matmul["calls"], matmul["time"]) == ("MUL_MAT f16", 4, 1000)
    assert (add["Op"], add["calls"], add["time"]) == ("ADD", 4, 600)
    assert (matmul["each"], add["each"]) == (250, 150)
    assert (matmul["share"], add["share"]) == (pytest.approx(0.625), pytest.approx(0.375))
    assert matmul["FLOP/s"] == pytest.approx(4 * 64 / 1000e-9)
    assert matmul["bytes/s"] == pytest.approx(4 * 112 / 1000e-9)


def test_the_ops_that_are_not_shown_have_a_share(tmp_path, monkeypatch):
    monkeypatch.setattr(summary, "TOP_OPS", 3)
    whole = Counter()
    graphs = {e.graph: e for e in EVENTS if isinstance(e, s.Graph)}
    plans = {e.plan: e for e in EVENTS if isinstance(e, s.Plan)}
    for ops in (e for e in EVENTS if isinstance(e, s.Ops)):
        nodes = graphs[plans[ops.plan].graph].nodes
        for first, dur in zip(plans[ops.plan].node, ops.dur, strict=True):
            whole[nodes.op[first]] += dur
    top = sections(tmp_path, EVENTS)["Top ops"]
    times = column(top, "time")
    assert len(times) == 3
    assert times == sorted(times, reverse=True)
    total = sum(whole.values())
    rest = 1 - sum(times) / total
    assert top.figures["share of other ops"] == (pytest.approx(rest), "fraction")
    n = top.figures["ops"][0] - 3
    assert f"Not shown: {n} other ops, {100 * rest:.1f} % of the time." in top.notes


def test_the_memory_is_the_latest_of_each_context_and_the_most_of_its_cache(tmp_path):
    events, n = [], 0
    for event in EVENTS:
        if isinstance(event, s.Memory):
            n += 1
            uses = [s.BufferUse(buffer="CPU", model=n, context=10 * n, compute=100 * n)]
            event = msgspec.structs.replace(event, buffers=uses, rss=50 - n)
        events.append(event)
    kv = next(e for e in events if isinstance(e, s.Kv))
    late = msgspec.structs.replace(kv, t=events[-1].t, step=-1, op="clear", used=0, bytes=0)
    events.insert(-1, late)  # the cache is empty again
    latest = {e.ctx: e.buffers[0] for e in events if isinstance(e, s.Memory)}
    memory = sections(tmp_path, events)["Memory"]
    assert memory.rows == [
        [ctx, "CPU", of.model, of.context, of.compute] for ctx, of in sorted(latest.items())
    ]
    assert memory.figures["resident"] == (49, "bytes")
    for ctx in latest:
        most = max((e for e in events if isinstance(e, s.Kv) and e.ctx == ctx),
                   key=lambda e: e.used)  # fmt: skip
        assert memory.figures[f"cells used of context {ctx}"] == (most.used, "count")
        assert memory.figures[f"bytes used of context {ctx}"] == (most.bytes, "bytes")
        assert memory.figures[f"cells of context {ctx}"] == (most.size, "count")


def test_the_recorder_s_figures_are_those_of_its_last_event(tmp_path):
    end = msgspec.structs.replace(EVENTS[-1], dropped=3, dropped_ops=4)
    found = sections(tmp_path, [*EVENTS[:-1], end])
    figures = found["Recorder"].figures
    assert figures["events"] == (len(EVENTS), "count")
    assert figures["bytes"] == (end.bytes, "bytes")
    assert figures["events dropped"] == (3, "count")
    assert figures["ops dropped"] == (4, "count")
    assert figures["overhead"] == (end.overhead_ns, "ns")
    params = sum(e.params for e in EVENTS if isinstance(e, s.Model))
    assert found["Session"].figures["parameters"] == (params, "count")


def test_a_share_of_a_phase_is_one_of_its_steps_time(tmp_path):
    """This also holds for the table of layers, which do not cover all of that time."""
    found = sections(tmp_path, EVENTS)
    for name in ("Where the time went", "Layers"):
        for phase in ("prefill", "decode"):
            total = sum(durations(EVENTS, phase))
            spent, shares = column(found[name], phase), column(found[name], f"of {phase}")
            assert shares == pytest.approx([ns / total for ns in spent])


def test_warm_up_runs_and_failed_steps_are_left_out_and_counted(tmp_path):
    sampled = [e for e in EVENTS if isinstance(e, s.Token)]
    begin = next(e for e in EVENTS if isinstance(e, s.StepBegin) and e.step == sampled[0].step)
    whole = sections(tmp_path, EVENTS)
    assert f"each of {len(sampled)} tokens" in notes(whole)
    found = sections(tmp_path, [*EVENTS, *warm_up_at(begin.t)])
    n_left_out = sum(e.step == begin.step for e in sampled)
    assert f"each of {len(sampled) - n_left_out} tokens" in notes(found)
    n_warm = sum(column(whole["Speed"], "steps")) - sum(column(found["Speed"], "steps"))
    assert n_warm >= 1
    assert f"Left out: {counted(n_warm, 'step')} of warm-up runs." in notes(found)
    first = next(e for e in EVENTS if isinstance(e, s.StepEnd))
    failed = [msgspec.structs.replace(e, status=1) if e is first else e for e in EVENTS]
    assert "Left out: 1 failed step." in notes(sections(tmp_path, failed))


def test_it_says_what_a_reader_has_to_know(tmp_path):
    text = notes(sections(tmp_path, EVENTS))
    end = EVENTS[-1]
    assert isinstance(end, s.SessionEnd)
    assert f"{100 * end.overhead_ns / end.decode_ns:.2f} % of the time in decode" in text
    assert "dropped 0 events and 0 ops." in text
    reused = sum(e.reused for e in EVENTS if isinstance(e, s.Compute))
    n_graphs = sum(isinstance(e, s.Graph) for e in EVENTS)
    assert f"built {counted(n_graphs, 'time')} and reused {counted(reused, 'time')}." in text
    assert "The log was not closed" in notes(sections(tmp_path, EVENTS[:-1]))
    minimal = make_log(Random(2).randint, n_contexts=1, level="minimal")
    assert "blocks need the level detailed" in notes(sections(tmp_path, minimal))


@pytest.mark.parametrize(
    ("n", "number"), [(12_345, "12,345 "), (3_670_000, "3.7M "), (7_240_000_000, "7.24B ")]
)
def test_a_model_has_its_number_of_parameters(n, number, tmp_path):
    events = [msgspec.structs.replace(e, params=n) if isinstance(e, s.Model) else e for e in EVENTS]
    (model,) = [row[1] for row in sections(tmp_path, events)["Session"].rows if row[0] == "model"]
    assert model.endswith(f", {number}parameters")


def test_a_cold_start_shows(tmp_path):
    first = next(e for e in EVENTS if isinstance(e, s.StepEnd))
    cold = msgspec.structs.replace(first, minflt=9000, majflt=7)
    events = [cold if e is first else e for e in EVENTS]
    assert "took 9,000 minor and 7 major page faults" in notes(sections(tmp_path, events))


@pytest.mark.parametrize(("first", "later", "cold"), [
    (101, 25, True), (100, 25, False), (200, 51, False), (200, 49, True),
])  # fmt: skip
def test_a_start_is_cold_if_the_others_have_few_page_faults(first, later, cold, tmp_path):
    log = Sketch()
    for i in range(3):
        log.step(1000, faults=later if i else first)
    assert ("Cold start" in notes(sections(tmp_path, log.events))) is cold


@given(events=unclosed_logs())
@settings(max_examples=12)
def test_any_log_has_a_summary_of_at_most_80_columns(events, tmp_path_factory):
    found = sections(tmp_path_factory.mktemp("log"), events)
    assert found["Session"].rows
    for line in render_text(list(found.values())).splitlines():
        assert len(line) <= 80
        assert line == line.rstrip()


@pytest.mark.parametrize("name", ["flat-event.log", "flat-type.log"])
def test_old_dialects_have_a_summary(name):
    reports = compute_summary(load_session(DIALECTS / name))
    assert "Converted from an earlier fork's log" in render_text(reports)


def test_the_command_prints_text_or_json(tmp_path):
    path = write(tmp_path / "session.log", EVENTS)
    assert printed("summary", path).startswith("Session\n")
    speed = next(
        section for section in json_reports("summary", path) if section["title"] == "Speed"
    )
    assert speed["units"]["time"] == "ns"
    decode = next(row for row in speed["rows"] if row["Phase"] == "decode")
    assert decode["time"] == sum(durations(EVENTS, "decode"))


def test_the_slowest_layers_are_of_layers(tmp_path):
    """What is outside of layers has a row, but does not count as a layer."""
    n = ALL_LAYERS + 18
    events = make_log(Random(2).randint, n_contexts=1, level="detailed", n_layers=n)
    spent = dict.fromkeys(range(-1, n), 0)
    for of in (event for event in events if isinstance(event, s.Layers)):
        for layer, dur in zip(of.layer, of.dur, strict=True):
            spent[layer] += dur
    slowest = sorted(range(n), key=lambda layer: -spent[layer])[:ALL_LAYERS]
    layers = sections(tmp_path, events)["Layers"]
    assert column(layers, "Layer") == [-1, *sorted(slowest)]
    for row in layers.rows:
        assert sum(row[1::2]) == spent[row[0]]
    assert f"The slowest of {n}; " in " ".join(layers.notes)
    median = float(np.median([spent[layer] for layer in range(n)]))
    assert layers.figures == {"layers": (n, "count"), "median layer": (median, "ns")}


def test_a_section_has_the_largest_of_many_rows(tmp_path):
    events = make_log(Random(2).randint, n_contexts=1)
    memory = next(event for event in events if isinstance(event, s.Memory))
    memory.buffers = [s.BufferUse(buffer=f"B{i}", model=i) for i in range(900)]
    found = by_title(compute_summary(session_of(tmp_path / "many.log", events)))["Memory"]
    text = render_text([found])
    assert re.findall(r"\bB\d+", text) == [f"B{i}" for i in range(800, 900)]
    assert "Not shown: 800 more rows." in text


def test_layers_take_time_in_proportion_to_their_number(tmp_path):
    """160,000 layers took more than three minutes, and twice as many four times as long; now they
    take a second."""
    events = make_log(Random(2).randint, n_contexts=1, level="verbose")[:-1]
    layers = next(event for event in events if isinstance(event, s.Layers))
    n = 160_000
    layers.layer, layers.dur, layers.gap = list(range(n)), [1] * n, None
    session = session_of(tmp_path / "long.log", events)
    begin = time.process_time()
    found = by_title(compute_summary(session))
    assert time.process_time() - begin < 60
    assert len(found["Layers"].rows) == ALL_LAYERS


def test_a_step_ends_when_its_result_is_ready(tmp_path):
    """Asynchronous backends return before that; llama.cpp then waits for them."""
    waits: dict[int, int] = {}
    events: list[s.Event] = []
    for event in make_log(Random(2).randint, n_contexts=1, level="detailed"):
        events.append(event)
        if isinstance(event, s.StepEnd):
            waits[event.step] = 10 if event.step % 2 else 30_001 + event.step
            events.append(s.Sync(t=event.t, ctx=0, dur=waits[event.step]))
    steps = session_of(tmp_path / "waits.log", events).steps
    long = {step: wait for step, wait in waits.items() if wait > 30_000}
    late = (steps["end"] - steps["returned"]).tolist()
    assert dict(zip(steps["step"].tolist(), late, strict=True)) == {
        step: long.get(step, 0) for step in waits
    }
    assert long
    time = sections(tmp_path, events)["Where the time went"]
    device = next(row for row in time.rows if row[0] == "device waits")
    assert sum(ns for ns in device[1::2] if isinstance(ns, int)) == sum(long.values())


@pytest.mark.parametrize("flash_attn", [True, False])
def test_attention_without_its_fused_kernel_is_named(tmp_path, flash_attn):
    events = [
        msgspec.structs.replace(event, flash_attn=flash_attn or event.ctx > 0)
        if isinstance(event, s.Context)
        else event
        for event in EVENTS
    ]
    facts = dict(sections(tmp_path, events)["Session"].rows)
    assert ("Llama(flash_attn=True)" in str(facts.get("flash attention"))) is not flash_attn


@pytest.mark.parametrize("gap", [0, 1000])
def test_the_time_between_ops_is_explained_where_there_is_some(tmp_path, gap):
    """The compute lasts as long as its kernels, and `gap` longer."""
    ops = {e.compute: sum(e.dur) for e in EVENTS if isinstance(e, s.Ops) and e.thread == 0}
    events = [
        msgspec.structs.replace(event, dur=ops[event.compute] + gap)
        if isinstance(event, s.Compute)
        else event
        for event in EVENTS
    ]
    found = sections(tmp_path, events)["Where the time went"].notes
    assert any(note.startswith("Between ops, thread 0 waits") for note in found) is bool(gap)
