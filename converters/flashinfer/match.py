"""Finds the definitions that the nodes of a graph use.

Invariant: a node belongs to one use at most.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress

from converters.flashinfer import simple
from converters.flashinfer.attention import attention
from converters.flashinfer.use import GraphNodes, Use

_Matcher = Callable[[GraphNodes, int], Use | None]
_MATCHERS: dict[str, tuple[_Matcher, int]] = {
    "MUL_MAT": (simple.gemm, 2),
    "MUL_MAT_ID": (simple.experts, 3),
    "RMS_NORM": (simple.norm, 1),
    "NORM": (simple.norm, 1),
    "GET_ROWS": (simple.rows, 2),
    "ROPE": (simple.rope, 2),
    "GLU": (simple.activation, 1),
    "UNARY": (simple.activation, 1),
    "SOFT_MAX": (simple.softmax, 1),
    "ARGSORT": (simple.topk, 1),
    "TOP_K": (simple.topk, 1),
    "FLASH_ATTN_EXT": (attention, 3),
    **dict.fromkeys(("ADD", "SUB", "MUL", "DIV"), (simple.elementwise, 2)),
}
"""by op: what describes a node, and how many sources it has at least"""


def uses_of(g: GraphNodes) -> list[Use]:
    """The uses of definitions, in the order of their first nodes. Nodes in none have no
    definition."""
    found: dict[int, Use] = {}
    # a norm takes the sum before it and the product behind it
    norms = [i for i, op in enumerate(g.nodes.op) if op in ("RMS_NORM", "NORM")]
    for node in [*norms, *range(len(g.nodes.op))]:
        matcher, least = _MATCHERS.get(g.nodes.op[node], (None, 0))
        if node in found or matcher is None or not g.nodes.exec[node]:
            continue
        if len(g.nodes.src[node]) < least:
            continue
        with suppress(ArithmeticError, ValueError):  # impossible sizes and parameters
            use = matcher(g, node)
            if use is not None:
                found.update(dict.fromkeys(use.nodes, use))
    return sorted(dict.fromkeys(found.values()), key=lambda use: use.nodes[0])
