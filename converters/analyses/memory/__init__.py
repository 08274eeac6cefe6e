"""The memory report: the size of each tensor, and the memory of a model and its contexts.

Invariant: rows add up: the tensors of every group to the model, and the uses of memory to their
total. Bytes are those of the file or of llama.cpp's own buffers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from converters.analyses.memory.report_of_context import Held, memory_report
from converters.analyses.memory.sizes import compute_layers as compute_layers
from converters.analyses.memory.sizes import compute_overview, compute_tensors
from converters.analyses.memory.sizes import compute_roles as compute_roles
from converters.analyses.memory.sizes import compute_types as compute_types
from converters.analyses.memory.sizes import without as without
from converters.analyses.stored_weights import StoredModel
from converters.report.report import Cell, Column, Report
from llamacpp_instr.terminal import counted

LARGEST = 20
"""tensors shown on a terminal"""
MANY_LAYERS = 12
"""layers, or kinds of layers, shown on a terminal"""
MANY_TYPES = 50
MANY_ROLES = 200
"""types and roles shown on a terminal: as many as a model can have"""


def compression_reports(model: StoredModel, held: Sequence[Held]) -> list[Report]:
    """All reports about one model: its sizes, its memory (one section for each of `held`), its
    tensors by type, role and layer, and each tensor. Sizes are in bytes; shares are from 0 to 1.
    """
    return [
        compute_overview(model),
        *(memory_report(model, memory) for memory in held),
        compute_types(model),
        compute_roles(model),
        compute_layers(model),
        compute_tensors(model, held),
    ]


def joined_tensors(models: Sequence[Sequence[Report]]) -> Report:
    """Every tensor of the models that these reports are about, as one table."""
    tables = [(reports[0].title, reports[-1]) for reports in models]
    first = tables[0][1]
    if len(tables) == 1:
        return first
    rows = [[*row, title] for title, table in tables for row in table.rows]
    return replace(first, columns=[*first.columns, Column("model")], rows=rows)


def shortened(reports: Sequence[Report]) -> list[Report]:
    """The reports of one model, shortened for a terminal: fewer columns, only the largest tensors,
    and each kind of layer once if there are many layers."""
    overview, *held, types, roles, layers, tensors = reports
    return [
        overview,
        *(without(report, "tensors") for report in held),
        _first(without(types, "elements", "of F32"), MANY_TYPES),
        _first(without(roles, "tensors", "elements", "of F32"), MANY_ROLES),
        _alike(without(layers, "elements", "of F32")),
        _largest(without(tensors, "elements", "of F16", "of F32", "layer", "role")),
    ]


def _first(report: Report, most: int) -> Report:
    if len(report.rows) <= most:
        return report
    note = f"{len(report.rows) - most:,} more are left out; a file (-o) has them all."
    return replace(report, rows=report.rows[:most], notes=[note, *report.notes])


def _largest(tensors: Report) -> Report:
    if len(tensors.rows) <= LARGEST:
        return tensors
    at = next(i for i, column in enumerate(tensors.columns) if column.unit == "bytes")
    rows = sorted(tensors.rows, key=lambda row: -int(row[at] or 0))[:LARGEST]
    rest = len(tensors.rows) - LARGEST
    note = f"Not shown: {counted(rest, 'smaller one')}; a file (-o) has them all."
    return replace(tensors, title="Largest tensors", rows=rows, notes=[note, *tensors.notes])


def _alike(layers: Report) -> Report:
    """One row for all layers with the same types and sizes, and one for what is outside of them."""
    inside = [row for row in layers.rows if row[0] != -1]
    if len(inside) <= MANY_LAYERS:
        return layers
    kinds: dict[tuple[Cell, ...], list[int]] = {}
    for layer, *figures in inside:
        kinds.setdefault(tuple(figures), []).append(int(layer or 0))
    rows: list[list[Cell]] = [[_ranges(of), *figures] for figures, of in kinds.items()]
    notes = ["A row is one layer of each kind; a file (-o) has all layers."]
    if len(rows) > MANY_LAYERS:
        notes.insert(0, f"The first {MANY_LAYERS} of {len(rows)} kinds of layers.")
    outside = [row for row in layers.rows if row[0] == -1]
    rows = [*rows[:MANY_LAYERS], *(["none", *figures] for _, *figures in outside)]
    columns = [Column("Layers"), *layers.columns[1:]]
    return replace(layers, columns=columns, rows=rows, notes=notes)


def _ranges(numbers: list[int]) -> str:
    """`0-3, 6`."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1] = [runs[-1][0], number]
        else:
            runs.append([number])
    return ", ".join("-".join(map(str, run)) for run in runs)
