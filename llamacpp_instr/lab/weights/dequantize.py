"""Converts stored tensors to numbers: with ggml's own code, or with gguf-py if it is missing.

Invariant: ggml is called only with whole blocks of a type that it converts, with enough input and
output memory. It checks none of this, or aborts the process.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from llamacpp_instr.base.errors import NativeError, UsageError
from llamacpp_instr.lab.weights.blocks import Bytes, Floats
from llamacpp_instr.llama.native import load
from llamacpp_instr.model.types import TYPES, GgmlType

# ggml has no `to_float` for these: they are numbers already. F64 and I64 are rounded to float32.
_NUMBERS: dict[str, npt.DTypeLike] = {
    "F32": "<f4",
    "F64": "<f8",
    "I8": "<i1",
    "I16": "<i2",
    "I32": "<i4",
    "I64": "<i8",
}
# blocks start with a 16-bit scale, and numbers have up to 8 bytes
_ALIGNMENT = 8

Convert: TypeAlias = "Callable[[Bytes, Floats], None]"
"""writes the numbers in whole blocks to an array of as many elements"""


class Dequantizer:
    """Converts stored bytes to numbers."""

    def __init__(self, name: str, converters: Mapping[str, Convert]) -> None:
        self.name = name
        """whose code it uses: `ggml` or `gguf-py`"""
        self._converters = converters
        """by name of a type"""

    def reads(self, type_: GgmlType) -> bool:
        """Whether it can convert this type."""
        return type_.name in _NUMBERS or type_.name in self._converters

    def fill(self, type_: GgmlType, data: bytes | Bytes, n_elements: int, room: Floats) -> None:
        """Writes the `n_elements` numbers in `data` to the beginning of `room`, in stored order.

        `data` has whole blocks, of one or more rows. Raises `UsageError` for a type that it cannot
        convert, for parts of a block, and for the wrong number of bytes.
        """
        if not self.reads(type_):
            raise UsageError(f"{self.name} has no conversion of {type_} to numbers")
        if n_elements < 0 or n_elements % type_.block:
            raise UsageError(
                f"{n_elements:,} elements are not a whole number of blocks of {type_}, "
                f"which have {type_.block}"
            )
        stored = np.frombuffer(data, np.uint8)
        if stored.size != type_.row_bytes(n_elements):
            raise UsageError(
                f"{n_elements:,} elements of {type_} have {type_.row_bytes(n_elements):,} bytes, "
                f"not {stored.size:,}"
            )
        if room.dtype != np.float32 or not room.flags.carray or room.size < n_elements:
            raise UsageError(f"the output must have room for {n_elements:,} float32")
        if not n_elements:
            return
        if _address(stored) % _ALIGNMENT:
            stored = stored.copy()
        if type_.name in _NUMBERS:
            with np.errstate(over="ignore"):
                room[:n_elements] = stored.view(_NUMBERS[type_.name])
        else:
            self._converters[type_.name](stored, room[:n_elements])

    def to_float(self, type_: GgmlType, data: bytes | Bytes, n_elements: int) -> Floats:
        """(n_elements,) all numbers in `data`, in a new array; otherwise like `fill`."""
        numbers = np.empty(max(n_elements, 0), np.float32)
        self.fill(type_, data, n_elements, numbers)
        return numbers


def load_dequantizer() -> Dequantizer:
    """ggml's own code if the patched library is installed, else gguf-py's, which lacks some
    types."""
    try:
        lib = load().lib
    except NativeError:
        return gguf_dequantizer()
    # on Windows a library exports only its own symbols, and ggml is another library
    return _ggml_dequantizer(lib) if hasattr(lib, "ggml_get_type_traits") else gguf_dequantizer()


class _Traits(ctypes.Structure):
    """`struct ggml_type_traits` (ggml.h) of the pinned upstream."""

    _fields_ = (
        ("type_name", ctypes.c_char_p),
        ("blck_size", ctypes.c_int64),
        ("blck_size_interleave", ctypes.c_int64),
        ("type_size", ctypes.c_size_t),
        ("is_quantized", ctypes.c_bool),
        ("to_float", ctypes.c_void_p),
        ("from_float_ref", ctypes.c_void_p),
    )


# from, to, elements. ctypes releases the GIL during the call.
_TO_FLOAT = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64)


def _ggml_dequantizer(lib: ctypes.CDLL) -> Dequantizer:
    """ggml's `to_float` of every type except Q8_1 and Q8_K, which hold activations during a matrix
    product and never occur in a file. Raises `NativeError` if the library's types differ from those
    that this package knows."""
    lib.ggml_get_type_traits.restype = ctypes.POINTER(_Traits)
    lib.ggml_get_type_traits.argtypes = [ctypes.c_int]
    functions: dict[str, Any] = {}
    for type_ in TYPES.values():
        traits = lib.ggml_get_type_traits(type_.number).contents
        reported = (traits.type_name.decode().upper(), traits.blck_size, traits.type_size)
        if reported != (type_.name, type_.block, type_.block_bytes):
            raise NativeError(
                f"the installed library stores {type_} differently from what this package "
                "expects; run `instr build`"
            )
        if traits.to_float:
            functions[type_.name] = _TO_FLOAT(traits.to_float)
    # The CPU backend converts F16 with vector instructions: the same numbers to the bit, in a tenth
    # of the time. Backends loaded at run time do not export it.
    with suppress(AttributeError):
        function, initialize = lib.ggml_cpu_fp16_to_fp32, lib.ggml_cpu_init
        # the elements after the last full vector are converted through a table that this fills
        initialize.restype = None
        initialize()
        function.restype = None
        function.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64]
        functions["F16"] = function

    def convert(function: Any, data: Bytes, room: Floats) -> None:
        function(_address(data), _address(room), room.size)

    return Dequantizer("ggml", {name: partial(convert, of) for name, of in functions.items()})


def gguf_dequantizer() -> Dequantizer:
    """gguf-py's conversions in numpy, which lack Q1_0, Q2_0, Q8_1 and Q8_K."""
    from gguf import GGMLQuantizationType
    from gguf.quants import dequantize

    def convert(qtype: GGMLQuantizationType, data: Bytes, room: Floats) -> None:
        # NaN scales cause warnings; the caller sees the result
        with np.errstate(all="ignore"):
            room[:] = dequantize(data, qtype)

    converters: dict[str, Convert] = {}
    for type_ in TYPES.values():
        with suppress(ValueError, NotImplementedError):
            qtype = GGMLQuantizationType(type_.number)
            dequantize(np.zeros(type_.block_bytes, np.uint8), qtype)
            converters[type_.name] = partial(convert, qtype)
    return Dequantizer("gguf-py", converters)


def _address(array: Floats | Bytes) -> int:
    return int(array.__array_interface__["data"][0])
