"""Copies of a scheduler: where a graph is split among backends, a part reads copies of what other
parts have computed, and of inputs.

ggml names a copy after its backend and its source, `RPC0[host:port]#inp_pos#0`
(`ggml_backend_sched_split_graph` in ggml/src/ggml-backend.cpp), and cuts names at 63 bytes.
"""

from __future__ import annotations

import re

from msgspec.structs import replace

from llamacpp_instr.log.graph.tensors import tensor
from llamacpp_instr.log.schema import Graph

_COPY = re.compile(r"[^#]+#(.+)#\d+")


def is_copy(name: str) -> bool:
    """Whether a leaf of that name is a scheduler's copy."""
    return _COPY.fullmatch(name) is not None


def without_copies(graph: Graph) -> Graph:
    """The graph, which must have its nodes, whose nodes read the sources of copies. A copy whose
    source the graph does not have remains, as those of inputs do."""
    nodes = graph.whole
    copies = {
        -1 - i: (found[1], leaf)
        for i, leaf in enumerate(graph.leafs)
        if (found := _COPY.fullmatch(leaf.name))
    }
    if not copies:
        return graph
    leafs = {leaf.name: -1 - i for i, leaf in enumerate(graph.leafs)}
    latest: dict[str, int] = {}
    src = []
    for i, sources in enumerate(nodes.src):
        read = []
        for source in sources:
            of = source
            if source in copies:
                name, leaf = copies[source]
                named = latest.get(name, leafs.get(name, source))
                there = tensor(graph, named)
                if (there.type, list(there.ne)) == (leaf.type, list(leaf.ne)):
                    of = named
            read.append(of)
        src.append(read)
        latest[nodes.name[i]] = i
    return replace(graph, nodes=replace(nodes, src=src))
