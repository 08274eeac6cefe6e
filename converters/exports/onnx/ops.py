"""ggml's ops as standard operators.

Invariant: a function gets the builder and the number of a node, adds operators, and returns the
name of the node's value, of four dimensions, or None if no operators express the node.
ggml/src/ggml-cpu/ops.cpp defines each op, with helpers such as `rope_yarn`,
`ggml_mrope_cache_init`, `ggml_compute_forward_soft_max_f32`, `ggml_compute_forward_flash_attn_ext`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray
from onnx import TensorProto, helper

from llamacpp_instr.converters.exports.onnx.builder import ELEMENTS, Builder
from llamacpp_instr.converters.exports.tensors import GATES
from llamacpp_instr.log.graph.ops import yarn


def sources_of(b: Builder, node: int) -> list[int]:
    return b.tensors.nodes.src[node]


def four(b: Builder, tensor: int) -> str:
    """The value of a tensor with four dimensions, also of a weight."""
    value = b.read(tensor)
    return b.reshape(value, b.tensors.shape(tensor)) if b.tensors.is_weight(tensor) else value


# --- elements ---


def with_second(operator: str, b: Builder, node: int) -> str:
    """An op of two tensors; the second is repeated to the shape of the first."""
    first, second = sources_of(b, node)[:2]
    return b.add(operator, four(b, first), repeated(b, second, b.tensors.shape(first)))


def repeated(b: Builder, tensor: int, to: tuple[int, ...]) -> str:
    """The value of a tensor as ggml repeats it: ONNX itself repeats dimensions of 1 only."""
    shape = b.tensors.shape(tensor)
    if all(n in (1, whole) for n, whole in zip(shape, to, strict=True)):
        # leading dimensions of 1 are ONNX's own
        one_row = b.tensors.is_weight(tensor) and len(b.tensors.dims(tensor)) == 1
        return b.read(tensor) if one_row else four(b, tensor)
    times = [whole // n for n, whole in zip(shape, to, strict=True)]
    return b.add("Tile", four(b, tensor), b.ints(times))


def of_one(operator: str, b: Builder, node: int) -> str:
    """An op of each element."""
    return b.add(operator, four(b, sources_of(b, node)[0]))


def scale(b: Builder, node: int) -> str:
    found = b.tensors.params(node)
    value = b.add("Mul", four(b, sources_of(b, node)[0]), b.constant(found["scale"]))
    return b.add("Add", value, b.constant(found["bias"])) if found["bias"] else value


def square(b: Builder, node: int) -> str:
    value = four(b, sources_of(b, node)[0])
    return b.add("Mul", value, value)


def clamp(b: Builder, node: int) -> str:
    found = b.tensors.params(node)
    low, high = b.constant(found["min"]), b.constant(found["max"])
    return b.add("Clip", four(b, sources_of(b, node)[0]), low, high)


def leaky_relu(b: Builder, node: int) -> str:
    slope = b.tensors.params(node)["negative_slope"]
    return b.add("LeakyRelu", four(b, sources_of(b, node)[0]), alpha=slope)


def unary(b: Builder, node: int) -> str | None:
    return function(b, str(b.tensors.params(node)["kind"]), four(b, sources_of(b, node)[0]))


_FUNCTIONS = {
    "ABS": "Abs", "NEG": "Neg", "TANH": "Tanh", "RELU": "Relu", "SIGMOID": "Sigmoid",
    "ELU": "Elu", "EXP": "Exp", "SOFTPLUS": "Softplus", "FLOOR": "Floor", "CEIL": "Ceil",
    "SGN": "Sign", "HARDSWISH": "HardSwish",
}  # fmt: skip


def function(b: Builder, kind: str, x: str) -> str | None:
    """A function of each element by ggml's name, None for one without standard operators."""
    if kind in _FUNCTIONS:
        return b.add(_FUNCTIONS[kind], x)
    if kind == "SILU":
        return b.add("Mul", x, b.add("Sigmoid", x))
    if kind in ("GELU", "GELU_ERF"):
        return b.add("Gelu", x, approximate="tanh" if kind == "GELU" else "none")
    if kind == "GELU_QUICK":
        return b.add("Mul", x, b.add("Sigmoid", b.add("Mul", x, b.constant(1.702))))
    if kind == "HARDSIGMOID":
        return b.add("HardSigmoid", x, alpha=1 / 6, beta=0.5)
    if kind == "EXPM1":
        return b.add("Sub", b.add("Exp", x), b.constant(1))
    if kind == "STEP":
        return b.add("Cast", b.add("Greater", x, b.constant(0)), to=TensorProto.FLOAT)
    return None


