"""The stack of a stop, from the op outwards: op, block, layer, step; and the scopes of each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from llamacpp_instr.debugger.dap.sources import SourceText
from llamacpp_instr.debugger.graph import Node
from llamacpp_instr.debugger.stop import Stop
from llamacpp_instr.terminal import counted

OP, BLOCK, LAYER, STEP = 1, 2, 3, 4
"""ids of the frames of a stop"""


@dataclass(frozen=True)
class Frame:
    """A frame: its first line in the listing, and the nodes that have run in it."""

    id: int
    name: str
    line: int
    nodes: Sequence[Node]

    def to_json(self, text: SourceText, first_line: int) -> dict[str, Any]:
        """`StackFrame` of the protocol."""
        place = {"source": text.to_json(), "line": self.line - 1 + first_line, "column": 1}
        return {"id": self.id, "name": self.name, **place}


def frames_of(stop: Stop, text: SourceText) -> list[Frame]:
    """The frames of a stop, the innermost first. The op's frame is at the op's line; the others
    begin where the op's block, layer and graph begin."""
    at, graph = stop.node, stop.graph
    ran = [node for node in graph.nodes[: at.index + 1] if node.runs]
    first_of_block = _first(ran, lambda node: (node.layer, node.block))
    first_of_layer = _first(ran, lambda node: node.layer)
    line_of = text.listing.line_of
    tokens = counted(stop.n_tokens, "token")
    return [
        Frame(OP, f"{at.name} = {at.op}", line_of[at.index], [at]),
        Frame(BLOCK, at.block, line_of[ran[first_of_block].index], ran[first_of_block:]),
        Frame(
            LAYER,
            f"layer {at.layer}" if at.layer >= 0 else "outside the layers",
            line_of[ran[first_of_layer].index],
            ran[first_of_layer:],
        ),
        Frame(STEP, f"step {stop.step}: {tokens}", line_of[ran[0].index], ran),
    ]


def _first(ran: Sequence[Node], part: Callable[[Node], object]) -> int:
    """Where the last run of nodes of one part begins."""
    here = part(ran[-1])
    begin = len(ran) - 1
    while begin and part(ran[begin - 1]) == here:
        begin -= 1
    return begin
