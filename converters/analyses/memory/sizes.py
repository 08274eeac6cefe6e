"""The sizes of a model's tensors: one by one, and by type, role and layer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TypeVar

from llamacpp_instr.converters.analyses.memory.report_of_context import ContextMemory
from llamacpp_instr.converters.analyses.stored_weights import StoredModel, StoredTensor, types_of
from llamacpp_instr.report.report import Cell, Column, Report, columns_of

_COST = [Column("bits/weight", "bits"), *columns_of("fraction", "of F16", "of F32")]
_SUMS = [
    *columns_of("count", "tensors", "elements"),
    Column("bytes", "bytes"),
    Column("share", "fraction"),
    *_COST,
]


def compute_overview(model: StoredModel) -> Report:
    """The model as a whole, in one row."""
    columns = [
        *columns_of("count", "Tensors", "elements"),
        *columns_of("bytes", "file", "weights"),
        *_COST,
    ]
    row: list[Cell] = [len(model.tensors), model.n_elements, model.file_size, model.n_bytes]
    row += _cost(model.n_elements, model.n_bytes)
    title = f"{model.name}: {model.description}" if model.description else model.name
    return Report(title, columns, [row], key="model")


def compute_types(model: StoredModel) -> Report:
    """By storage type, ordered by bytes."""
    groups = _grouped(model, lambda tensor: tensor.type)
    groups.sort(key=lambda group: -_bytes(group[1]))
    rows: list[list[Cell]] = [[name, *_sums(model, tensors)] for name, tensors in groups]
    return Report("Types", [Column("Type"), *_SUMS], rows)


def compute_roles(model: StoredModel) -> Report:
    """By the tensors' role in a layer, in the order of the file."""
    groups = _grouped(model, lambda tensor: tensor.role)
    rows: list[list[Cell]] = [
        [role, ", ".join(types_of(tensors)), *_sums(model, tensors)] for role, tensors in groups
    ]
    return Report("Roles", [Column("Role"), Column("types"), *_SUMS], rows)


def compute_layers(model: StoredModel) -> Report:
    """By layer; tensors without a layer come last."""
    groups = dict(_grouped(model, lambda tensor: tensor.layer))
    rows: list[list[Cell]] = [
        [layer, ", ".join(types_of(groups[layer])), *_sums(model, groups[layer])]
        for layer in sorted(groups, key=lambda layer: (layer < 0, layer))
    ]
    return Report("Layers", [Column("Layer", "layer"), Column("types"), *_SUMS], rows)


def compute_tensors(model: StoredModel, contexts: Sequence[ContextMemory]) -> Report:
    """Every tensor, in the order of the file. `buffer` is measured if that is known, otherwise
    predicted."""
    known = (c.measured or c.predicted for c in contexts if c.measured or c.predicted)
    breakdown = next(known, None)
    buffers = breakdown.buffers_of() if breakdown else {}
    rows: list[list[Cell]] = []
    for tensor in model.tensors:
        cells: list[Cell] = [tensor.name, tensor.type, "x".join(map(str, tensor.ne))]
        cells += [tensor.n_elements, tensor.n_bytes, *_cost(tensor.n_elements, tensor.n_bytes)]
        places = buffers.get(tensor.name)
        cells += [", ".join(places) if places else None, tensor.layer, tensor.role]
        rows.append(cells)
    columns = [
        *columns_of("text", "Tensor", "type", "shape"),
        Column("elements", "count"),
        Column("bytes", "bytes"),
        *_COST,
        Column("buffer"),
        Column("layer", "layer"),
        Column("role"),
    ]
    return Report("Tensors", columns, rows)


def without(report: Report, *names: str) -> Report:
    """The report without the columns of these names."""
    kept = [i for i, column in enumerate(report.columns) if column.name not in names]
    columns = [report.columns[i] for i in kept]
    rows = [[row[i] for i in kept] for row in report.rows]
    return replace(report, columns=columns, rows=rows)


Key = TypeVar("Key", int, str)


def _grouped(
    model: StoredModel, key: Callable[[StoredTensor], Key]
) -> list[tuple[Key, list[StoredTensor]]]:
    groups: dict[Key, list[StoredTensor]] = {}
    for tensor in model.tensors:
        groups.setdefault(key(tensor), []).append(tensor)
    return list(groups.items())


def _sums(model: StoredModel, tensors: list[StoredTensor]) -> list[Cell]:
    n_bytes, n_elements = _bytes(tensors), sum(tensor.n_elements for tensor in tensors)
    share = n_bytes / model.n_bytes if model.n_bytes else None
    return [len(tensors), n_elements, n_bytes, share, *_cost(n_elements, n_bytes)]


def _cost(n_elements: int, n_bytes: int) -> list[Cell]:
    """Bits per weight, and the size as a share of F16 and F32."""
    if not n_elements:
        return [None, None, None]
    return [8 * n_bytes / n_elements, n_bytes / (2 * n_elements), n_bytes / (4 * n_elements)]


def _bytes(tensors: list[StoredTensor]) -> int:
    return sum(tensor.n_bytes for tensor in tensors)
