"""How the makespan falls with the number of engines: a table of points."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from converters.report.report import Cell, Column, Report, columns_of
from converters.scheduling.bounds import Bound, compute_bounds
from converters.scheduling.schedule import Schedule


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
    said = [
        "The speed-up is against one engine, on which the tasks run in sequence; at most: what the"
        " lower bound of the makespan allows."
    ]
    return [Report("Speed-up by number of engines", columns, rows, [*said, *notes])]
