"""Why a schedule takes as long as it does: its critical path, and its tables and charts.

Invariant: the parts of a critical path follow each other without a gap from 0 to the makespan, so
the times of the tables by cause, layer, block and op each add up to it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from llamacpp_instr.base.terminal import counted
from llamacpp_instr.converters.scheduling.optimum import Bound, compute_bounds
from llamacpp_instr.converters.scheduling.schedule import After, Schedule
from llamacpp_instr.converters.scheduling.tasks import Label
from llamacpp_instr.report.charts import Bar, Chart, curve_chart, lane_chart
from llamacpp_instr.report.report import Cell, Column, Figures, Report, columns_of


@dataclass(frozen=True)
class Part:
    """A stretch of the critical path."""

    what: Literal["task", "transfer", "hand-over", "wait"]
    """wait: the schedule begins later than it has to"""
    task: int
    """the number of the task that runs, that is fed, or that waits"""
    engine: int
    """-1 for a hand-over or a wait"""
    begin: int
    end: int
    after: After
    """what ended when a task or transfer began; order: in program order it began with a task that
    it may not overtake, and the path goes on with what that one waited for"""


def critical_path(made: Schedule) -> list[Part]:
    """The parts of the critical path, in time; empty without tasks. If several tasks end last, or
    a start has several causes, one of them is followed: a source rather than an engine."""
    look, parts = made.activities, list[Part]()
    now = int(np.argmax(made.end)) if len(made.tasks) else -1
    while now >= 0:
        task, begin, end = look.task[now], look.begin[now], look.end[now]
        cause = look.cause(now)
        what: Literal["task", "transfer"] = "task" if now == task else "transfer"
        parts.append(Part(what, task, look.engine[now], begin, end, cause.after))
        if cause.time < begin:
            parts.append(Part("wait", task, -1, cause.time, begin, cause.after))
        ended = look.end[cause.of] if cause.of >= 0 else 0
        if ended < cause.time:
            parts.append(Part("hand-over", task, -1, ended, cause.time, cause.after))
        now = cause.of
    return parts[::-1]


@dataclass(frozen=True)
class SweepPoint:
    """What is kept of a schedule on some number of engines."""

    engines: int
    makespan: int
    """ns"""
    sequence: int
    """ns of its tasks, one after the other"""
    busy: int
    """ns of all engines, with transfers"""
    bound: Bound

    @property
    def speed_up(self) -> float:
        """Against one engine, on which the tasks run in sequence."""
        return self.sequence / max(self.makespan, 1)

    @property
    def most(self) -> float:
        """The most that the bound allows."""
        return self.sequence / max(self.bound.ns, 1)


def sweep_point(made: Schedule) -> SweepPoint:
    """What a curve needs of a schedule."""
    busy = sum(made.activities.end) - sum(made.activities.begin)
    bound = compute_bounds(made.tasks, made.engines)[0]
    return SweepPoint(made.engines.count(), made.makespan, int(made.tasks.ns.sum()), busy, bound)


def sweep_reports(points: Sequence[SweepPoint], notes: Sequence[str]) -> list[Report]:
    """A row for each number of engines: makespan, speed-up, utilization, the bound that binds."""
    rows: list[list[Cell]] = [
        [
            of.engines, of.makespan, of.speed_up, of.most,
            of.busy / max(of.makespan * of.engines, 1), of.bound.ns, of.bound.name,
        ]
        for of in points
    ]  # fmt: skip
    columns = [
        Column("engines", "count"), Column("makespan", "ns"), Column("speed-up", "ratio"),
        Column("at most", "ratio"), Column("utilization", "fraction"),
        Column("lower bound", "ns"), Column("what binds", "text"),
    ]  # fmt: skip
    explanation = [
        "The speed-up is against one engine, on which the tasks run in sequence; at most: what the"
        " lower bound of the makespan allows."
    ]
    return [Report("Speed-up by number of engines", columns, rows, [*explanation, *notes])]


TOP = 15
"""ops of the critical path that are shown"""
_CAUSES = {
    ("task", "start"): "tasks that could begin at once",
    ("task", "source"): "tasks that waited for a source",
    ("task", "transfer"): "tasks that waited for their load",
    ("task", "engine"): "tasks that waited for an engine",
    ("task", "buffer"): "tasks whose load waited for a buffer",
    ("task", "order"): "tasks that may not overtake",
    ("transfer", "start"): "loads that could begin at once",
    ("transfer", "source"): "loads that waited for a source",
    ("transfer", "engine"): "loads that waited for a DMA engine",
    ("transfer", "buffer"): "loads that waited for a buffer",
}
_OTHER_CAUSES = {"hand-over": "hand-over to another engine"}
_POLICIES = {"program": "in program order", "list": "list scheduling", "optimal": "optimum"}


def schedule_reports(made: Schedule, notes: Sequence[str]) -> list[Report]:
    """The makespan with its bounds, the engines, and the critical path by cause, layer, block and
    op. `notes` follow those of the first table."""
    parts = critical_path(made)
    return [
        _whole(made, notes),
        _engines(made),
        _causes(made, parts),
        _by(made, parts, Column("layer", "layer"), lambda label: label.layer),
        _by(made, parts, Column("block"), lambda label: label.block),
        _by(made, parts, Column("op"), lambda label: label.title),
    ]


def _whole(made: Schedule, notes: Sequence[str]) -> Report:
    bounds = compute_bounds(made.tasks, made.engines)
    sequence, makespan = int(made.tasks.ns.sum()), made.makespan
    n, bound = made.engines.count(), bounds[0]
    times = [
        ("one engine, in sequence", sequence),
        (f"makespan, {_POLICIES.get(made.policy, made.policy)}", makespan),
    ]
    if made.proven is not None:
        times.append(("proven: no schedule is shorter", made.proven))
    times += [(f"bound: {of.name}", of.ns) for of in bounds]
    rows: list[list[Cell]] = [[what, ns, sequence / ns if ns else None] for what, ns in times]
    gap = 1 - max(bound.ns, made.proven or 0) / makespan if makespan else 0.0
    verdict = "No schedule on these engines is shorter."
    if gap:
        verdict = f"A schedule on these engines can be at most {100 * gap:.1f} % shorter."
    figures: Figures = {
        "makespan": (makespan, "ns"),
        "sequence": (sequence, "ns"),
        "speed_up": (sequence / makespan if makespan else None, "ratio"),
        "engines": (n, "count"),
        "tasks": (len(made.tasks), "count"),
        "bound": (bound.ns, "ns"),
        "gap": (gap, "fraction"),
    }
    columns = [Column("", key="what"), Column("time", "ns"), Column("speed-up", "ratio")]
    title = f"Schedule of {counted(len(made.tasks), 'task')} on {counted(n, 'engine')}"
    notes = [f"{verdict} Tightest bound: {bound.name}.", *notes]
    return Report(title, columns, rows, notes, figures=figures, key="schedule")


def _engines(made: Schedule) -> Report:
    work, n = made.activities, len(made.tasks)
    kind_of = np.array(made.engines.kind_numbers())[np.array(work.engine, np.int64)]
    ns = np.array(work.end, np.int64) - np.array(work.begin, np.int64)
    rows: list[list[Cell]] = []
    for number, kind in enumerate(made.engines.kinds):
        own = kind_of == number
        busy, moved = int(ns[own].sum()), int(work.moved[own].sum()) or None
        n_tasks, loads = int(own[:n].sum()), int(own[n:].sum()) or None
        runs = "everything" if kind.runs is None else ", ".join(sorted(kind.runs))
        utilization = busy / (made.makespan * kind.count) if made.makespan else 0.0
        rows.append([kind.name, runs, kind.count, n_tasks, loads, busy, utilization, moved])
    columns = [
        *columns_of("text", "engines", "runs"),
        *columns_of("count", "count", "tasks", "loads"),
        Column("busy", "ns"), Column("utilization", "share"), Column("bytes", "bytes"),
    ]  # fmt: skip
    return Report("Engines", columns, rows)


def _causes(made: Schedule, parts: Sequence[Part]) -> Report:
    time, count = Counter[str](), Counter[str]()
    for part in parts:
        name = _CAUSES.get((part.what, part.after)) or _OTHER_CAUSES.get(
            part.what, "starts that could be earlier"
        )
        time[name] += part.end - part.begin
        count[name] += 1
    rows: list[list[Cell]] = [
        [name, count[name], time[name], time[name] / made.makespan]
        for name in sorted(time, key=lambda name: (-time[name], name))
    ]
    columns = [
        Column("", key="what"), Column("parts", "count"), Column("time", "ns"),
        Column("of the makespan", "share"),
    ]  # fmt: skip
    return Report("Critical path, by what its parts waited for", columns, rows)


def _by(
    made: Schedule, parts: Sequence[Part], column: Column, key: Callable[[Label], str | int]
) -> Report:
    """The time of the critical path, and that of all tasks, for each key."""
    tasks = made.tasks
    time, whole = Counter[str | int](), Counter[str | int]()
    for part in parts:
        time[key(tasks.label_of(part.task))] += part.end - part.begin
    of_label = np.bincount(tasks.label, made.end - made.begin, len(tasks.labels))
    for label, ns in zip(tasks.labels, of_label.tolist(), strict=True):
        whole[key(label)] += int(ns)
    notes = []
    if column.unit == "layer":
        order = sorted(time, key=lambda layer: (layer == -1, layer))
    else:
        order = sorted(time, key=lambda name: (-time[name], str(name)))
    if column.name == "op" and len(order) > TOP:
        rest = sum(time[name] for name in order[TOP:])
        others = counted(len(order) - TOP, "other op")
        notes = [f"Not shown: {others}, {100 * rest / made.makespan:.1f} % of it."]
        order = order[:TOP]
    rows: list[list[Cell]] = [
        [name, time[name], time[name] / made.makespan, whole[name]] for name in order
    ]
    columns = [
        column, Column("time", "ns"), Column("of the makespan", "share"),
        Column("of all engines", "ns"),
    ]  # fmt: skip
    return Report(f"Critical path, by {column.name}", columns, rows, notes)


MOST_LANES = 32
MOST_BARS = 4000


def gantt_chart(made: Schedule, title: str) -> Chart | None:
    """A row for each engine, with its tasks in the colour of their block, and transfers; what is on
    the critical path is marked. None if there are too many engines or tasks to be drawn."""
    engines, tasks = made.engines, made.tasks
    if engines.count() > MOST_LANES or not 0 < len(tasks) <= MOST_BARS:
        return None
    critical = {(part.task, part.what) for part in critical_path(made)}
    work, bars = made.activities, []
    for of, task in enumerate(work.task):
        label, what = tasks.label_of(task), "task" if of == task else "transfer"
        block = label.block if of == task else "load"
        where = work.engine[of], work.begin[of], work.end[of]
        bars.append(Bar(*where, block, label.name, (task, what) in critical))
    lanes = [engines.name(engine) for engine in range(engines.count())]
    return lane_chart(title, lanes, bars, "critical path")


def sweep_chart(points: Sequence[SweepPoint], title: str) -> Chart:
    """The speed-up over the number of engines, and the most that the bounds allow."""
    counts = [float(point.engines) for point in points]
    curves = {
        "speed-up": [point.speed_up for point in points],
        "at most": [point.most for point in points],
    }
    return curve_chart(title, "engines", "speed-up", counts, curves)
