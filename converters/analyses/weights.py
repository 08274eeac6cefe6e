"""The weights of a model, and their errors against another's: by role, layer and type, of each
tensor, its outlier channels; and charts along the layers.

Invariant: the figures of a group are computed from its tensors' moments, or sums of squares, as if
they were one tensor; they are never a mean of means.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence

from llamacpp_instr.base.terminal import counted, first_names
from llamacpp_instr.converters.analyses.tables import Headings, grouped, header, layer_order
from llamacpp_instr.lab.weights.figures import (
    PERCENTS,
    SAMPLE,
    THRESHOLD,
    Channels,
    Moments,
    Sums,
    WeightError,
    WeightStats,
)
from llamacpp_instr.report.charts import (
    Chart,
    Point,
    lines_by_layer,
    map_by_layer,
    scatter_size_error,
)
from llamacpp_instr.report.report import Cell, Report, known, shown

MIB = 1 << 20
MOST_CHANNELS = 20
"""outlier channels that are listed"""
MOST_LAYERS = 512
"""as in llama.cpp; a map omits further layers"""

_SIDES = ("row", "column")


def layers_of(layers: Iterable[int]) -> list[int]:
    """Each layer once, in order, with -1 (no layer) last."""
    return sorted(set(layers), key=layer_order)


def layer_names(layers: Sequence[int]) -> list[str]:
    """Layer names for the axis of a chart."""
    return [shown(layer, "layer") for layer in layers]


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
    figures: dict[str, Callable[[WeightStats], float | None]] = {
        "Root mean square of the weights": lambda of: of.moments.rms,
        "Largest weight, in standard deviations": lambda of: _ratio(of.largest, of.moments.std),
        "Outlier channels": lambda of: _count([of.rows, of.columns]),
    }
    charts = []
    for title, figure in figures.items():
        rows = [
            [figure(at[layer, role]) if (layer, role) in at else None for role in roles]
            for layer in layers
        ]
        charts.append(map_by_layer(title, "role", layer_names(layers), rows, roles))
    return charts


def each_tensor(stats: Sequence[WeightStats]) -> Report:
    sides: list[Headings] = []
    for side in _SIDES:
        sides += [("number", f"{side} median", f"{side} largest"), ("count", f"{side} outliers")]
    columns = header(
        "Tensor", "type", "shape", ("bytes", "bytes"), ("number", "mean", "std", "largest"),
        ("number", *(f"p{percent:g}" for percent in PERCENTS)), ("fraction", "zeros"),
        ("number", "kurtosis", "norm"), *sides,
    )  # fmt: skip
    rows: list[list[Cell]] = []
    for of in stats:
        weight, moments = of.weight, of.moments
        row: list[Cell] = [
            weight.name, weight.type.name, " x ".join(map(str, weight.ne)), weight.n_bytes,
            known(moments.mean if moments.n else math.nan), known(moments.std), known(of.largest),
            *map(known, of.percentiles), known(_ratio(of.n_zero, moments.n)),
            known(moments.kurtosis), moments.norm,
        ]  # fmt: skip
        for channels in (of.rows, of.columns):
            row += [None] * 3
            if channels is not None:
                row[-3:] = [channels.median, channels.largest, channels.n_outliers]
        rows.append(row)
    notes = [
        "A shape has the length of a row first, as in ggml; a row makes one output. largest is the "
        "largest |x|; norm is √Σx², of the tensor and of its rows and columns; kurtosis is 0 for a "
        "normal distribution and grows with the tails; p0.1 to p99.9 are percentiles."
    ]
    if any(of.weight.n_elements > SAMPLE for of in stats):
        notes.append(f"Percentiles of more than {SAMPLE:,} elements come from an even sample.")
    notes += _excluded([(of.weight.name, of.non_finite) for of in stats])
    return Report("Figures of each tensor", columns, rows, notes)


def _excluded(non_finite: Sequence[tuple[str, int]]) -> list[str]:
    """A sentence on elements that no figure includes; `non_finite` has their number by tensor."""
    names = [name for name, n in non_finite if n]
    n = counted(sum(n for _, n in non_finite), "NaN or infinite element")
    return [f"Excluded: {n}, in {first_names(names)}."] if names else []


def _roles(stats: Sequence[WeightStats], name: str) -> Report:
    rows: list[list[Cell]] = []
    for role, group in grouped(stats, lambda of: of.weight.role).items():
        moments = sum((of.moments for of in group), start=Moments())
        rows.append([
            role, len(group), sum(of.weight.n_bytes for of in group), known(moments.rms),
            known(moments.std), max((of.largest for of in group if of.moments.n), default=None),
            known(moments.kurtosis), known(_ratio(sum(of.n_zero for of in group), moments.n)),
            _count([of.rows for of in group]), _count([of.columns for of in group]),
        ])  # fmt: skip
    columns = header(
        "Role", ("count", "tensors"), ("bytes", "bytes"),
        ("number", "RMS", "std", "largest", "kurtosis"), ("fraction", "zeros"),
        ("count", "outlier rows", "outlier columns"),
    )  # fmt: skip
    return Report(f"Weights of {name}", columns, rows, key="weights")


def _outliers(stats: Sequence[WeightStats]) -> Report:
    found = [
        (of.weight.name, side, channel)
        for of in stats
        for side, channels in zip(_SIDES, (of.rows, of.columns), strict=True)
        if channels is not None
        for channel in channels.worst
    ]
    found.sort(key=lambda each: -each[2].times_median)
    rows: list[list[Cell]] = [
        [name, side, c.index, c.norm, c.times_median, c.score]
        for name, side, c in found[:MOST_CHANNELS]
    ]
    columns = header(
        "Tensor", "side", ("id", "channel"), ("number", "norm"), ("ratio", "times the median"),
        ("number", "score"),
    )  # fmt: skip
    n, m = _count([of.rows for of in stats]) or 0, _count([of.columns for of in stats]) or 0
    notes = [
        f"An outlier has a norm whose modified z-score, 0.6745·(norm - median)/MAD, is above "
        f"{THRESHOLD} (Iglewicz and Hoaglin 1993), as does one in 4,300 channels of random weights."
    ]
    if len(found) > MOST_CHANNELS:
        notes.append(f"The {MOST_CHANNELS} furthest above their median, of {n + m:,}.")
    elif not found:
        notes.append("No channel is an outlier.")
    return Report(
        "Outlier channels", columns, rows, notes, labels=3,
        figures={"outlier rows": (n, "count"), "outlier columns": (m, "count")},
    )  # fmt: skip


def _count(sides: Sequence[Channels | None]) -> int | None:
    counts = [side.n_outliers for side in sides if side is not None]
    return sum(counts) if counts else None


def _ratio(a: float, b: float) -> float:
    return a / b if b else math.nan


# --- errors ---

_POOLED = header(
    ("bytes", "bytes"), ("bits", "bits/weight"), ("decibel", "SQNR"), ("number", "RMSE", "largest"),
    ("cosine", "cosine"),
)  # fmt: skip


def weight_error_reports(
    errors: Sequence[WeightError], reference_name: str, candidate_name: str
) -> list[Report]:
    """The error of the candidate's weights against the reference: the model, roles (the worst
    first), layers, types and, in the file's order, tensors."""
    title = f"Error of the weights of {candidate_name} against {reference_name}"
    notes = [
        "SQNR is 10·log10(Σx²/Σ(x-y)²), ∞ if nothing differs; largest is the largest |x-y|; "
        "bytes are those of the candidate.",
        *_excluded([(error.name, error.non_finite) for error in errors]),
    ]
    skipped = grouped((error for error in errors if error.skipped), lambda error: error.skipped)
    for reason, of in skipped.items():
        cure = "; `instr build` installs one that has" if reason.startswith("gguf-py") else ""
        names = first_names([error.name for error in of])
        notes.append(f"Not measured: {names}: {reason}{cure}.")
    rows: list[list[Cell]] = [["all weights", *_pooled(errors)]]
    model = Report(title, header("Model", *_POOLED), rows, notes, key="weight_errors")
    roles = _rolled("By role", "Role", errors, lambda error: error.role)
    in_order = sorted(errors, key=lambda error: error.layer)
    layers = _rolled("By layer", ("layer", "Layer"), in_order, lambda error: error.layer)
    types = _rolled("By type", "Type", errors, _types)
    for report in (roles, types):
        report.rows.sort(key=_sqnr)
    return [model, roles, layers, types, _error_of_each(errors)]


