"""The values that `--stats` read: each tensor over all computes, and two sessions side by side.

Invariant: figures of several computes are those of all their elements together. Only finite
elements count in the smallest, largest and mean value and in the deviation.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from converters.report.report import Cell, Column, Figures, Report, shown
from llamacpp_instr.errors import UsageError
from llamacpp_instr.log.session import Session
from llamacpp_instr.schema import TensorStats

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
    told = [(max(e.n - e.nan - e.inf, 0), e.mean, e.std) for e in events]
    parts = [(n, m, s) for n, m, s in told if n and m is not None and s is not None]
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
        _number(mean),
        _number(std),
        sum(e.nan for e in events),
        sum(e.inf for e in events),
        sum(e.zero for e in events),
    )


def _number(value: float | None) -> float | None:
    return None if value is None or math.isnan(value) else value


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
        rows.append([*_name(read), len(events), of.n, *figures, zeros])
    columns = [
        *_NAMES,
        Column("computes", "count"),
        Column("elements", "count"),
        Column("min", "number"),
        Column("max", "number"),
        Column("mean", "number"),
        Column("std", "number"),
        Column("NaN", "count"),
        Column("infinite", "count"),
        Column("zeros", "fraction"),
    ]
    return Report(f"Values: {_whether_finite(session)}", columns, rows, _notes(session), labels=3)


_NAMES = (Column("tensor"), Column("op"), Column("layer", "layer"))


def _name(read: Read) -> list[Cell]:
    again = f" #{read.place + 1}" if read.place else ""
    return [read.tensor + again, read.op, read.layer]


def _whether_finite(session: Session) -> str:
    bad = [event for event in session.stats if event.nan or event.inf]
    if not bad:
        return "all that were read are finite"
    step_of = dict(
        zip(session.computes["compute"].tolist(), session.computes["step"].tolist(), strict=True)
    )
    first = bad[0]
    step = step_of.get(first.compute, -1)
    where = f"in {first.name}" + (f", step {step}" if step >= 0 else "")
    n_nan, n_inf = sum(event.nan for event in bad), sum(event.inf for event in bad)
    return f"{n_nan:,} NaN and {n_inf:,} infinite, first {where}"


def _notes(session: Session) -> list[str]:
    ended = session.log_end.sentence()
    return [f"{ended[0].upper()}{ended[1:]}."] if ended else []


# --- two sessions ---


def compare_values(a: Session, b: Session) -> Report:
    """The tensors that both sessions read, with their mean and deviation in each.

    `shift` is the difference of the means in deviations of A; `std B / A` is the ratio of the
    deviations. The title names the tensor with the largest shift. Notes name what only one has.
    Raises UsageError if a session read no values or none of the same tensors.
    """
    of_a, of_b = values_of(a), values_of(b)
    both = [read for read in of_a if read in of_b]
    if not both:
        raise UsageError(f"{a.path} and {b.path} read no values of the same tensors")
    rows: list[list[Cell]] = []
    shifts: dict[Read, float] = {}
    for read in both:
        one, other = joined(of_a[read]), joined(of_b[read])
        shift = _ratio(_difference(other.mean, one.mean), one.std)
        if shift is not None:
            shifts[read] = abs(shift)
        rows.append(
            [
                *_name(read), one.mean, other.mean, one.std, other.std, shift,
                _ratio(other.std, one.std), one.nan + one.inf, other.nan + other.inf,
            ]
        )  # fmt: skip
    columns = [
        *_NAMES,
        Column("mean A", "number"),
        Column("mean B", "number"),
        Column("std A", "number"),
        Column("std B", "number"),
        Column("shift", "number"),
        Column("std B / A", "ratio"),
        Column("not finite A", "count"),
        Column("not finite B", "count"),
    ]
    title = "Values of B against A"
    figures: Figures = {}
    if shifts:
        most = max(shifts, key=lambda read: shifts[read])
        figures["largest shift"] = (shifts[most], "number")
        size = shown(shifts[most], "number")
        title += f": means differ by up to {size} deviations, in {_words(most)}"
    notes = [f"A is {a.path}, B is {b.path}.", *_only("A", of_a, of_b), *_only("B", of_b, of_a)]
    n_alike = sum(len(of_a[read]) == len(of_b[read]) for read in both)
    if n_alike < len(both):
        notes.append("The sessions computed different numbers of graphs: use the same prompt.")
    return Report(title, columns, rows, [*notes, *_notes(a), *_notes(b)], figures=figures, labels=3)


def _only(name: str, these: Mapping[Read, object], those: Mapping[Read, object]) -> list[str]:
    lacking = [read for read in these if read not in those]
    if not lacking:
        return []
    return [f"Only in {name}: {len(lacking):,} tensors, such as {_words(lacking[0])}."]


def _words(read: Read) -> str:
    return read.tensor + (f" of layer {read.layer}" if read.layer >= 0 else "")


def _difference(x: float | None, y: float | None) -> float | None:
    return None if x is None or y is None else _number(x - y)


def _ratio(x: float | None, y: float | None) -> float | None:
    return None if x is None or not y else _number(x / y)
