"""Turns the bytes of any storage type into numbers: with ggml's own code, or without it gguf-py's.

Invariant: ggml is called only with whole blocks of a type that it converts, from bytes that are
there, into floats that have room: it checks nothing, and aborts the process on what it notices.
"""

from __future__ import annotations

import ctypes
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from llamacpp_instr.errors import NativeError, UsageError
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
    """What turns stored bytes into numbers."""

    name: str
    """whose code it is: `ggml` or `gguf-py`"""

    def __init__(self) -> None:
        self._types: dict[str, Any] = {}
        """what converts each type, by its name"""

    @abstractmethod
    def _convert(self, type_: GgmlType, data: Bytes, room: Floats) -> None:
        """Write the numbers in `data`, whole blocks, to `room`, which has as many elements."""

    def reads(self, type_: GgmlType) -> bool:
        """Whether it can turn this type into numbers."""
        return type_.name in _NUMBERS or type_.name in self._types

    def fill(
        self, type_: GgmlType, data: bytes | Bytes, n_elements: int, room: Floats
    ) -> Iterator[int]:
        """Write the `n_elements` numbers in `data` to `room`, in the order in which they are
        stored: as many at a time as find room, and yield how many.

        `data` is whole blocks, of one row or of many. Raises `UsageError` for a type that it does
        not read, for parts of a block, and for bytes of another length.
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
        """Return all numbers in `data`, in a new array; raises what `fill` raises."""
        numbers = np.empty(max(n_elements, 0), np.float32)
        for _ in self.fill(type_, data, n_elements, numbers):
            pass
        return numbers

    def _checked(
        self, type_: GgmlType, data: bytes | Bytes, n_elements: int, room: Floats
    ) -> Bytes:
        """The bytes as an aligned array that lies in one piece, after every check."""
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
            raise UsageError(f"there must be room for whole blocks of {type_} as floats of 32 bits")
        if n_elements and not room.size:
            raise UsageError("there is no room for numbers")
        if stored.size and _address(stored) % _ALIGNMENT:
            stored = stored.copy()
        return stored


def load_dequantizer() -> Dequantizer:
    """ggml's own code when the patched library is installed, else gguf-py's, which lacks some
    types."""
    try:
        lib = load().lib
    except NativeError:
        return GgufDequantizer()
    # Windows finds in a library only what is its own, and ggml is another
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


# from, to, elements. ctypes lets other threads run while it calls.
_TO_FLOAT = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64)


class GgmlDequantizer(Dequantizer):
    """ggml's `to_float` of every type. Only Q8_1 and Q8_K have none: they hold activations during
    a matrix product and never occur in a file."""

    name = "ggml"

    def __init__(self, lib: ctypes.CDLL) -> None:
        """Raises `NativeError` when the library's types are not those that this package knows."""
        lib.ggml_get_type_traits.restype = ctypes.POINTER(_Traits)
        lib.ggml_get_type_traits.argtypes = [ctypes.c_int]
        super().__init__()
        for type_ in TYPES.values():
            traits = lib.ggml_get_type_traits(type_.number).contents
            said = (traits.type_name.decode().upper(), traits.blck_size, traits.type_size)
            if said != (type_.name, type_.block, type_.block_bytes):
                raise NativeError(
                    f"the installed library stores {type_} differently from what this package "
                    "expects; run `instr build`"
                )
            if traits.to_float:
                self._types[type_.name] = _TO_FLOAT(traits.to_float)
        self._use_vectors(lib)

    def _use_vectors(self, lib: ctypes.CDLL) -> None:
        """The CPU backend has the same conversion of F16 with vector instructions: to the bit the
        same numbers, in a tenth of the time."""
        try:
            function = lib.ggml_cpu_fp16_to_fp32
            initialize = lib.ggml_cpu_init
        except AttributeError:  # backends that are loaded at run time export nothing
            return
        # what is left of a row after the last vector goes through a table that this fills
        initialize.restype = None
        initialize()
        function.restype = None
        function.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64]
        self._types["F16"] = function

    def _convert(self, type_: GgmlType, data: Bytes, room: Floats) -> None:
        self._types[type_.name](_address(data), _address(room), room.size)


class GgufDequantizer(Dequantizer):
    """gguf-py's conversions in numpy; it has none for Q1_0, Q2_0, Q8_1 and Q8_K."""

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
        # scales that are NaN cause warnings; the caller sees the result
        with np.errstate(all="ignore"):
            room[:] = self._dequantize(data, self._types[type_.name])


def _address(array: npt.NDArray[Any]) -> int:
    return int(array.__array_interface__["data"][0])
