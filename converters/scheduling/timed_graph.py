"""The kernels of a graph with their times, what each reads and moves, and which slices it needs.

Invariants: the times are measured, or predicted by the caller that made the TimedGraph; nothing
here changes them. Columns are as long as the plan. `Axes` never gives less than what is needed:
where it does not understand an op, a view or a fused kernel, it gives all of the source. An axis is
ggml's: 0 is the length of a row.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from math import gcd, prod
from typing import NamedTuple

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
    """The kind of engine that a ggml op is made for."""
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
    """by kernel, for flash attention: the cells of the cache that it reads"""
    devices: Sequence[str] = ()
    """by kernel: the device that ran it behind thread 0, or empty; none if there are no devices"""

    @property
    def nodes(self) -> Nodes:
        return self.graph.whole

    def device(self, kernel: int) -> str:
        """The device that ran a kernel behind thread 0; empty for none."""
        return self.devices[kernel] if self.devices else ""

    @cached_property
    def inside(self) -> list[list[int]]:
        """The nodes of each kernel that compute something."""
        return kernel_nodes(self.graph, self.plan)

    @cached_property
    def kernel_of(self) -> dict[int, int]:
        """The kernel that computes a node."""
        return {node: kernel for kernel, nodes in enumerate(self.inside) for node in nodes}

    @cached_property
    def names(self) -> list[str]:
        """A unique name of each kernel: its tensor's, with op and number where others share it."""
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
    devices: Sequence[str] = (),
) -> TimedGraph:
    """The kernels of `plan` with the times `ns`; `work` is what they do, `devices` where. Kernels
    outside `layers` (first and last, both included) are not chosen. Raises UsageError, which names
    `source`, if there are none."""
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
    loaded = [sum(_loaded(graph, node) for node in inside) for inside in kernel_nodes(graph, plan)]
    # of attention, only the cells that it reads
    load = np.array(loaded, np.int64) - np.maximum(kernels.bytes - work.bytes, 0)
    cells = {
        kernel: of.n_kv - int(kernels.bytes[kernel] - work.bytes[kernel]) // max(1, of.cell_bytes)
        for kernel, of in kernels.attention.items()
    }
    load = np.clip(load, 0, moved)
    ns = np.maximum(ns, 1)
    return TimedGraph(graph, plan, timeline, ns, moved, load, tuple(chosen), cells, devices)


def leaf_below(nodes: Nodes, source: int) -> int:
    """The leaf (negative) or the node that a source is, looking through views."""
    *_, last = views_below(nodes, source)
    return last


def views_below(nodes: Nodes, source: int) -> Iterator[int]:
    """A source and, while it is a view, what it is a view of."""
    yield source
    while source >= 0 and not nodes.exec[source] and nodes.src[source]:
        below = nodes.src[source][0]
        if below >= source:
            break
        yield below
        source = below


def written_cache(nodes: Nodes, node: int) -> int | None:
    """Which source of a node is what it writes to, or None: caches are written in place."""
    op, sources = nodes.op[node], nodes.src[node]
    at = {"SET_ROWS": 2, "CPY": 1, "SET": 0, "ACC": 0}.get(op)
    return at if at is not None and at < len(sources) else None


def _loaded(graph: Graph, node: int) -> int:
    """Bytes of weights and caches that a node reads."""
    nodes = graph.whole
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


ELEMENTWISE = frozenset(
    {
        "ADD", "ADD1", "ADD_ID", "SUB", "MUL", "DIV", "SCALE", "SQR", "SQRT", "LOG", "SIN", "COS",
        "UNARY", "CLAMP", "LEAKY_RELU", "CPY", "CONT", "DUP", "GLU",
    }
)  # fmt: skip
BY_ROW = frozenset(
    {"NORM", "RMS_NORM", "L2_NORM", "SOFT_MAX", "ROPE", "ARGSORT", "TOP_K", "SUM_ROWS", "CUMSUM"}
)
"""a row of the result needs the same row of the first source, all of it"""
PRODUCTS = frozenset({"MUL_MAT", "MUL_MAT_ID"})


