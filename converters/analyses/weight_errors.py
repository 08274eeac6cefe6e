"""The error of weights as reports: of the model, by role, layer and type, and of each tensor.

Invariant: the error of a group is computed from sums of squares, as if its tensors were one; it is
never a mean of means.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from llamacpp_instr.base.terminal import counted, first_names
from llamacpp_instr.lab.weights.error import SAMPLE, Sums, WeightError
from llamacpp_instr.report.report import Cell, Column, Report, columns_of, known

_POOLED = [
    Column("bytes", "bytes"),
    Column("bits/weight", "bits"),
    Column("SQNR", "decibel"),
    *columns_of("number", "RMSE", "largest"),
    Column("cosine", "cosine"),
]


def weight_error_reports(
    errors: Sequence[WeightError], reference_name: str, candidate_name: str
) -> list[Report]:
    """The error of the candidate's weights against the reference: the model, roles (the worst
    first), layers, types and, in the file's order, tensors."""
    model = Report(
        f"Error of the weights of {candidate_name} against {reference_name}",
        [Column("Model"), *_POOLED],
        [["all weights", *_pooled(errors)]],
        key="weight_errors",
        notes=[
            "SQNR is 10·log10(Σx²/Σ(x-y)²), ∞ if nothing differs; largest is the largest |x-y|; "
            "bytes are those of the candidate.",
            *_notes(errors),
        ],
    )
    roles = _rolled("By role", Column("Role"), errors, lambda error: error.role)
    roles.rows.sort(key=_sqnr)
    in_order = sorted(errors, key=lambda error: error.layer)
    layers = _rolled("By layer", Column("Layer", "layer"), in_order, lambda error: error.layer)
    types = _rolled("By type", Column("Type"), errors, _types)
    types.rows.sort(key=_sqnr)
    return [model, roles, layers, types, _tensors(errors)]


def _tensors(errors: Sequence[WeightError]) -> Report:
    columns = [
        *columns_of("text", "Tensor", "type"),
        Column("bytes", "bytes"),
        Column("SQNR", "decibel"),
        *columns_of("number", "RMSE", "largest"),
        Column("cosine", "cosine"),
        *columns_of("number", "p50", "p90", "p99", "p99.9"),
        Column("worst block", "count"),
        Column("its RMSE", "number"),
    ]
    rows: list[list[Cell]] = []
    for error in errors:
        measured = bool(error.sums.n)
        numbers = (
            error.sqnr_db, error.rmse, error.max_error, error.cosine,
            error.p50, error.p90, error.p99, error.p999,
        )  # fmt: skip
        worst: list[Cell] = [error.worst_block if measured else None, known(error.worst_block_rmse)]
        rows.append(
            [error.name, _types(error), error.n_bytes, *map(known, numbers), *worst]
        )  # fmt: skip
    notes = ["p50 to p99.9 are percentiles of |x-y|; worst is the block with the largest RMSE."]
    if any(error.n_elements > SAMPLE and not error.skipped for error in errors):
        notes.append(f"Percentiles of more than {SAMPLE:,} elements come from an even sample.")
    return Report("Each tensor", columns, rows, notes)


def _types(error: WeightError) -> str:
    """`F16 → Q4_K`, or the type if both are equal."""
    if error.reference_type == error.type:
        return str(error.type)
    return f"{error.reference_type} → {error.type}"


def _rolled(
    title: str,
    column: Column,
    errors: Sequence[WeightError],
    key: Callable[[WeightError], str | int],
) -> Report:
    groups: dict[str | int, list[WeightError]] = {}
    for error in errors:
        groups.setdefault(key(error), []).append(error)
    rows: list[list[Cell]] = [[name, *_pooled(group)] for name, group in groups.items()]
    return Report(title, [column, *_POOLED], rows)


def _pooled(errors: Sequence[WeightError]) -> list[Cell]:
    """The cells of `_POOLED`. An output that is the token embedding adds no bytes."""
    sums = sum((error.sums for error in errors), start=Sums())
    n_bytes = sum(error.n_bytes for error in errors)
    n_elements = sum(error.n_elements for error in errors if error.n_bytes)
    return [
        n_bytes,
        8 * n_bytes / n_elements if n_elements else None,
        known(sums.sqnr_db),
        known(sums.rmse),
        max((error.max_error for error in errors if error.sums.n), default=None),
        known(sums.cosine),
    ]


def _sqnr(row: list[Cell]) -> float:
    """Sort key of rows: the worst first, those that were not measured last."""
    sqnr = row[1 + [column.name for column in _POOLED].index("SQNR")]
    return sqnr if isinstance(sqnr, float) else math.inf


def _notes(errors: Sequence[WeightError]) -> list[str]:
    notes = []
    bad = [error for error in errors if error.non_finite]
    if bad:
        n = sum(error.non_finite for error in bad)
        names = first_names([error.name for error in bad])
        notes.append(f"Excluded: {counted(n, 'NaN or infinite element')}, in {names}.")
    for reason in dict.fromkeys(error.skipped for error in errors if error.skipped):
        names = first_names([error.name for error in errors if error.skipped == reason])
        cure = "; `instr build` installs one that has" if reason.startswith("gguf-py") else ""
        notes.append(f"Not measured: {names}: {reason}{cure}.")
    return notes
