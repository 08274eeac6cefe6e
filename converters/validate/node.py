"""One op computed by ONNX Runtime, from the inputs that llama.cpp's kernel had.

Invariant: nothing of ggml computes here: weights are dequantized, and floats are float32 unless a
tensor is stored in another type.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import onnxruntime

from llamacpp_instr.converters.exports.onnx.export import export_node
from llamacpp_instr.converters.exports.onnx.weights import with_weights_as_inputs
from llamacpp_instr.log.schema import Graph

Array = npt.NDArray[Any]
_TYPES = {"float": np.float32, "float16": np.float16, "int32": np.int32, "int64": np.int64}


class NotKnown(Exception):
    """No standard operators express the op."""


def compute_node(graph: Graph, node: int, value_of: Callable[[int], Array]) -> Array:
    """The value of a node, of four dimensions. `value_of` gives that of a tensor that has memory of
    its own, by its number. Raises `NotKnown`."""
    exported = export_node(graph, node)
    if exported is None:
        raise NotKnown
    model = with_weights_as_inputs(exported, graph)
    session = open_session(model.SerializeToString())
    tensors = {name: tensor for tensor, name in (exported.inputs | exported.weights).items()}
    feeds = {
        of.name: typed(value_of(tensors[of.name]), of.type).reshape(of.shape)
        for of in session.get_inputs()
    }
    value: Array = session.run(None, feeds)[0]
    return value


def open_session(model: bytes | str) -> onnxruntime.InferenceSession:
    """A model, or the path of one, on the CPU. What is computed once need not be optimized; weights
    stay in their file, which is mapped: nothing is folded or packed."""
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.add_session_config_entry("session.disable_prepacking", "1")
    return onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])


def typed(values: Array, onnx_type: str) -> Array:
    """The values in the type that ONNX calls `tensor(float16)`, for example."""
    return values.astype(_TYPES[onnx_type.removeprefix("tensor(").removesuffix(")")], copy=False)


def error_of(found: Array, real: Array) -> float:
    """The normalized mean squared error, as test-backend-ops has it (`nmse`); infinity where one
    has a number and the other has none."""
    a, b = found.astype(np.float64).ravel(), real.astype(np.float64).ravel()
    finite = np.isfinite(b)
    if a.size != b.size or not np.array_equal(a[~finite], b[~finite], equal_nan=True):
        return float("inf")
    total = float((b[finite] ** 2).sum())
    squares = float(((a[finite] - b[finite]) ** 2).sum())
    return squares / total if total else float("inf") if squares else 0.0
