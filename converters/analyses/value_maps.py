"""Maps of the values that `--stats` read: layers by tokens."""

from __future__ import annotations

from collections import defaultdict

from converters.analyses.value_comparison import shift_of, values_of_both
from converters.analyses.value_tokens import computed_tokens
from converters.analyses.values import Read, values_of
from converters.report.charts import Chart, map_by_layer
from converters.report.report import shown
from llamacpp_instr.log.session import Session

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
