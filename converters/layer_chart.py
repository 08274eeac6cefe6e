"""The chart of where a model's bits are."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from converters.charts import Chart, bar_by_layer
from converters.report import shown
from converters.stored import StoredTensor


def chart_bits_by_layer(tensors: Sequence[StoredTensor]) -> Chart:
    """Bits per weight of every layer, as the sum of what each type has in it. Tensors that belong
    to no layer stand last."""
    of_layer: dict[int, list[StoredTensor]] = defaultdict(list)
    of_type: dict[str, int] = defaultdict(int)
    for tensor in tensors:
        of_layer[tensor.layer].append(tensor)
        of_type[tensor.type] += tensor.n_bytes
    layers = sorted(of_layer, key=lambda layer: (layer < 0, layer))
    parts: dict[str, list[float | None]] = {
        type_: [
            8 * sum(tensor.n_bytes for tensor in of_layer[layer] if tensor.type == type_)
            / max(sum(tensor.n_elements for tensor in of_layer[layer]), 1)
            for layer in layers
        ]
        for type_ in sorted(of_type, key=lambda type_: -of_type[type_])
    }  # fmt: skip
    names = [shown(layer, "layer") for layer in layers]
    return bar_by_layer("Bits per weight by layer", "bits per weight", names, parts)
