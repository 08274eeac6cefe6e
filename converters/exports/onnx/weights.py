"""Writes an ONNX model with its weights beside it, as external data.

Invariant: memory holds one piece of a weight at a time, so a model may be larger than memory. F32
and F16 are written as they are, every other type as float32.
https://onnx.ai/onnx/repo-docs/ExternalData.html
"""

from __future__ import annotations

from typing import BinaryIO

from onnx import ModelProto, TensorProto, helper

from converters.exports.onnx.builder import ELEMENTS
from converters.exports.onnx.export import Exported
from llamacpp_instr.errors import UsageError
from llamacpp_instr.model.file import ModelFile
from llamacpp_instr.progress import OnProgress
from llamacpp_instr.schema import Graph
from llamacpp_instr.weights.measure import WeightReader

ALIGNMENT = 4096
"""bytes: a program may map each weight"""


def with_external_weights(
    exported: Exported, graph: Graph, model: ModelFile, name: str, data: BinaryIO,
    on_progress: OnProgress,
) -> ModelProto:  # fmt: skip
    """The ONNX model whose weights lie in the file `name` beside it; writes them to `data`.

    `on_progress` gets the bytes written and in total. Raises `UsageError` for a weight that the
    model file lacks, that has another shape there, or whose type has no conversion to numbers.
    """
    reader = WeightReader(model)
    known = {weight.name: weight for weight in model.weights}
    chosen = []
    for leaf, value in exported.weights.items():
        of = graph.leafs[-1 - leaf]
        weight = known.get(of.name)
        if weight is None or list(weight.ne) != [*of.ne, *weight.ne[len(of.ne) :]]:
            raise UsageError(f"{model.path} has no tensor {of.name!r} of the graph's shape")
        reader.check(weight)
        chosen.append((value, weight, list(reversed(of.ne))))
    total = sum(_bytes(weight.type.name, weight.n_elements) for _, weight, _ in chosen)
    at = done = 0
    for value, weight, shape in chosen:
        data.write(bytes(-at % ALIGNMENT))
        at += -at % ALIGNMENT
        n_bytes = _bytes(weight.type.name, weight.n_elements)
        half = weight.type.name == "F16"
        for piece in reader.bytes(weight) if half else reader.pieces(weight):
            data.write(piece.data)
            done += piece.nbytes
            on_progress(done, total)
        tensor = TensorProto(
            name=value, dims=shape, data_location=TensorProto.EXTERNAL, data_type=_kind(half)
        )
        for key, told in (("location", name), ("offset", at), ("length", n_bytes)):
            tensor.external_data.add(key=key, value=str(told))
        exported.model.graph.initializer.append(tensor)
        at += n_bytes
    return exported.model


def with_weights_as_inputs(exported: Exported, graph: Graph) -> ModelProto:
    """The ONNX model without weights: they are further inputs."""
    for leaf, value in exported.weights.items():
        of = graph.leafs[-1 - leaf]
        kind = ELEMENTS.get(of.type, TensorProto.FLOAT)
        info = helper.make_tensor_value_info(value, kind, list(reversed(of.ne)))
        exported.model.graph.input.append(info)
    return exported.model


def _kind(half: bool) -> int:
    return TensorProto.FLOAT16 if half else TensorProto.FLOAT


def _bytes(type_: str, n_elements: int) -> int:
    return n_elements * (2 if type_ == "F16" else 4)
