"""Steps of known times in a trace: phases, rates, positions, and the tokens that a step takes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
from perfetto.protos.perfetto.trace import perfetto_trace_pb2 as pb

from llamacpp_instr.base.errors import UsageError
from llamacpp_instr.converters.exports.perfetto import Options
from llamacpp_instr.log import schema as s
from llamacpp_instr.log.graph.timeline import Selection
from tests.exports import test_chrome as chrome
from tests.exports.test_perfetto import FLOWS, Back, convert
from tests.kit.made_log import encode, make_log

MADE = make_log(lambda low, _: low, n_contexts=2, level="minimal")
FACTS = [e for e in MADE if isinstance(e, s.SessionStart | s.Model | s.Context)]
T = max(e.t for e in FACTS) + 1000
"""all times below are after it"""


def begin(t: int, step: int, n_tokens: int = 1, pos: int = 1, **more: Any) -> s.StepBegin:
    fields: dict[str, Any] = {"ctx": 0, "phase": "decode" if n_tokens == 1 else "prefill"}
    fields |= {"n_outputs": 1, "n_seqs": 1, **more}
    return s.StepBegin(t=T + t, step=step, kind="decode", n_tokens=n_tokens, pos=pos, **fields)


def end(t: int, step: int, **more: Any) -> s.StepEnd:
    fields = {"status": 0, "n_ubatch": 1, "n_reused": 0, "prepare": 0, "readback": 0, **more}
    return s.StepEnd(t=T + t, step=step, **fields)


def token(t: int, step: int, ctx: int = 0, index: int = 0, **more: Any) -> s.Token:
    return s.Token(t=T + t, ctx=ctx, step=step, seq=0, index=index, id=1, text="x", dur=1, **more)


GRAPH = next(
    e
    for e in make_log(lambda _, high: high, n_contexts=1, level="minimal")
    if isinstance(e, s.Graph)
)


def graph() -> s.Graph:
    return msgspec.structs.replace(GRAPH, t=T, graph=0, ctx=0)


def compute(t: int, number: int, step: int, **more: Any) -> s.Compute:
    fields = {"graph": 0, "ctx": 0, "source": "decode", "reused": False, "n_threads": 1,
              "start": 100, "dur": 400, **more}  # fmt: skip
    return s.Compute(t=T + t, compute=number, step=step, **fields)


def drawn(tmp_path: Path, events: list[s.Event], options: Options = FLOWS) -> tuple[Back, pb.Trace]:
    trace, _ = convert(tmp_path / "a.log", encode([*FACTS, *events]), options)
    return Back(trace), trace


def of_category(back: Back, category: str) -> list[dict[str, Any]]:
    return [of for of in back.slices if of["category"] == category]


def spans(back: Back, category: str) -> list[tuple[str, int, int]]:
    """Name, start and end, counted from T."""
    return [(of["name"], of["ts"] - T, of["ts"] + of["dur"] - T)
            for of in of_category(back, category)]  # fmt: skip


# --- tokens that a step takes ---


@pytest.mark.parametrize(
    ("step", "n_taken"),
    [
        (begin(200, 1, pos=4), 1),
        (begin(200, 1, pos=5), 1),
        (begin(200, 1, pos=-1), 1),
        (begin(200, 1, pos=0), 0),
        (begin(200, 1, n_tokens=2, pos=5, phase="decode", n_seqs=2), 2),
        (begin(200, 1, n_tokens=3, pos=5, phase="decode", n_seqs=3), 2),
        (begin(200, 1, pos=1, ctx=1), 0),
        (begin(200, 1, n_tokens=5, pos=4, phase="prefill"), 0),
    ],
)
def test_a_decode_takes_as_many_tokens_of_its_context_as_it_has(
    tmp_path: Path, step: s.StepBegin, n_taken: int
) -> None:
    events: list[s.Event] = [
        begin(0, 0, n_tokens=4, pos=0), end(100, 0), token(110, 0), token(120, 0),
        step, end(300, 1),
    ]  # fmt: skip
    _, trace = drawn(tmp_path, events, Options(flows=True, selection=Selection(steps=(0, 1))))
    samples = [p.track_event for p in trace.packet if p.track_event.flow_ids]
    takers = [p for p in trace.packet if p.track_event.terminating_flow_ids]
    assert [list(sample.flow_ids) for sample in samples] == [[i + 1] for i in range(n_taken)]
    assert [list(p.track_event.terminating_flow_ids) for p in takers] == (
        [list(range(1, n_taken + 1))] if n_taken else []
    )
    assert all(p.timestamp == step.t for p in takers)


def test_a_token_is_taken_once_and_only_with_flows(tmp_path: Path) -> None:
    events: list[s.Event] = [begin(0, 0), end(100, 0), token(110, 0)]
    for step in (1, 2):
        events += [begin(200 * step, step), end(200 * step + 100, step)]
    chosen = Selection(steps=(0, 2))
    back, _ = drawn(tmp_path, events, Options(flows=True, selection=chosen))
    assert back.flows_out == back.flows_in == {1: 1}
    back, _ = drawn(tmp_path, events, Options(selection=chosen))
    assert back.flows_out == back.flows_in == {}
    assert spans(back, "sampler") == [("sample", 110, 111)]


# --- a step ---


@pytest.mark.parametrize(
    ("step", "positions"),
    [
        (begin(0, 0, n_tokens=1, pos=7), "7"),
        (begin(0, 0, n_tokens=2, pos=7), "7 to 8"),
        (begin(0, 0, n_tokens=5, pos=0), "0 to 4"),
        (begin(0, 0, n_tokens=5, pos=3, n_seqs=2), "3"),
        (begin(0, 0, n_tokens=5, pos=-1), None),
    ],
)
def test_a_step_says_its_positions(tmp_path: Path, step: s.StepBegin, positions: str) -> None:
    back, _ = drawn(tmp_path, [step, end(100, 0)])
    (of,) = of_category(back, "step")
    assert of["args"].get("positions") == positions


@pytest.mark.parametrize(
    ("n_tokens", "until", "rate"), [(1, 100, 1e7), (3, 100, 3e7), (1, 0, None), (0, 100, None)]
)
def test_a_step_has_a_rate_if_it_took_time_and_tokens(
    tmp_path: Path, n_tokens: int, until: int, rate: float | None
) -> None:
    back, _ = drawn(tmp_path, [begin(0, 0, n_tokens=n_tokens), end(until, 0)])
    found = [(t - T, value) for name, t, value in back.counters if name == "tokens/s"]
    assert found == ([(0, rate), (until, 0)] if rate else [])


def test_a_step_of_a_log_that_stopped_ends_with_it(tmp_path: Path) -> None:
    events: list[s.Event] = [begin(0, 0, n_tokens=3), s.Note(t=T + 70, name="last", data=1)]
    back, _ = drawn(tmp_path, events)
    (of,) = of_category(back, "step")
    assert (of["ts"] - T, of["dur"]) == (0, 70)
    assert of["args"]["ended"] == "not before the log did"
    assert not [name for name, *_ in back.counters if name in ("tokens/s", "minor page faults")]
    (of,) = [e for e in chrome.convert(tmp_path / "b.log", encode([*FACTS, *events]))
             if e.get("cat") == "step"]  # fmt: skip
    assert (of["ts"] - T, of["dur"], of["args"]["status"]) == (0, 70, "the log ended")


@pytest.mark.parametrize(
    ("computes", "ended", "phases"),
    [
        # prepare is cut where the first compute begins, readback follows the last one
        ([compute(50, 0, 0)], {"prepare": 20, "readback": 30},
         [("prepare", 0, 20), ("compute", 150, 550), ("readback", 550, 580)]),
        ([compute(50, 0, 0)], {"prepare": 90, "readback": 0},
         [("prepare", 0, 50), ("compute", 150, 550)]),
        ([compute(50, 0, 0)], {"readback": 2000}, [("compute", 150, 550), ("readback", 550, 1000)]),
        ([compute(50, 0, 0, source="memory_update", dur=200), compute(450, 1, 0, start=150)],
         {"prepare": 460},
         [("prepare", 0, 450), ("compute", 150, 350), ("compute", 600, 1000)]),
        ([compute(50, 0, 0, start=10, dur=40), compute(100, 1, 0)], {"readback": 5, "n_ubatch": 2},
         [("compute", 60, 100), ("compute", 200, 600), ("readback", 600, 605)]),
        ([], {"prepare": 30, "readback": 10}, [("prepare", 0, 30), ("readback", 0, 10)]),
        ([], {"prepare": 3000}, [("prepare", 0, 1000)]),
        ([compute(50, 0, 0, apply=30, build=20, alloc=40, inputs=90)], {},
         [("apply", 50, 80), ("build", 80, 100), ("alloc", 100, 140), ("inputs", 140, 150),
          ("compute", 150, 550)]),
    ],
)  # fmt: skip
def test_phases_follow_each_other_and_stay_in_their_step(
    tmp_path: Path,
    computes: list[s.Compute],
    ended: dict[str, int],
    phases: list[tuple[str, int, int]],
) -> None:
    events: list[s.Event] = [begin(0, 0), graph(), *computes, end(1000, 0, **ended)]
    back, _ = drawn(tmp_path, events)
    assert sorted(spans(back, "phase"), key=lambda span: span[1:]) == sorted(
        phases, key=lambda span: span[1:]
    )
    several = [of["args"] for of in of_category(back, "phase") if of["name"] == "readback"]
    n = ended.get("n_ubatch", 1)
    assert all(args == ({"sum_of_ubatches": n} if n > 1 else {}) for args in several)
    of_chrome = chrome.convert(tmp_path / "b.log", encode([*FACTS, *events]))
    found = [(e["name"], e["ts"] - T, e["ts"] + e["dur"] - T)
             for e in of_chrome if e.get("cat") == "phase"]  # fmt: skip
    assert sorted(found) == sorted(phases)


def test_a_compute_of_no_step_is_drawn_where_it_was(tmp_path: Path) -> None:
    back, _ = drawn(tmp_path, [graph(), compute(50, 0, -1), begin(900, 0), end(950, 0)])
    assert spans(back, "phase") == [("compute", 150, 550)]
    chosen = Options(selection=Selection(steps=(0, 0)))
    back, _ = drawn(tmp_path, [graph(), compute(50, 0, -1), begin(900, 0), end(950, 0)], chosen)
    assert spans(back, "phase") == []


@pytest.mark.parametrize(("waited", "until"), [(20_000, 20_110), (19_999, 100)])
def test_a_long_wait_for_the_result_belongs_to_the_step_before_it(
    tmp_path: Path, waited: int, until: int
) -> None:
    events: list[s.Event] = [
        begin(0, 0), end(100, 0), s.Sync(t=T + 110, ctx=0, dur=waited),
        begin(30_000, 1, pos=2), end(30_100, 1),
    ]  # fmt: skip
    back, _ = drawn(tmp_path, events)
    assert spans(back, "step") == [("decode", 0, until), ("decode", 30_000, 30_100)]
    assert spans(back, "wait") == [("synchronize", 110, 110 + waited)]


@pytest.mark.parametrize(("status", "warm_up", "n"), [(0, False, 1), (1, False, 0), (0, True, 0)])
def test_steps_that_failed_or_warm_up_serve_no_request(
    tmp_path: Path, status: int, warm_up: bool, n: int
) -> None:
    events: list[s.Event] = [begin(10, 0, n_tokens=3, pos=0), end(100, 0, status=status)]
    if warm_up:
        marks = [s.Mark(t=T + t, mark=0, name="warm-up", phase=phase)
                 for t, phase in ((0, "begin"), (150, "end"))]  # fmt: skip
        events = [marks[0], *events, marks[1]]
    back, _ = drawn(tmp_path, events)
    assert len(of_category(back, "request")) == n


# --- what a trace says of itself ---


@pytest.mark.parametrize(
    ("chosen", "message"),
    [((5, 9), "the log has steps 2 to 4"), ((0, 1), "the log has steps 2 to 4")],
)
def test_a_choice_of_no_step_says_the_first_and_the_last(
    tmp_path: Path, chosen: tuple[int, int], message: str
) -> None:
    events: list[s.Event] = []
    for i, step in enumerate((3, 2, 4)):
        events += [begin(200 * i, step), end(200 * i + 100, step)]
    with pytest.raises(UsageError, match=message):
        drawn(tmp_path, events, Options(selection=Selection(steps=chosen)))


def test_a_log_without_steps_says_so(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no step was selected; the log has no steps"):
        drawn(tmp_path, [], Options(selection=Selection(steps=(0, 9))))


@pytest.mark.parametrize(
    ("change", "present", "absent"),
    [
        ({}, "at level minimal on A CPU.", "Tensor values"),
        (
            {"host": s.Host(cpu="", features=[], cores=2, memory=1, os="Linux")},
            "on a machine.",
            "Converted",
        ),
        ({"perturbed": True}, "do not compare times.", "Converted"),
        ({"args": {"dialect": "old"}}, "Converted from an earlier fork's log", "Tensor values"),
    ],
)
def test_a_trace_says_how_it_was_recorded(
    tmp_path: Path, change: dict[str, Any], present: str, absent: str
) -> None:
    start = msgspec.structs.replace(FACTS[0], **change)
    trace, _ = convert(tmp_path / "a.log", encode([start, *FACTS[1:]]))
    (home, *_) = [p.track_descriptor for p in trace.packet if p.HasField("track_descriptor")]
    assert present in home.description
    assert absent not in home.description


def test_each_context_has_its_tracks_and_only_the_first_has_short_names(tmp_path: Path) -> None:
    events: list[s.Event] = [begin(0, 0), end(100, 0), token(110, 0)]
    events += [begin(0, 1, ctx=1), end(100, 1), token(110, 1, ctx=1)]
    _, trace = drawn(tmp_path, events)
    tracks = [p.track_descriptor for p in trace.packet if p.HasField("track_descriptor")]
    of = {track.name: track for track in tracks}
    assert {"session", "context 1", "sampler", "sampler of context 1"} <= of.keys()
    assert of["sampler"].parent_uuid == of["session"].uuid
    assert of["sampler of context 1"].parent_uuid == of["context 1"].uuid
    assert (of["session"].sibling_order_rank, of["context 1"].sibling_order_rank) == (0, 1)
    assert [track.uuid for track in tracks] == list(range(1, len(tracks) + 1))
    assert "context 0" not in of
