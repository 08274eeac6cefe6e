"""Follows a run of a model, and checks each op as soon as it has run.

Invariant: an op is checked with the inputs that its kernel had. So a value is kept until the last
node that reads it, because ggml may use its memory again. Where the graph is split among backends,
a copy has the value of its source.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace

import numpy as np

from llamacpp_instr.converters.exports.onnx.tensors import Tensors
from llamacpp_instr.converters.validate.live import Inputs, as_event
from llamacpp_instr.converters.validate.node import Array, NotKnown, compute_node, error_of
from llamacpp_instr.converters.validate.tolerances import rounded, rounds, tolerance_of
from llamacpp_instr.debugger.graph import LiveGraph, Ubatch
from llamacpp_instr.debugger.stop import Stop
from llamacpp_instr.debugger.tensors import device_of, read
from llamacpp_instr.log.graph.kernels import without_copies
from llamacpp_instr.log.schema import Graph


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

    @property
    def tolerance(self) -> float:
        return tolerance_of(self.op, self.kind)

    @property
    def is_fault(self) -> bool:
        """Whether the kernel is wrong, and not only rounds."""
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
        self._graph: Graph | None = None
        self._tensors: Tensors | None = None
        self._live: LiveGraph | None = None
        self._values: dict[int, Array] = {}
        self._last: dict[int, int] = {}

    def wants(self, graph: LiveGraph, _ubatch: Ubatch) -> Collection[int]:
        """All nodes that run."""
        self._live, self._graph = graph, without_copies(as_event(graph))
        self._tensors = Tensors(self._graph)
        self._inputs = Inputs(self._graph)
        self._values = {}
        self._last = {}
        for i, sources in enumerate(self._tensors.nodes.src):
            for source in sources:
                self._last[self._tensors.place(source).base] = i
        return [node.index for node in graph.nodes if node.runs]

    def passed(self, stop: Stop) -> None:
        """Checks the op that ran, and keeps its value."""
        assert self._graph is not None
        assert self._tensors is not None
        i, tensors = stop.node.index, self._tensors
        self._values.update(self._inputs.read(stop))
        real = stop.values()
        sources = tensors.nodes.src[i]
        node = stop.node
        kind = str(node.params.get("kind", ""))
        error = self._error(stop, real, self._value)
        types = ", ".join(tensors.type(source) for source in sources)
        device = device_of(node.address)
        checked = Checked(
            stop.compute, i, node.op, node.name, node.layer, device, types, kind, error
        )
        if checked.is_fault and node.op.startswith("MUL_MAT") and rounds(tensors.type(sources[0])):
            checked = replace(checked, rounded=self._error(stop, real, self._rounded(sources)))
        self._on_checked(checked)
        base = tensors.place(i).base
        self._values[base] = real if base == i else read(stop.graph.address_of(base))
        for source in {tensors.place(source).base for source in sources}:
            if self._last[source] == i and source >= 0:
                self._values.pop(source, None)

    def _error(self, stop: Stop, real: Array, value_of: Callable[[int], Array]) -> float | None:
        assert self._graph is not None
        try:
            return _error(stop, compute_node(self._graph, stop.node.index, value_of), real)
        except NotKnown:
            return None

    def _rounded(self, sources: Sequence[int]) -> Callable[[int], Array]:
        """The values of tensors, with the activations of a product rounded."""
        assert self._tensors is not None
        weight, activations = self._tensors.type(sources[0]), self._tensors.place(sources[1]).base

        def value(tensor: int) -> Array:
            values = self._value(tensor)
            return rounded(values, weight) if tensor == activations else values

        return value

    def _value(self, tensor: int) -> Array:
        assert self._tensors is not None
        if self._tensors.is_weight(tensor):
            return self._weight(self._tensors.name(tensor))
        return self._values[tensor]


def _error(stop: Stop, found: Array, real: Array) -> float:
    """For indices, the error of what they choose: the order of equal numbers is open."""
    op = stop.node.op
    if op not in ("ARGSORT", "TOP_K", "ARGMAX"):
        return error_of(found, real)
    rows = read(stop.node.sources[0].address)
    rows = rows.reshape(-1, rows.shape[-1])
    chosen = [
        np.take_along_axis(rows, index.reshape(len(rows), -1).astype(np.int64), 1)
        for index in (found, real)
    ]
    if op == "TOP_K":
        chosen = [np.sort(values, axis=1) for values in chosen]
    return error_of(*chosen)
