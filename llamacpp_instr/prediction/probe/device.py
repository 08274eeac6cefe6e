"""Measures a device with ggml's own ops, as `measure` does the CPU.

Invariant: only ops that the device says it supports are computed there, because ggml ends the
process on others. A graph has as many equal ops as take LONG_ENOUGH together, so that its
submission and the wait for it do not count.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial
from math import prod
from time import perf_counter_ns
from typing import Any

import numpy as np

from llamacpp_instr.base.errors import NativeError
from llamacpp_instr.base.terminal import OnProgress
from llamacpp_instr.llama.devices import Device
from llamacpp_instr.llama.native import POINTER, InitParams, declare
from llamacpp_instr.model.types import BY_NAME
from llamacpp_instr.prediction.probe.file import Bandwidth, Barrier, DeviceLimits, Kernel
from llamacpp_instr.prediction.probe.measure import (
    F32,
    MIB,
    OVERHEAD,
    ROW,
    SECONDS,
    TYPES_OF_WEIGHTS,
    fastest_ns,
    ggml,
)

SIZES = (1, 16, 64, 256, 1024)
"""MiB that are copied from one half to the other"""
TOKENS = (1, 8, 64, 512)
WIDTH, ROWS = 4096, (256, 1024, 4096)
"""of the weight: more rows for a device that finishes few too soon"""
LONG_ENOUGH = 5_000_000
"""ns of a graph"""
MOST_OPS = 1024
"""of a graph"""


@cache
def _backend() -> Any:
    """The library with the functions for backends."""
    size, number = ctypes.c_size_t, ctypes.c_int
    return declare(
        {
            "ggml_backend_dev_init": (POINTER, [POINTER, ctypes.c_char_p]),
            "ggml_backend_free": (None, [POINTER]),
            "ggml_backend_dev_supports_op": (ctypes.c_bool, [POINTER, POINTER]),
            "ggml_backend_alloc_ctx_tensors": (POINTER, [POINTER, POINTER]),
            "ggml_backend_buffer_free": (None, [POINTER]),
            "ggml_backend_tensor_set": (None, [POINTER, POINTER, size, size]),
            "ggml_backend_graph_compute": (number, [POINTER, POINTER]),
            "ggml_nbytes": (size, [POINTER]),
        }
    )


class DeviceGraph:
    """A graph whose tensors are on a device; `with` frees it."""

    def __init__(self, device: int, backend: int) -> None:
        self._lib, self._of, self._device = ggml(), _backend(), device
        self._backend, self._buffer = backend, None
        self._ctx = self._lib.ggml_init(InitParams(2 * OVERHEAD, None, True))
        self._graph = self._lib.ggml_new_graph_custom(self._ctx, 2 * MOST_OPS, False)
        self._filled: dict[int, tuple[int, tuple[int, ...]]] = {}
        self.supported = True
        """whether the device has all of its ops"""

    def __enter__(self) -> DeviceGraph:
        return self

    def __exit__(self, *_: object) -> None:
        if self._buffer:
            self._of.ggml_backend_buffer_free(self._buffer)
        self._lib.ggml_free(self._ctx)

    def filled(self, type_: int, *ne: int) -> int:
        """A tensor that `allocate` fills with random values, quantized by ggml unless F32."""
        tensor: int = self._lib.ggml_new_tensor_4d(self._ctx, type_, *[*ne, 1, 1][:4])
        self._filled[tensor] = type_, ne
        return tensor

    def node(self, function: str, *arguments: float) -> int:
        """The result of a ggml function, computed by the graph."""
        tensor: int = getattr(self._lib, function)(self._ctx, *arguments)
        self._lib.ggml_build_forward_expand(self._graph, tensor)
        self.supported &= bool(self._of.ggml_backend_dev_supports_op(self._device, tensor))
        return tensor

    def allocate(self) -> bool:
        """Allocates and fills the tensors; returns whether the device has the memory."""
        self._buffer = self._of.ggml_backend_alloc_ctx_tensors(self._ctx, self._backend)
        if not self._buffer:
            return False
        for tensor, (type_, ne) in self._filled.items():
            n, rows = ne[0], prod(ne[1:])
            some = np.random.default_rng(0).standard_normal((min(rows, 64), n), np.float32)
            values = np.resize(some, (rows, n))
            data = values.ctypes.data
            n_bytes = self._of.ggml_nbytes(tensor)
            if type_ != F32:
                room = ctypes.create_string_buffer(n_bytes)
                self._lib.ggml_quantize_chunk(type_, data, room, 0, rows, n, None)
                data = ctypes.addressof(room)
            self._of.ggml_backend_tensor_set(tensor, data, 0, n_bytes)
        return True

    def compute(self) -> None:
        """Computes the graph and waits. Raises NativeError if the device reports a failure."""
        if self._of.ggml_backend_graph_compute(self._backend, self._graph) != 0:
            raise NativeError("the device could not compute a graph")


def measure_device(
    device: Device,
    on_progress: OnProgress,
    types: Sequence[str] = TYPES_OF_WEIGHTS,
    sizes: Sequence[int] = SIZES,
) -> DeviceLimits:
    """Measures how fast a device copies memory and multiplies weights of these types, and what its
    smallest op costs; `on_progress` gets the figures done and their total. Raises NativeError if it
    cannot be used."""
    backend = _backend().ggml_backend_dev_init(device.handle, None)
    if not backend:
        raise NativeError(f"{device.name} cannot be used: ggml could not start it")
    time = partial(_time, device.handle, backend)
    total = len(sizes) + len(types) * len(TOKENS) + 1
    found: list[Bandwidth | Kernel | Barrier | None] = []
    try:
        for parts in (_copies(time, device, sizes), _products(time, types), _empty(time)):
            for part in parts:
                found.append(part)
                on_progress(len(found), total)
    finally:
        _backend().ggml_backend_free(backend)
    limits = DeviceLimits(
        device.name,
        device.description,
        [of for of in found if isinstance(of, Bandwidth)],
        [of for of in found if isinstance(of, Kernel)],
        [of for of in found if isinstance(of, Barrier)],
    )
    if not limits.bandwidth or not limits.kernels:
        raise NativeError(f"{device.name} can neither copy nor multiply on its own")
    return limits


def _time(
    device: int,
    backend: int,
    inputs: Sequence[tuple[int, ...]],
    function: str,
) -> float | None:
    """The time, ns, of a ggml function on tensors that are given by type and shape; None if the
    device lacks the op or the memory."""
    n = 1
    while True:
        with DeviceGraph(device, backend) as graph:
            tensors = [graph.filled(*of) for of in inputs]
            for _ in range(n):
                graph.node(function, *tensors)
            if not graph.supported or not graph.allocate():
                return None
            graph.compute()  # which compiles its shaders
            begin = perf_counter_ns()
            graph.compute()
            once = perf_counter_ns() - begin
            if once >= LONG_ENOUGH or n >= MOST_OPS:
                return fastest_ns(graph.compute, SECONDS) / n
        n = min(MOST_OPS, max(2 * n, int(1.2 * n * LONG_ENOUGH / once)))


Time = Callable[..., "float | None"]


def _copies(time: Time, device: Device, sizes: Sequence[int]) -> Iterator[Bandwidth | None]:
    for size in sizes:
        rows = size * MIB // 2 // (4 * ROW)
        half = (F32, ROW, rows)
        fits = 2 * size * MIB <= device.free_bytes
        ns = time([half, half], "ggml_cpy") if fits else None
        yield Bandwidth(1, size * MIB, size * MIB / ns * 1e9) if ns else None


def _products(time: Time, types: Sequence[str]) -> Iterator[Kernel | None]:
    for name in types:
        for tokens in TOKENS:
            fastest = 0.0
            for rows in ROWS:
                weight = (BY_NAME[name].number, WIDTH, rows)
                ns = time([weight, (F32, WIDTH, tokens)], "ggml_mul_mat")
                if ns is None:
                    break
                fastest = max(fastest, 2 * WIDTH * rows * tokens / ns * 1e9)
                if ns > LONG_ENOUGH / 10:
                    break  # busy with few rows
            yield Kernel(name, tokens, 1, fastest) if fastest else None


def _empty(time: Time) -> Iterator[Barrier | None]:
    ns = time([(F32, 1, 1), (F32, 1, 1)], "ggml_add")
    yield Barrier(1, ns) if ns else None