def glu(b: Builder, node: int) -> str | None:
    """A function of one half, or of the first tensor, times the other."""
    found, sources = b.tensors.params(node), sources_of(b, node)
    if len(sources) > 1:
        x, gate = four(b, sources[0]), four(b, sources[1])
    else:
        halves = b.add_many("Split", [four(b, sources[0])], 2, axis=3, num_outputs=2)
        x, gate = reversed(halves) if found["swapped"] else halves
    kind = str(found["kind"])
    if kind in ("SWIGLU_OAI", "SWIGLU_CLAMP"):
        alpha, limit = _floats(b.tensors.nodes.params[node], 2, 3)
        x = b.add("Clip", x, "", b.constant(limit))
        gate = b.add("Clip", gate, b.constant(-limit), b.constant(limit))
        if kind == "SWIGLU_OAI":
            x = b.add("Mul", x, b.add("Sigmoid", b.add("Mul", x, b.constant(alpha))))
            return b.add("Mul", x, b.add("Add", gate, b.constant(1)))
        kind = "SWIGLU"
    value = function(b, GATES[kind], x) if kind in GATES else None
    return None if value is None else b.add("Mul", value, gate)


def _floats(words: list[int], *at: int) -> list[float]:
    """Parameters that are floats, by their words."""
    raw = np.array([words[i] if i < len(words) else 0 for i in at], np.int32)
    return [float(value) for value in raw.view(np.float32)]


# --- rows ---


def norm(operator: str, b: Builder, node: int) -> str:
    x = sources_of(b, node)[0]
    ones = b.filled(b.tensors.shape(x)[3:], 1)
    return b.add(operator, four(b, x), ones, axis=-1, epsilon=b.tensors.params(node)["eps"])


def l2_norm(b: Builder, node: int) -> str:
    x = four(b, sources_of(b, node)[0])
    length = b.add("ReduceL2", x, b.ints([3]))
    least = b.constant(b.tensors.params(node)["eps"])
    return b.add("Div", x, b.add("Max", length, least))


def reduced(operator: str, b: Builder, node: int) -> str:
    """A sum or a mean of each row, or of all."""
    axes = range(4) if b.tensors.nodes.op[node] == "SUM" else (3,)
    return b.add(operator, four(b, sources_of(b, node)[0]), b.ints(axes))


def cumsum(b: Builder, node: int) -> str:
    return b.add("CumSum", four(b, sources_of(b, node)[0]), b.constant(3, np.int64))


def argsort(b: Builder, node: int) -> str:
    """ARGSORT, and TOP_K, whose order ggml leaves open."""
    (x,) = sources_of(b, node)[:1]
    largest = b.tensors.nodes.op[node] == "TOP_K" or b.tensors.params(node)["order"] == "DESC"
    k = b.ints([b.tensors.shape(node)[3]])
    _, index = b.add_many("TopK", [four(b, x), k], 2, axis=3, largest=int(largest))
    return b.add("Cast", index, to=TensorProto.INT32)


def argmax(b: Builder, node: int) -> str:
    index = b.add("ArgMax", four(b, sources_of(b, node)[0]), axis=3, keepdims=0)
    index = b.reshape(index, b.tensors.shape(node))
    return b.add("Cast", index, to=TensorProto.INT32)


