"""Ops that look back through a state: convolution and scan of state space models, the delta rule.

Invariant: as in `ops`.
"""

from __future__ import annotations

import math
from math import prod

from onnx import GraphProto, TensorProto, ValueInfoProto, helper

from llamacpp_instr.converters.exports.onnx.builder import Builder
from llamacpp_instr.converters.exports.onnx.ops import four, sources_of


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
    last, ys = b.add_many(
        "Scan", [before, decay, new, outputs], 2, body=_body(shape, b.tensors.shape(a)[3]),
        num_scan_inputs=3, scan_input_axes=[1, 1, 1], scan_output_axes=[1],
    )  # fmt: skip
    return _joined(b, node, ys, last)


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
    last, ys = b.add_many(
        "Scan", [before, decay, keys, values, step, queries], 2, body=_delta(shape, gates),
        num_scan_inputs=5, scan_input_axes=[1] * 5, scan_output_axes=[1],
    )  # fmt: skip
    return _joined(b, node, ys, last)


def _tiled(b: Builder, tensor: int, shape: tuple[int, ...]) -> str:
    """Keys or queries for every head: head h has those of h modulo their number."""
    seqs, tokens, heads, width = shape
    value = four(b, tensor)
    if b.tensors.shape(tensor) != shape:
        times = [n // own for n, own in zip(shape, b.tensors.shape(tensor), strict=True)]
        value = b.add("Tile", value, b.ints(times))
    return b.reshape(value, (seqs, tokens, heads, 1, width))


def _joined(b: Builder, node: int, ys: str, last: str) -> str:
    flat = [b.reshape(value, (-1,)) for value in (ys, last)]
    return b.reshape(b.add("Concat", *flat, axis=0), b.tensors.shape(node))


def _value(name: str, *shape: int) -> ValueInfoProto:
    return helper.make_tensor_value_info(name, TensorProto.FLOAT, shape)


def _last_axis() -> TensorProto:
    return helper.make_tensor("last", TensorProto.INT64, [1], [3])


def _body(shape: tuple[int, ...], decays: int) -> GraphProto:
    """state = state * decay + new; y = the sum of state * outputs."""
    seqs, heads, dim, width = shape
    nodes = [
        helper.make_node("Mul", ["state", "decay"], ["kept"]),
        helper.make_node("Add", ["kept", "new"], ["next"]),
        helper.make_node("Mul", ["next", "outputs"], ["seen"]),
        helper.make_node("ReduceSum", ["seen", "last"], ["y"], keepdims=0),
    ]
    inputs = [
        _value("state", *shape),
        _value("decay", seqs, heads, 1, decays),
        _value("new", *shape),
        _value("outputs", seqs, heads, 1, width),
    ]
    outputs = [_value("next", *shape), _value("y", seqs, heads, dim)]
    return helper.make_graph(nodes, "scan", inputs, outputs, [_last_axis()])


def _delta(shape: tuple[int, ...], gates: int) -> GraphProto:
    """What the decayed state returns for the key is replaced by the value, in the part `beta`."""
    seqs, heads, width, _ = shape
    nodes = [
        helper.make_node("Mul", ["state", "decay"], ["kept"]),
        helper.make_node("Mul", ["kept", "key"], ["of key"]),
        helper.make_node("ReduceSum", ["of key", "last"], ["known"], keepdims=1),
        helper.make_node("Sub", ["value", "known"], ["unknown"]),
        helper.make_node("Mul", ["unknown", "beta"], ["learned"]),
        helper.make_node("Mul", ["learned", "key"], ["new"]),
        helper.make_node("Add", ["kept", "new"], ["next"]),
        helper.make_node("Mul", ["next", "query"], ["seen"]),
        helper.make_node("ReduceSum", ["seen", "last"], ["y"], keepdims=0),
    ]
    inputs = [
        _value("state", *shape),
        _value("decay", seqs, heads, 1, gates),
        _value("key", seqs, heads, 1, width),
        _value("value", seqs, heads, width, 1),
        _value("beta", seqs, heads, 1, 1),
        _value("query", seqs, heads, 1, width),
    ]
    outputs = [_value("next", *shape), _value("y", seqs, heads, width)]
    return helper.make_graph(nodes, "delta", inputs, outputs, [_last_axis()])