class Slice(NamedTuple):
    """An axis that is divided into consecutive slices, as equal as they can be."""

    axis: int
    n: int


class Need(NamedTuple):
    """What a kernel needs from an earlier one."""

    kernel: int
    source: int
    """which source reads it: the position among the sources of the first node; 9 for other nodes"""
    slice: Slice | None
    """of the earlier kernel's result: a share of the axis needs the same share of this axis. `n` is
    how many slices it can have that are not shared. None: all of it is needed"""


class Axes:
    """The slices of a graph's kernels. `n` slices of a result may share a slice of a source, as
    heads share keys and values; then the source has fewer slices."""

    def __init__(self, timed: TimedGraph) -> None:
        self._timed = timed
        self._graph, self._nodes = timed.graph, timed.nodes
        self._writers = self._find_writers()

    def shape(self, source: int) -> list[int]:
        """The four dimensions of a node or a leaf."""
        return [*tensor(self._graph, source).ne, 1, 1, 1, 1][:4]

    def result(self, kernel: int) -> list[int]:
        """The shape that slices of a kernel cut; for SET_ROWS, that of the rows that it writes."""
        node = self._timed.inside[kernel][-1]
        sources = self._nodes.src[node]
        if self._nodes.op[node] == "SET_ROWS" and sources:
            return self.shape(sources[0])
        return self.shape(node)

    def divisible(self, kernel: int, axis: int) -> bool:
        """Whether the result can be computed slice by slice along an axis."""
        for node in self._timed.inside[kernel]:
            op = self._nodes.op[node]
            if op in BY_ROW or op in ("GET_ROWS", "REPEAT", "FLASH_ATTN_EXT"):
                possible = axis > 0
            elif op == "CONCAT":
                possible = axis != (self._nodes.params[node] or [0])[0]
            elif op == "SET_ROWS":
                possible = axis < 2
            else:
                possible = op in ELEMENTWISE or op in PRODUCTS
            if not possible:
                return False
        return True

    def needs(self, kernel: int, of: Slice | None) -> Iterator[Need]:
        """What a kernel needs from earlier ones if its result is sliced like this."""
        inside = self._timed.inside[kernel]
        slices: dict[int, Slice | None] = {inside[-1]: of}
        for node in reversed(inside):
            own = slices.get(node)
            for k, source in enumerate(self._nodes.src[node]):
                if k == written_cache(self._nodes, node) and leaf_below(self._nodes, source) < 0:
                    continue  # written in place: what it held does not matter
                at, needed = self._through_views(source, self.to_source(node, k, own))
                which = k if node == inside[0] else 9
                if at in inside:
                    slices[at] = needed
                elif at >= 0:
                    producer = self._timed.kernel_of.get(at)
                    if producer is not None and producer < kernel:
                        last = self._timed.inside[producer][-1] == at
                        yield Need(producer, which, needed if last else None)
                else:
                    for producer in self._writers.get(at, ()):
                        if producer < kernel:
                            yield Need(producer, which, self._written(producer, needed))

    def to_source(self, node: int, k: int, of: Slice | None) -> Slice | None:
        """The slices of source `k` that slices of a node's result need; None: all of it."""
        if of is None:
            return None
        source = self._nodes.src[node][k]
        axis = self._source_axis(node, k, of.axis)
        if axis is None:
            return None
        length = self.shape(source)[axis]
        return Slice(axis, gcd(of.n, length)) if length > 1 else None

    def _source_axis(self, node: int, k: int, axis: int) -> int | None:
        nodes = self._nodes
        op, params, source = nodes.op[node], nodes.params[node], nodes.src[node][k]
        ours, its = self.shape(node), self.shape(source)
        if op in PRODUCTS:
            return _product_axis(op, k, axis, ours, its)
        if op == "FLASH_ATTN_EXT":
            return {1: 2, 2: 1 if k == 0 else None, 3: 3}.get(axis) if k < 3 else None
        if op == "SET_ROWS":
            return axis if k == 0 else None
        if op == "PERMUTE":
            places = [*params, 0, 0, 0, 0][:4]
            return places.index(axis) if sorted(places) == [0, 1, 2, 3] else None
        if op == "TRANSPOSE":
            return (1, 0, 2, 3)[axis]
        if op in ("VIEW", "RESHAPE") and source < 0 and self._is_cache(source):
            # the heads of a cache are axis 0, its row, however its values lie in it
            is_heads = axis == 1 and its[0] in (ours[0] * ours[1], ours[1] * ours[2])
            return 0 if is_heads else None
        if op in ("VIEW", "RESHAPE", "CONT", "CPY") and ours != its and k == 0:
            return _reshaped(ours, its, axis)
        if op == "GET_ROWS":
            return axis - 1 if k == 1 and axis > 0 else None
        if op == "CONCAT":
            return axis if axis != (params or [0])[0] else None
        known = op in ELEMENTWISE or op in ("VIEW", "RESHAPE") or (op in BY_ROW and axis > 0)
        return axis if known and (op in ELEMENTWISE or k == 0) and its[axis] == ours[axis] else None

    def _through_views(self, source: int, needed: Slice | None) -> tuple[int, Slice | None]:
        for view, below in pairwise(views_below(self._nodes, source)):
            needed = self.to_source(view, 0, needed)
            source = below
        if source < 0 and needed is not None and not self._is_cache(source):
            needed = None
        return source, needed

    def _written(self, writer: int, needed: Slice | None) -> Slice | None:
        """The slices of what a kernel wrote to a cache, whose heads are axis 0 of `needed`."""
        node = self._timed.inside[writer][-1]
        if needed is None or needed.axis != 0 or self._nodes.op[node] != "SET_ROWS":
            return None
        rows = self.result(writer)
        # a cache of values without flash attention gets its elements one by one
        axis = 0 if rows[0] > 1 else 1
        target = leaf_below(self._nodes, self._nodes.src[node][2])
        whole = target < 0 and rows[axis] == self.shape(target)[0]
        return Slice(axis, needed.n) if whole else None

    def _find_writers(self) -> dict[int, list[int]]:
        """The kernels that write to each cache, by its leaf."""
        found: dict[int, list[int]] = {}
        for kernel, inside in enumerate(self._timed.inside):
            for node in inside:
                k = written_cache(self._nodes, node)
                leaf = leaf_below(self._nodes, self._nodes.src[node][k]) if k is not None else 0
                if leaf < 0 and self._is_cache(leaf):
                    found.setdefault(leaf, []).append(kernel)
        return found

    def _is_cache(self, leaf: int) -> bool:
        return is_cache(self._graph.leaf(leaf).name)


def _product_axis(op: str, k: int, axis: int, ours: list[int], its: list[int]) -> int | None:
    """MUL_MAT: [K, N, b, c] by [K, M, B, C] is [N, M, B, C]. MUL_MAT_ID: experts [K, N, n] by
    [K, 1 or used, M] with the numbers [used, M] is [N, used, M]."""
    if axis == 0:
        return 1 if k == 0 else None
    if op == "MUL_MAT":
        return axis if k == 1 or (k == 0 and axis > 1) else None
    if k == 1:
        return axis if its[axis] == ours[axis] else None
    return axis - 1 if k == 2 else None


def _reshaped(ours: list[int], its: list[int], axis: int) -> int | None:
    """The axis of a tensor with the same number of elements whose slices hold the same elements:
    the stride and the length of what is divided together cover the same run of elements."""
    if prod(ours) != prod(its):
        return None
    end = prod(ours[: axis + 1])
    same = (other for other in range(4) if its[other] > 1 and prod(its[: other + 1]) == end)
    return next(same, None) if ours[axis] > 1 else None
