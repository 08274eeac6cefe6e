"""A graph of llama.cpp as an ONNX model: its inputs, outputs, weights, and what has no mapping.

Invariant: every node whose kernel runs becomes operators, or one named operator of the domain
`ggml`, which is listed. https://onnx.ai/onnx/repo-docs/IR.html Weights are inputs, or written
beside the model, as external data (https://onnx.ai/onnx/repo-docs/ExternalData.html): F32 and F16
unchanged, every other type as float32. Memory holds one piece of a weight at a time, so a model may
be larger than memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from math import prod
from typing import Any, BinaryIO, Protocol

from numpy.typing import NDArray
from onnx import ModelProto, TensorProto, helper

from llamacpp_instr.base.errors import UsageError
from llamacpp_instr.base.terminal import OnProgress
from llamacpp_instr.converters.exports.onnx import ops
from llamacpp_instr.converters.exports.onnx.builder import CUSTOM, ELEMENTS, Builder
from llamacpp_instr.log.graph.kernels import without_copies
from llamacpp_instr.log.graph.ops import VIEW_OPS, blocks_of
from llamacpp_instr.log.graph.words import OPSET
from llamacpp_instr.log.schema import Graph, Leaf
from llamacpp_instr.log.session import Session

IR_VERSION = 10
"""the first with metadata of nodes"""
ALIGNMENT = 4096
"""bytes: a program may map each weight"""


@dataclass
class Exported:
    """An ONNX model without its weights."""

    model: ModelProto
    inputs: dict[int, str]
    """leafs that are not weights: tokens, positions, masks, caches"""
    weights: dict[int, str]
    """leafs that are weights, with the names of their values"""
    names: dict[int, str]
    """the names of the values of nodes"""
    missing: dict[str, int] = field(default_factory=dict)
    """ops without a mapping, and how many nodes have them"""


def graph_of_step(session: Session, step: int | None) -> Graph:
    """The graph that the last compute of a step, by default the last one, ran, without copies.
    Raises `UsageError` for a step that computed none, and for a graph without strides."""
    computes = session.computes
    wanted = computes["step"] >= 0 if step is None else computes["step"] == step
    found = computes["graph"][wanted].tolist()
    if not found:
        what = "no step" if step is None else f"no step {step}"
        raise UsageError(f"{session.path}: {what} that computed a graph")
    graph = session.graphs[found[-1]]
    if graph.nodes is None or graph.nodes.nb is None:
        raise UsageError(f"{session.path} has no strides of tensors; record with --level verbose")
    return without_copies(graph)


def export_graph(graph: Graph) -> Exported:
    """The graph as an ONNX model whose weights are named and absent. Its outputs are the values
    that no node reads, and what was written (caches). Raises `UsageError` for a graph without
    strides."""
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
            # an operator of ours, with ggml's parameters unchanged
            values = [ops.four(b, source) for source in nodes.src[i]]
            value = b.add(op, *values, domain=CUSTOM, op_params=[*nodes.params[i]] or [0])
        value = b.as_stored(i, value)
        if b.tensors.written(i) is None:
            value = names[i] = b.rename(value, nodes.name[i])
        b.write(i, value)
    return _model(b, names, missing)


def export_node(graph: Graph, node: int) -> Exported | None:
    """One node as an ONNX model: what it reads are inputs, its value is the only output. None for a
    node without a mapping. Raises `UsageError` like `export_graph`."""
    b = Builder(graph)
    b.begin(b.tensors.nodes.name[node], {})
    value = _checked(graph, b, node)
    if value is None:
        return None
    value = b.rename(b.as_stored(node, value), "value")
    output = b.info(node, value)
    made = helper.make_graph(b.nodes, "node", [*b.inputs.values()], [output], b.constants)
    domains = [helper.make_opsetid("", OPSET)]
    model = helper.make_model(made, opset_imports=domains, ir_version=IR_VERSION)
    inputs = {tensor: info.name for tensor, info in b.inputs.items()}
    return Exported(model, inputs, b.weights, {node: value})


def _checked(graph: Graph, b: Builder, node: int) -> str | None:
    """The value of a node, None for one without a mapping."""
    nodes = b.tensors.nodes
    convert = ops.OPS.get(nodes.op[node])
    try:
        return convert(b, node) if convert else None
    except (ArithmeticError, LookupError, ValueError):
        raise UsageError(
            f"node {node} of graph {graph.graph}, {nodes.op[node]} {nodes.name[node]!r}, has"
            " sources or shapes that this op cannot have, so it cannot be exported; for a log,"
            " `instr check` says what is wrong"
        ) from None


def _model(b: Builder, names: dict[int, str], missing: dict[str, int]) -> Exported:
    nodes = b.tensors.nodes
    read = {b.tensors.place(source).base for sources in nodes.src for source in sources}
    b.begin("outputs", {})
    outputs = []
    for i in (i for i in names if i not in read):
        is_input = any(info.name == names[i] for info in b.inputs.values())
        value = b.add("Identity", names[i]) if is_input else names[i]
        outputs.append(b.info(i, value))
    for leaf, value in b.written.items():
        output = b.rename(b.add("Identity", value), f"{b.tensors.name(leaf)} after")
        outputs.append(b.info(leaf, output))
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
    return Exported(model, inputs, b.weights, names, missing)


# --- weights ---


class Weights(Protocol):
    """Where the numbers of weights come from."""

    def check(self, leaf: Leaf) -> None:
        """Raises `UsageError` for a weight that it does not have."""

    def pieces(self, leaf: Leaf) -> Iterator[NDArray[Any]]:
        """The weight in stored order: float16 if it is of type F16, else float32."""


def with_external_weights(
    exported: Exported, graph: Graph, weights: Weights, name: str, data: BinaryIO,
    on_progress: OnProgress,
) -> ModelProto:  # fmt: skip
    """The ONNX model whose weights lie in the file `name` beside it; writes them to `data`.

    `on_progress` gets the bytes written and in total. Raises `UsageError` for a weight that
    `weights` does not have.
    """
    leafs = {value: graph.leaf(leaf) for leaf, value in exported.weights.items()}
    for leaf in leafs.values():
        weights.check(leaf)
    total = weight_bytes(exported, graph)
    at = done = 0
    for value, leaf in leafs.items():
        data.write(bytes(-at % ALIGNMENT))
        at += -at % ALIGNMENT
        for piece in weights.pieces(leaf):
            data.write(piece.data)
            done += piece.nbytes
            on_progress(done, total)
        kind = TensorProto.FLOAT16 if leaf.type == "f16" else TensorProto.FLOAT
        tensor = TensorProto(
            name=value, dims=leaf.ne[::-1], data_location=TensorProto.EXTERNAL, data_type=kind
        )
        for key, entry in (("location", name), ("offset", at), ("length", _bytes(leaf))):
            tensor.external_data.add(key=key, value=str(entry))
        exported.model.graph.initializer.append(tensor)
        at += _bytes(leaf)
    return exported.model


def with_weights_as_inputs(exported: Exported, graph: Graph) -> ModelProto:
    """The ONNX model without weights: they are further inputs."""
    for leaf, value in exported.weights.items():
        of = graph.leaf(leaf)
        kind = ELEMENTS.get(of.type, TensorProto.FLOAT)
        info = helper.make_tensor_value_info(value, kind, list(reversed(of.ne)))
        exported.model.graph.input.append(info)
    return exported.model


def weight_bytes(exported: Exported, graph: Graph) -> int:
    """The bytes of all weights as `with_external_weights` writes them."""
    return sum(_bytes(graph.leaf(leaf)) for leaf in exported.weights)


def _bytes(leaf: Leaf) -> int:
    return prod(leaf.ne) * (2 if leaf.type == "f16" else 4)
