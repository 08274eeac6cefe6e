"""Finds the definitions that the nodes of a graph use.

Invariant: a node belongs to one use at most.
"""

from __future__ import annotations

from collections.abc import Callable

from converters.flashinfer import simple
from converters.flashinfer.attention import attention
from converters.flashinfer.use import GraphNodes, Use

_MATCHERS: dict[str, Callable[[GraphNodes, int], Use | None]] = {
    "MUL_MAT": simple.gemm,
    "MUL_MAT_ID": simple.experts,
    "RMS_NORM": simple.norm,
    "NORM": simple.norm,
    "GET_ROWS": simple.rows,
    "ROPE": simple.rope,
    "GLU": simple.activation,
    "UNARY": simple.activation,
    "SOFT_MAX": simple.softmax,
    "ARGSORT": simple.topk,
    "TOP_K": simple.topk,
    "FLASH_ATTN_EXT": attention,
    **dict.fromkeys(("ADD", "SUB", "MUL", "DIV"), simple.elementwise),
}


def uses_of(g: GraphNodes) -> list[Use]:
    """The uses of definitions, in the order of their first nodes. Nodes in none have no
    definition."""
    found: dict[int, Use] = {}
    # a norm takes the sum before it and the product behind it
    norms = [i for i, op in enumerate(g.nodes.op) if op in ("RMS_NORM", "NORM")]
    for node in [*norms, *range(len(g.nodes.op))]:
        matcher = _MATCHERS.get(g.nodes.op[node])
        if node in found or matcher is None or not g.nodes.exec[node]:
            continue
        use = matcher(g, node)
        if use is not None:
            found.update(dict.fromkeys(use.nodes, use))
    return sorted(dict.fromkeys(found.values()), key=lambda use: use.nodes[0])
