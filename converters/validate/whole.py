"""The whole graph of a prefill computed by ONNX Runtime, from the inputs that llama.cpp set.

Invariant: nothing but the tokens, positions, masks and the empty cache comes from llama.cpp; every
other value is ONNX Runtime's own, so an error in the wiring of the graph shows in the logits.
"""

from __future__ import annotations

import shutil
from collections.abc import Collection
from dataclasses import dataclass

from llamacpp_instr.base.system import temporary_directory
from llamacpp_instr.converters.exports.onnx.export import export_graph
from llamacpp_instr.converters.exports.onnx.weights import weight_bytes, with_external_weights
from llamacpp_instr.converters.validate.live import Inputs, as_event
from llamacpp_instr.converters.validate.node import Array, error_of, open_session, typed
from llamacpp_instr.debugger.graph import LiveGraph, Ubatch
from llamacpp_instr.debugger.stop import Stop
from llamacpp_instr.lab.weights.measure import LeafWeights
from llamacpp_instr.log.graph.kernels import without_copies
from llamacpp_instr.log.schema import Graph
from llamacpp_instr.model.file import ModelFile


@dataclass(frozen=True)
class Whole:
    """The logits of the whole graph against llama.cpp's."""

    error: float | None
    """normalized mean squared error; None if the graph was not computed"""
    reason: str = ""
    """why it was not"""


class FirstInputs:
    """A follower of a `Debugger` that keeps the first graph and its inputs."""

    def __init__(self) -> None:
        self.graph: Graph | None = None
        self.inputs: dict[int, Array] = {}
        """by leaf, -1 minus its number: all but weights, as they were before the compute"""

    def wants(self, graph: LiveGraph, _ubatch: Ubatch) -> Collection[int]:
        """The first op of the first compute, and the first readers of copies."""
        if self.graph is not None:
            return []
        self.graph = without_copies(as_event(graph))
        self._inputs = Inputs(self.graph)
        first = next(node.index for node in graph.nodes if node.runs)
        return [first, *self._inputs.readers]

    def passed(self, stop: Stop) -> None:
        """Reads the inputs."""
        self.inputs.update(self._inputs.read(stop))


def compare_logits(file: ModelFile, first: FirstInputs, logits: Array) -> Whole:
    """Computes the graph whose inputs `first` kept, and compares the last row of its last value
    with `logits`, (vocabulary,)."""
    assert first.graph is not None
    exported = export_graph(first.graph)
    if exported.missing:
        return Whole(None, f"no standard operators express {', '.join(sorted(exported.missing))}")
    needed = weight_bytes(exported, first.graph)
    with temporary_directory("instr-validate-") as folder:
        free = shutil.disk_usage(folder).free
        if needed > free:
            return Whole(
                None,
                f"its weights need {needed / 1e9:,.1f} GB of disk, {folder.parent} has"
                f" {free / 1e9:,.1f} GB; set TMPDIR",
            )
        path = folder / "graph.onnx"
        with (folder / "graph.data").open("wb") as data:
            model = with_external_weights(
                exported, first.graph, LeafWeights(file), "graph.data", data, lambda _n, _of: None
            )
        path.write_bytes(model.SerializeToString())
        session = open_session(str(path))
        leaf = {name: number for number, name in exported.inputs.items()}
        feeds = {
            of.name: typed(first.inputs[leaf[of.name]], of.type).reshape(of.shape)
            for of in session.get_inputs()
        }
        last = exported.names[max(exported.names)]
        (found,) = session.run([last], feeds)
        return Whole(error_of(found.reshape(-1, found.shape[-1])[-1], logits))
