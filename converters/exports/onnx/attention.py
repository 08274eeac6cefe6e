"""Positions, softmax and attention as standard operators.

Invariant: as in `ops`. The formulas are those of ggml/src/ggml-cpu/ops.cpp: `rope_yarn`,
`ggml_mrope_cache_init`, `ggml_compute_forward_soft_max_f32`, `ggml_compute_forward_flash_attn_ext`.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray
from onnx import TensorProto

from llamacpp_instr.converters.exports.onnx.builder import Builder
from llamacpp_instr.converters.exports.onnx.ops import four, params_of, sources_of
from llamacpp_instr.log.graph.ops import yarn

_SECTIONED = ("MROPE", "IMROPE")


def rope(b: Builder, node: int) -> str | None:
    """Rotates pairs by angles of their position, ROPE_BACK by the negative angles; None for images,
    whose positions are of two dimensions."""
    found, sources = params_of(b, node), sources_of(b, node)
    mode, n_dims, skipped = str(found["mode"]), int(found["n_dims"]), int(found["n_offs"])
    if mode not in ("NORMAL", "NEOX", *_SECTIONED):
        return None
    i3, tokens, _, width = b.tensors.shape(sources[0])
    frequencies, magnitude = _frequencies(found)
    positions = b.add("Cast", b.read(sources[1]), to=TensorProto.FLOAT)
    if mode in _SECTIONED:
        section = _sections(b.tensors.nodes.params[node], n_dims // 2, mode)
        rows = b.reshape(positions, (4, tokens))
        chosen = b.add("Gather", rows, b.constant(section, np.int64), axis=0)
        positions = b.add("Transpose", chosen, perm=(1, 0))
    else:
        positions = b.reshape(positions, (tokens, 1))
    turns = b.constant(frequencies)
    if len(sources) > 2:
        factors = b.add(
            "Slice", b.read(sources[2]), b.ints([0]), b.ints([n_dims // 2]), b.ints([0])
        )
        turns = b.add("Div", turns, factors)
    angle = b.reshape(b.add("Mul", positions, turns), (1, tokens, n_dims // 2))
    angle = b.add("Expand", angle, b.ints([i3, tokens, n_dims // 2]))
    if b.tensors.nodes.op[node] == "ROPE_BACK":
        angle = b.add("Neg", angle)
    of_angle = [b.add(f, angle) for f in ("Cos", "Sin")]
    if magnitude != 1:
        of_angle = [b.add("Mul", value, b.constant(magnitude)) for value in of_angle]
    x = b.add("Transpose", four(b, sources[0]), perm=(0, 2, 1, 3))
    parts = [x]
    if skipped or n_dims < width:
        sizes = [skipped, n_dims, width - skipped - n_dims]
        parts = b.add_many("Split", [x, b.ints(sizes)], 3, axis=3)
    at = len(parts) // 2
    parts[at] = b.add(
        "RotaryEmbedding", parts[at], *of_angle, interleaved=int(mode == "NORMAL")
    )  # fmt: skip
    if len(parts) > 1:
        x = b.add("Concat", *parts, axis=3)
    else:
        (x,) = parts
    return b.add("Transpose", x, perm=(0, 2, 1, 3))


def _frequencies(found: dict[str, Any]) -> tuple[NDArray[np.float64], float]:
    """The angle of one position for each pair, and the factor of the result."""
    n = int(found["n_dims"])
    kept, magnitude = yarn(found)
    whole = float(found["freq_base"]) ** (-np.arange(0, n, 2) / n)
    return whole * (found["freq_scale"] * (1 - kept) + kept), magnitude


def _sections(params: list[int], pairs: int, mode: str) -> list[int]:
    """Which of the four positions of a token turns each pair."""
    sizes = [params[i] if i < len(params) else 0 for i in range(11, 15)]
    chosen = []
    for pair in range(pairs):
        at = pair % sum(sizes)
        if mode == "IMROPE":
            way = at % 3
            chosen.append(way if at < 3 * sizes[way] else 3)
        else:
            ends = np.cumsum(sizes)
            chosen.append(int(np.searchsorted(ends, at, side="right")))
    return chosen


def soft_max(b: Builder, node: int) -> str:
    """Softmax of rows, scaled, with a mask, a bias of distance and sinks."""
    found, (x, *others) = params_of(b, node), sources_of(b, node)
    shape = b.tensors.shape(x)
    mask = next((t for t in others if b.tensors.shape(t)[3] == shape[3]), None)
    sinks = next((t for t in others if t != mask), None)
    value = b.add("Mul", four(b, x), b.constant(found["scale"]))
    if mask is not None:
        value = b.add("Add", value, _bias(b, mask, shape, found["max_bias"]))
    return _with_sinks(b, value, shape, sinks)


def flash_attention(b: Builder, node: int) -> str:
    """Scores, softmax and weighted sum; the result has heads before tokens, as ggml's has."""
    found, (q, k, v, *others) = params_of(b, node), sources_of(b, node)
    (n3, heads, tokens, _), (_, kv_heads, cells, _) = b.tensors.shape(q), b.tensors.shape(k)
    shape = (n3, heads, tokens, cells)
    bias = [_bias(b, others[0], shape, found["max_bias"])] if others else []
    values = [four(b, tensor) for tensor in (q, k, v)]
    if len(others) < 2 and not found["logit_softcap"]:
        found_ = b.add("Attention", *values, *bias, scale=found["scale"])
        return b.add("Transpose", found_, perm=(0, 2, 1, 3))
    for i, width in ((1, b.tensors.shape(k)[3]), (2, b.tensors.shape(v)[3])):
        if kv_heads != heads:
            grouped = b.reshape(values[i], (n3, kv_heads, 1, cells, width))
            every = b.ints([n3, kv_heads, heads // kv_heads, cells, width])
            values[i] = b.reshape(b.add("Expand", grouped, every), (n3, heads, cells, width))
    scores = b.add("MatMul", values[0], b.add("Transpose", values[1], perm=(0, 1, 3, 2)))
    cap = found["logit_softcap"]
    scores = b.add("Mul", scores, b.constant(found["scale"] / cap if cap else found["scale"]))
    if cap:
        scores = b.add("Mul", b.add("Tanh", scores), b.constant(cap))
    if bias:
        scores = b.add("Add", scores, bias[0])
    shares = _with_sinks(b, scores, shape, others[1] if len(others) > 1 else None)
    return b.add("Transpose", b.add("MatMul", shares, values[2]), perm=(0, 2, 1, 3))


def _bias(b: Builder, mask: int, shape: tuple[int, ...], max_bias: float) -> str:
    """What is added to the scores. A mask may have more rows than there are tokens."""
    value = four(b, mask)
    (m3, m2, rows, _), (n3, heads, tokens, _) = b.tensors.shape(mask), shape
    if rows > tokens:
        value = b.add("Slice", value, b.ints([0]), b.ints([tokens]), b.ints([2]))
    if m2 not in (1, heads) or m3 not in (1, n3):
        value = b.add("Tile", value, b.ints([n3 // m3, heads // m2, 1, 1]))
    if max_bias <= 0:
        return value
    whole = 2 ** math.floor(math.log2(heads))
    slopes = [
        2 ** (-max_bias * (h + 1) / whole)
        if h < whole
        else 2 ** (-max_bias / 2 * (2 * (h - whole) + 1) / whole)
        for h in range(heads)
    ]
    return b.add("Mul", value, b.constant(np.array(slopes).reshape(1, heads, 1, 1)))


def _with_sinks(b: Builder, scores: str, shape: tuple[int, ...], sinks: int | None) -> str:
    """Softmax of the last dimension. A sink is a score without a value: it takes its share."""
    if sinks is None:
        return b.add("Softmax", scores, axis=3)
    n3, heads, tokens, cells = shape
    column = b.reshape(b.read(sinks), (1, heads, 1, 1))
    column = b.add("Expand", column, b.ints([n3, heads, tokens, 1]))
    shares = b.add("Softmax", b.add("Concat", scores, column, axis=3), axis=3)
    return b.add("Slice", shares, b.ints([0]), b.ints([cells]), b.ints([3]))


def lightning_indexer(b: Builder, node: int) -> str:
    """The sum over heads of what each scores above zero, weighted, with a mask."""
    q, k, weights, mask = sources_of(b, node)[:4]
    (streams, tokens, heads, width), cells = b.tensors.shape(q), b.tensors.shape(k)[1]
    keys = b.reshape(four(b, k), (streams, 1, cells, width))
    scores = b.add("MatMul", four(b, q), b.add("Transpose", keys, perm=(0, 1, 3, 2)))
    parts = b.reshape(four(b, weights), (streams, tokens, heads, 1))
    weighted = b.add("Mul", b.add("Relu", scores), parts)
    total = b.reshape(b.add("ReduceSum", weighted, b.ints([2])), (streams, 1, tokens, cells))
    return b.add("Add", total, _bias(b, mask, (streams, 1, tokens, cells), 0))
