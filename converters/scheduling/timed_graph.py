"""The kernels of a graph with their times, and what each reads and moves: what tasks are made from.

Invariant: the times are measured, or predicted by the caller that made the TimedGraph; nothing here
changes them. Columns are as long as the plan.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from llamacpp_instr.base.errors import UsageError
from llamacpp_instr.converters.scheduling.tasks import Int64, Kind
from llamacpp_instr.log.graph.kernels import KernelWork, kernel_nodes
from llamacpp_instr.log.graph.ops import bytes_read, is_cache, tensor
from llamacpp_instr.log.graph.timeline import PlanTimeline, plan_timeline
from llamacpp_instr.log.schema import Graph, Nodes, Plan

MATRIX_OPS = frozenset(
    {
        "MUL_MAT", "MUL_MAT_ID", "OUT_PROD", "FLASH_ATTN_EXT", "CONV_2D", "CONV_2D_DW", "CONV_3D",
        "CONV_TRANSPOSE_1D", "CONV_TRANSPOSE_2D", "SOLVE_TRI",
    }
)  # fmt: skip
MEMORY_OPS = frozenset(
    {
        "GET_ROWS", "SET_ROWS", "CPY", "CONT", "DUP", "CONCAT", "REPEAT", "SET", "PAD", "ROLL",
        "FILL", "IM2COL", "WIN_PART", "WIN_UNPART",
    }
)  # fmt: skip


def kind_of(op: str) -> Kind:
    """The engine that an op of ggml is made for."""
    return "matrix" if op in MATRIX_OPS else "memory" if op in MEMORY_OPS else "vector"


@dataclass(frozen=True)
class TimedGraph:
    """A graph that was computed, or would be, with the time of each kernel of its plan."""

    graph: Graph
    """with its nodes"""
    plan: Plan
    timeline: PlanTimeline
    ns: Int64
    """by kernel, at least 1"""
    bytes: Int64
    """by kernel, read and written"""
    load: Int64
    """by kernel: of `bytes`, weights and cached keys and values that it reads"""
    chosen: tuple[int, ...]
    """the kernels that are scheduled, ascending"""
    cells: dict[int, int]
    """by kernel that is a flash attention: the cells of the cache that it reads"""

    @property
    def nodes(self) -> Nodes:
        return self.graph.whole

    @cached_property
    def inside(self) -> list[list[int]]:
        """The nodes of each kernel that compute something."""
        return kernel_nodes(self.graph, self.plan)

    @cached_property
    def kernel_of(self) -> dict[int, int]:
        """The kernel that computes a node."""
        return {node: kernel for kernel, nodes in enumerate(self.inside) for node in nodes}

    @cached_property
    def titles(self) -> list[str]:
        """By kernel, the same in every layer: `MUL_MAT ffn_down`."""
        return [op.title for op in self.timeline.ops]

    @cached_property
    def names(self) -> list[str]:
        """By kernel, unique: its tensor's name, with the op and a number where others have it."""
        plain = [self.nodes.name[nodes[-1]] or f"node_{nodes[-1]}" for nodes in self.inside]
        shared, seen = Counter(plain), Counter[str]()
        names = []
        for name, nodes in zip(plain, self.inside, strict=True):
            label = name if shared[name] == 1 else f"{name} {self.nodes.op[nodes[0]]}"
            seen[label] += 1
            names.append(label if seen[label] == 1 else f"{label} {seen[label]}")
        return names


def timed_graph(
    graph: Graph,
    plan: Plan,
    ns: Int64,
    work: KernelWork,
    layers: tuple[int, int] | None = None,
    source: str = "",
) -> TimedGraph:
    """The kernels of `plan` with the times `ns`; `work` is what they do. Kernels outside `layers`
    (first and last, both included) are not chosen. Raises UsageError, which names `source`, if
    there are none."""
    timeline = plan_timeline(graph, plan)
    kernels = timeline.kernels
    chosen = [
        i
        for i, layer in enumerate(kernels.layer.tolist())
        if layers is None or layers[0] <= layer <= layers[1]
    ]
    if not chosen:
        known = sorted({layer for layer in kernels.layer.tolist() if layer >= 0})
        has = f"its layers are {known[0]} to {known[-1]}" if known else "its graph has no layers"
        assert layers is not None or not len(ns)
        wanted = f"layer {layers[0]}" if layers else "kernel"
        raise UsageError(f"{source}: no {wanted} to schedule; {has}")
    moved = np.maximum(work.bytes, 0)
    loaded = [
        sum(_loaded(graph, graph.whole, node) for node in inside)
        for inside in kernel_nodes(graph, plan)
    ]
    load = np.array(loaded, np.int64)
    # of attention, only the cells that it reads
    load -= np.maximum(kernels.bytes - work.bytes, 0)
    cells = {
        kernel: of.n_kv - int(kernels.bytes[kernel] - work.bytes[kernel]) // max(1, of.cell_bytes)
        for kernel, of in kernels.attention.items()
    }
    return TimedGraph(
        graph,
        plan,
        timeline,
        np.maximum(ns, 1),
        moved,
        np.clip(load, 0, moved),
        tuple(chosen),
        cells,
    )


def leaf_below(nodes: Nodes, source: int) -> int:
    """The leaf (negative) or the node that a source is, views looked through."""
    while source >= 0 and not nodes.exec[source] and nodes.src[source]:
        below = nodes.src[source][0]
        if below >= source:
            break
        source = below
    return source


def written_cache(nodes: Nodes, node: int) -> int | None:
    """Which source of a node is what it writes to, or None: caches are written in place."""
    op, sources = nodes.op[node], nodes.src[node]
    at = {"SET_ROWS": 2, "CPY": 1, "SET": 0, "ACC": 0}.get(op)
    return at if at is not None and at < len(sources) else None


def _loaded(graph: Graph, nodes: Nodes, node: int) -> int:
    """Bytes of weights and caches that a node reads."""
    if not nodes.exec[node]:
        return 0
    written = written_cache(nodes, node)
    total = 0
    read = [tensor(graph, source) for source in nodes.src[node]]
    shapes = [of.ne for of in read]
    for k, source in enumerate(nodes.src[node]):
        if (below := leaf_below(nodes, source)) < 0 and k != written:
            leaf = graph.leaf(below)
            if leaf.tensor >= 0 or is_cache(leaf.name):
                total += bytes_read(nodes.op[node], k, shapes, read[k].bytes)
    return total
