"""The listings of the graphs that were computed, as source texts with a reference each; and the
stack of a stop in one of them, from the op outwards: op, block, layer, step.

Graphs with the same listing share one. Its name, `graph-1` for the first, is the same in every
session that computes the same graphs, so a breakpoint that an editor kept finds its line again.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import msgspec

from llamacpp_instr.base.terminal import counted
from llamacpp_instr.debugger.graph import LiveGraph, Node
from llamacpp_instr.debugger.listing import Listing, make_listing
from llamacpp_instr.debugger.stop import Stop

MIME_TYPE = "text/x-python"
"""what an editor colours it as: comments and names look alike"""
OP, BLOCK, LAYER, STEP = 1, 2, 3, 4
"""ids of the frames of a stop"""


class SourceArgument(msgspec.Struct, rename="camel"):
    """`Source`: what a client says about one of our texts, or about a file of its own."""

    name: str | None = None
    path: str | None = None
    source_reference: int | None = None


@dataclass(frozen=True)
class SourceText:
    """A listing and its reference, counted from 1."""

    reference: int
    listing: Listing
    nodes: dict[int, Node]
    """by line"""

    @property
    def name(self) -> str:
        return f"graph-{self.reference}"

    def to_json(self) -> dict[str, Any]:
        """`Source` of the protocol."""
        return {"name": self.name, "path": self.name, "sourceReference": self.reference}


class Sources:
    """All listings of a session."""

    def __init__(self) -> None:
        self._texts: list[SourceText] = []
        self._of_graph: WeakKeyDictionary[LiveGraph, SourceText] = WeakKeyDictionary()

    def __len__(self) -> int:
        return len(self._texts)

    def __iter__(self) -> Iterator[SourceText]:
        return iter(self._texts)

    def of(self, graph: LiveGraph) -> SourceText:
        """The text of a graph; a new one, if no graph had the same lines."""
        if (known := self._of_graph.get(graph)) is not None:
            return known
        listing = make_listing(graph)
        same = next((text for text in self._texts if text.listing.lines == listing.lines), None)
        text = SourceText(
            same.reference if same else len(self._texts) + 1,
            listing,  # the lines of its own nodes: another graph may have other views between them
            {line: graph.nodes[index] for line, index in listing.nodes.items()},
        )
        if same is None:
            self._texts.append(text)
        self._of_graph[graph] = text
        return text

    def find(self, source: SourceArgument) -> SourceText | None:
        """The text that a client means: by its reference, else by the last part of its path."""
        number = source.source_reference or 0
        if not number:
            match = _NAME.search(source.path or source.name or "")
            number = int(match[1]) if match else 0
        return self._texts[number - 1] if 1 <= number <= len(self._texts) else None

    @staticmethod
    def could_be(source: SourceArgument) -> bool:
        """Whether a client may mean a text that does not exist yet, not a file of its own."""
        return bool(source.source_reference or _NAME.search(source.path or source.name or ""))


_NAME = re.compile(r"(?:^|[/\\:])graph-(\d{1,9})$")


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
