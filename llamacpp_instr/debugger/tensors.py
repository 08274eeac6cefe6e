"""The tensors that ggml holds in memory, read through its C API, and their values: figures and
conditions on these, histograms, pictures and slices. Any backend, any type, any strides.

Shapes are numpy's: ggml's reversed, without leading ones. A matrix of 4 tokens of width 64 is
(4, 64). Figures are computed in float64, from the finite values; the others are counted.

Invariant: an address is only used while its compute is stopped; ggml frees or reuses it later.
"""

from __future__ import annotations

import ctypes
import functools
import math
import operator
import re
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from llamacpp_instr.base.errors import NativeError, UsageError
from llamacpp_instr.lab.weights.measure import load_dequantizer
from llamacpp_instr.llama.native import POINTER, InitParams, Signatures, declare
from llamacpp_instr.model.types import INTERLEAVED, TYPES

Array = npt.NDArray[Any]
Slice = tuple[int | slice, ...]
"""what indexes an array: a number or a range for each of its first dimensions"""

MAX_SRC = 10
_OBJECT_BYTES = 32  # sizeof(struct ggml_object)
_WEIGHTS_BUFFER = 1  # GGML_BACKEND_BUFFER_USAGE_WEIGHTS
_NUMBERS = {
    "F32": np.float32, "F16": np.float16, "BF16": np.uint16, "F64": np.float64,
    "I8": np.int8, "I16": np.int16, "I32": np.int32, "I64": np.int64,
}  # fmt: skip

FIGURES: dict[str, Callable[[Array], float]] = {
    "absmax": lambda finite: float(np.abs(finite).max(initial=0)),
    "min": lambda finite: float(finite.min(initial=math.inf)),
    "max": lambda finite: float(finite.max(initial=-math.inf)),
    "mean": lambda finite: float(finite.mean()) if finite.size else math.nan,
    "std": lambda finite: float(finite.std()) if finite.size else math.nan,
}
"""of the finite values, in float64"""
COUNTS: dict[str, Callable[[Array], float]] = {
    "nan": lambda values: float(np.isnan(values).sum()),
    "inf": lambda values: float(np.isinf(values).sum()),
    "zero": lambda values: float((values == 0).sum()),
}


class Tensor(ctypes.Structure):
    """`struct ggml_tensor` (ggml/include/ggml.h) of the pinned upstream."""

    _fields_ = (
        ("type", ctypes.c_int),
        ("buffer", POINTER),
        ("ne", ctypes.c_int64 * 4),
        ("nb", ctypes.c_size_t * 4),
        ("op", ctypes.c_int),
        ("op_params", ctypes.c_int32 * 16),
        ("flags", ctypes.c_int32),
        ("src", POINTER * MAX_SRC),
        ("view_src", POINTER),
        ("view_offs", ctypes.c_size_t),
        ("data", POINTER),
        ("name", ctypes.c_char * 64),
        ("extra", POINTER),
        ("padding", ctypes.c_char * 8),
    )


class Info(ctypes.Structure):
    """`struct llama_instr_debug_info` (llama-instrumentation.h)."""

    _fields_ = (
        ("ctx", POINTER),
        ("graph", POINTER),
        ("layers", ctypes.POINTER(ctypes.c_int32)),
        ("wanted", ctypes.POINTER(ctypes.c_uint8)),
        *(
            (name, ctypes.c_int32)
            for name in ("n_nodes", "n_tokens", "step", "compute", "graph_id", "encoder")
        ),
    )


ON_COMPUTE = ctypes.CFUNCTYPE(None, ctypes.POINTER(Info))
ON_NODE = ctypes.CFUNCTYPE(ctypes.c_int32, ctypes.c_int32)


