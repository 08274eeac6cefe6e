"""The shapes of a graph's kernels that have parts, so that the parts can be timed.

Invariant: an attention has the cells that the recorded kernel read, not the window of the cache
that it was given.
"""

from __future__ import annotations

from math import prod

from converters.scheduling.axes import Axes
from converters.scheduling.split import kernels_with_parts
from converters.scheduling.timed_graph import TimedGraph
from llamacpp_instr.graph.tensors import tensor
from llamacpp_instr.probe.shapes import AttentionShape, KernelShape, ScaledNormShape


def part_shapes(timed: TimedGraph) -> dict[int, KernelShape]:
    """By chosen kernel that is an attention, a soft-max of one, or a fused norm."""
    axes, nodes = Axes(timed), timed.nodes
    found: dict[int, KernelShape] = {}
    for kernel in kernels_with_parts(timed):
        node = timed.inside[kernel][0]
        if nodes.op[node] == "RMS_NORM":
            elements, *rows = axes.shape(node)
            found[kernel] = ScaledNormShape(elements, prod(rows))
        elif nodes.op[node] == "SOFT_MAX":
            cells, tokens, heads, _ = axes.shape(node)
            found[kernel] = AttentionShape(tokens, heads, 1, cells, 1, 1, "f32", "f32", fused=False)
        else:
            found[kernel] = _flash_attention(timed, axes, kernel)
    return found


def _flash_attention(timed: TimedGraph, axes: Axes, kernel: int) -> AttentionShape:
    nodes, (node,) = timed.nodes, timed.inside[kernel]
    query, key, value = (axes.shape(source) for source in nodes.src[node][:3])
    type_k, type_v = (tensor(timed.graph, source).type for source in nodes.src[node][1:3])
    return AttentionShape(
        tokens=query[1],
        heads=query[2] * query[3],
        kv_heads=max(1, key[2] * key[3]),
        cells=max(1, timed.cells.get(kernel, key[1])),
        key=key[0],
        value=value[0],
        type_k=type_k,
        type_v=type_v,
        fused=True,
    )
