"""The values that `--stats` read: each tensor over all computes.

Invariant: figures of several computes are those of all their elements together. Only finite
elements count in the smallest, largest and mean value and in the deviation.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from llamacpp_instr.base.errors import UsageError
from llamacpp_instr.log.schema import TensorStats
from llamacpp_instr.log.session import Session
from llamacpp_instr.report.report import Cell, Column, Report, columns_of, known

_LAYER = re.compile(r"-\d+$")


class Read(NamedTuple):
    """What was read in every compute: results of one op, by the tensor's name without its layer.
    In a layer the same name can be read more than once; `place` counts."""

    tensor: str
    op: str
    layer: int
    place: int


@dataclass(frozen=True)
class Spread:
    """The values of several computes together; None where no element is finite."""

    n: int
    min: float | None
    max: float | None
    mean: float | None
    std: float | None
    """population standard deviation"""
    nan: int
    inf: int
    zero: int


def values_of(session: Session) -> dict[Read, list[TensorStats]]:
    """The statistics of each tensor in order of the computes. Raises UsageError without any."""
    if not session.stats:
        raise UsageError(f"{session.path}: no values were read; record with --stats PATTERN")
    found: dict[Read, list[TensorStats]] = {}
    places: dict[tuple[int, str, str], int] = {}
    for event in session.stats:
        nodes = session.graphs[event.graph].nodes
        op = nodes.op[event.node] if nodes else ""
        name = _LAYER.sub("", event.name)
        place = places.get((event.compute, event.name, op), 0)
        places[event.compute, event.name, op] = place + 1
        found.setdefault(Read(name, op, event.layer, place), []).append(event)
    return found


def joined(events: Sequence[TensorStats]) -> Spread:
    """The figures of all elements of the events together."""
    figures = [(max(e.n - e.nan - e.inf, 0), e.mean, e.std) for e in events]
    parts = [(n, m, s) for n, m, s in figures if n and m is not None and s is not None]
    n_finite = sum(n for n, _, _ in parts)
    mean = std = None
    if n_finite:
        mean = sum(n * m for n, m, _ in parts) / n_finite
        within = sum(n * (s * s + (m - mean) * (m - mean)) for n, m, s in parts)
        std = math.sqrt(within / n_finite) if within >= 0 else None
    return Spread(
        sum(e.n for e in events),
        min((e.min for e in events if e.min is not None), default=None),
        max((e.max for e in events if e.max is not None), default=None),
        known(mean),
        known(std),
        sum(e.nan for e in events),
        sum(e.inf for e in events),
        sum(e.zero for e in events),
    )


def compute_values(session: Session) -> Report:
    """One row for each tensor, op and layer that was read, in the order of the graph: computes,
    elements, smallest, largest, mean, deviation, and the number of NaN, infinities and zeros.

    The title says whether every value is finite. Raises UsageError if no values were read.
    """
    values = values_of(session)
    rows: list[list[Cell]] = []
    for read, events in values.items():
        of = joined(events)
        figures = (of.min, of.max, of.mean, of.std, of.nan, of.inf)
        zeros = of.zero / of.n if of.n else None
        rows.append([*name_of(read), len(events), of.n, *figures, zeros])
    columns = [
        *NAMES,
        *columns_of("count", "computes", "elements"),
        *columns_of("number", "min", "max", "mean", "std"),
        *columns_of("count", "NaN", "infinite"),
        Column("zeros", "fraction"),
    ]
    return Report(
        f"Values: {_whether_finite(session)}", columns, rows, session.log_end.notes(), labels=3,
        key="values",
    )  # fmt: skip


NAMES = (Column("tensor"), Column("op"), Column("layer", "layer"))


def name_of(read: Read) -> list[Cell]:
    """Its cells of the columns NAMES."""
    again = f" #{read.place + 1}" if read.place else ""
    return [read.tensor + again, read.op, read.layer]


def _whether_finite(session: Session) -> str:
    bad = [event for event in session.stats if event.nan or event.inf]
    if not bad:
        return "all that were read are finite"
    first = bad[0]
    step = dict(session.computes.tuples("compute", "step")).get(first.compute, -1)
    where = f"in {first.name}" + (f", step {step}" if step >= 0 else "")
    n_nan, n_inf = sum(event.nan for event in bad), sum(event.inf for event in bad)
    return f"{n_nan:,} NaN and {n_inf:,} infinite, first {where}"
