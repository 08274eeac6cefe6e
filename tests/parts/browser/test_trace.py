"""Perfetto's trace_processor reads the report's figures from a schedule's trace."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings

from llamacpp_instr.converters.scheduling.report import critical_path
from llamacpp_instr.converters.scheduling.schedule import schedule_list, schedule_program
from llamacpp_instr.converters.scheduling.tasks import EngineKind, Engines
from tests.kit.schedule_kit import graphs, machines, make_tasks
from tests.kit.trace_processor import ask, check
from tests.scheduling.test_trace import drawn, trace_of

SLICES = "from slice s join track t on t.id = s.track_id"
ARG = "extract_arg(s.arg_set_id, 'debug.{}')"


@pytest.mark.native
@settings(max_examples=8)
@given(graphs(most=40), machines())
def test_sql_gives_the_figures_of_the_schedule(tmp_path_factory, tasks, engines) -> None:
    made = schedule_list(tasks, engines)
    trace = trace_of(made, tmp_path_factory.mktemp("trace"))
    (report,) = check(trace)
    assert report["problems"] == []
    whole, busy, path, rows, loads, flows, late, overlaps, peak = ask(
        trace,
        "select ts, dur from slice where category = 'schedule'",
        f"select t.name, sum(s.dur) {SLICES} where s.category in ('task', 'critical', 'transfer')"
        " group by t.name order by t.name",
        f"select s.ts, s.dur, {ARG.format('what')} {SLICES} where t.name = 'critical path'"
        " order by s.ts",
        f"select {ARG.format('name')}, t.name, s.ts, s.dur, {ARG.format('recorded_ns')} {SLICES}"
        " where s.category in ('task', 'critical')",
        f"select {ARG.format('name')}, t.name, s.ts, s.dur {SLICES} where s.category = 'transfer'",
        "select count(*) from flow",
        "select count(*) from flow f join slice a on a.id = f.slice_out"
        " join slice b on b.id = f.slice_in where b.ts < a.ts + a.dur"
        " and a.category <> 'transfer'",
        "select count(*) from slice where depth > 0",
        "select max(c.value) from counter c join track t on t.id = c.track_id"
        " where t.name = 'busy engines'",
    )
    assert whole == [[0, made.makespan]]
    ran = drawn(range(len(tasks)), engines, made.engine, made.begin, made.end)
    fed = np.flatnonzero(made.transfer_engine >= 0).tolist()
    brought = drawn(fed, engines, made.transfer_engine, made.transfer_begin, made.transfer_end)
    expected = Counter[str]()
    for _, engine, _, took in (*ran, *brought):
        expected[engine] += took
    assert dict(busy) == expected
    parts = critical_path(made)
    assert path == [[part.begin, part.end - part.begin, part.what] for part in parts]
    assert sum(dur for _, dur, _ in path) == made.makespan
    assert sorted(rows) == sorted([*row, int(tasks.ns[i])] for i, row in enumerate(ran))
    assert sorted(loads) == sorted(brought)
    assert flows == [[len(tasks.sources) + len(fed)]]
    assert (late, overlaps) == ([[0]], [[0]])
    spans = [(begin, begin + took) for _, _, begin, took in (*ran, *brought)]
    assert peak == [[max(sum(a <= t < b for a, b in spans) for t, _ in spans)]]


@pytest.mark.native
def test_what_is_critical_is_marked_and_says_what_it_waited_for(tmp_path: Path) -> None:
    tasks = make_tasks(
        [("ADD", 10, []), ("ADD", 4, []), ("MUL_MAT", 5, [0])], bytes=[1000, 2000, 500]
    )
    kinds = (EngineKind("m", 1, frozenset({"MUL_MAT"}), {"*": 2.0}), EngineKind("v", 2))
    made = schedule_program(tasks, Engines(kinds, handover_ns=1))
    rows, rates = ask(
        trace_of(made, tmp_path),
        f"select {ARG.format('name')}, s.category, {ARG.format('waited_for')},"
        f" {ARG.format('speed')} {SLICES} where s.category in ('task', 'critical') order by 1",
        "select c.ts, c.value from counter c join track t on t.id = c.track_id"
        " where t.name = 'bytes/s in flight' order by c.ts",
    )
    assert rows == [
        ["t0", "critical", "start", 1.0],
        ["t1", "task", "start", 1.0],
        ["t2", "critical", "source: t0", 5 / 3],
    ]
    assert rates == [[0, 6e11], [4, 1e11], [10, 0], [11, pytest.approx(5e11 / 3)], [14, 0]]
