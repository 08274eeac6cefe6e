"""Charts of the error of weights: by layer, and of whole models over their size."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

from llamacpp_instr.lab.weights.error import Sums, WeightError
from llamacpp_instr.report.charts import Chart, Point, lines_by_layer, scatter_size_error
from llamacpp_instr.report.report import shown

MIB = 1 << 20


def draw_errors(errors: Mapping[str, Sequence[WeightError]]) -> list[Chart]:
    """Charts of the errors of weights by model name: their SQNR by layer, with a line per model,
    and the relative error of each model, 10^(-SQNR/20), over its bytes. Empty without
    models."""
    if not errors:
        return []
    layers = layers_of(error.layer for its in errors.values() for error in its)
    lines = {name: _by_layer(its, layers) for name, its in errors.items()}
    points = [
        Point(name, sum(e.n_bytes for e in its) / MIB, 10 ** (-_sums(its).sqnr_db / 20))
        for name, its in errors.items()
    ]
    names = layer_names(layers)
    return [
        lines_by_layer("Error by layer", "SQNR, dB (more is better)", names, lines),
        scatter_size_error("Error against size", "weights, MiB", "relative error", points),
    ]


def layers_of(layers: Iterable[int]) -> list[int]:
    """Each layer once, in order, with -1 (no layer) last."""
    return sorted(set(layers), key=lambda layer: (layer < 0, layer))


def layer_names(layers: Sequence[int]) -> list[str]:
    """Layer names for the axis of a chart."""
    return [shown(layer, "layer") for layer in layers]


def _by_layer(errors: Sequence[WeightError], layers: Sequence[int]) -> list[float]:
    of_layer: dict[int, list[WeightError]] = defaultdict(list)
    for error in errors:
        of_layer[error.layer].append(error)
    return [_sums(of_layer[layer]).sqnr_db for layer in layers]


def _sums(errors: Sequence[WeightError]) -> Sums:
    return sum((error.sums for error in errors), Sums())
