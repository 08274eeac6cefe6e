"""The tensors and graphs of ggml that are in memory, read through its C API.

Invariant: an address is only used while its compute is stopped; ggml frees or reuses it later.
"""

from __future__ import annotations

import ctypes
import functools
from typing import Any

from llamacpp_instr.base.errors import NativeError
from llamacpp_instr.llama.native import POINTER, Signatures, declare

MAX_SRC = 10


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


_OBJECT_BYTES = 32  # sizeof(struct ggml_object)


class Info(ctypes.Structure):
    """`struct llama_instr_debug_info` (llama-instrumentation.h)."""

    _fields_ = (
        ("ctx", POINTER),
        ("graph", POINTER),
        ("layers", ctypes.POINTER(ctypes.c_int32)),
        ("wanted", ctypes.POINTER(ctypes.c_uint8)),
        ("n_nodes", ctypes.c_int32),
        ("n_tokens", ctypes.c_int32),
        ("step", ctypes.c_int32),
        ("compute", ctypes.c_int32),
        ("graph_id", ctypes.c_int32),
        ("encoder", ctypes.c_int32),
    )


ON_COMPUTE = ctypes.CFUNCTYPE(None, ctypes.POINTER(Info))
ON_NODE = ctypes.CFUNCTYPE(ctypes.c_int32, ctypes.c_int32)


@functools.cache
def ggml() -> Any:
    """The library, its functions declared. Raises NativeError without the patched library, or if
    its tensors differ from what this module reads."""
    size, text = ctypes.c_size_t, ctypes.c_char_p
    signatures: Signatures = {
        "ggml_graph_node": (POINTER, [POINTER, ctypes.c_int]),
        "ggml_op_name": (text, [ctypes.c_int]),
        "ggml_nbytes": (size, [POINTER]),
        "ggml_tensor_overhead": (size, []),
        "ggml_backend_tensor_get": (None, [POINTER, POINTER, size, size]),
        "ggml_backend_tensor_set": (None, [POINTER, POINTER, size, size]),
        "ggml_backend_buffer_name": (text, [POINTER]),
        "ggml_backend_buffer_get_usage": (ctypes.c_int, [POINTER]),
        "ggml_backend_buffer_is_host": (ctypes.c_bool, [POINTER]),
        "llama_instr_debug": (None, [ON_COMPUTE, ON_NODE]),
    }
    lib = declare(signatures)
    if lib.ggml_tensor_overhead() != ctypes.sizeof(Tensor) + _OBJECT_BYTES:
        raise NativeError("the installed ggml has other tensors; run `instr build`")
    return lib


def tensor_at(address: int) -> Tensor:
    """The tensor at an address: a view of ggml's memory, not a copy."""
    return Tensor.from_address(address)
