"""Converts stored tensors to numbers: with ggml's own code, or with gguf-py if it is missing.

Invariant: ggml is called only with whole blocks of a type that it converts, with enough input and
output memory. It checks none of this, or aborts the process.
"""

from __future__ import annotations

import ctypes
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from llamacpp_instr.base.errors import NativeError, UsageError
from llamacpp_instr.llama.native import load
from llamacpp_instr.model.types import TYPES, GgmlType

Floats = npt.NDArray[np.float32]
Bytes = npt.NDArray[np.uint8]

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


class Dequantizer(ABC):
    """Converts stored bytes to numbers."""

    name: str
    """whose code it uses: `ggml` or `gguf-py`"""

    def __init__(self) -> None:
        self._types: dict[str, Any] = {}
        """by name of a type: what converts it"""

    @abstractmethod
    def _convert(self, type_: GgmlType, data: Bytes, room: Floats) -> None:
        """Writes the numbers in `data`, whole blocks, to `room`, which has as many elements."""

    def reads(self, type_: GgmlType) -> bool:
        """Whether it can convert this type."""
        return type_.name in _NUMBERS or type_.name in self._types

    def fill(
        self, type_: GgmlType, data: bytes | Bytes, n_elements: int, room: Floats
    ) -> Iterator[int]:
        """Writes the `n_elements` numbers in `data` to `room` in stored order, as many at a time
        as fit, and yields how many.

        `data` has whole blocks, of one or more rows. Raises `UsageError` for a type that it cannot
        convert, for parts of a block, and for the wrong number of bytes.
        """
        stored = self._checked(type_, data, n_elements, room)
        for at in range(0, n_elements, room.size or 1):
            n = min(room.size, n_elements - at)
            part = stored[type_.row_bytes(at) : type_.row_bytes(at + n)]
            if type_.name in _NUMBERS:
                with np.errstate(over="ignore"):
                    room[:n] = part.view(_NUMBERS[type_.name])
            else:
                self._convert(type_, part, room[:n])
            yield n

    def to_float(self, type_: GgmlType, data: bytes | Bytes, n_elements: int) -> Floats:
        """(n_elements,) all numbers in `data`, in a new array; otherwise like `fill`."""
        numbers = np.empty(max(n_elements, 0), np.float32)
        for _ in self.fill(type_, data, n_elements, numbers):
            pass
        return numbers

    def _checked(
        self, type_: GgmlType, data: bytes | Bytes, n_elements: int, room: Floats
    ) -> Bytes:
        """The bytes as an aligned, contiguous array, after all checks."""
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
        if room.dtype != np.float32 or not room.flags.carray or room.size % type_.block:
            raise UsageError(f"the output must have room for whole blocks of {type_} as float32")
        if n_elements and not room.size:
            raise UsageError("the output has no room for numbers")
        if stored.size and _address(stored) % _ALIGNMENT:
            stored = stored.copy()
        return stored


def load_dequantizer() -> Dequantizer:
    """ggml's own code if the patched library is installed, else gguf-py's, which lacks some
    types."""
    try:
        lib = load().lib
    except NativeError:
        return GgufDequantizer()
    # on Windows a library exports only its own symbols, and ggml is another library
    return GgmlDequantizer(lib) if hasattr(lib, "ggml_get_type_traits") else GgufDequantizer()


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


class GgmlDequantizer(Dequantizer):
    """ggml's `to_float` of every type except Q8_1 and Q8_K, which hold activations during a matrix
    product and never occur in a file."""

    name = "ggml"

    def __init__(self, lib: ctypes.CDLL) -> None:
        """Raises `NativeError` if the library's types differ from those that this package knows."""
        lib.ggml_get_type_traits.restype = ctypes.POINTER(_Traits)
        lib.ggml_get_type_traits.argtypes = [ctypes.c_int]
        super().__init__()
        for type_ in TYPES.values():
            traits = lib.ggml_get_type_traits(type_.number).contents
            reported = (traits.type_name.decode().upper(), traits.blck_size, traits.type_size)
            if reported != (type_.name, type_.block, type_.block_bytes):
                raise NativeError(
                    f"the installed library stores {type_} differently from what this package "
                    "expects; run `instr build`"
                )
            if traits.to_float:
                self._types[type_.name] = _TO_FLOAT(traits.to_float)
        self._use_vectors(lib)

    def _use_vectors(self, lib: ctypes.CDLL) -> None:
        """The CPU backend converts F16 with vector instructions: the same numbers to the bit, in a
        tenth of the time."""
        try:
            function = lib.ggml_cpu_fp16_to_fp32
            initialize = lib.ggml_cpu_init
        except AttributeError:  # backends loaded at run time do not export it
            return
        # the elements after the last full vector are converted through a table that this fills
        initialize.restype = None
        initialize()
        function.restype = None
        function.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64]
        self._types["F16"] = function

    def _convert(self, type_: GgmlType, data: Bytes, room: Floats) -> None:
        self._types[type_.name](_address(data), _address(room), room.size)


class GgufDequantizer(Dequantizer):
    """gguf-py's conversions in numpy, which lack Q1_0, Q2_0, Q8_1 and Q8_K."""

    name = "gguf-py"

    def __init__(self) -> None:
        super().__init__()
        from gguf import GGMLQuantizationType
        from gguf.quants import dequantize

        self._dequantize: Callable[[Bytes, Any], Floats] = dequantize
        for type_ in TYPES.values():
            try:
                qtype = GGMLQuantizationType(type_.number)
                dequantize(np.zeros(type_.block_bytes, np.uint8), qtype)
            except (ValueError, NotImplementedError):
                continue
            self._types[type_.name] = qtype

    def _convert(self, type_: GgmlType, data: Bytes, room: Floats) -> None:
        # NaN scales cause warnings; the caller sees the result
        with np.errstate(all="ignore"):
            room[:] = self._dequantize(data, self._types[type_.name])


def _address(array: npt.NDArray[Any]) -> int:
    return int(array.__array_interface__["data"][0])
