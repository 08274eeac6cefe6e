"""The listings of the graphs that were computed, as source texts with a reference each, and the
breakpoints that a client sets: lines of a listing, our breakpoints' text, exceptions.

Graphs with the same listing share one. Its name, `graph-1` for the first, is the same in every
session that computes the same graphs, so a breakpoint that an editor kept finds its line again. A
client sends all breakpoints of one kind, or of one source, at once. One that it sends again keeps
its id and its hits. One on a line applies to the op of that line in every graph.
"""

from __future__ import annotations

import glob
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import msgspec
from msgspec import structs

from llamacpp_instr.base.errors import UsageError
from llamacpp_instr.debugger.graph import Listing, LiveGraph
from llamacpp_instr.debugger.stop import Breakpoint, Debugger, Stop
from llamacpp_instr.debugger.tensors import Condition

Json = dict[str, Any]
FILTERS = {
    "nan": ("NaN", "* if nan", "Stop after the first op whose result has a NaN."),
    "inf": ("Infinity", "* if inf", "Stop after the first op whose result has an infinity."),
}
"""exception filters: label, breakpoint, description"""
MIME_TYPE = "text/x-python"  # what an editor colours a listing as: comments and names look alike
_NAME = re.compile(r"(?:^|[/\\:])graph-(\d{1,9})$")


class SourceArgument(msgspec.Struct, rename="camel"):
    """`Source`: what a client says about one of our texts, or about a file of its own."""

    name: str | None = None
    path: str | None = None
    source_reference: int | None = None

    @property
    def reference(self) -> int:
        """The number of one of our texts, which may come later, by its path; 0 for other files."""
        match = _NAME.search(self.path or self.name or "")
        return self.source_reference or (int(match[1]) if match else 0)


class Sources(dict[tuple[str, ...], Listing]):
    """The listings of a session: the first one with these lines, in the order of references."""

    def of(self, graph: LiveGraph) -> Listing:
        """The listing of a graph, with its own nodes: another one with the same lines may have
        other views between them. It gets a new reference if no graph had the same lines."""
        listing = graph.listing
        same = self.setdefault(listing.lines, listing)
        listing.reference = same.reference or len(self)
        return listing

    def do_loadedSources(self) -> Json:
        return {"sources": list(map(source_json, self.values()))}

    def do_source(self, source_reference: int, source: SourceArgument | None = None) -> Json:
        text = self.find(source or SourceArgument(source_reference=source_reference))
        if text is None:
            raise UsageError("the listing of this graph does not exist; a compute makes it")
        return {"content": "\n".join(text.lines) + "\n", "mimeType": MIME_TYPE}

    def find(self, source: SourceArgument) -> Listing | None:
        """The listing that a client means, if it exists."""
        number = source.reference
        return [*self.values()][number - 1] if 1 <= number <= len(self) else None


def source_json(listing: Listing) -> Json:
    """`Source` of the protocol."""
    return {"name": listing.name, "path": listing.name, "sourceReference": listing.reference}


class Wanted(msgspec.Struct, rename="camel", frozen=True):
    """`SourceBreakpoint` or `FunctionBreakpoint`."""

    line: int = 0
    name: str = ""
    condition: str | None = None
    hit_condition: str | None = None

    @property
    def stripped_condition(self) -> str:
        return (self.condition or "").strip()

    @property
    def from_hit(self) -> int:
        """The first hit that stops."""
        text = (self.hit_condition or "1").strip()
        match = re.fullmatch(r"(>=|>|==?)?\s*(\d{1,9})", text)
        if not match or match[1] in ("=", "=="):
            raise UsageError(
                f"hit condition {text[:60]!r}: give the first hit that stops, such as 3 or >= 3"
            )
        return int(match[2]) + (match[1] == ">")


@dataclass
class Placed:
    """A breakpoint of the client, and what it is in the debugger."""

    id: int
    wanted: Wanted
    source: SourceArgument | None = None
    point: Breakpoint | None = None
    verified: bool = False
    line: int = 0
    message: str = ""


