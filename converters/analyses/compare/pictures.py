"""The charts of a comparison: bits and error by layer, error against size."""

from __future__ import annotations

from collections.abc import Sequence

from converters.analyses.compare.candidate import Candidate, bits_per_weight
from converters.analyses.error_charts import draw_errors, layer_names, layers_of
from converters.report.charts import Chart, lines_by_layer


def draw_comparison(candidates: Sequence[Candidate]) -> list[Chart]:
    """Bits per weight by layer. If errors are known, also the SQNR by layer, and the relative error
    of each model over its size."""
    layers = layers_of(tensor.layer for of in candidates for tensor in of.model.tensors)
    # the reference last, so that a model has the same colour in both charts
    ordered = sorted(candidates, key=lambda of: of.is_reference)
    bits = {of.name: _bits(of, layers) for of in ordered}
    return [
        lines_by_layer("Bits per weight by layer", "bits per weight", layer_names(layers), bits),
        *draw_errors({of.name: list(of.errors.values()) for of in candidates if of.errors}),
    ]


def _bits(of: Candidate, layers: Sequence[int]) -> list[float | None]:
    tensors = of.model.by_layer
    return [bits_per_weight(tensors[layer]) if layer in tensors else None for layer in layers]
