"""Perfetto's trace_processor reads in a trace of a real session what stands in the log."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from converters.perfetto import Options, write_perfetto
from llamacpp_instr.log import read_events as read_log
from tests.conftest import read_events
from tests.native_kit import DEMO, run_probe
from tests.perfetto_truth import Truth, truth
from tests.trace_processor import ask, check, needs_node

pytestmark = needs_node

ARCHITECTURES = ("llama", "gpt2", "bert")
RECORDED = [("demo", level) for level in ("minimal", "detailed", "verbose")] + [
    (name, "verbose") for name in ARCHITECTURES
]

QUERIES = {
    "steps": "select s.ts, s.dur, s.name, extract_arg(s.arg_set_id, 'debug.step'),"
    " extract_arg(s.arg_set_id, 'debug.tokens'), extract_arg(s.arg_set_id, 'debug.status')"
    " from slice s where category = 'step'",
    "layers": "select ts, dur, name from slice where category = 'layer'",
    "ops": "select s.ts, s.dur, s.name, extract_arg(s.arg_set_id, 'debug.tensor'),"
    " extract_arg(s.arg_set_id, 'debug.output') from slice s join track t on t.id = s.track_id"
    " where t.name = 'layers' and category not in ('layer', 'block')",
    "threads": "select cast(substr(t.name, 8) as int), s.ts, s.dur, s.name,"
    " extract_arg(s.arg_set_id, 'debug.wait_ns') from slice s join track t on t.id = s.track_id"
    " where t.name glob 'thread [0-9]*' and category <> 'wait'",
    "tokens": "select s.ts, s.dur, extract_arg(s.arg_set_id, 'debug.text'),"
    " extract_arg(s.arg_set_id, 'debug.id'), extract_arg(s.arg_set_id, 'debug.p')"
    " from slice s where s.name = 'sample'",
    "kv": "select c.ts, cast(c.value as int) from counter c join track t on t.id = c.track_id"
    " where t.name glob 'KV cells*'",
    "faults": "select c.ts, cast(c.value as int) from counter c join track t"
    " on t.id = c.track_id where t.name = 'minor page faults'",
}


@pytest.fixture(scope="module", params=RECORDED, ids="-".join)
def recorded(request, tmp_path_factory, models) -> tuple[Path, Truth]:
    """A trace with its flows, and what has to be in it."""
    name, level = request.param
    folder = tmp_path_factory.mktemp(name)
    log, trace = folder / "session.log", folder / "session.pftrace"
    model = DEMO if name == "demo" else models / f"{name}.gguf"
    if name == "bert":
        embed = ["run", model, "--embed", "--prompt", "once upon a time", "--level", level]
        subprocess.run(
            [sys.executable, "-m", "llamacpp_instr", *map(str, embed), "--log", str(log)],
            check=True, capture_output=True,
        )  # fmt: skip
    else:
        probe = ["--threads", "2", "--level", level, "--log", str(log)]
        run_probe(folder / "out.npz", model, *probe)
    with trace.open("wb") as file:
        write_perfetto(read_log(log), file, Options(flows=True))
    return trace, truth(read_events(log))


def rows_of(trace: Path, *names: str) -> list[list[tuple[Any, ...]]]:
    answers = ask(trace, *(QUERIES[name] for name in names))
    return [sorted(map(tuple, rows), key=lambda row: tuple(map(str, row))) for rows in answers]


def test_it_imports_without_a_problem(recorded) -> None:
    (report,) = check(recorded[0])
    assert report["problems"] == []
    assert report["slices"] > 0


def test_every_slice_and_counter_is_that_of_the_log(recorded) -> None:
    trace, expected = recorded
    for name, rows in zip(QUERIES, rows_of(trace, *QUERIES), strict=True):
        wanted = getattr(expected, name)
        assert len(rows) == len(wanted), name
        assert rows == wanted, name


def test_the_sums_are_those_of_the_log(recorded) -> None:
    trace, expected = recorded
    by_name, waits, rates = ask(
        trace,
        "select s.name, sum(s.dur), count(*) from slice s join track t on t.id = s.track_id"
        " where t.name = 'layers' and category not in ('layer', 'block') group by s.name",
        "select cast(substr(t.name, 8) as int), sum(s.dur) from slice s join track t"
        " on t.id = s.track_id where category = 'wait' and t.name glob 'thread *' group by 1",
        "select c.ts, c.value from counter c join track t on t.id = c.track_id"
        " where t.name = 'tokens/s'",
    )
    spent, n = Counter[str](), Counter[str]()
    for _, dur, name, *_ in expected.ops:
        spent[name] += dur
        n[name] += 1
    assert {name: (dur, count) for name, dur, count in by_name} == {
        name: (spent[name], n[name]) for name in n
    }
    assert dict(waits) == dict(expected.gaps)
    assert dict(rates) == pytest.approx(dict(expected.rates))


def test_what_an_op_achieved_is_its_work_by_its_time(recorded) -> None:
    rows = ask(
        recorded[0],
        "select s.dur, extract_arg(s.arg_set_id, 'debug.bytes'),"
        " extract_arg(s.arg_set_id, 'debug.GB/s'), extract_arg(s.arg_set_id, 'debug.flops'),"
        " extract_arg(s.arg_set_id, 'debug.GFLOP/s') from slice s"
        " where extract_arg(s.arg_set_id, 'debug.output') is not null and s.dur > 0",
    )[0]
    for dur, n_bytes, gigabytes, n_flops, gigaflops in rows:
        assert gigabytes == (n_bytes and pytest.approx(n_bytes / dur))
        assert gigaflops == (n_flops and pytest.approx(n_flops / dur))


def test_slices_nest_exactly(recorded) -> None:
    wrong = (
        # a child that begins before its parent, or ends after it
        "select c.name from slice c join slice p on p.id = c.parent_id"
        " where c.ts < p.ts or c.ts + c.dur > p.ts + p.dur",
        # an op that is in no block, a block that is in no layer, a block of another layer
        "select c.name from slice c join track t on t.id = c.track_id"
        " left join slice p on p.id = c.parent_id where t.name = 'layers' and"
        " case c.category when 'layer' then p.id is not null"
        " when 'block' then p.category is not 'layer' or extract_arg(p.arg_set_id, 'debug.layer')"
        " <> extract_arg(c.arg_set_id, 'debug.layer')"
        " else p.category is not 'block' or p.name <> c.category end",
        # a layer that lies in no step
        "select l.name from slice l where l.category = 'layer' and not exists (select 1 from"
        " slice s where s.category = 'step' and s.ts <= l.ts and l.ts + l.dur <= s.ts + s.dur)",
        # slices of one depth that overlap
        "select a.name from slice a join slice b on a.track_id = b.track_id and a.depth = b.depth"
        " and a.id < b.id where a.ts < b.ts and b.ts < a.ts + a.dur",
    )
    for found in ask(recorded[0], *wrong):
        assert found == []


def test_flows_lead_from_ops_to_their_readers(recorded) -> None:
    trace, expected = recorded
    total, backwards, tokens = ask(
        trace,
        "select count(*) from flow",
        "select a.name, b.name from flow f join slice a on a.id = f.slice_out"
        " join slice b on b.id = f.slice_in where a.ts + a.dur > b.ts and a.track_id = b.track_id",
        "select count(*) from flow f join slice a on a.id = f.slice_out"
        " join slice b on b.id = f.slice_in where a.name = 'sample' and b.name = 'decode'",
    )
    assert total[0][0] == expected.n_edges + expected.n_taken
    assert tokens[0][0] == expected.n_taken
    assert backwards == []


def test_the_tracks_stand_in_their_order(recorded) -> None:
    (rows,) = ask(
        recorded[0],
        "select t.name, extract_arg(t.source_arg_set_id, 'sibling_order_rank') from track t"
        " join track p on p.id = t.parent_id where p.name = 'session'",
    )
    ranks = {name: int(rank or 0) for name, rank in rows}
    order = [name for name in ("phases", "layers", "threads", "tokens/s") if name in ranks]
    assert [ranks[name] for name in order] == sorted(ranks[name] for name in order)
    assert {"phases", "layers"} <= set(ranks)
