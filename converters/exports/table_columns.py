"""Columns of a DataFrame: words as numbers, integers that may be missing, rates, intervals; and
what describes kernels and nodes.

Invariant: each plan and each graph is processed once, whatever the number of computes.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from llamacpp_instr.log.graph import ops as knowledge
from llamacpp_instr.log.graph.kernels import node_backends, node_work, weight_read
from llamacpp_instr.log.schema import Graph
from llamacpp_instr.log.session import Session, Timings

Int64 = NDArray[np.int64]

_KERNEL_NUMBERS = ("plan", "kernel", "node", "n_nodes", "layer")
_KERNEL_WORDS = (
    "device", "block", "op", "name", "label", "type", "shape", "weight", "weight_type",
)  # fmt: skip
NODE_COLUMNS = (
    "graph", "node", "name", "op", "layer", "block", "type", "shape", "bytes", "executed", "flops",
    "bytes_moved", "backend", "buffer", "weight", "weight_type", "params", "src",
)  # fmt: skip


class Words:
    """Numbers for the words of one column, in the order of their first use; None is -1."""

    def __init__(self, words: Sequence[str] = ()) -> None:
        self._code: dict[str | None, int] = {word: i for i, word in enumerate(words)}

    def codes(self, words: Iterable[str | None]) -> NDArray[np.int32]:
        code = self._code
        return np.array(
            [-1 if word is None else code.setdefault(word, len(code)) for word in words], np.int32
        )

    def categorical(self, codes: NDArray[Any]) -> pd.Categorical:
        categories = pd.Index(list(self._code), dtype="object" if not self._code else None)
        return pd.Categorical.from_codes(codes, categories=categories)


def joined(pieces: Sequence[NDArray[Any]]) -> Int64:
    """The pieces joined; empty without any."""
    column: Int64 = np.concatenate([np.zeros(0, np.int64), *pieces])
    return column


def int64(values: Sequence[int]) -> Int64:
    return np.array(values, np.int64)


def rate(amount: NDArray[Any], by: NDArray[Any]) -> NDArray[np.float64]:
    """`amount / by`; NaN where either of them is 0 or `by` is negative."""
    known = (amount != 0) & (by > 0)
    rates: NDArray[np.float64] = np.full(len(by), np.nan)
    np.divide(amount, by, out=rates, where=known)
    return rates


def masked(values: Int64, missing: NDArray[np.bool_]) -> Any:
    """Integers that may be missing (pandas' Int64)."""
    return pd.arrays.IntegerArray(np.where(missing, 0, values), missing)


def optional(values: Sequence[int | None] | NDArray[Any]) -> Any:
    """Integers; None becomes a missing value."""
    missing = np.array([value is None for value in values], np.bool_)
    return masked(int64([value or 0 for value in values]), missing)


def text(values: Sequence[str | None] | NDArray[Any]) -> Any:
    return pd.array(list(values), dtype="string")


class Rows:
    """A row for each interval of `timings`."""

    def __init__(self, timings: Sequence[Timings]) -> None:
        self.timings = timings
        places = joined([np.repeat(of.place, of.dur.shape[1]) for of in timings])
        self.order = np.argsort(places, kind="stable")

    def __len__(self) -> int:
        return len(self.order)

    def column(self, matrices: Sequence[NDArray[Any]]) -> Int64:
        """A column from a matrix for each of the timings; one of rows or of columns is repeated."""
        pairs = zip(matrices, self.timings, strict=True)
        pieces = [np.broadcast_to(matrix, of.dur.shape).ravel() for matrix, of in pairs]
        return joined(pieces)[self.order]

    def of_computes(self, values: Sequence[NDArray[Any]]) -> Int64:
        """A column from a value for each compute."""
        return self.column([of[:, None] for of in values])

    def times(self) -> dict[str, Int64]:
        """When each interval begins and how long it is, as the schema defines gap and dur."""
        return {
            "begin": self.column([of.begin for of in self.timings]),
            "dur": self.column([of.dur for of in self.timings]),
        }

    def waits(self) -> Any:
        """The time inside barriers; missing where the log does not record it."""
        waits = self.column(
            [np.zeros(1, np.int64) if of.wait is None else of.wait for of in self.timings]
        )
        return masked(waits, self.column([np.array(of.wait is None) for of in self.timings]) > 0)


class KernelRows:
    """Every kernel of every plan seen so far, one row each."""

    def __init__(self) -> None:
        self._words = {name: Words(knowledge.BLOCKS * (name == "block")) for name in _KERNEL_WORDS}
        self._first: dict[int, int] = {}
        self._n = 0
        self._pieces: dict[str, list[NDArray[Any]]] = {
            name: [] for name in (*_KERNEL_NUMBERS, *_KERNEL_WORDS)
        }

    def columns(self, session: Session, rows: Rows) -> dict[str, Any]:
        """What describes the kernels of `rows`."""
        for ops in rows.timings:
            if ops.plan not in self._first:
                self._add(session, ops.plan)
        known = rows.column([self._first[ops.plan] + ops.label for ops in rows.timings])
        columns: dict[str, Any] = {}
        for name, pieces in self._pieces.items():
            if len(pieces) != 1:
                pieces[:] = [joined(pieces)]
            words, column = self._words.get(name), pieces[0][known]
            columns[name] = words.categorical(column) if words else column
        return columns

    def _add(self, session: Session, number: int) -> None:
        plan, kernels = session.plans[number], session.kernels(number)
        graph = session.graphs[plan.graph]
        nodes = graph.whole
        n = len(plan.node)
        result = [of[-1] for of in kernels.nodes]
        backends = node_backends(graph)
        columns: dict[str, Any] = {
            "device": [backends[of[0]] for of in kernels.nodes],
            "block": kernels.block,
            "op": ["+".join(nodes.op[node] for node in of) for of in kernels.nodes],
            "name": [nodes.name[node] for node in result],
            "label": kernels.label,
            "type": [nodes.type[node] for node in result],
            "shape": [shape_text(nodes.ne[node]) for node in result],
            "weight": kernels.weight,
            "weight_type": kernels.weight_type,
            "plan": np.full(n, number),
            "kernel": np.arange(n),
            "node": np.array(plan.node, np.int64),
            "n_nodes": np.array(plan.counts, np.int64),
            "layer": kernels.layer,
        }
        for name, values in columns.items():
            words = self._words.get(name)
            self._pieces[name].append(words.codes(values) if words else values)
        self._first[number] = self._n
        self._n += n


def node_columns(graph: Graph) -> dict[str, list[Any]]:
    """The columns of NODE_COLUMNS, a row for each node. The graph must have its nodes."""
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
    decoded = [
        f"{name}={value:g}" if isinstance(value, float) else f"{name}={value}"
        for name, value in knowledge.op_params(op, words).items()
    ]
    return ", ".join(decoded) or None


def shape_text(ne: Sequence[int]) -> str:
    return "x".join(map(str, ne))
