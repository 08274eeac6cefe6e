"""Follows a run of a model, and checks each op as soon as it has run.

ONNX Runtime computes the op from the inputs that llama.cpp's kernel had. So a value is kept until
the last node that reads it, because ggml may reuse its memory. Nothing of ggml computes here:
weights are dequantized, and floats are float32 unless a tensor is stored in another type.

The tolerances are those of tests/test-backend-ops.cpp (`max_nmse_err`) of the pinned upstream:
1e-7, unless the test of an op says otherwise, and for a rotation with factors, the float32 rounding
of its largest angle. Activations are also rounded as ggml's CPU backend rounds them before a
product with quantized weights. Only the grid of that rounding is ggml's: blocks of 256 numbers for
types in blocks of 256 (Q8_K), of 32 for others (Q8_0, Q8_1), each number a multiple of the block's
largest divided by 127 (`vec_dot_type` of ggml/src/ggml-cpu/ggml-cpu.c, quantize_row_q8_K of
ggml/src/ggml-quants.c).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import onnxruntime

from llamacpp_instr.converters.exports.onnx.export import export_node, with_weights_as_inputs
from llamacpp_instr.converters.exports.tensors import Tensors
from llamacpp_instr.converters.validate.live import Inputs, as_event
from llamacpp_instr.debugger.graph import LiveGraph, Ubatch
from llamacpp_instr.debugger.stop import Stop
from llamacpp_instr.debugger.tensors import device_of, read
from llamacpp_instr.log.schema import Graph
from llamacpp_instr.model.types import TYPES

DEFAULT = 1e-7
_OF_OP = {"LIGHTNING_INDEXER": 1e-6, "SOFT_MAX": 1e-6} | dict.fromkeys(
    ("CONV_2D", "CONV_2D_DW", "CONV_3D", "CONV_TRANSPOSE_2D", "FLASH_ATTN_EXT", "MUL_MAT",
     "MUL_MAT_ID", "OUT_PROD"), 5e-4,
)  # fmt: skip
_OF_KIND = dict.fromkeys(("GELU", "GELU_QUICK", "GEGLU", "GEGLU_QUICK"), 1e-6)
"""ggml's CPU backend looks these up in a table of float16"""


ANGLE = 2.0**-23
"""relative error of an angle; the factors of a random model make it as large as 100,000"""


def tolerance_of(op: str, kind: str = "") -> float:
    """The largest normalized mean squared error that is not a fault; `kind` is that of a function
    of elements or of a gate, such as GELU."""
    return _OF_KIND.get(kind) or _OF_OP.get(op, DEFAULT)


_BLOCKS = {type_.name.lower(): type_.block for type_ in TYPES.values() if type_.is_quantized}


def rounds(weight_type: str) -> bool:
    """Whether activations are rounded to 8 bits before a product with such weights."""
    return weight_type in _BLOCKS


def rounded(values: npt.NDArray[np.float32], weight_type: str) -> npt.NDArray[np.float32]:
    """The activations on the grid; rows have a multiple of the block's length."""
    block = 256 if _BLOCKS[weight_type] == 256 else 32
    rows = values.reshape(-1, block)
    step = np.abs(rows).max(axis=1, keepdims=True) / np.float32(127)
    with np.errstate(invalid="ignore", divide="ignore"):
        on_grid = np.where(step > 0, np.rint(rows / step) * step, 0)
    return on_grid.astype(np.float32).reshape(values.shape)


Array = npt.NDArray[Any]
_TYPES = {"float": np.float32, "float16": np.float16, "int32": np.int32, "int64": np.int64}


def compute_node(graph: Graph, node: int, value_of: Callable[[int], Array]) -> Array | None:
    """The value of a node, in four dimensions; None if no standard operators express the op.
    `value_of` gives that of a tensor that has memory of its own, by its number."""
    exported = export_node(graph, node)
    if exported is None:
        return None
    session = open_session(with_weights_as_inputs(exported, graph).SerializeToString())
    numbers = {name: number for number, name in (exported.inputs | exported.weights).items()}
    return run(session, None, lambda name: value_of(numbers[name]))


def run(session: Any, wanted: list[str] | None, value_of: Callable[[str], Array]) -> Array:
    """The first of the wanted values, by default of all; `value_of` gives that of an input, which
    is converted to the type that ONNX calls `tensor(float16)`, for example."""
    feeds = {}
    for of in session.get_inputs():
        dtype = _TYPES[of.type.removeprefix("tensor(").removesuffix(")")]
        feeds[of.name] = value_of(of.name).astype(dtype, copy=False).reshape(of.shape)
    value: Array = session.run(wanted, feeds)[0]
    return value


def open_session(model: bytes | str) -> onnxruntime.InferenceSession:
    """A model, or the path of one, on the CPU. What is computed once need not be optimized; weights
    stay in their file, which is mapped: nothing is folded or packed."""
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.add_session_config_entry("session.disable_prepacking", "1")
    return onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])