def _error_of_each(errors: Sequence[WeightError]) -> Report:
    columns = header(
        "Tensor", "type", ("bytes", "bytes"), ("decibel", "SQNR"), ("number", "RMSE", "largest"),
        ("cosine", "cosine"), ("number", "p50", "p90", "p99", "p99.9"), ("count", "worst block"),
        ("number", "its RMSE"),
    )  # fmt: skip
    rows: list[list[Cell]] = []
    for error in errors:
        numbers = (
            error.sqnr_db, error.rmse, error.max_error, error.cosine,
            error.p50, error.p90, error.p99, error.p999,
        )  # fmt: skip
        worst = error.worst_block if error.sums.n else None
        row: list[Cell] = [error.name, _types(error), error.n_bytes, *map(known, numbers)]
        rows.append([*row, worst, known(error.worst_block_rmse)])
    notes = ["p50 to p99.9 are percentiles of |x-y|; worst is the block with the largest RMSE."]
    if any(error.n_elements > SAMPLE and not error.skipped for error in errors):
        notes.append(f"Percentiles of more than {SAMPLE:,} elements come from an even sample.")
    return Report("Each tensor", columns, rows, notes)


def _types(error: WeightError) -> str:
    """`F16 → Q4_K`, or the type if both are equal."""
    same = error.reference_type == error.type
    return str(error.type) if same else f"{error.reference_type} → {error.type}"


