"""Finds a tensor whose blocks can be opened, and reads them from its model file.

Invariant: only the needed bytes are read, so memory follows the chunk, not the file.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from llamacpp_instr.base.errors import UsageError
from llamacpp_instr.lab.weights.layout import (
    LAYOUTS,
    Blocks,
    Bytes,
    Floats,
    can_decode,
    decode_blocks,
)
from llamacpp_instr.model.file import ModelFile, Weight

CHUNK = 1 << 19
"""elements decoded at a time: whole blocks of every type"""


_PLAIN = {"F32": "<f4", "F16": "<f2", "BF16": "<u2", "F64": "<f8"}
"""types of a reference that store plain numbers, with numpy's codes"""


@dataclass(frozen=True, eq=False)
class OneBlock:
    weight: Weight
    index: int
    raw: dict[str, bytes]
    """its bytes by field name"""
    offset: int
    """bytes from the start of the file"""
    blocks: Blocks
    """this block alone"""
    reference: Floats | None
    """(block,) the values of the reference at the same place"""

    @property
    def place(self) -> tuple[int, int]:
        """(row, column) of its first element."""
        return place(self.weight, self.index)


def find_weight(model: ModelFile, name: str) -> Weight:
    """The tensor of that name. Raises `UsageError`, which suggests similar names."""
    if name not in model.by_name:
        raise no_tensor(model, name)
    return model.by_name[name]


def no_tensor(model: ModelFile, name: str) -> UsageError:
    """The error that no tensor has that name, which may be a pattern; suggests similar names."""
    names, bare = list(model.by_name), name.strip("*")
    close = [n for n in names if bare and bare in n] or difflib.get_close_matches(bare, names)
    some = ", ".join(map(repr, close[:3]))
    hint = f"did you mean {some}?" if close else f"it has {len(names)} tensors"
    return UsageError(f"{model.path} has no tensor {name!r} ({hint})")


def check_openable(model: ModelFile, weight: Weight) -> None:
    """Raises `UsageError` if the blocks of the tensor cannot be decoded."""
    if can_decode(weight.type):
        if weight.n_bytes == 0:
            raise UsageError(f"{weight.path}: tensor {weight.name!r} has no elements")
        return
    why = "whose blocks cannot be opened" if weight.type.is_quantized else "which has no blocks"
    others = [w.name for w in model.weights if can_decode(w.type)]
    closest = difflib.get_close_matches(weight.name, others, n=1, cutoff=0)
    hint = f"try {closest[0]!r}" if closest else "quantize it first"
    raise UsageError(
        f"{weight.path}: tensor {weight.name!r} is {weight.type}, {why} ({hint}); "
        f"types that can be opened: {', '.join(LAYOUTS)}"
    )


def find_reference(model: ModelFile, weight: Weight) -> Weight:
    """The tensor of the reference model with the name of `weight`.

    Raises `UsageError` if it does not exist, has another shape, or a type that cannot be read.
    """
    reference = find_weight(model, weight.name)
    if reference.ne != weight.ne:
        raise UsageError(
            f"{reference.path}: tensor {reference.name!r} is {_shape(reference)}, not "
            f"{_shape(weight)} as in {weight.path}; give a file of the same model"
        )
    if reference.type.name not in _PLAIN and not can_decode(reference.type):
        raise UsageError(
            f"{reference.path}: tensor {reference.name!r} is {reference.type}, which cannot be "
            "read as reference; give the model in F32, F16 or BF16"
        )
    return reference


def load_block(weight: Weight, index: int, reference: Weight | None = None) -> OneBlock:
    """One block of a tensor that passed `check_openable`. Raises `UsageError` if the tensor has
    no block `index`."""
    type_ = weight.type
    n_blocks = weight.n_elements // type_.block
    if not 0 <= index < n_blocks:
        raise UsageError(
            f"{weight.path}: tensor {weight.name!r} has no block {index}, its blocks are numbered "
            f"0 to {n_blocks - 1}"
        )
    data = _read_bytes(weight, index * type_.block_bytes, type_.block_bytes)
    raw, at = {}, 0
    for field in LAYOUTS[type_.name].fields:
        raw[field.name] = data[at : at + field.n_bytes].tobytes()
        at += field.n_bytes
    values = None
    if reference is not None:
        values = load_values(reference, index * type_.block, type_.block)
    offset = weight.offset + index * type_.block_bytes
    return OneBlock(weight, index, raw, offset, decode_blocks(type_, data[None, :]), values)


def load_values(weight: Weight, begin: int, count: int) -> Floats:
    """(count,) elements of a tensor as float32, from element `begin` on, in the file's order.

    Reads only the bytes it needs. `find_reference` must accept the type.
    """
    block, block_bytes = weight.type.block, weight.type.block_bytes
    first, last = begin // block, -(-(begin + count) // block)
    data = _read_bytes(weight, first * block_bytes, (last - first) * block_bytes)
    name = weight.type.name
    if name == "BF16":
        values = (data.view("<u2").astype(np.uint32) << 16).view(np.float32)
    elif name in _PLAIN:
        with np.errstate(invalid="ignore", over="ignore"):
            values = data.view(_PLAIN[name]).astype(np.float32)
    else:
        values = decode_blocks(weight.type, data.reshape(-1, block_bytes)).values().ravel()
    return values[begin - first * block :][:count]


def read_blocks(weight: Weight) -> Iterator[tuple[int, Blocks]]:
    """The blocks of a tensor, chunk by chunk, each with the index of its first block."""
    type_ = weight.type
    n_blocks, per_chunk = weight.n_elements // type_.block, CHUNK // type_.block
    for begin in range(0, n_blocks, per_chunk):
        n = min(per_chunk, n_blocks - begin)
        data = _read_bytes(weight, begin * type_.block_bytes, n * type_.block_bytes)
        yield begin, decode_blocks(type_, data.reshape(n, type_.block_bytes))


def place(weight: Weight, block: int) -> tuple[int, int]:
    """(row, column) of the first element of a block."""
    row, in_row = divmod(block, weight.ne[0] // weight.type.block)
    return row, in_row * weight.type.block


def _read_bytes(weight: Weight, begin: int, n_bytes: int) -> Bytes:
    # read, not mapped: if the file is truncated meanwhile, this raises an error, a map SIGBUS
    try:
        data = np.fromfile(weight.path, np.uint8, n_bytes, offset=weight.offset + begin)
    except OSError as error:
        raise UsageError(f"{weight.path} cannot be read: {error.strerror or error}") from None
    if len(data) != n_bytes:
        raise UsageError(f"{weight.path} ends inside tensor {weight.name!r}: it was truncated")
    return data


def _shape(weight: Weight) -> str:
    return " x ".join(map(str, weight.ne))
