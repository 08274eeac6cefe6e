"""ggml's ops as standard operators: elements, rows, matrices, copies.

Invariant: a function gets the builder and the number of a node, adds operators, and returns the
name of the node's value, of four dimensions. ggml/src/ggml-cpu/ops.cpp defines each op.
"""

from __future__ import annotations

from math import prod
from typing import Any

import numpy as np
from onnx import TensorProto

from llamacpp_instr.converters.exports.onnx.builder import ELEMENTS, Builder
from llamacpp_instr.log.graph.ops import op_params


def params_of(b: Builder, node: int) -> dict[str, Any]:
    """The parameters of a node by name."""
    nodes = b.tensors.nodes
    return op_params(nodes.op[node], nodes.params[node])


def sources_of(b: Builder, node: int) -> list[int]:
    return b.tensors.nodes.src[node]


def four(b: Builder, tensor: int) -> str:
    """The value of a tensor with four dimensions, also of a weight."""
    value = b.read(tensor)
    return b.reshape(value, b.tensors.shape(tensor)) if b.tensors.is_weight(tensor) else value


# --- elements ---


def with_second(operator: str) -> Any:
    """An op of two tensors; the second is repeated to the shape of the first."""

    def convert(b: Builder, node: int) -> str:
        first, second = sources_of(b, node)[:2]
        return b.add(operator, four(b, first), repeated(b, second, b.tensors.shape(first)))

    return convert


