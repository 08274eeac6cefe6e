"""The charts of a comparison: bits and error by layer, error against size."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from converters.charts import Chart, Point, lines_by_layer, scatter_size_error
from converters.compare.candidate import Candidate, bits_per_weight
from llamacpp_instr.weight_error import Sums

MIB = 1 << 20


def draw_comparison(candidates: Sequence[Candidate]) -> list[Chart]:
    """Bits per weight by layer; where errors are known their SQNR by layer, and the relative
    error of each model against its size."""
    numbers = sorted({tensor.layer for of in candidates for tensor in of.model.tensors})
    numbers = [n for n in numbers if n >= 0] + [n for n in numbers if n < 0]
    layers = [str(n) if n >= 0 else "none" for n in numbers]
    # the reference last, so that a model has its colour in both charts
    ordered = sorted(candidates, key=lambda of: of.is_reference)
    bits = {of.name: [_bits(of, n) for n in numbers] for of in ordered}
    charts = [lines_by_layer("Bits per weight by layer", "bits per weight", layers, bits)]
    judged = [of for of in candidates if of.errors]
    if judged:
        sqnr = {of.name: [_sums(of, n).sqnr_db for n in numbers] for of in judged}
        charts.append(lines_by_layer("Error by layer", "SQNR, dB (more is better)", layers, sqnr))
        points = [Point(of.name, of.model.n_bytes / MIB, relative_error(of)) for of in judged]
        charts.append(
            scatter_size_error("Error against size", "weights, MiB", "relative error", points)
        )
    return charts


def relative_error(of: Candidate) -> float:
    """The weights' RMS error as a share of their RMS, 10^(-SQNR/20); NaN when it is not known."""
    sqnr = of.sqnr_db(of.errors)
    return math.nan if sqnr is None else 10 ** (-sqnr / 20)


def _bits(of: Candidate, layer: int) -> float | None:
    tensors = [tensor for tensor in of.model.tensors if tensor.layer == layer]
    return bits_per_weight(tensors) if tensors else None


def _sums(of: Candidate, layer: int) -> Sums:
    return sum(_of_layer(of, layer), Sums())


def _of_layer(of: Candidate, layer: int) -> Iterator[Sums]:
    for error in of.errors.values():
        if error.layer == layer:
            yield error.sums
