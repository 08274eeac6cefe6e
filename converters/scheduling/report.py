"""The tables of a schedule: how long it takes and why.

Invariant: the times of the tables by cause, layer, block and op each add up to the makespan.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from llamacpp_instr.base.terminal import counted
from llamacpp_instr.converters.scheduling.bounds import Bound, Bounds, compute_bounds
from llamacpp_instr.converters.scheduling.critical import Part, critical_path
from llamacpp_instr.converters.scheduling.schedule import Schedule
from llamacpp_instr.converters.scheduling.tasks import Label
from llamacpp_instr.report.charts import Chart
from llamacpp_instr.report.lane_chart import Bar, curve_chart, lane_chart
from llamacpp_instr.report.report import Cell, Column, Figures, Report, columns_of


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
    bound = compute_bounds(made.tasks, made.engines).binding
    return SweepPoint(made.engines.count(), made.makespan, int(made.tasks.ns.sum()), busy, bound)


def sweep_reports(points: Sequence[SweepPoint], notes: Sequence[str]) -> list[Report]:
    """A row for each number of engines: makespan, speed-up, utilization, the bound that binds."""
    rows: list[list[Cell]] = [
        [
            point.engines,
            point.makespan,
            point.speed_up,
            point.most,
            point.busy / max(point.makespan * point.engines, 1),
            point.bound.ns,
            point.bound.name,
        ]
        for point in points
    ]
    columns = [
        Column("engines", "count"),
        Column("makespan", "ns"),
        *columns_of("ratio", "speed-up", "at most"),
        Column("utilization", "fraction"),
        Column("lower bound", "ns"),
        Column("what binds", "text"),
    ]
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
_POLICIES = {"program": "in program order", "list": "list scheduling", "optimal": "optimum"}


def schedule_reports(made: Schedule, notes: Sequence[str]) -> list[Report]:
    """The makespan with its bounds, the engines, and the critical path by cause, layer, block and
    op. `notes` follow those of the first table."""
    parts = critical_path(made)
    reports = [_whole(made, notes), _engines(made), _causes(made, parts)]
    labels = [made.tasks.labels[made.tasks.label[part.task]] for part in parts]
    reports += [
        _by(made, parts, labels, Column("layer", "layer"), lambda label: label.layer),
        _by(made, parts, labels, Column("block"), lambda label: label.block),
        _by(made, parts, labels, Column("op"), lambda label: label.title),
    ]
    return reports


def _whole(made: Schedule, notes: Sequence[str]) -> Report:
    bounds = compute_bounds(made.tasks, made.engines)
    sequence, makespan = int(made.tasks.ns.sum()), made.makespan
    n = made.engines.count()
    rows: list[list[Cell]] = [
        ["one engine, in sequence", sequence, 1.0 if sequence else None],
        [
            f"makespan, {_POLICIES.get(made.policy, made.policy)}",
            makespan,
            _over(sequence, makespan),
        ],
    ]
    if made.proven is not None:
        rows.append(["proven: no schedule is shorter", made.proven, _over(sequence, made.proven)])
    rows += [[f"bound: {b.name}", b.ns, _over(sequence, b.ns)] for b in bounds.bounds]
    figures: Figures = {
        "makespan": (makespan, "ns"),
        "sequence": (sequence, "ns"),
        "speed_up": (_over(sequence, makespan), "ratio"),
        "engines": (n, "count"),
        "tasks": (len(made.tasks), "count"),
        "bound": (bounds.makespan, "ns"),
        "gap": (_gap(made, bounds), "fraction"),
    }
    columns = [Column("", key="what"), Column("time", "ns"), Column("speed-up", "ratio")]
    title = f"Schedule of {counted(len(made.tasks), 'task')} on {counted(n, 'engine')}"
    notes = [_verdict(made, bounds), *notes]
    return Report(title, columns, rows, notes, figures=figures, key="schedule")


def _verdict(made: Schedule, bounds: Bounds) -> str:
    gap = _gap(made, bounds)
    binds = f"What binds most: {bounds.binding.name}."
    if not gap:
        return f"No schedule on these engines is shorter. {binds}"
    return f"A schedule on these engines can be at most {100 * gap:.1f} % shorter. {binds}"


def _gap(made: Schedule, bounds: Bounds) -> float:
    """By which fraction the best schedule can be shorter, at most."""
    least = max(bounds.makespan, made.proven or 0)
    return 1 - least / made.makespan if made.makespan else 0.0


def _over(sequence: int, ns: int) -> float | None:
    return sequence / ns if ns else None


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
        rows.append(
            [
                kind.name,
                "everything" if kind.runs is None else ", ".join(sorted(kind.runs)),
                kind.count,
                int(own.sum()),
                int(brings.sum()) or None,
                busy,
                busy / (made.makespan * kind.count) if made.makespan else 0.0,
                moved or None,
            ]
        )
    columns = [
        *columns_of("text", "engines", "runs"),
        *columns_of("count", "count", "tasks", "loads"),
        Column("busy", "ns"),
        Column("utilization", "share"),
        Column("bytes", "bytes"),
    ]
    return Report("Engines", columns, rows)


def _causes(made: Schedule, parts: Sequence[Part]) -> Report:
    time: dict[str, int] = {}
    count: dict[str, int] = {}
    for part in parts:
        name = _CAUSES.get((part.what, part.after))
        if name is None:
            name = (
                "hand-over to another engine"
                if part.what == "hand-over"
                else "begins that could be earlier"
            )
        time[name] = time.get(name, 0) + part.end - part.begin
        count[name] = count.get(name, 0) + 1
    rows: list[list[Cell]] = [
        [name, count[name], time[name], time[name] / made.makespan]
        for name in sorted(time, key=lambda name: (-time[name], name))
    ]
    columns = [
        Column("", key="what"),
        Column("parts", "count"),
        Column("time", "ns"),
        Column("of the makespan", "share"),
    ]
    return Report("Critical path, by what its parts waited for", columns, rows)


def _by(
    made: Schedule,
    parts: Sequence[Part],
    labels: Sequence[Label],
    column: Column,
    key: Callable[[Label], str | int],
) -> Report:
    """The time of the critical path, and that of all tasks, of each key."""
    time: dict[str | int, int] = {}
    for part, label in zip(parts, labels, strict=True):
        time[key(label)] = time.get(key(label), 0) + part.end - part.begin
    of_label = np.bincount(
        made.tasks.label, weights=made.end - made.begin, minlength=len(made.tasks.labels)
    )
    whole: dict[str | int, int] = {}
    for label, ns in zip(made.tasks.labels, of_label.tolist(), strict=True):
        whole[key(label)] = whole.get(key(label), 0) + int(ns)
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
        column,
        Column("time", "ns"),
        Column("of the makespan", "share"),
        Column("of all engines", "ns"),
    ]
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
    bars = []
    for task in range(len(tasks)):
        label = tasks.labels[tasks.label[task]]
        bars.append(
            Bar(
                int(made.engine[task]), int(made.begin[task]), int(made.end[task]), label.block,
                label.name, (task, "task") in critical,
            )
        )  # fmt: skip
    for task in np.flatnonzero(made.transfer_engine >= 0).tolist():
        label = tasks.labels[tasks.label[task]]
        bars.append(
            Bar(
                int(made.transfer_engine[task]), int(made.transfer_begin[task]),
                int(made.transfer_end[task]), "load", label.name, (task, "transfer") in critical,
            )
        )  # fmt: skip
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