@functools.cache
def ggml() -> Any:
    """The library, with its functions declared. Raises NativeError without the patched library, or
    if its tensors differ from what this module reads."""
    size, text, number, flag = ctypes.c_size_t, ctypes.c_char_p, ctypes.c_int, ctypes.c_bool
    signatures: Signatures = {
        "ggml_graph_node": (POINTER, [POINTER, number]),
        "ggml_op_name": (text, [number]),
        "ggml_nbytes": (size, [POINTER]),
        "ggml_tensor_overhead": (size, []),
        "ggml_graph_overhead": (size, []),
        "ggml_init": (POINTER, [InitParams]),
        "ggml_free": (None, [POINTER]),
        "ggml_new_graph": (POINTER, [POINTER]),
        "ggml_new_tensor": (POINTER, [POINTER, number, number, ctypes.POINTER(ctypes.c_int64)]),
        "ggml_build_forward_expand": (None, [POINTER, POINTER]),
        "ggml_backend_tensor_get": (None, [POINTER, POINTER, size, size]),
        "ggml_backend_tensor_set": (None, [POINTER, POINTER, size, size]),
        "ggml_backend_alloc_ctx_tensors": (POINTER, [POINTER, POINTER]),
        "ggml_backend_buffer_name": (text, [POINTER]),
        "ggml_backend_buffer_get_usage": (number, [POINTER]),
        "ggml_backend_buffer_get_type": (POINTER, [POINTER]),
        "ggml_backend_buffer_free": (None, [POINTER]),
        "ggml_backend_buft_get_device": (POINTER, [POINTER]),
        "ggml_backend_buft_is_host": (flag, [POINTER]),
        "ggml_backend_dev_by_type": (POINTER, [number]),
        "ggml_backend_dev_type": (number, [POINTER]),
        "ggml_backend_dev_init": (POINTER, [POINTER, text]),
        "ggml_backend_dev_supports_op": (flag, [POINTER, POINTER]),
        "ggml_backend_free": (None, [POINTER]),
        "ggml_backend_cpu_set_n_threads": (None, [POINTER, number]),
        "ggml_backend_graph_compute": (number, [POINTER, POINTER]),
        "llama_instr_debug": (None, [ON_COMPUTE, ON_NODE]),
    }
    lib = declare(signatures)
    if lib.ggml_tensor_overhead() != ctypes.sizeof(Tensor) + _OBJECT_BYTES:
        raise NativeError("the installed ggml has another layout of tensors; run `instr build`")
    return lib


def tensor_at(address: int) -> Tensor:
    """The tensor at an address: a view of ggml's memory, not a copy."""
    return Tensor.from_address(address)


def name_of(tensor: Tensor) -> str:
    """The name that llama.cpp gave a tensor, or one that ggml made up."""
    return bytes(tensor.name).decode(errors="replace")


def shape_of(tensor: Tensor) -> tuple[int, ...]:
    """ggml's dimensions reversed, without leading ones; at least one dimension."""
    shape = tuple(int(n) for n in reversed(tensor.ne))
    while len(shape) > 1 and shape[0] == 1:
        shape = shape[1:]
    return shape


def is_weight(tensor: Tensor) -> bool:
    """Whether a tensor, or what it is a view of, lies in a buffer of weights."""
    buffer = _buffer(tensor)
    return bool(buffer) and ggml().ggml_backend_buffer_get_usage(buffer) == _WEIGHTS_BUFFER


def device_of(address: int) -> str:
    """The backend of a tensor's memory, as its buffer is named; `CPU` for the host's."""
    buffer = _buffer(tensor_at(address))
    name = _buffer_name(buffer) if buffer else "CPU"
    return "CPU" if name.startswith("CPU") else name


def _buffer(tensor: Tensor) -> int | None:
    owner = tensor_at(tensor.view_src) if tensor.view_src else tensor
    return owner.buffer or None


def _buffer_name(buffer: int) -> str:
    return bytes(ggml().ggml_backend_buffer_name(buffer)).decode(errors="replace")


# --- values ---


def read(address: int) -> Array:
    """The values of the tensor at `address`, a copy: float32 for every float and quantized type
    (F64 stays float64), integers as they are. Raises `UsageError` if its memory cannot be read:
    ggml has repacked it, or it is not allocated."""
    tensor, data = tensor_at(address), _bytes(address)
    type_ = TYPES[tensor.type]
    if type_.name in _NUMBERS:
        values = _strided(tensor, data, type_.name)
        if type_.name == "BF16":
            values = (values.astype(np.uint32) << 16).view(np.float32)
        else:
            values = values.astype(np.float32) if type_.name == "F16" else values.copy()
        return values.reshape(shape_of(tensor))
    if tensor.nb[0] != type_.block_bytes:
        raise UsageError(f"{name_of(tensor)}: blocks of {type_} are not contiguous")
    ne, nb = list(tensor.ne), list(tensor.nb)
    rows = np.lib.stride_tricks.as_strided(
        data, (*ne[:0:-1], type_.row_bytes(ne[0])), (*nb[:0:-1], 1), writeable=False
    )
    stored = np.ascontiguousarray(rows).reshape(-1)
    return load_dequantizer().to_float(type_, stored, math.prod(ne)).reshape(shape_of(tensor))


