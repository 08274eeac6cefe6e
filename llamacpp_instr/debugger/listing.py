"""The graph as a text: one line for each op, under headings for layers and blocks.

It is the source text that an editor shows: a breakpoint is a line, a stop is at a line.
"""

from __future__ import annotations

from dataclasses import dataclass

from llamacpp_instr.debugger.graph import LiveGraph, Node

_DEFAULTS = (0, "UNDEFINED", "NONE")


@dataclass(frozen=True)
class Listing:
    """The lines of a graph, counted from 1, and the nodes that they show."""

    lines: tuple[str, ...]
    nodes: dict[int, int]
    """node by line"""
    line_of: dict[int, int]
    """line by node; of a view, the line of the next node that runs"""

    @property
    def text(self) -> str:
        return "\n".join(self.lines) + "\n"

    def node_at(self, line: int) -> int | None:
        """The node of the first line at or after `line` that has one, None at the end."""
        later = [at for at in self.nodes if at >= line]
        return self.nodes[min(later)] if later else None


def make_listing(graph: LiveGraph) -> Listing:
    """The listing of a graph. Views, for which no kernel runs, have no line."""
    lines: list[str] = []
    nodes: dict[int, int] = {}
    line_of: dict[int, int] = {}
    part: tuple[int, str] | None = None
    width = max((len(_statement(node)) for node in graph.nodes if node.runs), default=0)
    waiting: list[int] = []
    for node in graph.nodes:
        waiting.append(node.index)
        if not node.runs:
            continue
        if (node.layer, node.block) != part:
            part = node.layer, node.block
            lines.append(f"# {_heading(node)}")
        lines.append(f"{_statement(node):<{min(width, 100)}}  # {node.purpose}")
        nodes[len(lines)] = node.index
        line_of |= dict.fromkeys(waiting, len(lines))
        waiting = []
    line_of |= dict.fromkeys(waiting, len(lines))
    return Listing(tuple(lines), nodes, line_of)


def _heading(node: Node) -> str:
    return node.block if node.layer < 0 else f"layer {node.layer}: {node.block}"


def _statement(node: Node) -> str:
    stated = {key: value for key, value in node.params.items() if value not in _DEFAULTS}
    params = "".join(f", {key}={_short(value)}" for key, value in stated.items())
    read = ", ".join(source.name for source in node.sources)
    shape = "×".join(str(n) for n in node.shape)
    return f"    {node.name}: {node.type}[{shape}] = {node.op}({read}{params})"


def _short(value: object) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)
