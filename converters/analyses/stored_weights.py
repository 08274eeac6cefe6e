"""A model's tensors as stored, from its file or from a session's log, and tables of their sizes.

Invariant: every tensor is listed once, with its bytes in the file, even if it is loaded twice. The
rows of every table add up to the model. Bytes are those of the file; shares are from 0 to 1.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from llamacpp_instr.base.errors import UsageError
from llamacpp_instr.converters.analyses.tables import grouped, header, layer_order
from llamacpp_instr.log.schema import Model
from llamacpp_instr.model.file import ModelFile, NamedTensor, load_model_file
from llamacpp_instr.recording.memory.breakdown import MemoryBreakdown, mapped_bytes
from llamacpp_instr.report.report import Cell, Report

if TYPE_CHECKING:
    from llamacpp_instr.log.session import Session


@dataclass(frozen=True)
class StoredTensor(NamedTensor):
    """A tensor in a file."""

    name: str
    type: str
    """`Q4_K`"""
    ne: tuple[int, ...]
    n_bytes: int


@dataclass(frozen=True)
class StoredModel:
    name: str
    """the file's name"""
    description: str
    """architecture and file type"""
    tensors: list[StoredTensor]
    file_size: int | None = None
    """bytes of all parts; None if the file was not seen"""
    span: int | None = None
    """bytes from each file's first tensor to the end of its last; None if it was not seen"""

    @cached_property
    def n_elements(self) -> int:
        return sum(tensor.n_elements for tensor in self.tensors)

    @cached_property
    def n_bytes(self) -> int:
        return sum(tensor.n_bytes for tensor in self.tensors)

    @cached_property
    def by_layer(self) -> dict[int, list[StoredTensor]]:
        """The tensors of each layer; -1 for those without a layer."""
        return grouped(self.tensors, lambda tensor: tensor.layer)


def types_of(tensors: Iterable[StoredTensor]) -> list[str]:
    """Their storage types, ordered by bytes, the largest first."""
    n_bytes: Counter[str] = Counter()
    for tensor in tensors:
        n_bytes[tensor.type] += tensor.n_bytes
    return [name for name, _ in n_bytes.most_common()]


def stored_in_file(model: ModelFile) -> StoredModel:
    """The model from the headers of its file."""
    tensors = [StoredTensor(w.name, w.type.name, w.ne, w.n_bytes) for w in model.weights]
    description = ", ".join(filter(None, (model.architecture, model.file_type)))
    span = mapped_bytes(model, model.by_name)
    return StoredModel(model.path.name, description, tensors, model.file_size, span)


def stored_in_log(session: Session, model: Model, file: ModelFile | None) -> StoredModel:
    """The model from a log's events; `file` is the model's file, if it still exists."""
    by_name = {
        event.name: StoredTensor(event.name, event.type.upper(), tuple(event.ne), event.bytes)
        for event in session.tensors_of.get(model.model, [])
    }
    name = model.path.replace("\\", "/").rpartition("/")[2]
    if file:
        return replace(stored_in_file(file), name=name, tensors=list(by_name.values()))
    description = ", ".join(filter(None, (model.arch, model.ftype)))
    return StoredModel(name, description, list(by_name.values()))


def recorded_file(session: Session, model: Model) -> ModelFile:
    """The model's file, at the path in the log, or beside the log.

    Raises `UsageError`, with the reason, if it does not exist or has other tensors.
    """
    file = load_model_file(_where(session, model))
    for tensor in session.tensors_of.get(model.model, []):
        weight = file.by_name.get(tensor.name)
        ne = [n for n in (weight.ne if weight else ()) if n > 1]
        same = weight and weight.type.name == tensor.type.upper() and weight.n_bytes == tensor.bytes
        if not same or ne != [n for n in tensor.ne if n > 1]:
            raise UsageError(
                f"{file.path} is no longer the model of the log: {tensor.name} differs"
            )
    return file


def _where(session: Session, model: Model) -> Path:
    path = Path(model.path)
    beside = Path(session.path).parent / path.name
    try:
        return beside if not path.exists() and beside.is_file() else path
    except (OSError, ValueError):
        return path  # no file can have this name: opening it reports that


# --- tables of sizes ---

_COST = header(("bits", "bits/weight"), ("fraction", "of F16", "of F32"))
_SUMS = header(("count", "tensors", "elements"), ("bytes", "bytes"), ("fraction", "share"), *_COST)


def compute_overview(model: StoredModel) -> Report:
    """The model as a whole, in one row."""
    columns = header(("count", "Tensors", "elements"), ("bytes", "file", "weights"), *_COST)
    row: list[Cell] = [len(model.tensors), model.n_elements, model.file_size, model.n_bytes]
    title = f"{model.name}: {model.description}" if model.description else model.name
    cost = _cost(model.n_elements, model.n_bytes)
    return Report(title, columns, [row + cost], key="model")


def compute_types(model: StoredModel) -> Report:
    """By storage type, ordered by bytes."""
    groups = grouped(model.tensors, lambda tensor: tensor.type)
    rows = [[name, *_sums(model, groups[name])] for name in types_of(model.tensors)]
    return Report("Types", header("Type", *_SUMS), rows)


def compute_roles(model: StoredModel) -> Report:
    """By the tensors' role in a layer, in the order of the file."""
    groups = grouped(model.tensors, lambda tensor: tensor.role)
    return Report("Roles", header("Role", "types", *_SUMS), _with_types(model, groups))


def compute_layers(model: StoredModel) -> Report:
    """By layer; tensors without a layer come last."""
    groups = {layer: model.by_layer[layer] for layer in sorted(model.by_layer, key=layer_order)}
    return Report("Layers", header(("layer", "Layer"), "types", *_SUMS), _with_types(model, groups))


def compute_tensors(model: StoredModel, breakdown: MemoryBreakdown | None) -> Report:
    """Every tensor, in the order of the file, with the buffers that `breakdown` has it in."""
    buffers = breakdown.buffers_of() if breakdown else {}
    rows: list[list[Cell]] = [
        [
            of.name, of.type, "x".join(map(str, of.ne)), of.n_elements, of.n_bytes,
            *_cost(of.n_elements, of.n_bytes), ", ".join(buffers.get(of.name, ())) or None,
            of.layer, of.role,
        ]
        for of in model.tensors
    ]  # fmt: skip
    columns = header(
        "Tensor", "type", "shape", ("count", "elements"), ("bytes", "bytes"), *_COST, "buffer",
        ("layer", "layer"), "role",
    )  # fmt: skip
    return Report("Tensors", columns, rows)


def _with_types(
    model: StoredModel, groups: Mapping[str, list[StoredTensor]] | Mapping[int, list[StoredTensor]]
) -> list[list[Cell]]:
    return [[key, ", ".join(types_of(of)), *_sums(model, of)] for key, of in groups.items()]


def _sums(model: StoredModel, tensors: Sequence[StoredTensor]) -> list[Cell]:
    n_bytes = sum(tensor.n_bytes for tensor in tensors)
    n_elements = sum(tensor.n_elements for tensor in tensors)
    share = n_bytes / model.n_bytes if model.n_bytes else None
    return [len(tensors), n_elements, n_bytes, share, *_cost(n_elements, n_bytes)]


def _cost(n_elements: int, n_bytes: int) -> list[Cell]:
    """Bits per weight, and the size as a share of F16 and F32."""
    if not n_elements:
        return [None, None, None]
    return [8 * n_bytes / n_elements, n_bytes / (2 * n_elements), n_bytes / (4 * n_elements)]