def write(address: int, values: npt.ArrayLike) -> None:
    """Sets all values of the tensor at `address`; `values` is broadcast to its shape. Raises
    `UsageError` if that does not fit, for a type in blocks, and for a weight: the file's memory."""
    tensor = tensor_at(address)
    name, type_ = name_of(tensor), TYPES[tensor.type].name
    if is_weight(tensor):
        raise UsageError(f"{name} is a weight and cannot be set")
    if type_ not in _NUMBERS:
        raise UsageError(f"{name}: values of type {type_} cannot be set")
    shape = shape_of(tensor)
    try:
        wanted = np.broadcast_to(np.asarray(values), shape)
    except ValueError:
        raise UsageError(
            f"{name} has the shape {shape}; values of the shape {np.shape(values)} do not fit"
        ) from None
    data = _bytes(address)
    view = _strided(tensor, data, type_)
    if type_ == "BF16":
        wanted = _to_bf16(wanted.astype(np.float32))
    view[...] = wanted.reshape(view.shape)
    ggml().ggml_backend_tensor_set(address, data.ctypes.data, 0, data.size)


def _bytes(address: int) -> npt.NDArray[np.uint8]:
    """The memory that the strides of a tensor reach, a copy."""
    tensor = tensor_at(address)
    name, buffer = name_of(tensor), _buffer(tensor)
    if buffer is None or not tensor.data:
        raise UsageError(f"{name} has no memory; its values cannot be read")
    if _buffer_name(buffer).startswith(INTERLEAVED):
        raise UsageError(f"{name} is repacked for this CPU; its values are those of the file")
    data = np.empty(ggml().ggml_nbytes(address), np.uint8)
    ggml().ggml_backend_tensor_get(address, data.ctypes.data, 0, data.size)
    return data


