"""Writes an ONNX model with its weights beside it, as external data.

Invariant: memory holds one piece of a weight at a time, so a model may be larger than memory. F32
and F16 are written as they are, every other type as float32.
https://onnx.ai/onnx/repo-docs/ExternalData.html
"""

from __future__ import annotations

from collections.abc import Iterator
from math import prod
from typing import Any, BinaryIO, Protocol

from numpy.typing import NDArray
from onnx import ModelProto, TensorProto, helper

from llamacpp_instr.base.terminal import OnProgress
from llamacpp_instr.converters.exports.onnx.builder import ELEMENTS
from llamacpp_instr.converters.exports.onnx.export import Exported
from llamacpp_instr.log.schema import Graph, Leaf

ALIGNMENT = 4096
"""bytes: a program may map each weight"""


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
