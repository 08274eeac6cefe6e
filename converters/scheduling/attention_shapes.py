"""The shapes of the attentions of a graph, so that their parts can be timed.

Invariant: a shape has the cells that the recorded kernel read, not the window of the cache that it
was given.
"""

from __future__ import annotations

from converters.scheduling.axes import Axes
from converters.scheduling.split import attention_kernels
from converters.scheduling.timed_graph import TimedGraph
from llamacpp_instr.probe.shapes import AttentionShape


def attention_shapes(timed: TimedGraph) -> dict[int, AttentionShape]:
    """By chosen kernel that is a flash attention or a soft-max of an attention."""
    axes, nodes = Axes(timed), timed.nodes
    found = {}
    for kernel in attention_kernels(timed):
        (node,) = timed.inside[kernel]
        if nodes.op[node] == "SOFT_MAX":
            cells, tokens, heads, _ = axes.shape(node)
            found[kernel] = AttentionShape(tokens, heads, 1, cells, 1, 1, "f32", "f32", fused=False)
            continue
        query, key, value = (axes.shape(source) for source in nodes.src[node][:3])
        type_k, type_v = (
            nodes.type[source] if source >= 0 else timed.graph.leafs[-1 - source].type
            for source in nodes.src[node][1:3]
        )
        found[kernel] = AttentionShape(
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
    return found
