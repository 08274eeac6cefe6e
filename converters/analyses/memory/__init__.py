"""The memory report: the size of each tensor, and the memory of a model and its contexts.

Invariant: rows add up: the tensors of every group to the model, and the uses of memory to their
total. Bytes are those of the file or of llama.cpp's own buffers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from llamacpp_instr.converters.analyses.memory.report_of_context import ContextMemory, memory_report
from llamacpp_instr.converters.analyses.memory.sizes import compute_layers as compute_layers
from llamacpp_instr.converters.analyses.memory.sizes import compute_overview, compute_tensors
from llamacpp_instr.converters.analyses.memory.sizes import compute_roles as compute_roles
from llamacpp_instr.converters.analyses.memory.sizes import compute_types as compute_types
from llamacpp_instr.converters.analyses.memory.sizes import without as without
from llamacpp_instr.converters.analyses.stored_weights import StoredModel
from llamacpp_instr.report.report import Column, Report

LARGEST = 20
"""tensors shown on a terminal"""
MANY_LAYERS = 12
"""layers, or kinds of layers, shown on a terminal"""
MANY_TYPES = 50
MANY_ROLES = 200
"""types and roles shown on a terminal: as many as a model can have"""


def compression_reports(model: StoredModel, contexts: Sequence[ContextMemory]) -> list[Report]:
    """All reports about one model: its sizes, its memory (one section for each of `contexts`), its
    tensors by type, role and layer, and each tensor. Sizes are in bytes; shares are from 0 to 1.
    """
    return [
        compute_overview(model),
        *(memory_report(model, memory) for memory in contexts),
        compute_types(model),
        compute_roles(model),
        compute_layers(model),
        compute_tensors(model, contexts),
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
    overview, *memory, types, roles, layers, tensors = reports
    tensors = without(tensors, "elements", "of F16", "of F32", "layer", "role")
    if len(tensors.rows) > LARGEST:
        notes = ["A file (-o) has all tensors.", *tensors.notes]
        tensors = replace(tensors, title="Largest tensors", notes=notes, most=LARGEST)
    return [
        overview,
        *(without(report, "tensors") for report in memory),
        replace(without(types, "elements", "of F32"), most=MANY_TYPES),
        replace(without(roles, "tensors", "elements", "of F32"), most=MANY_ROLES),
        replace(without(layers, "elements", "of F32"), most=MANY_LAYERS + 1),
        tensors,
    ]
