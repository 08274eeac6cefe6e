"""Times the parts of an attention or of a fused kernel with ggml's own kernels, at the very shape.

An RMS_NORM that is fused with a MUL is timed as these two ops, each alone. What is timed for each
part of an attention (ggml/src/ggml-cpu/ops.cpp, vec.cpp):

- dot products: MUL_MAT of the cached keys by the queries, as without flash attention
- maximum: SCALE, ADD of the mask and ARGMAX: what SOFT_MAX does before its exponentials. ARGMAX
  compares once more for each score than SOFT_MAX does
- exponentials: `ggml_vec_soft_max_f32`, the loop of SOFT_MAX itself, over all rows at once. For
  rows shorter than a vector, and for flash attention, UNARY EXP: these call `expf` for each score
- normalization: SCALE in place, the last loop of SOFT_MAX
- weighted sum: OUT_PROD of the cached values by the scores: like flash attention, it adds one value
  after the other

Invariant: one thread, and a copy of every tensor for each time that a kernel runs, because a decode
reads the keys and values of each layer once.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import partial

import numpy as np

from llamacpp_instr.base.errors import UsageError
from llamacpp_instr.base.terminal import progress_bar
from llamacpp_instr.llama.native import POINTER, declare
from llamacpp_instr.model.types import type_named
from llamacpp_instr.prediction.probe.ggml import F32, Ggml, Graph, fastest_ns
from llamacpp_instr.prediction.probe.measure import cpu_name
from llamacpp_instr.prediction.probe.shapes import (
    AttentionShape,
    KernelShape,
    PartTimes,
    ScaledNormShape,
)

SECONDS = 0.1
"""for each part"""
COPIES = 64
MOST_BYTES = 256 << 20
"""of all copies of the tensors of a part"""
MOST_ELEMENTS = 1 << 24
"""of one tensor of a part"""


def time_all(cpu: str, shapes: list[KernelShape]) -> dict[KernelShape, PartTimes] | str:
    """`time_parts` of each shape, or the name of this machine's processor if that is not `cpu`; an
    unknown one is not another one."""
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
    ggml = _ggml()
    rows = shape.elements, shape.rows
    n_bytes = 4 * shape.elements * shape.rows
    if n_bytes > 4 * MOST_ELEMENTS:
        raise UsageError(
            f"a norm of {shape.rows:,} rows is too large to time in parts; choose a decode with"
            " --phase or --step"
        )
    return {
        "RMS_NORM": _timed(
            ggml, 2 * n_bytes, lambda g: g.node("ggml_rms_norm", g.filled(F32, *rows), 1e-5)
        ),
        "MUL": _timed(
            ggml,
            3 * n_bytes,
            lambda g: g.node("ggml_mul", g.filled(F32, *rows), g.filled(F32, shape.elements, 1)),
        ),
    }


def _timed(ggml: Ggml, n_bytes: int, add: Callable[[Graph], object]) -> float:
    """ns of one of the nodes that `add` adds, whose tensors hold `n_bytes`."""
    copies = max(2, min(COPIES, MOST_BYTES // max(1, n_bytes)))
    with Graph(ggml, copies * (n_bytes + (1 << 12))) as graph:
        for _ in range(copies):
            add(graph)
        return fastest_ns(partial(graph.compute, 1), SECONDS) / copies


def _attention(shape: AttentionShape) -> PartTimes:
    n_scores = shape.cells * shape.tokens * shape.heads
    largest = max(n_scores, shape.cells * shape.kv_heads * max(shape.key, shape.value))
    if largest > MOST_ELEMENTS:
        raise UsageError(
            f"an attention of {shape.tokens} tokens to {shape.cells} cells is too large to time in"
            " parts; choose a decode with --phase or --step"
        )
    ggml = _ggml()
    rows = (shape.cells, shape.tokens * shape.heads)
    bytes_of_scores = 4 * n_scores

    timed = partial(_timed, ggml)

    def over_scores(function: str, *arguments: float) -> float:
        return timed(
            3 * bytes_of_scores, lambda g: g.node(function, g.filled(F32, *rows), *arguments)
        )

    masked = timed(
        4 * bytes_of_scores,
        lambda g: g.node("ggml_add", g.filled(F32, *rows), g.filled(F32, shape.cells, 1)),
    )
    times: PartTimes = {}
    if shape.fused:
        key = _type(shape.type_k)
        of_cells = 4 * shape.cells * shape.kv_heads
        n_bytes = of_cells * shape.key + 4 * shape.key * shape.tokens * shape.heads
        times["DOT_PRODUCTS"] = timed(
            2 * (n_bytes + bytes_of_scores),
            lambda g: g.node(
                "ggml_mul_mat",
                g.filled(key, shape.key, shape.cells, shape.kv_heads),
                g.filled(F32, shape.key, shape.tokens, shape.heads),
            ),
        )
    times["MAXIMUM"] = over_scores("ggml_scale", 0.5) + masked + over_scores("ggml_argmax")
    times["EXPONENTIALS"] = (
        over_scores("ggml_exp")
        if shape.fused or shape.cells < 16
        else _soft_max_loop_ns(ggml, n_scores)
    )
    times["NORMALIZATION"] = over_scores("ggml_scale_inplace", 0.5)
    if shape.fused:
        value = _type(shape.type_v)
        # heads that share values are columns of one product, which reads these values once
        shared = shape.tokens * shape.heads // shape.kv_heads
        n_bytes = of_cells * shape.value + 4 * shape.value * shape.tokens * shape.heads
        times["WEIGHTED_SUM"] = timed(
            2 * (n_bytes + bytes_of_scores),
            lambda g: g.node(
                "ggml_out_prod",
                g.filled(value, shape.value, shape.cells, shape.kv_heads),
                g.filled(F32, shared, shape.cells, shape.kv_heads),
            ),
        )
    return times


def _ggml() -> Ggml:
    two, scaled = [POINTER, POINTER], [POINTER, POINTER, ctypes.c_float]
    ggml = Ggml()
    declare(
        {
            "ggml_argmax": (POINTER, two),
            "ggml_exp": (POINTER, two),
            "ggml_mul": (POINTER, [POINTER, POINTER, POINTER]),
            "ggml_rms_norm": (POINTER, scaled),
            "ggml_scale": (POINTER, scaled),
            "ggml_scale_inplace": (POINTER, scaled),
            "ggml_out_prod": (POINTER, [POINTER, POINTER, POINTER]),
            "ggml_vec_soft_max_f32": (
                ctypes.c_double,
                [ctypes.c_int, POINTER, POINTER, ctypes.c_float],
            ),
        }
    )
    return ggml


def _soft_max_loop_ns(ggml: Ggml, n: int) -> float:
    """`ggml_vec_soft_max_f32` over `n` scores, without the call from Python."""
    times = max(1, (1 << 16) // n)
    scores = np.random.default_rng(0).standard_normal(n * times, np.float32)
    result = np.empty_like(scores)
    run = ggml.lib.ggml_vec_soft_max_f32
    at, into = scores.ctypes.data, result.ctypes.data
    whole = fastest_ns(lambda: run(len(scores), into, at, 4.0), SECONDS)
    call = fastest_ns(lambda: run(0, into, at, 4.0), SECONDS / 10)
    return max(1.0, whole - call) / times


def _type(name: str) -> int:
    type_ = type_named(name)
    if type_ is None or type_.name == "BF16":
        raise UsageError(f"a cache of {name} cannot be timed in parts; record with f16")
    return type_.number
