"""Why a schedule takes as long as it does: its critical path, and its tables and charts.

Invariant: the parts of a critical path follow each other without a gap from 0 to the makespan, so
the times of the tables by cause, layer, block and op each add up to it.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal, NamedTuple

import numpy as np

from llamacpp_instr.base.terminal import counted
from llamacpp_instr.converters.scheduling.optimum import Bound, compute_bounds
from llamacpp_instr.converters.scheduling.schedule import Schedule
from llamacpp_instr.converters.scheduling.tasks import Label
from llamacpp_instr.report.charts import Bar, Chart, curve_chart, lane_chart
from llamacpp_instr.report.report import Cell, Column, Figures, Report, columns_of

After = Literal["start", "source", "transfer", "engine", "buffer", "order"]
_PREFERRED: tuple[After, ...] = ("start", "buffer", "engine", "transfer", "source")
"""of what ended at the same time, the last is reported"""


@dataclass(frozen=True)
class Part:
    """A stretch of the critical path."""

    what: Literal["task", "transfer", "hand-over", "wait"]
    """wait: the schedule begins later than it has to"""
    task: int
    """the number of the task that runs, that is fed, or that waits"""
    engine: int
    """-1 of a hand-over or wait"""
    begin: int
    end: int
    after: After
    """what ended when a task or transfer began; order: in program order it began with a task that
    it may not overtake, and the path goes on with what that one waited for"""


class Activity(NamedTuple):
    """A task, or the transfer that brings its load."""

    task: int
    transfer: bool


class Cause(NamedTuple):
    """What something waited for."""

    time: int
    """ns: when it could begin because of that, with the hand-over"""
    after: After
    of: Activity | None
    """what ended; None for the start"""


def critical_path(made: Schedule) -> list[Part]:
    """The parts of the critical path, in time; empty without tasks. If several tasks end last, or
    a start has several causes, one of them is followed: a source rather than an engine."""
    if not len(made.tasks):
        return []
    look = Causes(made)
    parts: list[Part] = []
    now: Activity | None = Activity(int(np.argmax(made.end)), False)
    while now is not None:
        begin, end = look.span(now)
        cause = look.cause(now)
        what: Literal["task", "transfer"] = "transfer" if now.transfer else "task"
        parts.append(Part(what, now.task, look.engine(now), begin, end, cause.after))
        if cause.time < begin:
            parts.append(Part("wait", now.task, -1, cause.time, begin, cause.after))
        ended = look.span(cause.of)[1] if cause.of else 0
        if ended < cause.time:
            parts.append(Part("hand-over", now.task, -1, ended, cause.time, cause.after))
        now = cause.of
    return parts[::-1]


class Causes:
    """Looks up why tasks and transfers of a schedule begin when they do."""

    def __init__(self, made: Schedule) -> None:
        self._made = made
        self._streams = (made.transfer_engine >= 0) & (made.transfer_begin == made.begin)
        fed = np.flatnonzero(made.transfer_engine >= 0)
        activities = [Activity(task, False) for task in range(len(made.tasks))]
        activities += [Activity(task, True) for task in fed.tolist()]
        engine = np.concatenate((made.engine, made.transfer_engine[fed]))
        begin = np.concatenate((made.begin, made.transfer_begin[fed]))
        self._before = {
            activities[other]: activities[one]
            for one, other in pairwise(np.lexsort((begin, engine)).tolist())
            if engine[one] == engine[other]
        }
        """what the same engine did before"""
        self._emptied: dict[int, list[tuple[int, int]]] = {}
        """of each engine: when its buffers were emptied, and by which task"""
        for task in fed[np.argsort(made.end[fed], kind="stable")].tolist():
            emptied = self._emptied.setdefault(int(made.engine[task]), [])
            emptied.append((int(made.end[task]), task))

    def span(self, of: Activity) -> tuple[int, int]:
        made = self._made
        if of.transfer:
            return int(made.transfer_begin[of.task]), int(made.transfer_end[of.task])
        return int(made.begin[of.task]), int(made.end[of.task])

    def engine(self, of: Activity) -> int:
        made = self._made
        return int((made.transfer_engine if of.transfer else made.engine)[of.task])

    def cause(self, of: Activity) -> Cause:
        """The latest of what an activity waited for."""
        if self._streams[of.task]:
            of = Activity(of.task, False)  # the two begin together
        begin = self.span(of)[0]
        found = self._own_cause(of)
        other = of.task
        in_order = self._made.policy == "program" and not of.transfer
        while in_order and found.time < begin:
            other -= 1
            if other < 0 or self._made.begin[other] < begin:
                break
            found = self._own_cause(Activity(other, False))._replace(after="order")
        return found

    def _own_cause(self, of: Activity) -> Cause:
        causes = [Cause(0, "start", None), *self._ended(of)]
        brought = Activity(of.task, True)
        if self._streams[of.task]:
            causes += self._ended(brought)
        elif not of.transfer and self._made.transfer_engine[of.task] >= 0:
            causes.append(Cause(self.span(brought)[1], "transfer", brought))
        return max(causes, key=lambda cause: (cause.time, _PREFERRED.index(cause.after)))

    def _ended(self, of: Activity) -> Iterator[Cause]:
        """What ended before: on its engine; its sources, of a transfer those that write the cache;
        and what the buffer of a transfer held."""
        made, tasks = self._made, self._made.tasks
        if of in self._before:
            before = self._before[of]
            yield Cause(self.span(before)[1], "engine", before)
        on = self.engine(of)
        for source in tasks.sources[tasks.first[of.task] : tasks.first[of.task + 1]].tolist():
            if not of.transfer or tasks.label_of(source).block == "kv":
                later = made.engines.handover_ns if made.engine[source] != on else 0
                yield Cause(int(made.end[source]) + later, "source", Activity(source, False))
        if of.transfer:
            emptied = self._emptied[int(made.engine[of.task])]
            at = bisect_right(emptied, (self.span(of)[0], len(tasks))) - 1
            if at >= 0:
                ended, holder = emptied[at]
                yield Cause(ended, "buffer", Activity(holder, False))


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
    busy = int((made.end - made.begin).sum() + (made.transfer_end - made.transfer_begin).sum())
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
    notes = [f"{verdict} What binds most: {bound.name}.", *notes]
    return Report(title, columns, rows, notes, figures=figures, key="schedule")


def _engines(made: Schedule) -> Report:
    kind_of = np.array(made.engines.kind_numbers())
    fed = made.transfer_engine >= 0
    rows: list[list[Cell]] = []
    for number, kind in enumerate(made.engines.kinds):
        own = kind_of[made.engine] == number
        brings = fed & (kind_of[made.transfer_engine] == number)
        busy = int((made.end - made.begin)[own].sum())
        busy += int((made.transfer_end - made.transfer_begin)[brings].sum())
        moved = int(made.tasks.bytes[own].sum() - made.tasks.load[own & fed].sum())
        moved += int(made.tasks.load[brings].sum())
        runs = "everything" if kind.runs is None else ", ".join(sorted(kind.runs))
        utilization = busy / (made.makespan * kind.count) if made.makespan else 0.0
        loads = int(brings.sum()) or None
        rows.append(
            [kind.name, runs, kind.count, int(own.sum()), loads, busy, utilization, moved or None]
        )
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
            part.what, "begins that could be earlier"
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
    """The time of the critical path, and that of all tasks, of each key."""
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
    labels = [tasks.labels[label] for label in tasks.label.tolist()]
    whole = zip(made.engine.tolist(), made.begin.tolist(), made.end.tolist(), strict=True)
    bars = [
        Bar(*where, label.block, label.name, (task, "task") in critical)
        for task, (where, label) in enumerate(zip(whole, labels, strict=True))
    ]
    for task in np.flatnonzero(made.transfer_engine >= 0).tolist():
        columns = made.transfer_engine, made.transfer_begin, made.transfer_end
        engine, begin, end = (int(column[task]) for column in columns)
        marked = (task, "transfer") in critical
        bars.append(Bar(engine, begin, end, "load", labels[task].name, marked))
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
