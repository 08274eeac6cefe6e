"""The kernels of a plan: what each is, where it belongs, how much it computes and moves.

Invariant: a fused kernel, which computes several nodes, is one entry. Data that passes between its
nodes does not count as moved.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from llamacpp_instr.graph.ops import Block, blocks_of, bytes_moved, flops
from llamacpp_instr.schema import Graph, Nodes, Plan

Int64 = NDArray[np.int64]


@dataclass(frozen=True)
class Kernels:
    """Columns as long as the plan."""

    label: list[str]
    """ops joined by +, the weight's type behind matrix products: `MUL_MAT q4_K`"""
    block: list[Block]
    layer: Int64
    flops: Int64
    bytes: Int64


def graph_problem(graph: Graph) -> str | None:
    """Why a graph is invalid (columns, sources, splits), or None."""
    nodes = graph.nodes
    for name in nodes.__struct_fields__ if nodes else ():
        column = getattr(nodes, name)
        if column is not None and len(column) != graph.n_nodes:
            return f"column `{name}` has {len(column)} of {graph.n_nodes} nodes"
    for sources in nodes.src if nodes else ():
        for source in sources:
            if not -len(graph.leafs) <= source < graph.n_nodes:
                return f"a node reads {source}, which the graph does not have"
    at = 0
    for split in graph.splits:
        # otherwise every node could be in every split
        if split.start < at or split.end < split.start:
            return f"split {split.start}..{split.end} overlaps the one before it"
        at = split.end
    if at > graph.n_nodes:
        return f"a split goes beyond the graph's {graph.n_nodes} nodes"
    return None


def plan_problem(plan: Plan, graph: Graph) -> str | None:
    """Why a plan is invalid, or None; `graph` is the one that it names."""
    counts = plan.n or [1] * len(plan.node)
    if len(counts) != len(plan.node):
        return "columns `node` and `n` differ in length"
    if graph.nodes is None:
        return f"graph {plan.graph} was given without its nodes"
    free = 0
    for first, n in zip(plan.node, counts, strict=True):
        # otherwise every kernel could contain every node
        if first < free:
            return f"node {first} is repeated or out of order"
        free = first + n
    if free > graph.n_nodes:
        return f"a kernel's nodes go beyond the graph's {graph.n_nodes}"
    return None


def plan_kernels(graph: Graph, plan: Plan) -> Kernels:
    """The kernels of `plan`, in its order; `graph` is its graph and must have its nodes."""
    nodes = graph.nodes
    assert nodes is not None
    n = len(plan.node)
    counts = plan.n or [1] * n
    blocks = blocks_of(nodes.op, nodes.name, nodes.layer, nodes.src, [f.name for f in graph.leafs])
    work = [node_work(graph, i) for i in range(graph.n_nodes)]
    label: list[str] = []
    n_flops, n_bytes = np.zeros(n, np.int64), np.zeros(n, np.int64)
    for i, (first, count) in enumerate(zip(plan.node, counts, strict=True)):
        inside = range(first, first + count)
        label.append("+".join(_label(graph, nodes, node) for node in inside if nodes.exec[node]))
        n_flops[i] = sum(work[node][0] for node in inside)
        passed = sum(nodes.bytes[node] for node in inside[:-1])
        n_bytes[i] = sum(work[node][1] for node in inside) - 2 * passed
    layer = np.array(nodes.layer, np.int64)[plan.node] if n else np.zeros(0, np.int64)
    return Kernels(label, [blocks[node] for node in plan.node], layer, n_flops, n_bytes)


def node_backends(graph: Graph) -> list[str | None]:
    """The backend of every node, by the graph's splits; None for a node in none."""
    backends: list[str | None] = [None] * graph.n_nodes
    for split in graph.splits:
        backends[split.start : split.end] = [split.backend] * (split.end - split.start)
    return backends


def _label(graph: Graph, nodes: Nodes, node: int) -> str:
    op = nodes.op[node]
    if not op.startswith("MUL_MAT") or not nodes.src[node]:
        return op
    weight = nodes.src[node][0]
    return f"{op} {nodes.type[weight] if weight >= 0 else graph.leafs[-1 - weight].type}"


def node_work(graph: Graph, node: int) -> tuple[int, int]:
    """Floating point operations and bytes moved of one node, as `ops` counts them; the graph must
    have its nodes."""
    nodes = graph.nodes
    assert nodes is not None
    sources = nodes.src[node]
    shapes = [nodes.ne[s] if s >= 0 else graph.leafs[-1 - s].ne for s in sources]
    sizes = [nodes.bytes[s] if s >= 0 else graph.leafs[-1 - s].bytes for s in sources]
    op, ne, size = nodes.op[node], nodes.ne[node], nodes.bytes[node]
    return flops(op, ne, shapes), bytes_moved(op, ne, size, shapes, sizes)


def weight_use(graph: Graph, nodes: Iterable[int]) -> tuple[str, str] | None:
    """Name of the first weight that the nodes read directly, and the op that reads it, or None. The
    graph must have its nodes."""
    assert graph.nodes is not None
    for node in nodes:
        for leaf in (graph.leafs[-1 - source] for source in graph.nodes.src[node] if source < 0):
            if leaf.tensor >= 0:
                return leaf.name, graph.nodes.op[node]
    return None


def weight_read(graph: Graph, nodes: Iterable[int]) -> tuple[str | None, str | None]:
    """Name and type of the first weight that the nodes read directly, or None, None. The graph must
    have its nodes."""
    assert graph.nodes is not None
    for node in nodes:
        for leaf in (graph.leafs[-1 - source] for source in graph.nodes.src[node] if source < 0):
            if leaf.tensor >= 0:
                return leaf.name, leaf.type
    return None, None
