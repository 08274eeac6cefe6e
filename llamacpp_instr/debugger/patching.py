"""Activation patching: values of one run, kept by position, come into the place of another's."""

from __future__ import annotations

from collections.abc import Collection, Container

import numpy as np

from llamacpp_instr.base.errors import UsageError
from llamacpp_instr.base.patterns import name_matches
from llamacpp_instr.debugger.changes import Note, change, replace
from llamacpp_instr.debugger.graph import LiveGraph, Node, Ubatch
from llamacpp_instr.debugger.rows import Rows, by_token, rows_of_nodes, token_numbers
from llamacpp_instr.debugger.stop import Stop
from llamacpp_instr.debugger.tensors import Array
from llamacpp_instr.log.graph.ops import VIEW_OPS


def matching(graph: LiveGraph, pattern: str) -> list[Node]:
    """The nodes whose names match a pattern (`ffn_out-*`); of several with one name, the last.

    Raises `UsageError`, which says why, if there is none.
    """
    found = [
        graph.nodes[index]
        for name, index in graph.by_name.items()
        # one that has no rows in this compute, as it wants no logits, has some in another
        if graph.nodes[index].op not in VIEW_OPS and name_matches(name, pattern)
    ]
    if not found:
        raise UsageError(f"no op of the graph matches {pattern!r}{graph.why_no_op(pattern)}")
    return sorted(found, key=lambda node: node.index)


class ByToken:
    """The nodes of a pattern, each with a row for each token."""

    def __init__(self, pattern: str) -> None:
        self.pattern = pattern
        self._graph: LiveGraph | None = None
        self._rows: dict[int, Rows] = {}

    def wants(self, graph: LiveGraph, _ubatch: Ubatch) -> Collection[int]:
        """Raises `UsageError` if no node matches, or if one has no row for each token."""
        if graph is not self._graph:
            known = rows_of_nodes(graph)
            self._rows = {}
            for node in matching(graph, self.pattern):
                rows = known[node.index]
                if rows is None or np.prod(node.ne[rows.axis + 1 :]) != 1:
                    raise UsageError(f"{node}: it has no row for each token")
                self._rows[node.index] = rows
            self._graph = graph
        return self._rows

    def rows(self, stop: Stop) -> tuple[Array, Rows]:
        """(rows, values of a row) of the node, and what its rows are."""
        rows = self._rows[stop.node.index]
        return by_token(stop, rows), rows

    def by_position(self, stop: Stop) -> tuple[Array, list[int]]:
        """(rows, values of a row) of the node, and the position of each row's token."""
        values, rows = self.rows(stop)
        if stop.ubatch.positions is None:
            raise UsageError("this model's graph does not name the positions of its tokens")
        return values, [int(stop.ubatch.positions[i]) for i in token_numbers(rows, stop.ubatch)]


class Captured(ByToken):
    """Keeps the values of all nodes of a pattern by position; a follower of a `Debugger` during the
    run that they are taken from. A position that is computed again has its latest values."""

    def __init__(self, pattern: str) -> None:
        super().__init__(pattern)
        self.values: dict[str, dict[int, Array]] = {}
        """a row by node and position"""

    def passed(self, stop: Stop) -> None:
        values, positions = self.by_position(stop)
        of_node = self.values.setdefault(stop.node.name, {})
        of_node.update((at, row.copy()) for at, row in zip(positions, values, strict=True))


class Patch(ByToken):
    """Puts captured values into the nodes of the same names, at the same positions; a follower of a
    `Debugger`. `positions` limits it to some of them."""

    def __init__(
        self, captured: Captured, note: Note, positions: Container[int] | None = None
    ) -> None:
        super().__init__(captured.pattern)
        self._captured, self._note, self._positions = captured.values, note, positions

    def passed(self, stop: Stop) -> None:
        values, positions = self.by_position(stop)
        of_node = self._captured.get(stop.node.name, {})
        known = {
            i: of_node[at]
            for i, at in enumerate(positions)
            if at in of_node and (self._positions is None or at in self._positions)
        }
        if not known:
            return
        for i, row in known.items():
            if row.shape != values[i].shape:
                raise UsageError(
                    f"{stop.node.name}: the captured run has {row.size} values for a token, "
                    f"this one {values[i].size}"
                )
            values[i] = row
        at = ", ".join(str(positions[i]) for i in known)
        origin = (
            f"the captured run at position {at}"
            if len(known) == 1
            else (
                f"the captured run at positions {min(positions[i] for i in known)} to "
                f"{max(positions[i] for i in known)}"
            )
        )
        change(stop, replace(values.reshape(stop.node.shape), origin), self._note)
