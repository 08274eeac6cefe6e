"""Reads and writes the values of a tensor in memory, on any backend, of any type and strides.

Shapes are numpy's: ggml's reversed, without leading ones. A matrix of 4 tokens of width 64 is
(4, 64).
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from llamacpp_instr.base.errors import UsageError
from llamacpp_instr.debugger.ggml import Tensor, ggml, tensor_at
from llamacpp_instr.lab.weights.dequantize import load_dequantizer
from llamacpp_instr.model.types import TYPES

Array = npt.NDArray[Any]

_WEIGHTS_BUFFER = 1  # GGML_BACKEND_BUFFER_USAGE_WEIGHTS

_NUMBERS = {
    "F32": np.float32, "F16": np.float16, "BF16": np.uint16, "F64": np.float64,
    "I8": np.int8, "I16": np.int16, "I32": np.int32, "I64": np.int64,
}  # fmt: skip


def shape_of(tensor: Tensor) -> tuple[int, ...]:
    """ggml's dimensions reversed, without leading ones; at least one dimension."""
    shape = tuple(int(n) for n in reversed(tensor.ne))
    while len(shape) > 1 and shape[0] == 1:
        shape = shape[1:]
    return shape


def read(address: int) -> Array:
    """The values of the tensor at `address`, a copy: float32 for every float and quantized type
    (F64 stays float64), integers as they are.

    Raises `UsageError` if its memory cannot be read: ggml has repacked it, or it is not allocated.
    """
    tensor = tensor_at(address)
    values = _numbers(tensor, _bytes(address))
    return values.reshape(shape_of(tensor))


def write(address: int, values: npt.ArrayLike) -> None:
    """Sets all values of the tensor at `address`; `values` is broadcast to its shape.

    Raises `UsageError` for a shape that does not fit, for a type in blocks, and for a weight, whose
    memory is the file's.
    """
    tensor = tensor_at(address)
    if is_weight(tensor):
        raise UsageError(f"{tensor.name.decode(errors='replace')} is a weight and cannot be set")
    name = TYPES[tensor.type].name
    if name not in _NUMBERS:
        raise UsageError(f"{tensor.name.decode()}: values of type {name} cannot be set")
    shape = shape_of(tensor)
    try:
        wanted = np.broadcast_to(np.asarray(values), shape)
    except ValueError:
        raise UsageError(
            f"{tensor.name.decode(errors='replace')} has the shape {shape}; "
            f"values of the shape {np.shape(values)} do not fit"
        ) from None
    data = _bytes(address)
    view = _strided(tensor, data, name)
    if name == "BF16":
        wanted = _to_bf16(wanted.astype(np.float32))
    view[...] = wanted.reshape(view.shape)
    ggml().ggml_backend_tensor_set(address, data.ctypes.data, 0, data.size)


def is_weight(tensor: Tensor) -> bool:
    """Whether a tensor, or what it is a view of, lies in a buffer of weights."""
    source = tensor_at(tensor.view_src) if tensor.view_src else tensor
    buffer = source.buffer
    return bool(buffer) and ggml().ggml_backend_buffer_get_usage(buffer) == _WEIGHTS_BUFFER


def device_of(address: int) -> str:
    """The backend of a tensor's memory, as its buffer is named; `CPU` for the host's."""
    tensor = tensor_at(address)
    source = tensor_at(tensor.view_src) if tensor.view_src else tensor
    if not source.buffer:
        return "CPU"
    name: str = ggml().ggml_backend_buffer_name(source.buffer).decode(errors="replace")
    return "CPU" if name.startswith("CPU") else name


def _bytes(address: int) -> npt.NDArray[np.uint8]:
    """What the strides of a tensor reach."""
    tensor = tensor_at(address)
    name = tensor.name.decode(errors="replace")
    source = tensor_at(tensor.view_src) if tensor.view_src else tensor
    if not source.buffer or not tensor.data:
        raise UsageError(f"{name} has no memory; its values cannot be read")
    buffer = ggml().ggml_backend_buffer_name(source.buffer).decode()
    if "REPACK" in buffer:
        raise UsageError(f"{name} is repacked for this CPU; its values are those of the file")
    data = np.empty(ggml().ggml_nbytes(address), np.uint8)
    ggml().ggml_backend_tensor_get(address, data.ctypes.data, 0, data.size)
    return data


def _numbers(tensor: Tensor, data: npt.NDArray[np.uint8]) -> Array:
    type_ = TYPES[tensor.type]
    if type_.name in _NUMBERS:
        values = _strided(tensor, data, type_.name)
        if type_.name == "BF16":
            return (values.astype(np.uint32) << 16).view(np.float32)
        return values.astype(np.float32) if type_.name == "F16" else values.copy()
    if tensor.nb[0] != type_.block_bytes:
        raise UsageError(f"{tensor.name.decode()}: blocks of {type_} are not in order")
    ne, nb = list(tensor.ne), list(tensor.nb)
    row_bytes = type_.row_bytes(ne[0])
    rows = np.lib.stride_tricks.as_strided(
        data, (ne[3], ne[2], ne[1], row_bytes), (nb[3], nb[2], nb[1], 1), writeable=False
    )
    stored = np.ascontiguousarray(rows).reshape(-1)
    values = load_dequantizer().to_float(type_, stored, ne[0] * ne[1] * ne[2] * ne[3])
    return values.reshape(ne[3], ne[2], ne[1], ne[0])


def _strided(tensor: Tensor, data: npt.NDArray[np.uint8], name: str) -> Array:
    """(ne3, ne2, ne1, ne0) the elements in `data`, not a copy."""
    dtype = np.dtype(_NUMBERS[name])
    base = data[: data.size // dtype.itemsize * dtype.itemsize].view(dtype)
    return np.lib.stride_tricks.as_strided(
        base, tuple(reversed(tensor.ne)), tuple(reversed(tensor.nb))
    )


def _to_bf16(values: npt.NDArray[np.float32]) -> npt.NDArray[np.uint16]:
    """Rounded to the nearest even, as ggml_fp32_to_bf16 does; a NaN stays one."""
    bits = values.view(np.uint32)
    rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    return np.where(np.isnan(values), np.uint16(0x7FC0), rounded)