def _rolled(
    title: str,
    label: Headings,
    errors: Sequence[WeightError],
    key: Callable[[WeightError], str | int],
) -> Report:
    rows: list[list[Cell]] = [[of, *_pooled(group)] for of, group in grouped(errors, key).items()]
    return Report(title, header(label, *_POOLED), rows)


def _pooled(errors: Sequence[WeightError]) -> list[Cell]:
    """The cells of `_POOLED`. An output that is the token embedding adds no bytes."""
    sums = _sums(errors)
    n_bytes = sum(error.n_bytes for error in errors)
    n_elements = sum(error.n_elements for error in errors if error.n_bytes)
    bits = 8 * n_bytes / n_elements if n_elements else None
    largest = max((error.max_error for error in errors if error.sums.n), default=None)
    return [n_bytes, bits, known(sums.sqnr_db), known(sums.rmse), largest, known(sums.cosine)]


def _sums(errors: Sequence[WeightError]) -> Sums:
    return sum((error.sums for error in errors), Sums())


def _sqnr(row: list[Cell]) -> float:
    """Sort key of rows: the worst first, those that were not measured last."""
    sqnr = row[1 + [column.name for column in _POOLED].index("SQNR")]
    return sqnr if isinstance(sqnr, float) else math.inf


def draw_errors(errors: Mapping[str, Sequence[WeightError]]) -> list[Chart]:
    """Charts of the errors of weights by model name: their SQNR by layer, with a line per model,
    and the relative error of each model, 10^(-SQNR/20), over its bytes. Empty if there are no
    models."""
    if not errors:
        return []
    layers = layers_of(error.layer for its in errors.values() for error in its)
    lines: dict[str, list[float]] = {}
    for name, its in errors.items():
        of_layer = grouped(its, lambda error: error.layer)
        lines[name] = [_sums(of_layer.get(layer, [])).sqnr_db for layer in layers]
    points = [
        Point(name, sum(e.n_bytes for e in its) / MIB, 10 ** (-_sums(its).sqnr_db / 20))
        for name, its in errors.items()
    ]
    names = layer_names(layers)
    return [
        lines_by_layer("Error by layer", "SQNR, dB (more is better)", names, lines),
        scatter_size_error("Error against size", "weights, MiB", "relative error", points),
    ]
