"""The experts that MUL_MAT_ID reads: those that its tokens use, each once.

The ids of a token name its experts. Nodes that read the same ids, such as those of gate, up and
down, use the same experts, so the log has them once, by the first of these nodes.

Invariant: where the log has the experts that a compute used, what is read is exact. Otherwise it is
the most that the ids can name, which is a bound if they are of several tokens: a token names no
expert twice, but several tokens may name the same one.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from llamacpp_instr.log.graph.ops import tensor
from llamacpp_instr.log.schema import MAX_EXPERTS, Experts, Graph

Int64 = NDArray[np.int64]
N = TypeVar("N", int, Int64)


class Used(NamedTuple):
    """How many experts a compute used; empty if the log does not have them."""

    node: tuple[int, ...] = ()
    n: tuple[int, ...] = ()

    def by_node(self) -> dict[int, int]:
        return dict(zip(self.node, self.n, strict=True))


@dataclass(frozen=True)
class Choice:
    """The experts among which a MUL_MAT_ID chooses."""

    node: int
    """the first that reads the same ids"""
    n: int
    ids: int
    most: int
    """that are read"""
    certain: bool
    """whether that many are read in any case"""
    bytes: int
    """of one"""

    def unread(self, used: N) -> N:
        """The bytes that are not read if only `used` experts are used."""
        return (self.most - used) * self.bytes

    def unread_of(self, used: Mapping[int, int]) -> tuple[int, bool]:
        """The same for a compute, and whether they may be more; `used` has its experts by node."""
        n = used.get(self.node)
        return (0, not self.certain) if n is None else (self.unread(n), False)


def choices(graph: Graph) -> dict[int, Choice]:
    """The experts of every MUL_MAT_ID; the graph must have its nodes."""
    nodes = graph.whole
    first: dict[int, int] = {}
    found = {}
    for i, op in enumerate(nodes.op):
        if op == "MUL_MAT_ID" and nodes.exec[i] and len(nodes.src[i]) > 2:
            weight, ids = tensor(graph, nodes.src[i][0]), tensor(graph, nodes.src[i][2])
            n = max(1, prod(weight.ne[2:3]))
            most = min(n, prod(ids.ne))
            found[i] = Choice(
                node=first.setdefault(nodes.src[i][2], i),
                n=n,
                ids=prod(ids.ne),
                most=most,
                certain=most <= prod(ids.ne[:1]),
                bytes=weight.bytes // n,
            )
    return found


def experts_problems(event: Experts, known: Mapping[int, Choice]) -> Iterator[str]:
    """Why the experts of a compute are invalid, one message each; `known` are those of its
    graph."""
    for name, column in (("expert", event.expert), ("uses", event.uses)):
        if column is not None and len(column) != len(event.node):
            yield f"column `{name}` has {len(column)} entries, `node` has {len(event.node)}"
            return
    for node, expert, uses in event.choices():
        choice = known.get(node)
        if choice is None or choice.node != node:
            yield f"node {node} is not the first that reads its ids of experts"
        elif choice.n > MAX_EXPERTS:
            yield f"node {node} has {choice.n} experts, more than {MAX_EXPERTS}"
        elif len(expert) > choice.most:
            yield f"{len(expert)} experts of node {node}, whose ids name {choice.most} at most"
        elif max(expert, default=0) >= choice.n:
            yield f"expert {max(expert)} of node {node}, which has {choice.n}"
        elif len(uses) != len(expert):
            yield f"{len(uses)} uses of {len(expert)} experts of node {node}"


def used_by_node(computes: Sequence[Used]) -> dict[int, Int64]:
    """How many experts each compute used, by node; -1 where the log does not record it."""
    rows: dict[tuple[int, ...], list[int]] = defaultdict(list)
    for row, used in enumerate(computes):
        rows[used.node].append(row)
    found: dict[int, Int64] = defaultdict(lambda: np.full(len(computes), -1, np.int64))
    for nodes, these in rows.items():
        counts = np.array([computes[row].n for row in these], np.int64)
        for i, node in enumerate(nodes):
            found[node][these] = counts[:, i]
    return found
