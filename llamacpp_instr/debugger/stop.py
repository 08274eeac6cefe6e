"""What is there while a compute is stopped: the op that just ran, and the values in memory."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass, field

from llamacpp_instr.base.errors import UsageError
from llamacpp_instr.debugger.graph import LiveGraph, Node, Ubatch
from llamacpp_instr.debugger.points import Breakpoint
from llamacpp_instr.debugger.tensors import Array, read


class Go(enum.Enum):
    """How a compute goes on after a stop: to the next breakpoint, or to the end of the next op,
    block, layer or compute, whichever is first."""

    ON = "continue"
    OP = "op"
    BLOCK = "block"
    LAYER = "layer"
    DECODE = "decode"
    QUIT = "quit"
    """end the compute; llama.cpp reports that it was aborted"""


STEPS = {go.value: go for go in (Go.OP, Go.BLOCK, Go.LAYER, Go.DECODE)}
"""the ends of a single step, by name"""


@dataclass
class Stop:
    """A compute that waits after `node`; its values are those of this moment."""

    graph: LiveGraph
    node: Node
    why: str
    step: int
    compute: int
    n_tokens: int
    ubatch: Ubatch
    """the tokens of the compute"""
    hit: Sequence[Breakpoint] = field(default_factory=tuple)
    go: Go = Go.ON
    """how to go on, for those who set it here"""
    over: bool = False
    """the compute has gone on: nothing can be read any more"""

    def address(self, name: str | None = None) -> int:
        """The tensor called `name`, or the node's own; only while its value is in memory. Of
        several with one name, the one that was computed last.

        Raises `UsageError` if there is none, if it has not been computed yet, or if a later op has
        used its memory.
        """
        if self.over:
            raise UsageError("the compute has gone on; nothing can be read any more")
        if name is None or name == self.node.name:
            return self.node.address
        graph, at = self.graph, self.node.index
        index = graph.by_name.get(name)
        if index is not None and index > at:
            ran = (node.index for node in graph.nodes[: at + 1] if node.runs and node.name == name)
            index = max(ran, default=index)
        found = graph.addresses[index] if index is not None else graph.leafs.get(name)
        if found is None:
            near = graph.nearest(name)
            hint = f"; the nearest are {', '.join(near)}" if near else ""
            raise UsageError(f"the graph has no tensor {name!r}{hint}")
        if index is not None and index > at:
            raise UsageError(f"{name} has not been computed yet; run to it first")
        if not graph.intact(found, at):
            raise UsageError(
                f"{name} is gone: a later op uses its memory; stop at it to see its values"
            )
        return found

    def values(self, name: str | None = None) -> Array:
        """A copy of the values of a tensor, or of the node's: float32, or integers as stored; the
        shape is numpy's (tokens first). Raises `UsageError` as `address` does, and for weights that
        ggml has repacked."""
        return read(self.address(name))

    def at_hand(self) -> list[str]:
        """The names of all tensors whose values are in memory, in the order of the graph."""
        graph, at = self.graph, self.node.index
        nodes = [n.name for n in graph.nodes[: at + 1] if graph.intact(n.address, at)]
        return [*(name for name, a in graph.leafs.items() if graph.intact(a, at)), *nodes]
