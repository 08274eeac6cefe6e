"""Perfetto's trace_processor reads the report's figures from a schedule's trace."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import repeat
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from perfetto.protos.perfetto.trace import perfetto_trace_pb2 as pb

from llamacpp_instr.base.errors import UsageError
from llamacpp_instr.converters.scheduling import trace as trace_of_schedule
from llamacpp_instr.converters.scheduling.report import critical_path
from llamacpp_instr.converters.scheduling.schedule import Schedule, schedule_list
from llamacpp_instr.converters.scheduling.tasks import Engines, equal_engines
from llamacpp_instr.converters.scheduling.trace import write_trace
from tests.exports.test_perfetto import Back
from tests.kit.schedule_kit import fed_core, graphs, machines, make_tasks


def trace_of(made: Schedule, folder: Path) -> Path:
    path = folder / "schedule.pftrace"
    with path.open("wb") as file:
        write_trace(made, file.write, "a schedule")
    return path


def drawn(tasks: Iterable[int], engines: Engines, engine: Any, begin: Any, end: Any) -> list[Any]:
    """A row for each of these tasks: its name and engine, when it begins, how long it takes."""
    return [
        [f"t{i}", engines.name(int(engine[i])), int(begin[i]), int(end[i] - begin[i])]
        for i in tasks
    ]


def read_back(made: Schedule, folder: Path) -> Back:
    trace = pb.Trace()
    trace.ParseFromString(trace_of(made, folder).read_bytes())
    return Back(trace)


def busy(rows: Iterable[tuple[int, int]], amounts: Iterable[int] = repeat(1)) -> list[Any]:
    """The sum of what is under way, whenever it changes; rows are starts and ends."""
    spans = list(zip(rows, amounts, strict=False))
    times = sorted({t for span, _ in spans for t in span})
    return [(t, sum(n for (begin, end), n in spans if begin <= t < end)) for t in times]


@settings(max_examples=15)
@given(graphs(most=20), machines())
def test_every_slice_is_that_of_the_schedule(tmp_path_factory, tasks, engines) -> None:
    """With loads, flows and counters, read with Perfetto's own classes."""
    made = schedule_list(tasks, engines)
    back = read_back(made, tmp_path_factory.mktemp("trace"))
    fed = np.flatnonzero(made.transfer_engine >= 0).tolist()
    ran = drawn(range(len(tasks)), engines, made.engine, made.begin, made.end)
    brought = drawn(fed, engines, made.transfer_engine, made.transfer_begin, made.transfer_end)
    of = {name: [c for c in back.slices if c["category"] in names.split()]
          for name, names in (("task", "task critical"), ("transfer", "transfer"))}  # fmt: skip
    for slices, rows in ((of["task"], ran), (of["transfer"], brought)):
        found = [[c["args"]["name"], c["track"], c["ts"], c["dur"]] for c in slices]
        assert sorted(found) == sorted(rows)
    for c in of["task"]:
        task = int(c["args"]["name"][1:])
        label = tasks.labels[task]
        assert c["name"] == label.title
        assert c["args"] == {
            "name": label.name, "op": label.op, "kind": label.kind, "layer": label.layer,
            "block": label.block, "copy": 0, "recorded_ns": int(tasks.ns[task]),
            "speed": pytest.approx(int(tasks.ns[task]) / c["dur"]),
            "bytes": int(tasks.bytes[task]), "waited_for": c["args"]["waited_for"],
        }  # fmt: skip
    for c in of["transfer"]:
        task = int(c["args"]["name"][1:])
        assert c["name"] == f"load {tasks.labels[task].title}"
        assert c["args"]["bytes"] == int(tasks.load[task])
        assert c["args"]["for_engine"] == engines.name(int(made.engine[task]))
    assert sum(back.flows_out.values()) == sum(back.flows_in.values())
    assert sum(back.flows_in.values()) == len(tasks.sources) + len(fed)
    (whole,) = (c for c in back.slices if c["category"] == "schedule")
    assert (whole["ts"], whole["dur"]) == (0, made.makespan)
    assert whole["args"]["makespan_ns"] == made.makespan
    spans = [(row[2], row[2] + row[3]) for row in (*ran, *brought)]
    counted = [(t, value) for name, t, value in back.counters if name == "busy engines"]
    assert counted == busy(spans)
    for number, kind in enumerate(engines.kinds if len(engines.kinds) > 1 else ()):
        numbers = engines.kind_numbers()
        chosen = [int(numbers[e] == number) for e in
                  [*made.engine.tolist(), *made.transfer_engine[fed].tolist()]]  # fmt: skip
        counted = [(t, value) for name, t, value in back.counters if name == f"busy {kind.name}"]
        assert counted == busy(spans, chosen)
    moved = [int(tasks.bytes[i]) - (int(tasks.load[i]) if i in fed else 0)
             for i in range(len(tasks))] + [int(tasks.load[i]) for i in fed]  # fmt: skip
    rates = [round(n / (end - begin) * 1e9) for n, (begin, end) in zip(moved, spans, strict=True)]
    counted = [(t, value) for name, t, value in back.counters if name == "bytes/s in flight"]
    assert counted == busy(spans, rates)


def test_parts_of_the_critical_path_say_what_they_are(tmp_path: Path) -> None:
    tasks = make_tasks(
        [("MUL_MAT", 10, []), ("MUL_MAT", 20, [0])], load=[100, 100], bytes=[150, 150]
    )
    made = schedule_list(tasks, fed_core())
    back = read_back(made, tmp_path)
    parts = [c for c in back.slices if c["category"] == "path"]
    expected = critical_path(made)
    assert [(c["ts"], c["ts"] + c["dur"], c["args"]["what"]) for c in parts] == [
        (part.begin, part.end, part.what) for part in expected
    ]
    for c, part in zip(parts, expected, strict=True):
        label = tasks.labels[part.task]
        assert c["name"] == (label.title if part.what == "task" else f"{part.what} {label.title}")
        known = {key: c["args"].get(key) for key in ("name", "layer", "block", "after", "engine")}
        assert known == {
            "name": label.name, "layer": label.layer, "block": label.block, "after": part.after,
            "engine": made.engines.name(part.engine) if part.engine >= 0 else None,
        }  # fmt: skip
    assert {c["args"]["what"] for c in parts} >= {"task"}
    assert any(c["args"]["critical"] for c in back.slices if c["category"] == "transfer")


def test_too_many_tasks_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trace_of_schedule, "MOST_TASKS", 200)
    made = schedule_list(make_tasks([("ADD", 1, [])] * 201), equal_engines(2))
    with pytest.raises(UsageError, match="201 tasks are too many for a trace"):
        write_trace(made, lambda _: None, "large")
