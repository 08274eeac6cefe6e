"""The breakpoints that a client sets: lines of a listing, our breakpoints' text, exceptions.

A client sends all of one kind, or of one source, at once. One that it sends again keeps its id and
its hits. A breakpoint in a line holds for the op of that line in every graph, because it is kept by
names.
"""

from __future__ import annotations

import glob
import itertools
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import msgspec

from llamacpp_instr.base.errors import UsageError
from llamacpp_instr.debugger.control import Debugger
from llamacpp_instr.debugger.dap.sources import SourceArgument, Sources, SourceText
from llamacpp_instr.debugger.graph import LiveGraph, Node
from llamacpp_instr.debugger.points import Breakpoint, Condition
from llamacpp_instr.debugger.stop import Stop

FILTERS = {
    "nan": ("NaN", "* if nan", "Stop after the first op whose result has a NaN."),
    "inf": ("Infinity", "* if inf", "Stop after the first op whose result has an infinity."),
}
"""exception filters: label, breakpoint, description"""


class Wanted(msgspec.Struct, rename="camel", frozen=True):
    """`SourceBreakpoint` or `FunctionBreakpoint`."""

    line: int = 0
    name: str = ""
    condition: str | None = None
    hit_condition: str | None = None


class SetBreakpoints(msgspec.Struct, rename="camel"):
    source: SourceArgument
    breakpoints: list[Wanted] = []
    lines: list[int] = []
    """the older form, used without `breakpoints`"""


class SetFunctionBreakpoints(msgspec.Struct, rename="camel"):
    breakpoints: list[Wanted] = []


class SetExceptionBreakpoints(msgspec.Struct, rename="camel"):
    filters: list[str] = []


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

    def to_json(self, first_line: int) -> dict[str, Any]:
        """`Breakpoint` of the protocol."""
        found: dict[str, Any] = {"id": self.id, "verified": self.verified}
        if self.message:
            found["message"] = self.message
        if self.line:
            found["line"] = self.line - 1 + first_line
        return found


