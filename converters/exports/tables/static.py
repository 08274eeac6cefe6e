"""The columns that describe ops and nodes, which are the same for every compute.

Invariant: each plan and each graph is processed once, whatever the number of computes.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llamacpp_instr.converters.exports.tables.cells import Int64, Words, joined
from llamacpp_instr.converters.exports.tables.timed import Rows
from llamacpp_instr.log.graph import ops as knowledge
from llamacpp_instr.log.graph.kernels import node_backends, node_work, weight_read
from llamacpp_instr.log.schema import Graph
from llamacpp_instr.log.session import Session

KERNEL_WORDS = ("block", "op", "name", "label", "type", "shape", "weight", "weight_type")
KERNEL_NUMBERS = ("plan", "kernel", "node", "n_nodes", "layer")


class KernelRows:
    """Every kernel of every plan seen so far, one row each."""

    def __init__(self) -> None:
        self.words = {name: Words(knowledge.BLOCKS * (name == "block")) for name in KERNEL_WORDS}
        self._first: dict[int, int] = {}
        self._n = 0
        self._pieces: dict[str, list[NDArray[Any]]] = defaultdict(list)

    def rows(self, session: Session, rows: Rows) -> Int64:
        """The row numbers of all kernels in `rows`, in order."""
        for ops in rows.timings:
            if ops.plan not in self._first:
                self._add(session, ops.plan)
        return rows.column([self._first[ops.plan] + ops.label for ops in rows.timings])

    def column(self, name: str) -> NDArray[Any]:
        """A column of all rows. Words are given as their numbers."""
        pieces = self._pieces[name]
        if len(pieces) != 1:
            pieces[:] = [joined(pieces)]
        return pieces[0]

    def _add(self, session: Session, number: int) -> None:
        plan, kernels = session.plans[number], session.kernels(number)
        graph = session.graphs[plan.graph]
        nodes = graph.whole
        n = len(plan.node)
        result = [of[-1] for of in kernels.nodes]
        words: dict[str, Sequence[str | None]] = {
            "block": kernels.block,
            "op": ["+".join(nodes.op[node] for node in of) for of in kernels.nodes],
            "name": [nodes.name[node] for node in result],
            "label": kernels.label,
            "type": [nodes.type[node] for node in result],
            "shape": [shape_text(nodes.ne[node]) for node in result],
            "weight": kernels.weight,
            "weight_type": kernels.weight_type,
        }
        numbers: dict[str, Any] = {
            "plan": np.full(n, number),
            "kernel": np.arange(n),
            "node": np.array(plan.node, np.int64),
            "n_nodes": np.array(plan.counts, np.int64),
            "layer": kernels.layer,
        }
        for name, values in words.items():
            self._pieces[name].append(self.words[name].codes(values))
        for name, column in numbers.items():
            self._pieces[name].append(column)
        self._first[number] = self._n
        self._n += n


NODE_COLUMNS: Mapping[str, str] = {
    "graph": "number", "node": "number", "name": "word", "op": "word", "layer": "number",
    "block": "word", "type": "word", "shape": "word", "bytes": "number", "executed": "bool",
    "flops": "number", "bytes_moved": "number", "backend": "word", "buffer": "word",
    "weight": "word", "weight_type": "word", "params": "word", "src": "text",
}  # fmt: skip


def node_columns(graph: Graph) -> dict[str, list[Any]]:
    """The columns of NODE_COLUMNS with a row for each node. The graph must have its nodes."""
    nodes, n = graph.whole, graph.n_nodes
    leafs = [leaf.name for leaf in graph.leafs]
    work = [node_work(graph, i) for i in range(n)]
    weights = [weight_read(graph, [i]) for i in range(n)]
    return {
        "graph": [graph.graph] * n,
        "node": list(range(n)),
        "name": nodes.name,
        "op": nodes.op,
        "layer": nodes.layer,
        "block": list(knowledge.blocks_of(nodes.op, nodes.name, nodes.layer, nodes.src, leafs)),
        "type": nodes.type,
        "shape": [shape_text(ne) for ne in nodes.ne],
        "bytes": nodes.bytes,
        "executed": [bool(runs) for runs in nodes.exec],
        "flops": [n_flops for n_flops, _ in work],
        "bytes_moved": [n_bytes for _, n_bytes in work],
        "backend": node_backends(graph),
        "buffer": [graph.buffers[i] if 0 <= i < len(graph.buffers) else None for i in nodes.buffer],
        "weight": [name for name, _ in weights],
        "weight_type": [type_ for _, type_ in weights],
        "params": [_params(op, words) for op, words in zip(nodes.op, nodes.params, strict=True)],
        "src": [",".join(map(str, sources)) for sources in nodes.src],
    }


def _params(op: str, words: Sequence[int]) -> str | None:
    decoded = knowledge.op_params(op, words).items()
    return (
        ", ".join(
            f"{name}={value:g}" if isinstance(value, float) else f"{name}={value}"
            for name, value in decoded
        )
        or None
    )


def shape_text(ne: Sequence[int]) -> str:
    return "x".join(map(str, ne))
