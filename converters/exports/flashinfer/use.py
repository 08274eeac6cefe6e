"""One use of a definition by a graph, and the nodes of a graph as its readers need them."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from functools import cached_property
from math import prod
from typing import Any

from llamacpp_instr.converters.exports.flashinfer.definition import Axes, Definition
from llamacpp_instr.log.graph.ops import VIEW_OPS, op_params
from llamacpp_instr.log.schema import Graph

HALF = "f16"
"""the stored type that the format has, too; the others are exported as float32"""


@dataclass(frozen=True)
class Indices:
    """Integers of an input that cannot be any: they lie below a bound, or count up."""

    below: int
    """0 for those that count from 0"""


@dataclass(frozen=True, eq=False)
class Use:
    """Nodes of a graph that compute a definition."""

    definition: Definition
    axes: Axes
    nodes: tuple[int, ...]
    """the last has the output"""
    reads: dict[str, int]
    """the tensor of each input, named as the log names sources"""
    indices: dict[str, Indices] = field(default_factory=dict)
    attention: bool = False
    """whether sizes and definition depend on the masks of a compute"""


class GraphNodes:
    """The nodes of a graph, and what reads them. A tensor is a node's number, or -1 minus that of a
    leaf."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.nodes = graph.whole

    @cached_property
    def readers(self) -> Counter[int]:
        """How many nodes read each node."""
        return Counter(source for sources in self.nodes.src for source in sources)

    def op(self, tensor: int) -> str:
        return self.nodes.op[tensor] if tensor >= 0 else ""

    def type(self, tensor: int) -> str:
        return self.nodes.type[tensor] if tensor >= 0 else self.graph.leaf(tensor).type

    def ne(self, tensor: int) -> tuple[int, int, int, int]:
        """In ggml's order: the length of a row first."""
        of = self.nodes.ne[tensor] if tensor >= 0 else self.graph.leaf(tensor).ne
        a, b, c, d = [*of, 1, 1, 1, 1][:4]
        return a, b, c, d

    def rows(self, tensor: int) -> int:
        return prod(self.ne(tensor)[1:])

    def params(self, node: int) -> dict[str, Any]:
        return op_params(self.nodes.op[node], self.nodes.params[node])

    def is_weight(self, tensor: int) -> bool:
        """Also through views of one."""
        base = self.base(tensor)
        return base < 0 and self.graph.leaf(base).tensor >= 0

    def base(self, tensor: int) -> int:
        """What a chain of views begins with."""
        while tensor >= 0 and self.nodes.op[tensor] in VIEW_OPS and self.nodes.src[tensor]:
            tensor = self.nodes.src[tensor][0]
        return tensor

    def name(self, tensor: int) -> str:
        return self.nodes.name[tensor] if tensor >= 0 else self.graph.leaf(tensor).name


def dtype_of(type_: str) -> str:
    """The format's type for a stored one."""
    return "float16" if type_ == HALF else "float32"


def type_tags(kind: str, type_: str) -> frozenset[str]:
    """`quantization:q4_k`, or `weights:f16` for floats that are not float32."""
    if type_ == "f32":
        return frozenset()
    floats = type_ in ("f16", "bf16")
    return frozenset({f"{kind if floats else 'quantization'}:{type_.lower()}"})
