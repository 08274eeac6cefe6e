"""The listings of the graphs that were computed, as source texts with a reference each.

Graphs with the same listing share one. Its name, `graph-1` for the first, is the same in every
session that computes the same graphs, so a breakpoint that an editor kept finds its line again.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import msgspec

from llamacpp_instr.debugger.graph import LiveGraph, Node
from llamacpp_instr.debugger.listing import Listing, make_listing

MIME_TYPE = "text/x-python"
"""what an editor colours it as: comments and names look alike"""


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
