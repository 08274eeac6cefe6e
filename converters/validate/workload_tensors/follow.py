"""Follows a run of a model, and keeps the tensors of each workload that it computes.

Invariant: inputs are those that the kernel had. So a value is read when it was computed, because
ggml may use its memory again.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

from llamacpp_instr.converters.exports.flashinfer.use import GraphNodes, Use
from llamacpp_instr.converters.exports.flashinfer.workloads import Found, Workload, uses_of
from llamacpp_instr.converters.exports.onnx.tensors import Tensors
from llamacpp_instr.converters.validate.live import Inputs, as_event
from llamacpp_instr.converters.validate.workload_tensors.arrays import Array, arrays_of_use
from llamacpp_instr.debugger.graph import LiveGraph, Ubatch
from llamacpp_instr.debugger.stop import Stop
from llamacpp_instr.debugger.tensors import read
from llamacpp_instr.log.graph.kernels import without_copies


class Capturer:
    """A follower of a `Debugger`. `weight` reads a weight by its name; `keep` gets each workload
    once, with its tensors."""

    def __init__(
        self,
        found: Found,
        weight: Callable[[str], Array],
        keep: Callable[[Workload, dict[str, Array]], object],
    ) -> None:
        self._found, self._weight, self._keep = found, weight, keep
        self._kept: set[str] = set()
        self._values: dict[int, Array] = {}
        self._uses: dict[int, list[Use]] = {}

    def wants(self, graph: LiveGraph, _ubatch: Ubatch) -> Collection[int]:
        """The nodes of one use of each kind, and what computes their inputs."""
        event = without_copies(as_event(graph))
        self._graph, self._tensors = GraphNodes(event), Tensors(event)
        self._values, self._uses = {}, {}
        kinds: dict[Any, Use] = {}
        for use in uses_of(self._graph):
            kinds.setdefault(self._kind(use), use)
        for use in kinds.values():
            self._uses.setdefault(use.nodes[-1], []).append(use)
        tensors = [
            tensor for use in kinds.values() for tensor in (*use.reads.values(), use.nodes[-1])
        ]
        self._bases = {self._tensors.place(tensor).base for tensor in tensors}
        self._inputs = Inputs(event, self._bases)
        runs = [node.index for node in graph.nodes if node.runs]
        computed = (i for i in runs if self._tensors.place(i).base in self._bases)
        return {runs[0], *computed, *self._inputs.readers}

    def _kind(self, use: Use) -> Any:
        g = self._graph
        if not use.attention:
            return use.definition.name, use.definition.variant, tuple(use.axes.items())
        (node,), mask = use.nodes, use.reads.get("mask")
        shapes = [(g.ne(use.reads[name]), g.type(use.reads[name])) for name in "qkv"]
        return tuple(shapes), mask, tuple(g.params(node).items()), "sinks" in use.reads

    def passed(self, stop: Stop) -> None:
        """Reads what was computed, and keeps the tensors of a use whose last node it was."""
        tensors = self._tensors
        self._values.update(self._inputs.read(stop))
        base = tensors.place(stop.node.index).base
        if base in self._bases:
            self._values[base] = read(stop.graph.address_of(base))
        for use in self._uses.get(stop.node.index, ()):
            case, arrays = arrays_of_use(self._graph, tensors, use, self._value)
            workload = self._found.workload(case)
            if workload.id not in self._kept:
                self._kept.add(workload.id)
                self._keep(workload, arrays)

    def _value(self, tensor: int) -> Array:
        if self._tensors.is_weight(tensor):
            return self._weight(self._tensors.name(tensor))
        return self._values[tensor]
