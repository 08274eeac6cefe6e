"""Maps of the values that `--stats` read: layers by computes, coloured by their deviation."""

from __future__ import annotations

from collections import defaultdict

from converters.analyses.values import Read, values_of
from converters.report.charts import Chart, map_by_layer
from converters.report.report import shown
from llamacpp_instr.log.session import Session

MOST_MAPS = 8
MOST_COMPUTES = 2000
"""columns of a map; later computes are not drawn"""


def chart_values(session: Session, name: str = "") -> list[Chart]:
    """A map for each tensor that was read in several layers: a row for each layer, a column for
    each compute (a prompt, then each token), coloured by the standard deviation. At most MOST_MAPS.
    Titles begin with `name`. Raises UsageError if no values were read."""
    tensors: dict[tuple[str, str, int], list[Read]] = defaultdict(list)
    values = values_of(session)
    for read in values:
        if read.layer >= 0:
            tensors[read.tensor, read.op, read.place].append(read)
    charts: list[Chart] = []
    for (tensor, op, _), reads in tensors.items():
        if len(reads) > 1 and len(charts) < MOST_MAPS:
            reads.sort(key=lambda read: read.layer)
            rows = [[event.std for event in values[read][:MOST_COMPUTES]] for read in reads]
            layers = [shown(read.layer, "layer") for read in reads]
            title = f"{name}{tensor}{f' ({op})' if op else ''}: standard deviation"
            charts.append(map_by_layer(title, "compute: the prompt, then each token", layers, rows))
    return charts
