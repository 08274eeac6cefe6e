"""The charts of a model's memory: by kind, and its bits per weight by layer."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence

from llamacpp_instr.converters.analyses.stored_weights import StoredTensor
from llamacpp_instr.report.charts import Chart, bar_by_layer
from llamacpp_instr.report.page import Figure
from llamacpp_instr.report.plain_charts import Group, bars
from llamacpp_instr.report.report import Report, shown


def draw_memory(reports: Sequence[Report]) -> Iterator[Figure]:
    """Bars of each report of a context's memory: what was measured, else predicted, by kind."""
    for report in reports:
        at = {column.name: i for i, column in enumerate(report.columns)}
        if not report.title.startswith("Memory") or "measured" not in at:
            continue
        rows = [row for row in report.rows if row[0] != "total"]
        for what in ("measured", "predicted"):
            values = [value for row in rows if isinstance(value := row[at[what]], int)]
            if values and len(values) == len(rows):
                names = [f"{row[0]}, {row[1]}" for row in rows]
                group = Group(what, values, "bytes")
                yield bars(f"{report.title} by kind", names, [group])
                break


MOST_LAYERS = 512
"""as in llama.cpp; a chart omits further layers"""
MOST_TYPES = 10
"""types in a chart; those with fewer bytes are omitted"""


def chart_bits_by_layer(tensors: Sequence[StoredTensor]) -> Chart:
    """Bits per weight of every layer, stacked by storage type. Tensors without a layer come
    last."""
    n_elements: Counter[int] = Counter()
    of_type: dict[str, Counter[int]] = defaultdict(Counter)
    for tensor in tensors:
        layer = tensor.layer
        n_elements[layer] += tensor.n_elements
        of_type[tensor.type][layer] += tensor.n_bytes
    layers = sorted(n_elements, key=lambda layer: (layer < 0, layer))[:MOST_LAYERS]
    types = sorted(of_type, key=lambda type_: -of_type[type_].total())[:MOST_TYPES]
    parts = {
        type_: [8 * of_type[type_][layer] / max(n_elements[layer], 1) for layer in layers]
        for type_ in types
    }
    names = [shown(layer, "layer") for layer in layers]
    return bar_by_layer("Bits per weight by layer", "bits per weight", names, parts)
