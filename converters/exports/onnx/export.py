"""A graph of llama.cpp as an ONNX model: its inputs, outputs, weights, and what has no mapping.

Invariant: every node whose kernel runs becomes operators, or one named operator of the domain
`ggml`, which is listed. https://onnx.ai/onnx/repo-docs/IR.html
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from onnx import ModelProto, TensorProto, helper

from llamacpp_instr.base.errors import UsageError
from llamacpp_instr.converters.exports.onnx import attention, ops, recurrent
from llamacpp_instr.converters.exports.onnx.builder import CUSTOM, ELEMENTS, Builder
from llamacpp_instr.log.graph.ops import VIEW_OPS, blocks_of
from llamacpp_instr.log.graph.words import OPSET
from llamacpp_instr.log.schema import Graph

IR_VERSION = 10
"""the first with metadata of nodes"""


@dataclass
class Exported:
    """An ONNX model without its weights."""

    model: ModelProto
    inputs: dict[int, str]
    """leafs that are not weights: tokens, positions, masks, caches"""
    state: dict[int, str]
    """those of them that are written (caches), with the names of the outputs"""
    weights: dict[int, str]
    """leafs that are weights, with the names of their values"""
    names: dict[int, str]
    """the names of the values of nodes"""
    missing: dict[str, int] = field(default_factory=dict)
    """ops without a mapping, and how many nodes have them"""


_Convert = Callable[[Builder, int], "str | None"]
_OPS: dict[str, _Convert] = {
    "ADD": ops.with_second("Add"),
    "ADD1": ops.with_second("Add"),
    "ADD_ID": ops.add_id,
    "ARANGE": ops.arange,
    "ARGMAX": ops.argmax,
    "ARGSORT": ops.argsort,
    "CLAMP": ops.clamp,
    "CONCAT": ops.concat,
    "CONT": ops.copied,
    "COS": ops.of_one("Cos"),
    "CPY": ops.copied,
    "CUMSUM": ops.cumsum,
    "DIV": ops.with_second("Div"),
    "DUP": ops.copied,
    "FILL": ops.fill,
    "FLASH_ATTN_EXT": attention.flash_attention,
    "GATED_DELTA_NET": recurrent.gated_delta_net,
    "GET_ROWS": ops.get_rows,
    "GLU": ops.glu,
    "L2_NORM": ops.l2_norm,
    "LEAKY_RELU": ops.leaky_relu,
    "LIGHTNING_INDEXER": attention.lightning_indexer,
    "LOG": ops.of_one("Log"),
    "MEAN": ops.reduced("ReduceMean"),
    "MUL": ops.with_second("Mul"),
    "MUL_MAT": ops.mul_mat,
    "MUL_MAT_ID": ops.mul_mat_id,
    "NORM": ops.norm,
    "REPEAT": ops.repeat,
    "RMS_NORM": ops.rms_norm,
    "ROPE": attention.rope,
    "ROPE_BACK": attention.rope,
    "SCALE": ops.scale,
    "SET_ROWS": ops.set_rows,
    "SIN": ops.of_one("Sin"),
    "SOFT_MAX": attention.soft_max,
    "SQR": ops.square,
    "SQRT": ops.of_one("Sqrt"),
    "SSM_CONV": recurrent.ssm_conv,
    "SSM_SCAN": recurrent.ssm_scan,
    "SUB": ops.with_second("Sub"),
    "SUM": ops.total,
    "SUM_ROWS": ops.reduced("ReduceSum"),
    "TOP_K": ops.argsort,
    "UNARY": ops.unary,
}


def export_graph(graph: Graph, outputs: Sequence[int] = ()) -> Exported:
    """The graph as an ONNX model whose weights are named and absent.

    `outputs` are nodes whose values the model also returns, besides those that no node reads.
    Raises `UsageError` for a graph without strides.
    """
    b = Builder(graph)
    nodes = b.tensors.nodes
    blocks = blocks_of(nodes.op, nodes.name, nodes.layer, nodes.src, [f.name for f in graph.leafs])
    missing: dict[str, int] = {}
    names: dict[int, str] = {}
    for i, op in enumerate(nodes.op):
        if op in VIEW_OPS or not nodes.bytes[i]:
            continue
        layer = nodes.layer[i]
        where = f"layer{layer}/{blocks[i]}" if layer >= 0 else blocks[i]
        b.begin(f"{where}/{nodes.name[i]}", {"op": op, "layer": str(layer), "block": blocks[i]})
        value = _checked(graph, b, i)
        if value is None:
            missing[op] = missing.get(op, 0) + 1
            value = _custom(b, i)
        value = b.as_stored(i, value)
        if b.tensors.written(i) is None:
            value = names[i] = b.rename(value, nodes.name[i])
        b.write(i, value)
    return _model(b, names, missing, outputs)


def export_node(graph: Graph, node: int) -> Exported | None:
    """One node as an ONNX model: what it reads are inputs, its value is the only output. None for a
    node without a mapping. Raises `UsageError` like `export_graph`."""
    b = Builder(graph)
    b.begin(b.tensors.nodes.name[node], {})
    value = _checked(graph, b, node)
    if value is None:
        return None
    value = b.rename(b.as_stored(node, value), "value")
    kind = ELEMENTS.get(b.tensors.nodes.type[node], TensorProto.FLOAT)
    shape = b.tensors.shape(node)
    output = helper.make_tensor_value_info(value, kind, shape)
    made = helper.make_graph(b.nodes, "node", [*b.inputs.values()], [output], b.constants)
    domains = [helper.make_opsetid("", OPSET)]
    model = helper.make_model(made, opset_imports=domains, ir_version=IR_VERSION)
    inputs = {tensor: info.name for tensor, info in b.inputs.items()}
    return Exported(model, inputs, {}, b.weights, {node: value})


def _checked(graph: Graph, b: Builder, node: int) -> str | None:
    """The value of a node, None for one without a mapping."""
    nodes = b.tensors.nodes
    convert = _OPS.get(nodes.op[node])
    try:
        return convert(b, node) if convert else None
    except (ArithmeticError, LookupError, ValueError):
        raise UsageError(
            f"node {node} of graph {graph.graph}, {nodes.op[node]} {nodes.name[node]!r}, has"
            " sources or shapes that this op cannot have, so it cannot be exported; of a log,"
            " `instr check` says what is wrong"
        ) from None


def _custom(b: Builder, node: int) -> str:
    """An operator of ours, with ggml's parameters as they are."""
    values = [ops.four(b, source) for source in ops.sources_of(b, node)]
    words = list(b.tensors.nodes.params[node]) or [0]
    return b.add(b.tensors.nodes.op[node], *values, domain=CUSTOM, op_params=words)


