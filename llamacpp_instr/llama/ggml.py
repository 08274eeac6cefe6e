"""Calls of ggml itself, declared for ctypes."""

from __future__ import annotations

import ctypes
from typing import Any

from llamacpp_instr.errors import NativeError
from llamacpp_instr.llama.native import load

POINTER = ctypes.c_void_p
Signatures = dict[str, tuple[Any, list[Any]]]
"""by function: the type that it returns, and those of its arguments"""


class InitParams(ctypes.Structure):
    """`struct ggml_init_params`: ggml/include/ggml.h."""

    _fields_ = (
        ("mem_size", ctypes.c_size_t),
        ("mem_buffer", ctypes.c_void_p),
        ("no_alloc", ctypes.c_bool),
    )


def declare(signatures: Signatures) -> Any:
    """The library, with the types of these functions. Raises NativeError without the patched
    library, or if it lacks one of them."""
    lib = load().lib
    for name, (result, arguments) in signatures.items():
        try:
            function = getattr(lib, name)
        except AttributeError:
            raise NativeError(f"the installed ggml has no {name}; run `instr build`") from None
        function.restype, function.argtypes = result, arguments
    return lib
