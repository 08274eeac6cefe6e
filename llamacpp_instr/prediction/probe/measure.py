"""Measures the machine, and the parts of kernels, with ggml's own kernels.

Graphs are built and computed with the library that llama_cpp ships. ggml ends the process on
misuse, so only shapes and types that its CPU backend multiplies are used. No session records these
graphs: they belong to no context of llama.cpp.

The parts of an attention or of a fused kernel are timed at exactly its shape, on one thread, with a
copy of every tensor for each run of a kernel, because a decode reads the keys and values of each
layer once. An RMS_NORM that is fused with a MUL is timed as these two ops, each on its own. What is
timed for each part of an attention (ggml/src/ggml-cpu/ops.cpp, vec.cpp):

- dot products: MUL_MAT of the cached keys by the queries, as without flash attention
- maximum: SCALE, ADD of the mask and ARGMAX: what SOFT_MAX does before its exponentials. ARGMAX
  compares once more for each score than SOFT_MAX does
- exponentials: `ggml_vec_soft_max_f32`, the loop of SOFT_MAX itself, over all rows at once. For
  rows shorter than a vector, and for flash attention, UNARY EXP: these call `expf` for each score
- normalization: SCALE in place, the last loop of SOFT_MAX
- weighted sum: OUT_PROD of the cached values by the scores: like flash attention, it adds one value
  after the other
"""

from __future__ import annotations

import ctypes
import math
import os
import re
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import datetime, timezone
from functools import cache, partial
from math import inf
from typing import Any

import numpy as np

from llamacpp_instr.base.cpus import cpu_name
from llamacpp_instr.base.errors import NativeError, UsageError
from llamacpp_instr.base.machine import free_memory
from llamacpp_instr.base.terminal import OnProgress, progress_bar
from llamacpp_instr.llama.native import POINTER, InitParams, Signatures, declare, load
from llamacpp_instr.llama.threads import default_threads
from llamacpp_instr.model.types import BY_NAME, type_named
from llamacpp_instr.prediction.probe.file import (
    AttentionShape,
    Bandwidth,
    Barrier,
    Kernel,
    KernelShape,
    PartTimes,
    Probe,
    ScaledNormShape,
)

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


_OF_TENSORS = {"argmax": 1, "exp": 1, "add": 2, "cpy": 2, "mul": 2, "mul_mat": 2, "out_prod": 2}
"""functions that make a tensor from this number of tensors"""
_OF_A_NUMBER = ("rms_norm", "scale", "scale_inplace")
"""those that make one from a tensor and a number"""


@cache
def ggml() -> Any:
    """The library with the functions that graphs need. Raises NativeError if it lacks one."""
    size, number, real, i64 = ctypes.c_size_t, ctypes.c_int, ctypes.c_float, ctypes.c_int64
    signatures: Signatures = {
        "ggml_init": (POINTER, [InitParams]),
        "ggml_free": (None, [POINTER]),
        "ggml_new_tensor_4d": (POINTER, [POINTER, number, i64, i64, i64, i64]),
        "ggml_get_data": (POINTER, [POINTER]),
        "ggml_quantize_chunk": (size, [number, POINTER, POINTER, i64, i64, i64, POINTER]),
        "ggml_new_graph_custom": (POINTER, [POINTER, size, ctypes.c_bool]),
        "ggml_build_forward_expand": (None, [POINTER, POINTER]),
        "ggml_graph_plan": (_Plan, [POINTER, number, POINTER]),
        "ggml_graph_compute": (number, [POINTER, ctypes.POINTER(_Plan)]),
        "ggml_vec_soft_max_f32": (ctypes.c_double, [number, POINTER, POINTER, real]),
        **{f"ggml_{name}": (POINTER, [POINTER] * (n + 1)) for name, n in _OF_TENSORS.items()},
        **{f"ggml_{name}": (POINTER, [POINTER, POINTER, real]) for name in _OF_A_NUMBER},
    }
    return declare(signatures)