def error_of(found: Array, real: Array) -> float:
    """The normalized mean squared error, as test-backend-ops computes it (`nmse`); infinity where
    one has a number and the other has none."""
    a, b = found.astype(np.float64).ravel(), real.astype(np.float64).ravel()
    finite = np.isfinite(b)
    if a.size != b.size or not np.array_equal(a[~finite], b[~finite], equal_nan=True):
        return float("inf")
    total = float((b[finite] ** 2).sum())
    squares = float(((a[finite] - b[finite]) ** 2).sum())
    return squares / total if total else float("inf") if squares else 0.0


@dataclass(frozen=True)
class Checked:
    """One op of one compute."""

    compute: int
    node: int
    op: str
    name: str
    layer: int
    device: str
    """the buffer of its result, `CPU` on the CPU"""
    types: str
    """of the sources"""
    kind: str
    """of a function of elements or of a gate"""
    error: float | None
    """normalized mean squared error; None if no standard operators express the op"""
    rounded: float | None = None
    """the error once activations are rounded as ggml rounds them (`rounding`), if `error` is beyond
    the tolerance of a product with quantized weights"""
    angle: float = 0.0
    """the largest of a rotation with factors, in radians; a float32 rounds it"""

    @property
    def tolerance(self) -> float:
        return max(tolerance_of(self.op, self.kind), (self.angle * ANGLE) ** 2)

    @property
    def is_fault(self) -> bool:
        """Whether the kernel is wrong and does not only round."""
        if self.error is None or self.error <= self.tolerance:
            return False
        return self.rounded is None or self.rounded > self.tolerance


class Checker:
    """A follower of a `Debugger`; `on_checked` gets each op. `weight` reads a weight by its
    name."""

    def __init__(
        self, weight: Callable[[str], Array], on_checked: Callable[[Checked], object]
    ) -> None:
        self._weight, self._on_checked = weight, on_checked
        self.first: Graph | None = None
        """the graph of the first compute"""
        self.first_inputs: dict[int, Array] = {}
        """its inputs by leaf: all but weights, as they were before the compute"""

    def wants(self, graph: LiveGraph, _ubatch: Ubatch) -> Collection[int]:
        """All nodes that run."""
        self._graph = as_event(graph)
        self.first = self.first or self._graph
        self._tensors = Tensors(self._graph)
        self._inputs = Inputs(self._graph)
        self._values: dict[int, Array] = {}
        self._last = {
            self._tensors.place(source).base: i
            for i, sources in enumerate(self._tensors.nodes.src)
            for source in sources
        }
        return [node.index for node in graph.nodes if node.runs]

    def passed(self, stop: Stop) -> None:
        """Checks the op that ran, and keeps its value."""
        node, tensors = stop.node, self._tensors
        inputs = self._inputs.read(stop)
        self._values.update(inputs)
        if self._graph is self.first:
            self.first_inputs.update(inputs)
        real = stop.values()
        sources = tensors.nodes.src[node.index]
        checked = Checked(
            compute=stop.compute, node=node.index, op=node.op, name=node.name, layer=node.layer,
            device=device_of(node.address),
            types=", ".join(tensors.type(source) for source in sources),
            kind=str(node.params.get("kind", "")), error=self._error(stop, real, self._value),
        )  # fmt: skip
        if checked.is_fault and node.op.startswith("ROPE") and len(sources) > 2:
            positions, factors = (np.abs(self._value(of)) for of in sources[1:3])
            checked = replace(checked, angle=float(positions.max() / factors.min()))
        if checked.is_fault and node.op.startswith("MUL_MAT") and rounds(tensors.type(sources[0])):
            checked = replace(checked, rounded=self._error(stop, real, self._rounded(sources)))
        self._on_checked(checked)
        base = tensors.place(node.index).base
        self._values[base] = real if base == node.index else read(stop.graph.address_of(base))
        for source in {tensors.place(source).base for source in sources}:
            if self._last[source] == node.index and source >= 0:
                self._values.pop(source, None)

    def _error(self, stop: Stop, real: Array, value_of: Callable[[int], Array]) -> float | None:
        """None if the op was not computed. For indices, the error of what they choose: the order of
        equal numbers is unspecified."""
        found = compute_node(self._graph, stop.node.index, value_of)
        op = stop.node.op
        if found is None or op not in ("ARGSORT", "TOP_K", "ARGMAX"):
            return None if found is None else error_of(found, real)
        rows = read(stop.node.sources[0].address)
        rows = rows.reshape(-1, rows.shape[-1])
        chosen = [
            np.take_along_axis(rows, index.reshape(len(rows), -1).astype(np.int64), 1)
            for index in (found, real)
        ]
        if op == "TOP_K":
            chosen = [np.sort(values, axis=1) for values in chosen]
        return error_of(*chosen)

    def _rounded(self, sources: Sequence[int]) -> Callable[[int], Array]:
        """The values of tensors, with the activations of a product rounded."""
        weight, activations = self._tensors.type(sources[0]), self._tensors.place(sources[1]).base

        def value(tensor: int) -> Array:
            values = self._value(tensor)
            return rounded(values, weight) if tensor == activations else values

        return value

    def _value(self, tensor: int) -> Array:
        if self._tensors.is_weight(tensor):
            return self._weight(self._tensors.name(tensor))
        return self._values[tensor]
