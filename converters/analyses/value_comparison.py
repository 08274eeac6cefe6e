"""The values that sessions read: of two side by side, by tensor and token by token, and as maps of
layers by tokens.

Figures of two are over the computes of the same tokens in both (`value_tokens`); if there are none,
over all of each session.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Mapping

from llamacpp_instr.base.errors import UsageError
from llamacpp_instr.base.terminal import counted
from llamacpp_instr.converters.analyses.value_tokens import Alike, computed_tokens, same_tokens
from llamacpp_instr.converters.analyses.values import (
    NAMES,
    Read,
    Spread,
    joined,
    name_of,
    values_of,
)
from llamacpp_instr.log.schema import TensorStats
from llamacpp_instr.log.session import Session
from llamacpp_instr.report.charts import Chart, map_by_layer
from llamacpp_instr.report.report import Cell, Column, Figures, Report, columns_of, known, shown

Values = dict[Read, list[TensorStats]]


def compare_values(a: Session, b: Session) -> list[Report]:
    """The tensors that both sessions read, with their mean and deviation in each; then a row for
    each compute of the same tokens, if there are any.

    `shift` is the difference of the means in deviations of A; `std B / A` is the ratio of the
    deviations. The title names the tensor with the largest shift. Notes name what only one has, and
    where the tokens part. Raises UsageError if a session read no values or none of the same
    tensors.
    """
    of_a, of_b, alike = values_of_both(a, b)
    both = [read for read in of_a if read in of_b]
    rows: list[list[Cell]] = []
    shifts: dict[Read, float] = {}
    for read in both:
        one, other = joined(of_a[read]), joined(of_b[read])
        shift = shift_of(one, other)
        if shift is not None:
            shifts[read] = abs(shift)
        rows.append(
            [
                *name_of(read), one.mean, other.mean, one.std, other.std, shift,
                _ratio(other.std, one.std), one.nan + one.inf, other.nan + other.inf,
            ]
        )  # fmt: skip
    columns = [
        *NAMES,
        *columns_of("number", "mean A", "mean B", "std A", "std B", "shift"),
        Column("std B / A", "ratio"),
        *columns_of("count", "not finite A", "not finite B"),
    ]
    title = "Values of B against A"
    figures: Figures = {}
    if shifts:
        most = max(shifts, key=lambda read: shifts[read])
        figures["largest shift"] = (shifts[most], "number")
        size = shown(shifts[most], "number")
        title += f": means differ by up to {size} deviations, in {_words(most)}"
    notes = [f"A is {a.path}, B is {b.path}.", *_only("A", of_a, of_b), *_only("B", of_b, of_a)]
    notes += [_extent(a, b, alike), *alike.parted, *a.log_end.notes(), *b.log_end.notes()]
    by_tensor = Report(title, columns, rows, notes, figures=figures, labels=3, key="values")
    return [by_tensor, *([_by_token(of_a, of_b, alike)] if alike.pairs else [])]


def values_of_both(a: Session, b: Session) -> tuple[Values, Values, Alike]:
    """The statistics of both sessions: those of the computes of the same tokens, in the same order,
    if there are any; else all. Raises UsageError if the sessions read none of the same tensors."""
    of_a, of_b = values_of(a), values_of(b)
    if not of_a.keys() & of_b.keys():
        raise UsageError(f"{a.path} and {b.path} read no values of the same tensors")
    alike = same_tokens(a, b)
    if alike.pairs:
        order = {compute: i for i, compute in enumerate(alike.pairs)}
        of_a = _chosen(of_a, order)
        of_b = _chosen(of_b, {alike.pairs[compute]: i for compute, i in order.items()})
    return of_a, of_b, alike


def shift_of(one: Spread | TensorStats, other: Spread | TensorStats) -> float | None:
    """The difference of the means in deviations of `one`; None if it is not known."""
    if one.mean is None or other.mean is None:
        return None
    return _ratio(known(other.mean - one.mean), one.std)


def _chosen(values: Values, order: Mapping[int, int]) -> Values:
    """The events of some computes, in their order; without the tensors that these did not have."""
    chosen = {
        read: sorted((e for e in of if e.compute in order), key=lambda e: order[e.compute])
        for read, of in values.items()
    }
    return {read: of for read, of in chosen.items() if of}


def _by_token(of_a: Values, of_b: Values, alike: Alike) -> Report:
    """One row for each pair of computes: the tensor with the largest shift, and the median ratio of
    the deviations of all tensors."""
    named: dict[int, list[tuple[Read, TensorStats, TensorStats]]] = {}
    for read in of_a.keys() & of_b.keys():
        others = {event.compute: event for event in of_b[read]}
        for event in of_a[read]:
            if (other := others.get(alike.pairs[event.compute])) is not None:
                named.setdefault(event.compute, []).append((read, event, other))
    rows: list[list[Cell]] = []
    for compute, tokens in alike.tokens.items():
        of = named.get(compute, [])
        shifts = {read: shift_of(one, other) for read, one, other in of}
        known = {read: shift for read, shift in shifts.items() if shift is not None}
        most = max(known, key=lambda read: abs(known[read])) if known else None
        every = (_ratio(other.std, one.std) for _, one, other in of)
        ratios = [ratio for ratio in every if ratio is not None]
        rows.append(
            [
                tokens.where, tokens.label, known[most] if most else None,
                *(name_of(most) if most else ["", "", None]),
                statistics.median(ratios) if ratios else None,
            ]
        )  # fmt: skip
    columns = [
        *columns_of("text", "position", "token"),
        Column("largest shift", "number"),
        *NAMES,
        Column("std B / A, median", "ratio"),
    ]
    notes = [
        "A row is a compute of the same tokens in both. A prompt is one, or one for each ubatch;"
        " the last layer then computes only the tokens whose logits are asked for."
    ]
    return Report("B against A, token by token", columns, rows, notes, labels=2)


def _extent(a: Session, b: Session, alike: Alike) -> str:
    if not alike.pairs:
        return "No compute has the same tokens in both: use the same prompt. All computes count."
    n_a, n_b = ({event.compute for event in of.stats} for of in (a, b))
    n = len(alike.pairs)
    return f"{counted(n, 'compute')} of the same tokens: A has {len(n_a):,} in all, B {len(n_b):,}."


def _only(name: str, these: Mapping[Read, object], those: Mapping[Read, object]) -> list[str]:
    lacking = [read for read in these if read not in those]
    if not lacking:
        return []
    return [f"Only in {name}: {counted(len(lacking), 'tensor')}, such as {_words(lacking[0])}."]


def _words(read: Read) -> str:
    return read.tensor + (f" of layer {read.layer}" if read.layer >= 0 else "")


def _ratio(x: float | None, y: float | None) -> float | None:
    return None if x is None or not y else known(x / y)


MOST_MAPS = 8
MOST_COLUMNS = 2000
"""columns of a map; later computes are not drawn"""
AXIS = "token that was computed; a prompt's are one column for each ubatch"


def map_values(session: Session) -> list[Chart]:
    """A map for each tensor that was read in several layers: a row for each layer, a column for
    each compute with the text of its token, coloured by the standard deviation. At most MOST_MAPS.
    Raises UsageError if no values were read."""
    values = values_of(session)
    read = dict.fromkeys(sorted(event.compute for event in session.stats))
    tokens = computed_tokens(session)
    columns = {compute: tokens[compute].label for compute in read}
    cells = {of: {e.compute: e.std for e in events} for of, events in values.items()}
    return _maps("standard deviation", columns, cells)


def map_shifts(a: Session, b: Session) -> list[Chart]:
    """Like `map_values`, of the computes of the same tokens in both sessions, coloured by the
    difference of the means in deviations of A, without its sign. Raises UsageError if the sessions
    read none of the same tensors."""
    of_a, of_b, alike = values_of_both(a, b)
    columns = {compute: of.label for compute, of in alike.tokens.items()}
    cells: dict[Read, dict[int, float | None]] = {}
    for read in of_a:
        others = {event.compute: event for event in of_b.get(read, ())}
        for event in of_a[read] if columns else ():
            other = others.get(alike.pairs[event.compute])
            shift = shift_of(event, other) if other is not None else None
            cells.setdefault(read, {})[event.compute] = None if shift is None else abs(shift)
    return _maps("difference of the means, B against A, in deviations of A", columns, cells)


def _maps(
    what: str, columns: dict[int, str], cells: dict[Read, dict[int, float | None]]
) -> list[Chart]:
    """The maps of tensors by layer and compute; `columns` has the label of each compute."""
    tensors: dict[tuple[str, str, int], list[Read]] = defaultdict(list)
    for read in cells:
        if read.layer >= 0:
            tensors[read.tensor, read.op, read.place].append(read)
    drawn = dict(list(columns.items())[:MOST_COLUMNS])
    charts: list[Chart] = []
    for (tensor, op, _), reads in tensors.items():
        if len(reads) > 1 and len(charts) < MOST_MAPS:
            reads.sort(key=lambda read: read.layer)
            rows = [[cells[read].get(compute) for compute in drawn] for read in reads]
            layers = [shown(read.layer, "layer") for read in reads]
            title = f"{tensor}{f' ({op})' if op else ''}: {what}"
            charts.append(map_by_layer(title, AXIS, layers, rows, list(drawn.values())))
    return charts