class Graph:
    """A graph in its own memory; `with` frees it. `n_bytes` is room for its tensors' data."""

    def __init__(self, n_bytes: int) -> None:
        self._lib = ggml()
        self._ctx = self._lib.ggml_init(InitParams(n_bytes + 4 * OVERHEAD, None, False))
        if not self._ctx:
            raise NativeError(f"ggml could not allocate {n_bytes:,} bytes")
        self._graph = self._lib.ggml_new_graph_custom(self._ctx, 2048, False)
        self._work = ctypes.create_string_buffer(1)

    def __enter__(self) -> Graph:
        return self

    def __exit__(self, *_: object) -> None:
        self._lib.ggml_free(self._ctx)

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
        """The result of a ggml function, computed by the graph."""
        tensor: int = getattr(self._lib, function)(self._ctx, *arguments)
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
    """The time of the fastest run, in ns, of five or more in about `seconds`. The fastest shows
    what the machine can do: whatever else runs there only takes time."""
    run()
    times: list[int] = []
    end = time.perf_counter() + seconds
    while len(times) < 5 or time.perf_counter() < end:
        begin = time.perf_counter_ns()
        run()
        times.append(time.perf_counter_ns() - begin)
    return float(min(times))


MIB = 1 << 20
SIZES = (1, 4, 16, 64, 256, 1024)
"""MiB; the sizes of caches lie between them"""
MOVED_AT_ONCE = 64
"""the least MiB that one graph moves, so that starting its threads does not count"""
ROW = 1024
"""elements of a row that is copied: 4 KiB"""
TYPES_OF_WEIGHTS = ("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_K", "Q5_K", "Q6_K")
TOKENS = (1, 8, 64, 256)
WIDTH, ROWS = 2048, 256
"""of the weight: 2 MiB in F32, 288 KiB in Q4_K"""
FLOPS_AT_ONCE = 2e8
EMPTY_OPS = 500
SECONDS = 0.3
"""for each figure"""
TRIES = 4
SLOWER = 2
"""times as slow as fewer threads, or as more memory, is implausible"""


def measure(on_progress: OnProgress) -> Probe:
    """Measures everything, and leaves out what is implausible; `on_progress` gets the figures done
    and their total."""
    (load_average, _, _) = os.getloadavg()
    counts = thread_counts()
    free = free_memory()
    sizes = [n for n in SIZES if 4 * n * MIB <= free] or [SIZES[0]]
    total = len(counts) * (len(sizes) + len(TYPES_OF_WEIGHTS) * len(TOKENS) + 1)
    started = datetime.now(timezone.utc).isoformat(timespec="seconds")
    found: list[Bandwidth | Kernel | Barrier] = []
    for part in (bandwidth(sizes, counts), _kernels(counts), barriers(counts)):
        for figure in part:
            found.append(figure)
            on_progress(len(found), total)
    copied = [of for of in found if isinstance(of, Bandwidth)]
    plausible = [of for of in copied if _is_plausible(of, copied)]
    on_progress(total, total)
    return Probe(
        probe=2,
        time=started,
        cpu=cpu_name(),
        cores=os.cpu_count() or 1,
        load=round(load_average, 2),
        llama_cpp=str(load().info()["llama_cpp"]),
        bandwidth=plausible,
        kernels=[of for of in found if isinstance(of, Kernel)],
        barriers=[of for of in found if isinstance(of, Barrier)],
        left_out=total - len(found) + len(copied) - len(plausible),
        features=features(),
    )


def features() -> list[str]:
    """The instruction sets that ggml uses on this machine, as `host.features` in a log. Raises
    `NativeError` if the library is missing."""
    system_info = load().lib.llama_print_system_info
    system_info.restype, system_info.argtypes = ctypes.c_char_p, []
    found = re.findall(r"(\w+) = (\w+)", (system_info() or b"").decode(errors="replace"))
    return [name if value == "1" else f"{name}={value}" for name, value in found if value != "0"]


def _is_plausible(of: Bandwidth, all_: Sequence[Bandwidth]) -> bool:
    """Whether it is not far slower than with more memory."""
    more = (o for o in all_ if o.threads == of.threads and o.bytes > of.bytes)
    return all(o.bytes_per_second <= SLOWER * of.bytes_per_second for o in more)


