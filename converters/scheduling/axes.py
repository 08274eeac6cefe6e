"""Which slice of a source a slice of a node's result needs, op by op, through views and the cache.

Invariant: never less than what is needed. Where an op, a view or a fused kernel is not understood,
all of the source is needed. An axis is ggml's: 0 is the length of a row.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import gcd, prod
from typing import NamedTuple

from llamacpp_instr.converters.scheduling.timed_graph import TimedGraph, leaf_below, written_cache
from llamacpp_instr.log.graph.ops import is_cache, tensor

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
    """What a kernel needs of an earlier one."""

    kernel: int
    source: int
    """which source reads it: position among the sources of the first node,
    and 9 for the others"""
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
        """Four numbers, of a node or a leaf."""
        return [*tensor(self._graph, source).ne, 1, 1, 1, 1][:4]

    def result(self, kernel: int) -> list[int]:
        """The shape that slices of a kernel cut; of SET_ROWS that of the rows it writes."""
        node = self._timed.inside[kernel][-1]
        sources = self._nodes.src[node]
        if self._nodes.op[node] == "SET_ROWS" and sources:
            return self.shape(sources[0])
        return self.shape(node)

    def divisible(self, kernel: int, axis: int) -> bool:
        """Whether the result can be computed slice by slice along an axis."""
        for node in self._timed.inside[kernel]:
            op = self._nodes.op[node]
            if op in BY_ROW or op in ("GET_ROWS", "REPEAT"):
                if axis == 0:
                    return False
            elif op == "CONCAT":
                if axis == (self._nodes.params[node] or [0])[0]:
                    return False
            elif op == "FLASH_ATTN_EXT":
                if axis == 0:
                    return False
            elif op == "SET_ROWS":
                if axis > 1:
                    return False
            elif op not in ELEMENTWISE and op not in PRODUCTS:
                return False
        return True

    def needs(self, kernel: int, of: Slice | None) -> Iterator[Need]:
        """What a kernel needs of earlier ones if its result is sliced so."""
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
            if k < 3:
                return {1: 2, 2: 1 if k == 0 else None, 3: 3}.get(axis)
            return None
        if op == "SET_ROWS":
            return axis if k == 0 else None
        if op == "PERMUTE":
            places = [*params, 0, 0, 0, 0][:4]
            return places.index(axis) if sorted(places) == [0, 1, 2, 3] else None
        if op == "TRANSPOSE":
            return (1, 0, 2, 3)[axis]
        if op in ("VIEW", "RESHAPE") and source < 0 and self._is_cache(source):
            return self._cache_axis(node, source, axis)
        if op in ("VIEW", "RESHAPE", "CONT", "CPY") and ours != its and k == 0:
            return _reshaped(ours, its, axis)
        if op == "GET_ROWS":
            return axis - 1 if k == 1 and axis > 0 else None
        if op == "CONCAT":
            return axis if axis != (params or [0])[0] else None
        known = op in ELEMENTWISE or op in ("VIEW", "RESHAPE") or (op in BY_ROW and axis > 0)
        return axis if known and (op in ELEMENTWISE or k == 0) and its[axis] == ours[axis] else None

    def _cache_axis(self, node: int, source: int, axis: int) -> int | None:
        """The heads of a cache are axis 0, its row, however its values lie in it."""
        ne, row = self.shape(node), self.shape(source)[0]
        is_heads = axis == 1 and row in (ne[0] * ne[1], ne[1] * ne[2])
        return 0 if is_heads else None

    def _through_views(self, source: int, needed: Slice | None) -> tuple[int, Slice | None]:
        nodes = self._nodes
        while source >= 0 and not nodes.exec[source] and nodes.src[source]:
            below = nodes.src[source][0]
            if below >= source:
                break
            needed = self.to_source(source, 0, needed)
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
    """The axis of a tensor with as many elements whose slices hold the same elements: the stride
    and the length of what is divided together cover the same run of elements."""
    if prod(ours) != prod(its):
        return None
    end = prod(ours[: axis + 1])
    if ours[axis] == 1:
        return None
    for other in range(4):
        if its[other] > 1 and prod(its[: other + 1]) == end:
            return other
    return None
