"""The charts of a comparison: speed, bits and error by layer, error against size."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from llamacpp_instr.converters.analyses.compare.candidate import (
    SHOWN_PHASES,
    Candidate,
    bits_per_weight,
)
from llamacpp_instr.converters.analyses.error_charts import draw_errors, layer_names, layers_of
from llamacpp_instr.report.charts import Chart, lines_by_layer
from llamacpp_instr.report.page import Figure
from llamacpp_instr.report.plain_charts import Group, bars


def draw_comparison(candidates: Sequence[Candidate]) -> list[Chart | Figure]:
    """The speed of each phase, if it was measured, and bits per weight by layer. If errors are
    known, also the SQNR by layer, and the relative error of each model over its size."""
    layers = layers_of(tensor.layer for of in candidates for tensor in of.model.tensors)
    # the reference last, so that a model has the same colour in both charts
    ordered = sorted(candidates, key=lambda of: of.is_reference)
    bits = {of.name: _bits(of, layers) for of in ordered}
    return [
        *_speeds(candidates),
        lines_by_layer("Bits per weight by layer", "bits per weight", layer_names(layers), bits),
        *draw_errors({of.name: list(of.errors.values()) for of in candidates if of.errors}),
    ]


def _speeds(candidates: Sequence[Candidate]) -> Iterator[Figure]:
    phases = [phase for phase in SHOWN_PHASES if any(phase in of.phases() for of in candidates)]
    groups = [
        Group(f"{phase}, tokens/s", [of.tokens_per_second(phase) for of in candidates])
        for phase in phases
    ]
    if groups:
        yield bars("Speed, median step", [of.name for of in candidates], groups)


def _bits(of: Candidate, layers: Sequence[int]) -> list[float | None]:
    tensors = of.model.by_layer
    return [bits_per_weight(tensors[layer]) if layer in tensors else None for layer in layers]