def _times(graph: Graph, counts: Sequence[int]) -> Iterator[tuple[int, float]]:
    """ns for each number of threads, without those that are far slower than fewer threads: a thread
    that another process keeps from its CPU makes all others wait."""
    fewer = inf
    for n in counts:
        for _ in range(TRIES):
            ns = fastest_ns(partial(graph.compute, n), SECONDS)
            if ns <= SLOWER * fewer:
                yield n, ns
                fewer = min(fewer, ns)
                break


def thread_counts() -> list[int]:
    """1, 2, 4 and so on, and as many as `instr run` uses by default."""
    most = default_threads()
    return sorted({most, *(1 << i for i in range(10) if 1 << i < most)})


def bandwidth(sizes: Sequence[int], counts: Sequence[int]) -> Iterator[Bandwidth]:
    """Copies from one half of the memory to the other: reads and writes together are `size`."""
    for size in sizes:
        times = max(1, MOVED_AT_ONCE // size)
        with Graph((size + 1) * MIB) as graph:
            rows = size * MIB // 2 // (4 * ROW)
            one, other = graph.filled(F32, ROW, rows), graph.filled(F32, ROW, rows)
            for _ in range(times):
                graph.node("ggml_cpy", one, other)
            for n, ns in _times(graph, counts):
                yield Bandwidth(n, size * MIB, times * size * MIB / ns * 1e9)


def _kernels(counts: list[int]) -> Iterator[Kernel]:
    for name in TYPES_OF_WEIGHTS:
        for tokens in TOKENS:
            n_flops = 2 * WIDTH * ROWS * tokens
            times = max(1, int(FLOPS_AT_ONCE / n_flops))
            room = 4 * (WIDTH * ROWS + WIDTH * tokens + times * ROWS * tokens)
            with Graph(room) as graph:
                weight = graph.filled(BY_NAME[name].number, WIDTH, ROWS)
                activations = graph.filled(F32, WIDTH, tokens)
                for _ in range(times):
                    graph.node("ggml_mul_mat", weight, activations)
                for n, ns in _times(graph, counts):
                    yield Kernel(name, tokens, n, times * n_flops / ns * 1e9)


def barriers(counts: list[int]) -> Iterator[Barrier]:
    with Graph(MIB) as graph:
        tensor = graph.filled(F32, 1, 1)
        for _ in range(EMPTY_OPS):
            tensor = graph.node("ggml_add", tensor, tensor)  # given to all threads
        for n in counts:
            yield Barrier(n, fastest_ns(partial(graph.compute, n), SECONDS) / EMPTY_OPS)


PART_SECONDS = 0.1
"""for each part"""
COPIES = 64
MOST_BYTES = 256 << 20
"""of all copies of the tensors of a part"""
MOST_ELEMENTS = 1 << 24
"""of one tensor of a part"""


def time_all(cpu: str, shapes: list[KernelShape]) -> dict[KernelShape, PartTimes] | str:
    """`time_parts` of each shape, or the name of this machine's processor if that is not `cpu`; an
    unknown one does not count as another."""
    here = cpu_name()
    if cpu and here and cpu != here:
        return here
    found: dict[KernelShape, PartTimes] = {}
    with progress_bar("Timing the parts of kernels") as on_progress:
        for i, shape in enumerate(shapes):
            found[shape] = time_parts(shape)
            on_progress(i + 1, len(shapes))
    return found


def time_parts(shape: KernelShape) -> PartTimes:
    """The time of each part in ns, all heads or rows together, on one thread. Raises UsageError for
    a shape that is too large and for a type of the cache whose rows ggml cannot add up."""
    return _norm(shape) if isinstance(shape, ScaledNormShape) else _attention(shape)


def _norm(shape: ScaledNormShape) -> PartTimes:
    rows = shape.elements, shape.rows
    n_bytes = 4 * shape.elements * shape.rows
    if n_bytes > 4 * MOST_ELEMENTS:
        raise UsageError(
            f"a norm of {shape.rows:,} rows is too large to time in parts; choose a decode with"
            " --phase or --step"
        )
    weight = shape.elements, 1
    return {
        "RMS_NORM": _timed(2 * n_bytes, "ggml_rms_norm", [(F32, *rows)], 1e-5),
        "MUL": _timed(3 * n_bytes, "ggml_mul", [(F32, *rows), (F32, *weight)]),
    }


def _timed(
    n_bytes: int, function: str, tensors: Sequence[tuple[int, ...]], *arguments: float
) -> float:
    """The time, ns, of a ggml function on tensors that are given by type and shape and together
    hold `n_bytes`."""
    copies = max(2, min(COPIES, MOST_BYTES // max(1, n_bytes)))
    with Graph(copies * (n_bytes + (1 << 12))) as graph:
        for _ in range(copies):
            graph.node(function, *(graph.filled(*tensor) for tensor in tensors), *arguments)
        return fastest_ns(partial(graph.compute, 1), PART_SECONDS) / copies


def _attention(shape: AttentionShape) -> PartTimes:
    n_scores = shape.cells * shape.tokens * shape.heads
    largest = max(n_scores, shape.cells * shape.kv_heads * max(shape.key, shape.value))
    if largest > MOST_ELEMENTS:
        raise UsageError(
            f"an attention of {shape.tokens} tokens to {shape.cells} cells is too large to time in"
            " parts; choose a decode with --phase or --step"
        )
    rows = (F32, shape.cells, shape.tokens * shape.heads)
    bytes_of_scores = 4 * n_scores
    over_scores = partial(_timed, 3 * bytes_of_scores)
    masked = _timed(4 * bytes_of_scores, "ggml_add", [rows, (F32, shape.cells, 1)])
    times: PartTimes = {}
    if shape.fused:
        times["DOT_PRODUCTS"] = _timed(
            2 * (_cached_bytes(shape, shape.key) + bytes_of_scores),
            "ggml_mul_mat",
            [
                (_type(shape.type_k), shape.key, shape.cells, shape.kv_heads),
                (F32, shape.key, shape.tokens, shape.heads),
            ],
        )
    scaled, largest_of = over_scores("ggml_scale", [rows], 0.5), over_scores("ggml_argmax", [rows])
    times["MAXIMUM"] = scaled + masked + largest_of
    times["EXPONENTIALS"] = (
        over_scores("ggml_exp", [rows])
        if shape.fused or shape.cells < 16
        else _soft_max_loop_ns(n_scores)
    )
    times["NORMALIZATION"] = over_scores("ggml_scale_inplace", [rows], 0.5)
    if shape.fused:
        # heads that share values are columns of one product, which reads these values once
        shared = shape.tokens * shape.heads // shape.kv_heads
        times["WEIGHTED_SUM"] = _timed(
            2 * (_cached_bytes(shape, shape.value) + bytes_of_scores),
            "ggml_out_prod",
            [
                (_type(shape.type_v), shape.value, shape.cells, shape.kv_heads),
                (F32, shared, shape.cells, shape.kv_heads),
            ],
        )
    return times


def _cached_bytes(shape: AttentionShape, width: int) -> int:
    """Room for cached keys or values, and for queries or results."""
    return 4 * width * (shape.cells * shape.kv_heads + shape.tokens * shape.heads)


def _soft_max_loop_ns(n: int) -> float:
    """`ggml_vec_soft_max_f32` over `n` scores, without the call from Python."""
    times = max(1, (1 << 16) // n)
    scores = np.random.default_rng(0).standard_normal(n * times, np.float32)
    result = np.empty_like(scores)
    run = ggml().ggml_vec_soft_max_f32
    at, into = scores.ctypes.data, result.ctypes.data
    whole = fastest_ns(lambda: run(len(scores), into, at, 4.0), PART_SECONDS)
    call = fastest_ns(lambda: run(0, into, at, 4.0), PART_SECONDS / 10)
    return max(1.0, whole - call) / times


def _type(name: str) -> int:
    type_ = type_named(name)
    if type_ is None or type_.name == "BF16":
        raise UsageError(f"a cache of {name} cannot be timed in parts; record with f16")
    return type_.number