class Breakpoints:
    """All breakpoints of a client; `on_change` is called when one is verified or refused later."""

    def __init__(
        self, debugger: Debugger, sources: Sources, on_change: Callable[[Placed], None]
    ) -> None:
        self._debugger, self._sources, self._on_change = debugger, sources, on_change
        self._placed: dict[str, list[Placed]] = {}

    def set_lines(self, source: SourceArgument, wanted: list[Wanted]) -> list[Placed]:
        """Replace those of one source; lines count from 1."""
        text = self._sources.find(source)
        key = text.name if text else source.path or source.name or str(source.source_reference)
        return self._replace(f"line {key.rpartition('/')[2]}", wanted, source)

    def set_functions(self, wanted: list[Wanted]) -> list[Placed]:
        """Replace those that are our text, as `ffn_out-* if absmax > 60`."""
        return self._replace("function", wanted)

    def set_exceptions(self, filters: list[str]) -> list[Placed]:
        """Replace the exceptions that stop: names of `FILTERS`. Raises `UsageError` for others."""
        if wrong := [name for name in filters if name not in FILTERS]:
            raise UsageError(
                f"no exception filter {wrong[0][:60]!r}; there are {', '.join(FILTERS)}"
            )
        return self._replace("exception", [Wanted(name=FILTERS[name][1]) for name in filters])

    def graph_is_known(self, graph: LiveGraph) -> None:
        """Verify what had to wait for a graph."""
        for placed in self._all():
            before = placed.verified, placed.message
            if not placed.verified:
                self._place(placed, graph)
            if (placed.verified, placed.message) != before:
                self._on_change(placed)

    def reason(self, stop: Stop) -> tuple[str, str, list[int]]:
        """Why it stopped, in the protocol's word and in a sentence, and the ids of the breakpoints;
        `step` if it was none of them."""
        hit = {point.number for point in stop.hit}
        kinds = {"line": "breakpoint", "function": "function breakpoint", "exception": "exception"}
        reasons, ids = [], []
        for key, placed in self._placed.items():
            here = [one.id for one in placed if one.id in hit]
            if here:
                reasons.append(kinds[key.partition(" ")[0]])
                ids += here
        reason = reasons[0] if reasons else "breakpoint" if stop.hit else "step"
        if reason != "exception":
            return reason, stop.why, ids
        texts = {point.text for point in stop.hit}
        what = " and ".join(label for label, text, _ in FILTERS.values() if text in texts)
        return reason, f"{what} in {stop.node.name}", ids

    def _all(self) -> Iterable[Placed]:
        return itertools.chain.from_iterable(list(self._placed.values()))

    def _replace(
        self, key: str, wanted: list[Wanted], source: SourceArgument | None = None
    ) -> list[Placed]:
        old = self._placed.get(key, [])
        new = []
        for one in wanted:
            same = next((placed for placed in old if placed.wanted == one), None)
            if same is not None:
                old.remove(same)
                new.append(same)
                continue
            placed = Placed(next(self._debugger.numbers), one, source)
            self._place(placed, self._debugger.graph)
            new.append(placed)
        for gone in old:
            if gone.point is not None:
                self._debugger.discard(gone.id)
        self._placed[key] = new
        return new

    def _place(self, placed: Placed, graph: LiveGraph | None) -> None:
        """Gives the breakpoint to the debugger, or says in `message` why not."""
        try:
            if placed.source is not None:
                point = self._of_line(placed, placed.source)
            else:
                point = _of_text(placed.wanted)
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

    def _of_line(self, placed: Placed, source: SourceArgument) -> Breakpoint | None:
        text = self._sources.find(source)
        if text is None:
            could = self._sources.could_be(source)
            placed.message = "verified when its graph is computed" if could else "it lists no graph"
            return None
        node = text.listing.node_at(placed.wanted.line)
        if node is None:
            raise UsageError(f"no op is at line {placed.wanted.line} of {text.name}, or after it")
        placed.line = text.listing.line_of[node]
        return _at_line(text, placed.line, placed.wanted)


@dataclass
class _LineBreakpoint(Breakpoint):
    """Stops at a node of a name and an op; of several in a graph, at those that read `sources`."""

    sources: tuple[str, ...] = ()

    def matches(self, node: Node) -> bool:
        return super().matches(node) and self.sources in ((), _names(node))


def _names(node: Node) -> tuple[str, ...]:
    return tuple(source.name for source in node.sources)


def _at_line(text: SourceText, line: int, wanted: Wanted) -> Breakpoint:
    node = text.nodes[line]
    point = _LineBreakpoint(node.name, pattern=glob.escape(node.name), op=node.op)
    if sum(point.matches(other) for other in text.nodes.values()) > 1:
        point.sources = _names(node)
    if wanted.condition and wanted.condition.strip():
        point.condition = Condition.parse(wanted.condition.strip())
        point.text += f" if {point.condition.text}"
    point.from_hit = _from_hit(wanted)
    return point


def _of_text(wanted: Wanted) -> Breakpoint:
    text = wanted.name
    point = Breakpoint.parse(text)
    if wanted.condition and wanted.condition.strip():
        if point.condition is not None:
            raise UsageError(f"breakpoint {text!r} has a condition already")
        point = Breakpoint.parse(f"{text} if {wanted.condition.strip()}")
    if wanted.hit_condition:
        point.from_hit = _from_hit(wanted)
    return point


def _from_hit(wanted: Wanted) -> int:
    """The first hit that stops."""
    text = (wanted.hit_condition or "1").strip()
    match = re.fullmatch(r"(>=|>|==?)?\s*(\d{1,9})", text)
    if not match or match[1] in ("=", "=="):
        raise UsageError(
            f"hit condition {text[:60]!r}: give the first hit that stops, as 3 or >= 3"
        )
    return int(match[2]) + (match[1] == ">")