class Breakpoints:
    """All breakpoints of a client; `on_change` gets one that is verified or refused later, as a
    `Breakpoint` of the protocol."""

    def __init__(
        self, debugger: Debugger, sources: Sources, on_change: Callable[[Json], None]
    ) -> None:
        self._debugger, self._sources, self._on_change = debugger, sources, on_change
        self._placed: dict[str, list[Placed]] = {}
        self.first_line = 1
        """what the client counts lines from"""

    def do_setBreakpoints(
        self, source: SourceArgument, breakpoints: Sequence[Wanted] = (), lines: Sequence[int] = ()
    ) -> Json:
        """`lines` is the older form, used without `breakpoints`."""
        wanted = breakpoints or [Wanted(line=line) for line in lines]
        text = self._sources.find(source)
        key = text.name if text else source.path or source.name or str(source.source_reference)
        moved = [structs.replace(one, line=one.line + 1 - self.first_line) for one in wanted]
        return self._replace(f"line {key.rpartition('/')[2]}", moved, source)

    def do_setFunctionBreakpoints(self, breakpoints: Sequence[Wanted] = ()) -> Json:
        """Their names are our text, such as `ffn_out-* if absmax > 60`."""
        return self._replace("function", breakpoints)

    def do_setExceptionBreakpoints(self, filters: Sequence[str] = ()) -> Json:
        """`filters` are names of `FILTERS`."""
        if wrong := [name for name in filters if name not in FILTERS]:
            raise UsageError(
                f"no exception filter {wrong[0][:60]!r}; there are {', '.join(FILTERS)}"
            )
        return self._replace("exception", [Wanted(name=FILTERS[name][1]) for name in filters])

    def graph_is_known(self, graph: LiveGraph) -> None:
        """Verify what had to wait for a graph."""
        for placed in chain.from_iterable(self._placed.values()):
            if not placed.verified:
                before = placed.message
                self._place(placed, graph)
                if placed.verified or placed.message != before:
                    self._on_change(self._json(placed))

    def reason(self, stop: Stop) -> tuple[str, str, list[int]]:
        """Why it stopped, in the protocol's word and a sentence, and the ids of the breakpoints."""
        hit = {point.number for point in stop.hit}
        kinds = {"line": "breakpoint", "function": "function breakpoint", "exception": "exception"}
        found = {
            one.id: kinds[key.partition(" ")[0]]
            for key, placed in self._placed.items()
            for one in placed
            if one.id in hit
        }
        ids = list(found)
        reason = next(iter(found.values()), "breakpoint" if stop.hit else "step")
        if reason != "exception":
            return reason, stop.why, ids
        texts = {point.text for point in stop.hit}
        what = " and ".join(label for label, text, _ in FILTERS.values() if text in texts)
        return reason, f"{what} in {stop.node.name}", ids

    def _replace(
        self, key: str, wanted: Sequence[Wanted], source: SourceArgument | None = None
    ) -> Json:
        old = self._placed.get(key, [])
        new = []
        for one in wanted:
            placed = next((known for known in old if known.wanted == one), None)
            if placed is not None:
                old.remove(placed)
            else:
                placed = Placed(next(self._debugger.numbers), one, source)
                self._place(placed, self._debugger.graph)
            new.append(placed)
        for gone in old:
            if gone.point is not None:
                self._debugger.discard(gone.id)
        self._placed[key] = new
        return {"breakpoints": list(map(self._json, new))}

    def _json(self, placed: Placed) -> Json:
        found: Json = {"id": placed.id, "verified": placed.verified}
        if placed.message:
            found["message"] = placed.message
        if placed.line:
            found["line"] = placed.line - 1 + self.first_line
        return found

    def _place(self, placed: Placed, graph: LiveGraph | None) -> None:
        """Gives the breakpoint to the debugger, or says in `message` why not."""
        try:
            point = self._of_line(placed) if placed.source is not None else _of_text(placed.wanted)
            if point is None:
                return
            if placed.point is None:
                # it waits in the debugger: another graph may have the op
                point.number = placed.id
                placed.point = self._debugger.put(point)
            if graph is None:
                placed.message = "verified when the first graph is computed"
                return
            if placed.source is None:
                placed.point.check(graph)
        except UsageError as error:
            placed.message = str(error)
        else:
            placed.verified, placed.message = True, ""

    def _of_line(self, placed: Placed) -> Breakpoint | None:
        """A breakpoint at a line's op, by its name; if several have it, also by what it reads."""
        source, wanted = placed.source, placed.wanted
        assert source is not None
        text = self._sources.find(source)
        if text is None:
            placed.message = (
                "verified when its graph is computed" if source.reference else "no graph's listing"
            )
            return None
        line = min((at for at in text.nodes if at >= wanted.line), default=None)
        if line is None:
            raise UsageError(f"no op is at line {wanted.line} of {text.name}, or after it")
        placed.line = line
        node = text.nodes[line]
        point = Breakpoint(node.name, pattern=glob.escape(node.name), op=node.op)
        if sum(point.matches(other) for other in text.nodes.values()) > 1:
            point.sources = node.reads
        if wanted.stripped_condition:
            point.condition = Condition.parse(wanted.stripped_condition)
            point.text += f" if {point.condition.text}"
        point.from_hit = wanted.from_hit
        return point


def _of_text(wanted: Wanted) -> Breakpoint:
    text = wanted.name
    point = Breakpoint.parse(text)
    if wanted.stripped_condition:
        if point.condition is not None:
            raise UsageError(f"breakpoint {text!r} already has a condition")
        point = Breakpoint.parse(f"{text} if {wanted.stripped_condition}")
    if wanted.hit_condition:
        point.from_hit = wanted.from_hit
    return point
