"""The weights of a model as reports: by role, each tensor, its outlier channels; and maps along the
layers.

Invariant: the figures of a group are computed from its tensors' moments, as if they were one
tensor; they are never a mean of means.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from llamacpp_instr.base.terminal import counted, first_names
from llamacpp_instr.lab.weights.distribution import (
    PERCENTS,
    THRESHOLD,
    Channels,
    Moments,
    WeightStats,
)
from llamacpp_instr.lab.weights.error import SAMPLE
from llamacpp_instr.report.charts import Chart, map_by_layer
from llamacpp_instr.report.report import Cell, Column, Report, known, shown

MOST_CHANNELS = 20
"""outlier channels that are listed"""
MOST_LAYERS = 512
"""as in llama.cpp; a map omits further layers"""

_SIDES = ("row", "column")


def weight_reports(stats: Sequence[WeightStats], name: str) -> list[Report]:
    """The weights of a model: by role, each tensor in the file's order, and the outlier channels,
    the largest first. `name` is the model's."""
    return [_roles(stats, name), each_tensor(stats), _outliers(stats)]


def weight_maps(stats: Sequence[WeightStats]) -> list[Chart]:
    """Maps of the tensors of layers: a row for each layer and a column for each role."""
    layers = sorted({s.weight.layer for s in stats if s.weight.layer >= 0})[:MOST_LAYERS]
    roles = list(dict.fromkeys(s.weight.role for s in stats if s.weight.layer >= 0))
    if not layers:
        return []
    at = {(s.weight.layer, s.weight.role): s for s in stats}
    figures: list[tuple[str, Callable[[WeightStats], float | None]]] = [
        ("Root mean square of the weights", lambda of: of.moments.rms),
        ("Largest weight, in standard deviations", lambda of: _ratio(of.largest, of.moments.std)),
        ("Outlier channels", lambda of: _count([of.rows, of.columns])),
    ]
    charts = []
    for title, figure in figures:
        rows = [
            [figure(at[layer, role]) if (layer, role) in at else None for role in roles]
            for layer in layers
        ]
        charts.append(
            map_by_layer(title, "role", [shown(layer, "layer") for layer in layers], rows, roles)
        )
    return charts


def each_tensor(stats: Sequence[WeightStats]) -> Report:
    """All figures of every tensor."""
    percents = [Column(f"p{percent:g}", "number") for percent in PERCENTS]
    columns = [
        Column("Tensor"), Column("type"), Column("shape"), Column("bytes", "bytes"),
        Column("mean", "number"), Column("std", "number"), Column("largest", "number"), *percents,
        Column("zeros", "fraction"), Column("kurtosis", "number"), Column("norm", "number"),
        *(column for side in _SIDES for column in (
            Column(f"{side} median", "number"), Column(f"{side} largest", "number"),
            Column(f"{side} outliers", "count"))),
    ]  # fmt: skip
    rows: list[list[Cell]] = []
    for of in stats:
        weight, moments = of.weight, of.moments
        row: list[Cell] = [
            weight.name, weight.type.name, " x ".join(map(str, weight.ne)), weight.n_bytes,
            known(moments.mean if moments.n else math.nan), known(moments.std), known(of.largest),
            *map(known, of.percentiles), known(_ratio(of.n_zero, moments.n)),
            known(moments.kurtosis), moments.norm,
        ]  # fmt: skip
        for side in (of.rows, of.columns):
            row += [None] * 3 if side is None else [side.median, side.largest, side.n_outliers]
        rows.append(row)
    notes = [
        "A shape has the length of a row first, as in ggml; a row makes one output. largest is the "
        "largest |x|; norm is √Σx², of the tensor and of its rows and columns; kurtosis is 0 for a "
        "normal distribution and grows with the tails; p0.1 to p99.9 are percentiles.",
    ]
    if any(of.weight.n_elements > SAMPLE for of in stats):
        notes.append(f"Percentiles of more than {SAMPLE:,} elements come from an even sample.")
    bad = [of for of in stats if of.non_finite]
    if bad:
        n = sum(of.non_finite for of in bad)
        names = first_names([of.weight.name for of in bad])
        notes.append(f"Excluded: {counted(n, 'NaN or infinite element')}, in {names}.")
    return Report("Figures of each tensor", columns, rows, notes)


def _roles(stats: Sequence[WeightStats], name: str) -> Report:
    groups: dict[str, list[WeightStats]] = {}
    for of in stats:
        groups.setdefault(of.weight.role, []).append(of)
    rows: list[list[Cell]] = []
    for role, group in groups.items():
        moments = sum((of.moments for of in group), start=Moments())
        sides = ([of.rows for of in group], [of.columns for of in group])
        rows.append([
            role, len(group), sum(of.weight.n_bytes for of in group), known(moments.rms),
            known(moments.std), max((of.largest for of in group if of.moments.n), default=None),
            known(moments.kurtosis), known(_ratio(sum(of.n_zero for of in group), moments.n)),
            *map(_count, sides),
        ])  # fmt: skip
    columns = [
        Column("Role"), Column("tensors", "count"), Column("bytes", "bytes"),
        Column("RMS", "number"), Column("std", "number"), Column("largest", "number"),
        Column("kurtosis", "number"), Column("zeros", "fraction"),
        Column("outlier rows", "count"), Column("outlier columns", "count"),
    ]  # fmt: skip
    return Report(f"Weights of {name}", columns, rows, key="weights")


def _outliers(stats: Sequence[WeightStats]) -> Report:
    found = [
        (of, side, channel)
        for of in stats
        for side, channels in zip(_SIDES, (of.rows, of.columns), strict=True)
        if channels is not None
        for channel in channels.worst
    ]
    found.sort(key=lambda each: -each[2].times_median)
    rows: list[list[Cell]] = [
        [of.weight.name, side, c.index, c.norm, c.times_median, c.score]
        for of, side, c in found[:MOST_CHANNELS]
    ]
    columns = [
        Column("Tensor"), Column("side"), Column("channel", "id"), Column("norm", "number"),
        Column("times the median", "ratio"), Column("score", "number"),
    ]  # fmt: skip
    n = sum(_count([of.rows]) or 0 for of in stats)
    m = sum(_count([of.columns]) or 0 for of in stats)
    notes = [
        f"An outlier has a norm whose modified z-score, 0.6745·(norm - median)/MAD, is above "
        f"{THRESHOLD} (Iglewicz and Hoaglin 1993); one in 4,300 channels of random weights has.",
    ]
    if len(found) > MOST_CHANNELS:
        notes.append(f"The {MOST_CHANNELS} with the largest norms in medians, of {n + m:,}.")
    elif not found:
        notes.append("No channel is one.")
    return Report(
        "Outlier channels", columns, rows, notes, labels=3,
        figures={"outlier rows": (n, "count"), "outlier columns": (m, "count")},
    )  # fmt: skip


def _count(sides: Sequence[Channels | None]) -> int | None:
    counts = [side.n_outliers for side in sides if side is not None]
    return sum(counts) if counts else None


def _ratio(a: float, b: float) -> float:
    return a / b if b else math.nan
