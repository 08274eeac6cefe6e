"""The kernels that ggml's CPU backend makes of a graph: which nodes run, and which run fused.

Invariant: the plan equals the one that a recording of the graph has. The rules are those of
`ggml_graph_compute_thread` and `ggml_cpu_try_fuse_ops` in ggml/src/ggml-cpu/ggml-cpu.c.
"""

from __future__ import annotations

from collections import Counter

from llamacpp_instr.graph.tensors import tensor
from llamacpp_instr.schema import Graph, Nodes, Plan


def cpu_plan(graph: Graph) -> Plan:
    """The plan of `graph`, which must have its nodes."""
    nodes = graph.whole
    uses = Counter(source for sources in nodes.src for source in sources)
    first: list[int] = []
    count: list[int] = []
    node = 0
    while node < graph.n_nodes:
        n = 2 if nodes.exec[node] and _is_scaled_norm(graph, nodes, uses, node) else 1
        if nodes.exec[node]:
            first.append(node)
            count.append(n)
        node += n
    return Plan(
        t=graph.t,
        plan=0,
        graph=graph.graph,
        node=first,
        n=count if any(n > 1 for n in count) else None,
    )


def _is_scaled_norm(graph: Graph, nodes: Nodes, uses: Counter[int], norm: int) -> bool:
    """Whether ggml computes this RMS_NORM together with the MUL that follows: nothing else reads
    the norm, all is F32, and the factor has a value for each element of a row."""
    product = norm + 1
    if nodes.op[norm] != "RMS_NORM" or product >= graph.n_nodes or uses[norm] != 1:
        return False
    sources = nodes.src[product]
    if nodes.op[product] != "MUL" or norm not in sources or nodes.ne[product] != nodes.ne[norm]:
        return False
    factor = tensor(graph, sources[1] if sources[0] == norm else sources[0])
    types = {tensor(graph, nodes.src[norm][0]).type, nodes.type[product], factor.type}
    return types == {"f32"} and factor.ne[:1] == nodes.ne[norm][:1]