def _model(
    b: Builder, names: dict[int, str], missing: dict[str, int], more: Sequence[int]
) -> Exported:
    nodes = b.tensors.nodes
    read = {b.tensors.place(source).base for sources in nodes.src for source in sources}
    returned = [i for i in names if i not in read or i in more]
    b.begin("outputs", {})
    outputs = []
    for i in returned:
        value = b.add("Identity", names[i]) if _is_input(b, names[i]) else names[i]
        kind = ELEMENTS.get(nodes.type[i], TensorProto.FLOAT)
        outputs.append(helper.make_tensor_value_info(value, kind, b.tensors.shape(i)))
    state = {}
    for leaf, value in b.written.items():
        output = b.rename(b.add("Identity", value), f"{b.tensors.name(leaf)} after")
        state[leaf] = output
        kind = ELEMENTS.get(b.tensors.type(leaf), TensorProto.FLOAT)
        outputs.append(helper.make_tensor_value_info(output, kind, b.tensors.shape(leaf)))
    infos = [
        helper.make_tensor_value_info(name, TensorProto.FLOAT, b.tensors.shape(i))
        for i, name in names.items()
        if nodes.op[i] in missing
    ]
    made = helper.make_graph(
        b.nodes, "llama.cpp", [*b.inputs.values()], outputs, b.constants, value_info=infos
    )
    domains = [helper.make_opsetid("", OPSET)]
    if missing:
        domains.append(helper.make_opsetid(CUSTOM, 1))
    model = helper.make_model(
        made, opset_imports=domains, ir_version=IR_VERSION, producer_name="llamacpp_instr"
    )
    inputs = {leaf: info.name for leaf, info in b.inputs.items()}
    return Exported(model, inputs, state, b.weights, names, missing)


def _is_input(b: Builder, name: str) -> bool:
    return any(info.name == name for info in b.inputs.values())
