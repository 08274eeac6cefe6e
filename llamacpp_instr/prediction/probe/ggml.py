"""Small graphs of ggml, built and computed with the library that llama_cpp ships.

Invariant: ggml ends the process on misuse, so only shapes and types that its CPU backend multiplies
come here. No session records these graphs: they belong to no context of llama.cpp.
"""

from __future__ import annotations

import ctypes
import math
import time
from collections.abc import Callable

import numpy as np

from llamacpp_instr.base.errors import NativeError
from llamacpp_instr.llama.native import POINTER, InitParams, Signatures, declare

I64 = ctypes.c_int64
F32 = 0
"""GGML_TYPE_F32"""
OVERHEAD = 1 << 20
"""bytes for a graph and its tensors, without their data; ggml needs 400 for a tensor"""


class _Plan(ctypes.Structure):
    """`struct ggml_cplan`: ggml/include/ggml-cpu.h."""

    _fields_ = (
        ("work_size", ctypes.c_size_t),
        ("work_data", ctypes.c_void_p),
        ("n_threads", ctypes.c_int),
        ("threadpool", ctypes.c_void_p),
        ("abort_callback", ctypes.c_void_p),
        ("abort_callback_data", ctypes.c_void_p),
        ("use_ref", ctypes.c_bool),
    )


class Ggml:
    """The functions of ggml that graphs need. Raises NativeError if the library lacks one."""

    def __init__(self) -> None:
        signatures: Signatures = {
            "ggml_init": (POINTER, [InitParams]),
            "ggml_free": (None, [POINTER]),
            "ggml_new_tensor_4d": (POINTER, [POINTER, ctypes.c_int, I64, I64, I64, I64]),
            "ggml_mul_mat": (POINTER, [POINTER, POINTER, POINTER]),
            "ggml_add": (POINTER, [POINTER, POINTER, POINTER]),
            "ggml_cpy": (POINTER, [POINTER, POINTER, POINTER]),
            "ggml_get_data": (POINTER, [POINTER]),
            "ggml_row_size": (ctypes.c_size_t, [ctypes.c_int, I64]),
            "ggml_quantize_chunk": (
                ctypes.c_size_t,
                [ctypes.c_int, POINTER, POINTER, I64, I64, I64, POINTER],
            ),
            "ggml_new_graph_custom": (POINTER, [POINTER, ctypes.c_size_t, ctypes.c_bool]),
            "ggml_build_forward_expand": (None, [POINTER, POINTER]),
            "ggml_graph_plan": (_Plan, [POINTER, ctypes.c_int, POINTER]),
            "ggml_graph_compute": (ctypes.c_int, [POINTER, ctypes.POINTER(_Plan)]),
        }
        self.lib = declare(signatures)

    def row_bytes(self, type_: int, n: int) -> int:
        """Bytes of a row of `n` elements, whole blocks."""
        return int(self.lib.ggml_row_size(type_, n))


class Graph:
    """A graph in memory of its own; `with` frees it. `bytes` is room for its tensors' data."""

    def __init__(self, ggml: Ggml, n_bytes: int) -> None:
        self._lib = ggml.lib
        self._ggml = ggml
        self._ctx = self._lib.ggml_init(InitParams(n_bytes + 4 * OVERHEAD, None, False))
        if not self._ctx:
            raise NativeError(f"ggml gets no memory for {n_bytes:,} bytes")
        self._graph = self._lib.ggml_new_graph_custom(self._ctx, 2048, False)
        self._work = ctypes.create_string_buffer(1)

    def __enter__(self) -> Graph:
        return self

    def __exit__(self, *_: object) -> None:
        self._lib.ggml_free(self._ctx)

    def product(self, weight: int, activations: int) -> int:
        """MUL_MAT, computed by the graph."""
        return self._computed(self._lib.ggml_mul_mat(self._ctx, weight, activations))

    def double(self, tensor: int) -> int:
        """ADD of a tensor to itself, computed by the graph. ggml gives it to all threads."""
        return self._computed(self._lib.ggml_add(self._ctx, tensor, tensor))

    def copy(self, tensor: int, to: int) -> int:
        """CPY to a tensor of the same shape, computed by the graph."""
        return self._computed(self._lib.ggml_cpy(self._ctx, tensor, to))

    def filled(self, type_: int, *ne: int) -> int:
        """A tensor of two to four axes with random values, quantized by ggml unless F32."""
        n, rows = ne[0], math.prod(ne[1:])
        tensor: int = self._lib.ggml_new_tensor_4d(self._ctx, type_, *[*ne, 1, 1][:4])
        some = np.random.default_rng(0).standard_normal((min(rows, 64), n), np.float32)
        values, at = np.resize(some, (rows, n)), self._lib.ggml_get_data(tensor)
        if type_ == F32:
            ctypes.memmove(at, values.ctypes.data, values.nbytes)
        else:
            self._lib.ggml_quantize_chunk(type_, values.ctypes.data, at, 0, rows, n, None)
        return tensor

    def node(self, function: str, *arguments: float) -> int:
        """What a function of ggml that was declared makes of its arguments, computed by the
        graph."""
        return self._computed(getattr(self._lib, function)(self._ctx, *arguments))

    def _computed(self, tensor: int) -> int:
        self._lib.ggml_build_forward_expand(self._graph, tensor)
        return tensor

    def compute(self, n_threads: int) -> None:
        """Computes the graph. Raises NativeError if ggml reports a failure."""
        plan = self._lib.ggml_graph_plan(self._graph, n_threads, None)
        if len(self._work) < plan.work_size:
            self._work = ctypes.create_string_buffer(plan.work_size)
        plan.work_data = ctypes.addressof(self._work)
        if self._lib.ggml_graph_compute(self._graph, ctypes.byref(plan)) != 0:
            raise NativeError("ggml could not compute a graph")


def fastest_ns(run: Callable[[], object], seconds: float) -> float:
    """The time of the fastest run, in ns, of five or more in about `seconds`. What the machine can
    do is the fastest: whatever else runs there only takes time."""
    run()
    times: list[int] = []
    end = time.perf_counter() + seconds
    while len(times) < 5 or time.perf_counter() < end:
        begin = time.perf_counter_ns()
        run()
        times.append(time.perf_counter_ns() - begin)
    return float(min(times))
