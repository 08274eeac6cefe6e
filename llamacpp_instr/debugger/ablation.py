"""Takes a head, a block or a layer out of every compute, as followers of a `Debugger`."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np

from llamacpp_instr.base.errors import UsageError
from llamacpp_instr.debugger.attention import attention_node
from llamacpp_instr.debugger.changes import Edit, Note, Repeated, change, replace, zero
from llamacpp_instr.debugger.graph import LiveGraph, Node, Ubatch
from llamacpp_instr.debugger.residual import Part, block_outputs, find_residual
from llamacpp_instr.debugger.rows import by_token, rows_of_nodes, token_numbers
from llamacpp_instr.debugger.stop import Stop
from llamacpp_instr.debugger.tensors import Array


def ablate_block(layer: int, part: Part, note: Note) -> Repeated:
    """What the attention or the feed-forward block of a layer adds to the stream becomes zero.

    It raises `UsageError` when a graph is computed that has no such layer or block.
    """

    def choose(graph: LiveGraph) -> Sequence[Node]:
        outputs = block_outputs(graph, find_residual(graph), layer)
        if part not in outputs:
            raise UsageError(
                f"layer {layer} has no {part} block; it has {', '.join(outputs) or 'none'}"
            )
        return outputs[part]

    return Repeated(choose, zero(), note)


def ablate_head(layer: int, head: int, note: Note) -> Repeated:
    """What a head of a layer's attention gives to the output projection becomes zero.

    It raises `UsageError` when a graph is computed that has no such layer or head.
    """
    axis = 2  # of ggml's dimensions, the heads

    def choose(graph: LiveGraph) -> Sequence[Node]:
        nonlocal axis
        node = attention_node(graph, layer)
        axis = 1
        if node.op == "SOFT_MAX":
            axis = 2
            node = next(
                found for found in graph.nodes[node.index + 1 :]
                if found.op == "MUL_MAT" and node.index in [source.node for source in found.sources]
            )  # fmt: skip
        heads = node.ne[axis]
        if not 0 <= head < heads:
            raise UsageError(f"layer {layer} has no head {head}; its heads are 0 to {heads - 1}")
        return [node]

    def edit(stop: Stop) -> Edit:
        shape = stop.node.ne[::-1]

        def without(values: Array) -> Array:
            new = values.reshape(shape).copy()
            np.moveaxis(new, 3 - axis, 0)[head] = 0
            return np.asarray(new.reshape(values.shape))

        return Edit(f"zero head {head}", without)

    return Repeated(choose, edit, note)


class AblatedLayer:
    """A layer's output becomes its input: the stream goes past it."""

    def __init__(self, layer: int, note: Note) -> None:
        self._layer, self._note = layer, note
        self._graph: LiveGraph | None = None
        self._nodes: tuple[int, int] = (-1, -1)
        self._before: Array | None = None

    def wants(self, graph: LiveGraph, _ubatch: Ubatch) -> Collection[int]:
        """The stream before and after the layer. Raises `UsageError` if there is no such layer."""
        if graph is not self._graph:
            residual = find_residual(graph)
            block_outputs(graph, residual, self._layer)
            self._rows = rows_of_nodes(graph)
            begin, end = residual.before(self._layer), residual.after[self._layer]
            self._nodes, self._graph = (begin.index, end.index), graph
        return self._nodes

    def passed(self, stop: Stop) -> None:
        node = stop.node
        rows = self._rows[node.index]
        if rows is None:
            raise UsageError(f"{node.name}: its rows are not tokens")
        if node.index == self._nodes[0]:
            self._before = by_token(stop, rows)
            return
        assert self._before is not None
        values = self._before[token_numbers(rows, stop.ubatch)].reshape(node.shape)
        change(stop, replace(values, f"the input of layer {self._layer}"), self._note)