def repeated(b: Builder, tensor: int, to: tuple[int, ...]) -> str:
    """The value of a tensor as ggml repeats it: ONNX itself repeats dimensions of 1 only."""
    shape = b.tensors.shape(tensor)
    if all(n in (1, whole) for n, whole in zip(shape, to, strict=True)):
        # leading dimensions of 1 are ONNX's own
        one_row = b.tensors.is_weight(tensor) and len(b.tensors.ne(tensor)) == 1
        return b.read(tensor) if one_row else four(b, tensor)
    times = [whole // n for n, whole in zip(shape, to, strict=True)]
    return b.add("Tile", four(b, tensor), b.ints(times))


def of_one(operator: str) -> Any:
    """An op of each element."""

    def convert(b: Builder, node: int) -> str:
        return b.add(operator, four(b, sources_of(b, node)[0]))

    return convert


def scale(b: Builder, node: int) -> str:
    found = params_of(b, node)
    value = b.add("Mul", four(b, sources_of(b, node)[0]), b.constant(found["scale"]))
    return b.add("Add", value, b.constant(found["bias"])) if found["bias"] else value


def square(b: Builder, node: int) -> str:
    value = four(b, sources_of(b, node)[0])
    return b.add("Mul", value, value)


def clamp(b: Builder, node: int) -> str:
    found = params_of(b, node)
    low, high = b.constant(found["min"]), b.constant(found["max"])
    return b.add("Clip", four(b, sources_of(b, node)[0]), low, high)


def leaky_relu(b: Builder, node: int) -> str:
    slope = params_of(b, node)["negative_slope"]
    return b.add("LeakyRelu", four(b, sources_of(b, node)[0]), alpha=slope)


def unary(b: Builder, node: int) -> str | None:
    return function(b, str(params_of(b, node)["kind"]), four(b, sources_of(b, node)[0]))


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


_GATES = {
    "REGLU": "RELU", "GEGLU": "GELU", "SWIGLU": "SILU", "GEGLU_ERF": "GELU_ERF",
    "GEGLU_QUICK": "GELU_QUICK",
}  # fmt: skip


def glu(b: Builder, node: int) -> str | None:
    """A function of one half, or of the first tensor, times the other."""
    found, sources = params_of(b, node), sources_of(b, node)
    if len(sources) > 1:
        x, gate = four(b, sources[0]), four(b, sources[1])
    else:
        halves = b.add_many("Split", [four(b, sources[0])], 2, axis=3, num_outputs=2)
        x, gate = reversed(halves) if found["swapped"] else halves
    kind = str(found["kind"])
    if kind == "SWIGLU_OAI":
        alpha, limit = _floats(b.tensors.nodes.params[node], 2, 3)
        x = b.add("Clip", x, "", b.constant(limit))
        gate = b.add("Clip", gate, b.constant(-limit), b.constant(limit))
        x = b.add("Mul", x, b.add("Sigmoid", b.add("Mul", x, b.constant(alpha))))
        return b.add("Mul", x, b.add("Add", gate, b.constant(1)))
    if kind == "SWIGLU_CLAMP":
        (limit,) = _floats(b.tensors.nodes.params[node], 3)
        x = b.add("Clip", x, "", b.constant(limit))
        gate = b.add("Clip", gate, b.constant(-limit), b.constant(limit))
        kind = "SWIGLU"
    value = function(b, _GATES[kind], x) if kind in _GATES else None
    return None if value is None else b.add("Mul", value, gate)


def _floats(words: list[int], *at: int) -> list[float]:
    """Parameters that are floats, by their words."""
    raw = np.array([words[i] if i < len(words) else 0 for i in at], np.int32)
    return [float(value) for value in raw.view(np.float32)]


# --- rows ---


def rms_norm(b: Builder, node: int) -> str:
    (x,) = sources_of(b, node)[:1]
    ones = b.filled(b.tensors.shape(x)[3:], 1)
    return b.add("RMSNormalization", four(b, x), ones, axis=-1, epsilon=params_of(b, node)["eps"])


def norm(b: Builder, node: int) -> str:
    (x,) = sources_of(b, node)[:1]
    ones = b.filled(b.tensors.shape(x)[3:], 1)
    return b.add("LayerNormalization", four(b, x), ones, axis=-1, epsilon=params_of(b, node)["eps"])


def l2_norm(b: Builder, node: int) -> str:
    x = four(b, sources_of(b, node)[0])
    length = b.add("ReduceL2", x, b.ints([3]))
    least = b.constant(params_of(b, node)["eps"])
    return b.add("Div", x, b.add("Max", length, least))


def reduced(operator: str) -> Any:
    """A sum or a mean of each row."""

    def convert(b: Builder, node: int) -> str:
        return b.add(operator, four(b, sources_of(b, node)[0]), b.ints([3]))

    return convert


def total(b: Builder, node: int) -> str:
    return b.add("ReduceSum", four(b, sources_of(b, node)[0]), b.ints([0, 1, 2, 3]))


def cumsum(b: Builder, node: int) -> str:
    return b.add("CumSum", four(b, sources_of(b, node)[0]), b.constant(3, np.int64))


def argsort(b: Builder, node: int) -> str:
    """Also TOP_K, whose order ggml leaves open."""
    (x,) = sources_of(b, node)[:1]
    largest = b.tensors.nodes.op[node] == "TOP_K" or params_of(b, node)["order"] == "DESC"
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
    value = b.read(weight)
    if b.tensors.is_weight(weight) and len(b.tensors.ne(weight)) <= 2:
        matrix = b.add("Transpose", value, perm=(1, 0)) if len(b.tensors.ne(weight)) == 2 else value
        if len(b.tensors.ne(weight)) == 1:
            matrix = b.reshape(value, (prod(b.tensors.ne(weight)), 1))
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
    return b.add("Concat", four(b, first), four(b, second), axis=3 - params_of(b, node)["dim"])


def get_rows(b: Builder, node: int) -> str:
    table, ids = sources_of(b, node)[:2]
    (t3, t2, rows, width), (_, i2, i1, n) = b.tensors.shape(table), b.tensors.shape(ids)
    if (t3, t2) == (1, 1):
        matrix = b.stored(table)
        if not b.tensors.is_weight(table) or len(b.tensors.ne(table)) != 2:
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
