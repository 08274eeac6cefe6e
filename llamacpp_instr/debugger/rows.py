"""Which tokens the rows of a node stand for, derived from how the graph computes it.

Invariant: an op whose result is not understood here has no rows, never guessed ones. A shape alone
is ambiguous: with four tokens and four heads it looks the same both ways.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Literal, NamedTuple

from llamacpp_instr.base.errors import UsageError
from llamacpp_instr.debugger.ggml import Tensor, tensor_at
from llamacpp_instr.debugger.graph import LiveGraph, Node, Ubatch
from llamacpp_instr.debugger.stop import Stop
from llamacpp_instr.debugger.tensors import Array


class Rows(NamedTuple):
    """A node has a row for each of these, along dimension `axis` in ggml's order."""

    axis: int
    of: Literal["tokens", "outputs"]
    """all tokens of the ubatch, or those whose logits are wanted"""


def rows_of_nodes(graph: LiveGraph) -> list[Rows | None]:
    """Of every node of a graph; None of a node whose dimensions are not tokens or not known."""
    found: list[Rows | None] = []
    for node in graph.nodes:
        rows = _rows(node, found)
        ne = node.ne
        same = rows is not None and _count(rows, graph, found) in (None, ne[rows.axis])
        found.append(rows if same else None)
    return found


def by_token(stop: Stop, rows: Rows) -> Array:
    """(rows, values of a row) of the node, whatever its dimensions are. Raises `UsageError` if the
    rows are not its outermost dimension."""
    ne = stop.node.ne
    if prod(ne[rows.axis + 1 :]) != 1:
        raise UsageError("its rows are not tokens")
    return stop.values().reshape(ne[rows.axis], prod(ne[: rows.axis]))


def token_numbers(rows: Rows, ubatch: Ubatch) -> list[int]:
    """For each row the number of its token in the ubatch."""
    if rows.of == "tokens" or ubatch.outputs is None:
        return list(range(ubatch.n_tokens))
    return [int(number) for number in ubatch.outputs]


def _count(rows: Rows, graph: LiveGraph, found: Sequence[Rows | None]) -> int | None:
    """How many rows the first node has that has such rows; None if this is the first."""
    for node, known in zip(graph.nodes, found, strict=False):
        if known is not None and known.of == rows.of:
            return node.ne[known.axis]
    return None


_COPIES = frozenset({"CPY", "CONT", "DUP", "RESHAPE"})
"""ops that keep the values and their order, and may take the dimensions apart in another way"""
_SAME = frozenset(
    {
        "ADD", "SUB", "MUL", "DIV", "ADD1", "ADD_ID", "SCALE", "SQR", "SQRT", "LOG", "SIN", "COS",
        "CLAMP", "UNARY", "GLU", "NORM", "RMS_NORM", "L2_NORM", "SOFT_MAX", "ROPE", "ARGSORT",
        "TOP_K", "SUM_ROWS", "MEAN",
    }
)  # fmt: skip
"""ops that compute each row by itself, and keep its place"""


def _rows(node: Node, found: Sequence[Rows | None]) -> Rows | None:
    known = [found[source.node] if source.node >= 0 else None for source in node.sources]
    ne = node.ne
    leafs = [source.name for source in node.sources if source.node < 0]
    if node.op == "GET_ROWS" and len(known) > 1:
        if "out_ids" in leafs:
            return Rows(1, "outputs") if known[0] else None
        return Rows(1, "tokens") if "inp_tokens" in leafs else None
    if node.op == "MUL_MAT" and len(known) > 1:
        return known[1] if known[1] and known[1].axis > 0 else None
    if node.op == "MUL_MAT_ID" and len(known) > 1:
        return known[1] and Rows(2, known[1].of)
    if node.op == "FLASH_ATTN_EXT":
        return known[0] and Rows(2, known[0].of) if ne[3] == 1 else None
    if not known:
        return None
    at = next((i for i, rows in enumerate(known) if rows), None)
    if at is None:
        return None
    rows = known[at]
    assert rows is not None
    source = tensor_at(node.sources[at].address)
    if node.op == "PERMUTE":
        return Rows(tensor_at(node.address).op_params[rows.axis], rows.of)
    if node.op == "TRANSPOSE":
        return Rows((1, 0, 2, 3)[rows.axis], rows.of)
    if node.op == "VIEW":
        return _of_view(rows, source, tensor_at(node.address))
    if node.op == "CONCAT":
        return rows if node.params.get("dim") != rows.axis else None
    if node.op in _COPIES:
        return _reshaped(rows, list(source.ne), ne)
    if node.op in _SAME and source.ne[rows.axis] == ne[rows.axis]:
        return rows
    return None


def _of_view(rows: Rows, source: Tensor, view: Tensor) -> Rows | None:
    """The dimension of a view that steps from row to row of its source, through all of them."""
    n, step = source.ne[rows.axis], source.nb[rows.axis]
    for axis in range(4):
        inner = prod(view.ne[:axis])
        if (
            view.ne[axis] == n
            and view.nb[axis] == step
            and (n > 1 or inner > 1 or axis == rows.axis)
        ):
            return Rows(axis, rows.of)
    return None


def _reshaped(rows: Rows, before: Sequence[int], after: Sequence[int]) -> Rows | None:
    """The dimension after a reshape: what is inside it and its length are the same."""
    if list(before) == list(after):
        return rows
    inner, n = prod(before[: rows.axis]), before[rows.axis]
    for axis in range(4):
        if prod(after[:axis]) == inner and after[axis] == n and (axis > 0 or rows.axis == 0):
            return Rows(axis, rows.of)
    return None