def _strided(tensor: Tensor, data: npt.NDArray[np.uint8], type_: str) -> Array:
    """(ne3, ne2, ne1, ne0) the elements in `data`, not a copy."""
    dtype = np.dtype(_NUMBERS[type_])
    base = data[: data.size // dtype.itemsize * dtype.itemsize].view(dtype)
    return np.lib.stride_tricks.as_strided(
        base, tuple(reversed(tensor.ne)), tuple(reversed(tensor.nb))
    )


def _to_bf16(values: npt.NDArray[np.float32]) -> npt.NDArray[np.uint16]:
    """Rounded to the nearest even, as ggml_fp32_to_bf16 does; a NaN stays one."""
    bits = values.view(np.uint32)
    rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    return np.where(np.isnan(values), np.uint16(0x7FC0), rounded)


# --- what is in an array of values ---


def finite_of(values: Array) -> tuple[Array, Array]:
    """An array in float64, and its finite values."""
    numbers = values.astype(np.float64)
    return numbers, numbers[np.isfinite(numbers)]


def figures_of(values: Array) -> dict[str, int | float | None]:
    """By name: `n`, the `COUNTS` and the `FIGURES`, which are None without a finite value."""
    numbers, finite = finite_of(values)
    found: dict[str, int | float | None] = {"n": int(values.size)}
    found |= {name: int(count(numbers)) for name, count in COUNTS.items()}
    for name in ("min", "max", "absmax", "mean", "std"):
        found[name] = FIGURES[name](finite) if finite.size else None
    return found


_COMPARE = {
    "<": operator.lt, "<=": operator.le, ">": operator.gt, ">=": operator.ge,
    "==": operator.eq, "!=": operator.ne,
}  # fmt: skip
_TERM = re.compile(r"(\w+)(?:\s*(<=|>=|==|!=|<|>)\s*([-+.\w]+))?$")


class Condition(NamedTuple):
    """Comparisons of a tensor's figures, joined by `or` and `and` (which binds tighter)."""

    text: str
    alternatives: tuple[tuple[tuple[str, str, float], ...], ...]

    @classmethod
    def parse(cls, text: str) -> Condition:
        """Raises `UsageError` for anything else. Nothing is evaluated as code."""
        alternatives = tuple(
            tuple(_comparison(term.strip(), text) for term in re.split(r"\band\b", part))
            for part in re.split(r"\bor\b", text)
        )
        return cls(text, alternatives)

    def holds(self, values: Array) -> bool:
        """Whether the values of a tensor satisfy it."""
        numbers, finite = finite_of(values)

        def holds(name: str, sign: str, limit: float) -> bool:
            figure = COUNTS[name](numbers) if name in COUNTS else FIGURES[name](finite)
            return bool(_COMPARE[sign](figure, limit))

        return any(all(holds(*term) for term in terms) for terms in self.alternatives)


def _comparison(term: str, text: str) -> tuple[str, str, float]:
    match = _TERM.match(term)
    names = (*FIGURES, *COUNTS)
    if not match or match[1] not in names:
        raise UsageError(
            f"condition {text!r}: {term!r} is not a comparison like `absmax > 60`; "
            f"the figures are {', '.join(names)}"
        )
    if match[2] is None:
        if match[1] not in COUNTS:
            raise UsageError(f"condition {text!r}: compare {match[1]} with a number")
        return match[1], ">", 0.0
    try:
        return match[1], match[2], float(match[3])
    except ValueError:
        raise UsageError(f"condition {text!r}: {match[3]!r} is not a number") from None


def histogram(values: Array, bins: int = 40) -> tuple[Array, Array]:
    """(bins,) counts of the finite values in intervals of equal width, and (bins + 1,) the edges
    from the smallest to the largest; the last interval includes its upper edge."""
    _, finite = finite_of(values)
    if not finite.size:
        return np.zeros(bins, np.int64), np.zeros(bins + 1)
    finite = np.clip(finite, -1e307, 1e307)  # the width of the range must not overflow
    low, high = float(finite.min()), float(finite.max())
    narrowest = 2 * bins * float(np.spacing(max(abs(low), abs(high))))
    if high - low < narrowest:  # bins cannot be narrower than the distance of two numbers
        low, high = low - narrowest, high + narrowest
    return np.histogram(finite, bins, (low, high))


def heat_map(values: Array, rows: int, columns: int) -> tuple[Array, Array, Array]:
    """A picture of at most `rows` by `columns` cells of an array as a matrix: its last dimension is
    the columns, all others the rows. Returns the cells, and (cells + 1,) the first row and the
    first column of each, and the end.

    A cell shows the value furthest from zero of those that it covers, with its sign, because a
    mean would hide the outliers that a reader looks for; NaN if one is.
    """
    matrix = values.astype(np.float64).reshape(-1, values.shape[-1] if values.ndim else 1)
    down, across = (
        np.arange(cells + 1, dtype=np.int64) * n // max(1, cells)
        for n, at_most in zip(matrix.shape, (rows, columns), strict=True)
        for cells in [min(n, max(1, at_most))]
    )
    if not matrix.size:
        return np.empty((len(down) - 1, len(across) - 1)), down, across

    def reduced(extreme: np.ufunc) -> Array:
        by_row = extreme.reduceat(matrix, down[:-1], axis=0)
        return np.asarray(extreme.reduceat(by_row, across[:-1], axis=1))

    high, low = reduced(np.maximum), reduced(np.minimum)
    return np.where(np.abs(high) >= np.abs(low), high, low), down, across


_ITEM = re.compile(r"(?P<index>-?\d{1,18})|(?P<first>-?\d{1,18})?:(?P<end>-?\d{1,18})?")


def parse_slice(text: str, shape: tuple[int, ...]) -> Slice:
    """The index that a text like `[3, :8]` means for an array of this shape; an empty text is all
    of it. Negative numbers count from the end, as in Python. Raises `UsageError` for anything else,
    and for what lies outside the shape. Nothing is evaluated as code."""
    inner = text.strip()
    if inner.startswith("[") and inner.endswith("]"):
        inner = inner[1:-1].strip()
    items = [item.strip() for item in inner.split(",")] if inner else []
    if len(items) > len(shape):
        raise UsageError(f"slice {text!r}: the shape is {shape}, of {len(shape)} dimensions")
    return tuple(_item(item, n, text) for item, n in zip(items, shape, strict=False))


def _item(item: str, n: int, text: str) -> int | slice:
    match = _ITEM.fullmatch(item)
    if not match:
        raise UsageError(f"slice {text!r}: {item!r} is neither a number nor a range like 2:5")
    if match["index"]:
        index = int(match["index"])
        if not -n <= index < n:
            raise UsageError(f"slice {text!r}: {index} is outside a dimension of {n}")
        return index
    first, end = (int(match[key]) if match[key] else None for key in ("first", "end"))
    found = slice(first, end)
    if not range(n)[found]:
        raise UsageError(f"slice {text!r}: {item!r} selects nothing of a dimension of {n}")
    return found