# --- matrices ---


def mul_mat(b: Builder, node: int) -> str:
    """Rows of the first by rows of the second; dimensions of the first are repeated."""
    weight, x = sources_of(b, node)[:2]
    value, dims = b.read(weight), b.tensors.dims(weight)
    if b.tensors.is_weight(weight) and not dims[2:]:
        two = len(dims) == 2
        matrix = b.add("Transpose", value, perm=(1, 0)) if two else b.reshape(value, (*dims, 1))
        return b.add("MatMul", four(b, x), matrix)
    value = four(b, weight)
    (o3, o2, _, _), (i3, i2, n, k) = b.tensors.shape(x), b.tensors.shape(weight)
    if (i3, i2) != (o3, o2) and (i3, i2) != (1, 1):
        # each of the first serves several of the second, which follow each other
        value = b.reshape(value, (i3, 1, i2, 1, n, k))
        value = b.add("Expand", value, b.ints([i3, o3 // i3, i2, o2 // i2, n, k]))
        value = b.reshape(value, (o3, o2, n, k))
    return b.add("MatMul", four(b, x), b.add("Transpose", value, perm=(0, 1, 3, 2)))


def mul_mat_id(b: Builder, node: int) -> str:
    """Each token by the experts that were chosen for it."""
    weight, x, ids = sources_of(b, node)[:3]
    (_, _, tokens, used), (_, n, k) = b.tensors.shape(ids), b.tensors.shape(weight)[1:]
    experts = b.reshape(b.read(weight), b.tensors.shape(weight)[1:])
    chosen = b.add("Gather", experts, b.reshape(four(b, ids), (tokens, used)), axis=0)
    each = b.reshape(four(b, x), (tokens, b.tensors.shape(x)[2], k, 1))
    return b.reshape(b.add("MatMul", chosen, each), (1, tokens, used, n))


def add_id(b: Builder, node: int) -> str:
    """Adds the rows that were chosen."""
    x, rows, ids = sources_of(b, node)[:3]
    width = b.tensors.shape(rows)[3]
    table = b.reshape(b.read(rows), (b.tensors.shape(rows)[2], width))
    index = b.reshape(four(b, ids), b.tensors.shape(ids)[2:])
    chosen = b.add("Gather", table, index, axis=0)
    return b.add("Add", four(b, x), b.reshape(chosen, (1, *b.tensors.shape(ids)[2:], width)))


# --- copies ---


def copied(b: Builder, node: int) -> str:
    """The elements in the order of the first, in the shape and as numbers of the result."""
    source = sources_of(b, node)[0]
    value = b.reshape(four(b, source), b.tensors.shape(node))
    whole = ("i32", "i64")
    to, stored = b.tensors.type(node), b.tensors.type(source)
    if to != stored and (to in whole or stored in whole):
        value = b.add("Cast", value, to=ELEMENTS.get(to, TensorProto.FLOAT))
    return value


def repeat(b: Builder, node: int) -> str:
    value = repeated(b, sources_of(b, node)[0], b.tensors.shape(node))
    return b.add("Expand", value, b.ints(b.tensors.shape(node)))


def concat(b: Builder, node: int) -> str:
    first, second = sources_of(b, node)[:2]
    return b.add("Concat", four(b, first), four(b, second), axis=3 - b.tensors.params(node)["dim"])


def get_rows(b: Builder, node: int) -> str:
    table, ids = sources_of(b, node)[:2]
    (t3, t2, rows, width), (_, i2, i1, n) = b.tensors.shape(table), b.tensors.shape(ids)
    if (t3, t2) == (1, 1):
        matrix = b.stored(table)
        if not b.tensors.is_weight(table) or len(b.tensors.dims(table)) != 2:
            matrix = b.reshape(matrix, (rows, width))
        found = b.add("Gather", matrix, b.reshape(four(b, ids), (n,)), axis=0)
        if b.is_half(table):
            found = b.add("Cast", found, to=TensorProto.FLOAT)
    else:
        index = b.add("Cast", b.reshape(four(b, ids), (i2, i1, n, 1)), to=TensorProto.INT64)
        found = b.add("GatherND", four(b, table), index, batch_dims=2)
    return b.reshape(found, b.tensors.shape(node))


def set_rows(b: Builder, node: int) -> str:
    """The tensor with some rows replaced, in the type that it is stored in."""
    data, ids, to = sources_of(b, node)[:3]
    (t3, t2, rows, width), (_, i2, i1, n) = b.tensors.shape(to), b.tensors.shape(ids)
    # rows of all matrices of the tensor, one after the other
    first = (np.arange(t3 * t2) * rows).reshape(t3, t2, 1)
    index = b.add("Cast", b.reshape(four(b, ids), (i2, i1, n)), to=TensorProto.INT64)
    index = b.reshape(b.add("Add", index, b.constant(first, np.int64)), (t3 * t2 * n, 1))
    values = b.reshape(four(b, data), (t3 * t2 * n, width))
    if b.is_half(node):
        values = b.add("Cast", values, to=TensorProto.FLOAT16)
    table = b.reshape(b.stored(to), (t3 * t2 * rows, width))
    return b.add("ScatterND", table, index, values)


def arange(b: Builder, node: int) -> str:
    start, _, step = _floats(b.tensors.nodes.params[node], 0, 1, 2)
    n = b.tensors.shape(node)[3]
    return b.constant((start + step * np.arange(n)).reshape(1, 1, 1, n))


def fill(b: Builder, node: int) -> str:
    (value,) = _floats(b.tensors.nodes.params[node], 0)
    return b.filled(b.tensors.shape(node), value)


# --- positions and attention ---

_SECTIONED = ("MROPE", "IMROPE")


def rope(b: Builder, node: int) -> str | None:
    """Rotates pairs by angles of their position, ROPE_BACK by the negative angles; None for images,
    whose positions have two dimensions."""
    found, sources = b.tensors.params(node), sources_of(b, node)
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
    interleaved = int(mode == "NORMAL")
    parts[at] = b.add("RotaryEmbedding", parts[at], *of_angle, interleaved=interleaved)
    x = b.add("Concat", *parts, axis=3) if len(parts) > 1 else parts[0]
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
    found, (x, *others) = b.tensors.params(node), sources_of(b, node)
    shape = b.tensors.shape(x)
    mask = next((t for t in others if b.tensors.shape(t)[3] == shape[3]), None)
    sinks = next((t for t in others if t != mask), None)
    value = b.add("Mul", four(b, x), b.constant(found["scale"]))
    if mask is not None:
        value = b.add("Add", value, _bias(b, mask, shape, found["max_bias"]))
    return _with_sinks(b, value, shape, sinks)


def flash_attention(b: Builder, node: int) -> str:
    """Scores, softmax and weighted sum; the result has heads before tokens, as ggml's has."""
    found, (q, k, v, *others) = b.tensors.params(node), sources_of(b, node)
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


# --- what looks back through a state ---


def ssm_conv(b: Builder, node: int) -> str:
    """A window of the last positions of each channel, with weights of its own."""
    x, weight = sources_of(b, node)[:2]
    (_, seqs, channels, length), (_, _, _, taps) = b.tensors.shape(x), b.tensors.shape(weight)
    values = b.reshape(four(b, x), (seqs, channels, length))
    kernel = b.reshape(b.read(weight), (channels, 1, taps))
    found = b.add("Conv", values, kernel, group=channels)
    return b.reshape(b.add("Transpose", found, perm=(0, 2, 1)), b.tensors.shape(node))


def ssm_scan(b: Builder, node: int) -> str | None:
    """y and the new state, one after the other in one row, as ggml returns them; None if it is
    asked for more than the last state."""
    state, x, dt, a, in_, out, ids = sources_of(b, node)[:7]
    seqs, tokens, heads, dim = b.tensors.shape(x)
    width, groups = b.tensors.shape(state)[3], b.tensors.shape(in_)[2]
    shape = (seqs, heads, dim, width)
    if prod(b.tensors.shape(node)) != seqs * tokens * heads * dim + prod(shape):
        return None
    states = b.reshape(four(b, state), (b.tensors.shape(state)[0], heads, dim, width))
    before = b.add("Gather", states, b.reshape(four(b, ids), (seqs,)), axis=0)
    step = b.reshape(b.add("Softplus", four(b, dt)), (seqs, tokens, heads, 1, 1))
    rate = b.reshape(b.read(a), (1, 1, heads, 1, b.tensors.shape(a)[3]))
    decay = b.add("Exp", b.add("Mul", step, rate))
    taken = b.add("Mul", b.reshape(four(b, x), (seqs, tokens, heads, dim, 1)), step)
    inputs, outputs = (_by_head(b, t, (seqs, tokens, heads, width), groups) for t in (in_, out))
    new = b.add("Mul", taken, inputs)
    inner = {
        "state": (before, shape),
        "decay": (decay, (seqs, heads, 1, b.tensors.shape(a)[3])),
        "new": (new, shape),
        "outputs": (outputs, (seqs, heads, 1, width)),
    }
    steps = ["kept = Mul(state, decay)", "next = Add(kept, new)", "seen = Mul(next, outputs)"]
    return _scan(b, node, "scan", inner, steps)


def _by_head(b: Builder, tensor: int, shape: tuple[int, ...], groups: int) -> str:
    """The weights of each head; several heads share a group's."""
    seqs, tokens, heads, width = shape
    value = b.reshape(four(b, tensor), (seqs, tokens, groups, 1, width))
    if groups != heads:
        value = b.add("Expand", value, b.ints([seqs, tokens, groups, heads // groups, width]))
    return b.reshape(value, (seqs, tokens, heads, 1, width))


def gated_delta_net(b: Builder, node: int) -> str | None:
    """y and the new state, one after the other, as ggml returns them; None if it is asked for more
    than the last state. `ggml_compute_forward_gated_delta_net_one_chunk` defines it."""
    q, k, v, gate, beta, state = sources_of(b, node)[:6]
    seqs, tokens, heads, width = b.tensors.shape(v)
    gates = b.tensors.shape(gate)[3]
    shape = (seqs, heads, width, width)
    if prod(b.tensors.shape(node)) != seqs * tokens * heads * width + prod(shape):
        return None
    decay = b.reshape(b.add("Exp", four(b, gate)), (seqs, tokens, heads, 1, gates))
    keys, queries = (_tiled(b, tensor, (seqs, tokens, heads, width)) for tensor in (k, q))
    queries = b.add("Mul", queries, b.constant(1 / math.sqrt(width)))
    values = b.reshape(four(b, v), (seqs, tokens, heads, width, 1))
    step = b.reshape(four(b, beta), (seqs, tokens, heads, 1, 1))
    before = b.reshape(four(b, state), shape)
    inner = {
        "state": (before, shape),
        "decay": (decay, (seqs, heads, 1, gates)),
        "key": (keys, (seqs, heads, 1, width)),
        "value": (values, (seqs, heads, width, 1)),
        "beta": (step, (seqs, heads, 1, 1)),
        "query": (queries, (seqs, heads, 1, width)),
    }
    # what the decayed state returns for the key is replaced by the value, to the degree `beta`
    steps = [
        "kept = Mul(state, decay)", "of key = Mul(kept, key)", "known = ReduceSum(of key, last)",
        "unknown = Sub(value, known)", "learned = Mul(unknown, beta)", "new = Mul(learned, key)",
        "next = Add(kept, new)", "seen = Mul(next, query)",
    ]  # fmt: skip
    return _scan(b, node, "delta", inner, steps)


def _tiled(b: Builder, tensor: int, shape: tuple[int, ...]) -> str:
    """Keys or queries for every head: head h has those of h modulo their number."""
    seqs, tokens, heads, width = shape
    value = four(b, tensor)
    if b.tensors.shape(tensor) != shape:
        times = [n // own for n, own in zip(shape, b.tensors.shape(tensor), strict=True)]
        value = b.add("Tile", value, b.ints(times))
    return b.reshape(value, (seqs, tokens, heads, 1, width))


def _scan(
    b: Builder,
    node: int,
    name: str,
    inner: Mapping[str, tuple[str, tuple[int, ...]]],
    steps: Sequence[str],
) -> str:
    """Takes the `steps` for each token: they make `next` from `state` and the parts of the other
    values, and `seen`, whose rows add up to y. The value of the node is y and the last state, one
    after the other. `inner` has the value and the shape of each name in the steps."""
    nodes = []
    for step in [*steps, "y = ReduceSum(seen, last)"]:
        to, _, call = step.partition(" = ")
        operator, _, inputs = call.removesuffix(")").partition("(")
        keep: dict[str, Any] = {"keepdims": int(to != "y")} if operator == "ReduceSum" else {}
        nodes.append(helper.make_node(operator, inputs.split(", "), [to], **keep))
    state = inner["state"][1]
    shapes = {name: shape for name, (_, shape) in inner.items()} | {"next": state, "y": state[:3]}
    infos = [
        helper.make_tensor_value_info(name, TensorProto.FLOAT, shape)
        for name, shape in shapes.items()
    ]
    axis = helper.make_tensor("last", TensorProto.INT64, [1], [3])
    body = helper.make_graph(nodes, name, infos[:-2], infos[-2:], [axis])
    values, n = [value for value, _ in inner.values()], len(inner) - 1
    last, ys = b.add_many(
        "Scan", values, 2, body=body, num_scan_inputs=n, scan_input_axes=[1] * n,
        scan_output_axes=[1],
    )  # fmt: skip
    flat = [b.reshape(value, (-1,)) for value in (ys, last)]
    return b.reshape(b.add("Concat", *flat, axis=0), b.tensors.shape(node))


_CONVERT: dict[str, Callable[[Builder, int], str | None]] = {
    "ADD_ID": add_id, "ARANGE": arange, "ARGMAX": argmax, "ARGSORT": argsort, "CLAMP": clamp,
    "CONCAT": concat, "CONT": copied, "CPY": copied, "CUMSUM": cumsum, "DUP": copied, "FILL": fill,
    "FLASH_ATTN_EXT": flash_attention, "GATED_DELTA_NET": gated_delta_net, "GET_ROWS": get_rows,
    "GLU": glu, "L2_NORM": l2_norm, "LEAKY_RELU": leaky_relu,
    "LIGHTNING_INDEXER": lightning_indexer, "MUL_MAT": mul_mat, "MUL_MAT_ID": mul_mat_id,
    "REPEAT": repeat, "ROPE": rope, "ROPE_BACK": rope, "SCALE": scale, "SET_ROWS": set_rows,
    "SOFT_MAX": soft_max, "SQR": square, "SSM_CONV": ssm_conv, "SSM_SCAN": ssm_scan,
    "TOP_K": argsort, "UNARY": unary,
}  # fmt: skip
_NAMED: dict[Callable[[str, Builder, int], str], dict[str, str]] = {
    with_second: {"ADD": "Add", "ADD1": "Add", "DIV": "Div", "MUL": "Mul", "SUB": "Sub"},
    of_one: {"COS": "Cos", "LOG": "Log", "SIN": "Sin", "SQRT": "Sqrt"},
    norm: {"NORM": "LayerNormalization", "RMS_NORM": "RMSNormalization"},
    reduced: {"MEAN": "ReduceMean", "SUM": "ReduceSum", "SUM_ROWS": "ReduceSum"},
}
OPS = _CONVERT | {
    op: partial(convert, operator)
    for convert, operators in _NAMED.items()
    for op, operator in operators.items()
}
"""by ggml's name"""
