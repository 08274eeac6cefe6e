"""How a kernel is divided into parts: along which axes of its result, and where.

Invariant: the parts cover the result once. A kernel that its op does not let be divided is whole.
"""

from __future__ import annotations

from collections.abc import Callable
from math import isqrt, prod

from llamacpp_instr.converters.scheduling.axes import PRODUCTS, Axes, Slice
from llamacpp_instr.converters.scheduling.timed_graph import TimedGraph, leaf_below

Division = dict[int, list[int]]
"""axis -> where its slices begin, and its length; empty for a whole kernel"""

ONE_THREAD = frozenset({"REPEAT", "SUM_ROWS", "SUM", "MEAN", "ARGMAX", "CUMSUM"})
"""ops that ggml computes on one thread: `params->ith != 0` in ggml/src/ggml-cpu/ops.cpp"""
SECOND_AXIS = frozenset({"NORM", "RMS_NORM", "L2_NORM", "SOFT_MAX", "CPY", "CONT", "DUP"})
"""ops whose rows ggml counts along axis 1 alone, so a norm of one token is one thread's"""

MOST_HEADS = 1024


def n_parts(division: Division) -> int:
    """The number of parts."""
    return prod(len(bounds) - 1 for bounds in division.values())


def by_heads(timed: TimedGraph, axes: Axes) -> dict[int, Division]:
    """One part for each head: what attends, and what makes or reads queries, keys and values of
    single heads. Keys and values have one part for each head of theirs."""
    slices: dict[int, Slice] = {}
    readers: dict[int, list[int]] = {}
    for kernel in range(len(timed.inside)):
        for need in axes.needs(kernel, None):
            readers.setdefault(need.kernel, []).append(kernel)
    todo = []
    for kernel, inside in enumerate(timed.inside):
        axis = _head_axis(timed, axes, inside[-1])
        if axis is not None:
            slices[kernel] = Slice(axis, axes.shape(inside[-1])[axis])
            todo.append(kernel)
    while todo:
        kernel = todo.pop()
        found = [(need.kernel, need.slice) for need in axes.needs(kernel, slices[kernel])]
        for reader in readers.get(kernel, ()):
            for axis, length in enumerate(axes.result(reader)):
                of = Slice(axis, slices[kernel].n)
                if length % of.n == 0 and _reads(axes, reader, of, kernel, slices[kernel]):
                    found.append((reader, of))
        for other, slice_ in found:
            known = slice_ is None or slice_.n < 2 or other in slices
            if not known and slice_ and axes.divisible(other, slice_.axis):
                slices[other] = slice_
                todo.append(other)
    return {kernel: {of.axis: _even(axes, kernel, of.axis, of.n)} for kernel, of in slices.items()}


def by_rows(timed: TimedGraph, axes: Axes, engines_of: Callable[[int], int]) -> dict[int, Division]:
    """As ggml divides rows among as many threads; `engines_of` a kernel is how many."""
    divisions = {}
    for kernel in range(len(timed.inside)):
        axis = _thread_axis(timed, axes, kernel, engines_of(kernel))
        if axis is not None and axes.divisible(kernel, axis):
            divisions[kernel] = {axis: _even(axes, kernel, axis, engines_of(kernel))}
    return divisions


def by_tiles(
    timed: TimedGraph, axes: Axes, engines_of: Callable[[int], int]
) -> dict[int, Division]:
    """Products of matrices into tiles of rows by tokens, as square as their number allows; the
    others as `by_rows`."""
    divisions = by_rows(timed, axes, engines_of)
    for kernel, inside in enumerate(timed.inside):
        n, ne = engines_of(kernel), axes.result(kernel)
        if timed.nodes.op[inside[-1]] in PRODUCTS and n > 1:
            tokens = next(axis for axis in (2, 1) if ne[axis] > 1 or axis == 1)
            across = max(i for i in range(1, isqrt(n) + 1) if n % i == 0)
            across = min(across, ne[tokens])
            tiled = {0: _even(axes, kernel, 0, n // across)}
            tiled |= {tokens: _even(axes, kernel, tokens, across)} if across > 1 else {}
            divisions[kernel] = {axis: at for axis, at in tiled.items() if len(at) > 2}
    return divisions


def _head_axis(timed: TimedGraph, axes: Axes, node: int) -> int | None:
    """The axis of the heads if a node attends: flash attention, or a product whose first factor is
    no weight."""
    op, sources = timed.nodes.op[node], timed.nodes.src[node]
    if op == "FLASH_ATTN_EXT" and len(sources) > 2:
        axis = 1
    elif op == "MUL_MAT" and sources and not _is_weight(timed, sources[0]):
        axis = 2
    else:
        return None
    return axis if 1 < axes.shape(node)[axis] <= MOST_HEADS else None


def _is_weight(timed: TimedGraph, source: int) -> bool:
    leaf = leaf_below(timed.nodes, source)
    return leaf < 0 and timed.graph.leaf(leaf).tensor >= 0


def _reads(axes: Axes, reader: int, of: Slice, kernel: int, slices: Slice) -> bool:
    """Whether slice i of a reader needs slice i of what it reads."""
    return any(
        need.kernel == kernel and need.slice == slices for need in axes.needs(reader, of)
    ) and axes.divisible(reader, of.axis)


def _thread_axis(timed: TimedGraph, axes: Axes, kernel: int, n: int) -> int | None:
    """The axis along which ggml divides a kernel among `n` threads, or None for one thread."""
    node = timed.inside[kernel][0]
    op, ne = timed.nodes.op[node], axes.result(kernel)
    if op in ONE_THREAD or n < 2:
        return None
    if op in PRODUCTS:
        rows = ne[1] * ne[2] * ne[3]
        # ggml_compute_forward_mul_mat; the experts' product always by rows of the weight
        axis = 0 if ne[0] > rows or op == "MUL_MAT_ID" else max((1, 2, 3), key=lambda a: ne[a])
    elif op == "FLASH_ATTN_EXT":
        axis = 1 if ne[1] > 1 else 2
    elif op == "CONCAT":
        axis = 2
    elif op in SECOND_AXIS:
        axis = 1
        if op in ("CPY", "CONT", "DUP"):
            source = axes.shape(timed.nodes.src[node][0]) if timed.nodes.src[node] else ne
            if source != ne and source[1] > 1:
                axis = 0 if ne[0] != source[0] else 1
    else:
        # rows of all axes together: the outermost that is long enough, else the longest
        axis = max((3, 2, 1), key=lambda a: (min(ne[a], n), a))
    return axis if ne[axis] > 1 else None


def _even(axes: Axes, kernel: int, axis: int, n: int) -> list[int]:
    length = axes.result(kernel)[axis]
    n = max(1, min(n, length))
    return [i * length // n for i in range(n + 1)]
