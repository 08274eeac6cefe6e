"""The tensors of a graph: its nodes, and the leafs that nodes read."""

from __future__ import annotations

from math import prod
from typing import NamedTuple

from llamacpp_instr.log.schema import Graph
from llamacpp_instr.model.types import type_named


class Tensor(NamedTuple):
    """A node or a leaf."""

    name: str
    type: str
    ne: list[int]
    bytes: int
    """of its elements; a log has the span of a view, with what lies between its elements"""


def tensor(graph: Graph, number: int) -> Tensor:
    """A node, or leaf -1 - `number`; the graph must have its nodes."""
    if number < 0:
        leaf = graph.leaf(number)
        return Tensor(leaf.name, leaf.type, leaf.ne, _bytes(leaf.type, leaf.ne, leaf.bytes))
    nodes = graph.whole
    type_, ne = nodes.type[number], nodes.ne[number]
    return Tensor(nodes.name[number], type_, ne, _bytes(type_, ne, nodes.bytes[number]))


def _bytes(type_: str, ne: list[int], span: int) -> int:
    """Elements may also overlap, and then the span is what there is."""
    known = type_named(type_)
    return span if known is None else min(span, prod(ne) * known.block_bytes // known.block)
