"""Calls of ggml itself, declared for ctypes."""

from __future__ import annotations

import ctypes
from typing import Any

from llamacpp_instr.llama import native

POINTER = ctypes.c_void_p
Signatures = native.Signatures


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
    lib = native.load().lib
    native.declare(signatures, lib)
    return lib
