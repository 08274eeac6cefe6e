"""Where the elements of each tensor of a graph lie: in which tensor with memory of its own, and
with which strides; and what a view selects, as steps that standard operators know.

A view names elements of a contiguous tensor by an offset and strides. Where each stride is a
multiple of the next, the base can be reshaped so that the view is a slice of each dimension. Any
other view is a list of positions.

Invariant: a tensor is named as a source is in the log: a node by its number, a leaf by -1 minus its
number. Shapes and strides have four dimensions in numpy's order, strides count elements.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, reduce
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llamacpp_instr.base.errors import UsageError
from llamacpp_instr.log.graph.ops import VIEW_OPS, op_params
from llamacpp_instr.log.schema import Graph
from llamacpp_instr.model.types import GgmlType, type_named

Int64 = NDArray[np.int64]
Four = tuple[int, int, int, int]
GATES = {
    "SWIGLU": "SILU", "GEGLU": "GELU", "REGLU": "RELU", "GEGLU_ERF": "GELU_ERF",
    "GEGLU_QUICK": "GELU_QUICK",
}  # fmt: skip
"""by ggml's name of a GLU: the function of its gate"""


@dataclass(frozen=True)
class Place:
    """A tensor as a part of another, which is contiguous."""

    base: int
    offset: int
    """in elements of the base"""
    shape: Four
    strides: tuple[int, ...]


class Tensors:
    """The tensors of one graph, which must have its nodes."""

    def __init__(self, graph: Graph) -> None:
        self.graph, self.nodes = graph, graph.whole

    @cached_property
    def readers(self) -> Counter[int]:
        """How many nodes read each tensor."""
        return Counter(source for sources in self.nodes.src for source in sources)

    def op(self, tensor: int) -> str:
        return self.nodes.op[tensor] if tensor >= 0 else ""

    def params(self, node: int) -> dict[str, Any]:
        """By name."""
        return op_params(self.nodes.op[node], self.nodes.params[node])

    def name(self, tensor: int) -> str:
        return self.nodes.name[tensor] if tensor >= 0 else self.graph.leaf(tensor).name

    def type(self, tensor: int) -> str:
        return self.nodes.type[tensor] if tensor >= 0 else self.graph.leaf(tensor).type

    def dims(self, tensor: int) -> list[int]:
        """As the log has them."""
        return self.nodes.ne[tensor] if tensor >= 0 else self.graph.leaf(tensor).ne

    def ne(self, tensor: int) -> Four:
        """In ggml's order: the length of a row first."""
        a, b, c, d = [*self.dims(tensor), 1, 1, 1, 1][:4]
        return a, b, c, d

    def shape(self, tensor: int) -> Four:
        """In numpy's order."""
        a, b, c, d = self.ne(tensor)
        return d, c, b, a

    def rows(self, tensor: int) -> int:
        return prod(self.ne(tensor)[1:])

    def is_weight(self, tensor: int) -> bool:
        return tensor < 0 and self.graph.leaf(tensor).tensor >= 0

    def viewed(self, tensor: int) -> int:
        """What a chain of views begins with."""
        while tensor >= 0 and self.nodes.op[tensor] in VIEW_OPS and self.nodes.src[tensor]:
            tensor = self.nodes.src[tensor][0]
        return tensor

    def shows_weight(self, tensor: int) -> bool:
        """Whether a tensor is a weight, or a view of one."""
        return self.is_weight(self.viewed(tensor))

    def _stored(self, tensor: int) -> GgmlType:
        if (found := type_named(self.type(tensor))) is None:
            raise UsageError(
                f"{self.name(tensor)} has the type {self.type(tensor)}, which is unknown"
            )
        return found

    def place(self, tensor: int) -> Place:
        """Where a tensor's elements lie: those of a node that writes to another tensor (CPY,
        SET_ROWS) lie in that one."""
        base, offset = self._base(tensor)
        type_ = self._stored(base)
        # a block of a quantized type has one stride, and its elements follow each other
        first, *others = self._bytes(tensor)
        steps = [n // type_.block_bytes * type_.block for n in reversed(others)]
        strides = (*steps, first // type_.block_bytes)
        start = offset // type_.block_bytes * type_.block
        return Place(base, start, self.shape(tensor), strides)

    def written(self, node: int) -> int | None:
        """The tensor that a node writes to; None if the node has memory of its own."""
        op, sources = self.nodes.op[node], self.nodes.src[node]
        if op == "CPY" and len(sources) > 1 and sources[1] != node:
            return sources[1]
        if op == "SET_ROWS":
            return sources[2]
        # ggml names the result of an op that works in place as a view
        if sources and self.nodes.name[node] == f"{self.name(sources[0])} (view)":
            return None if op in VIEW_OPS else sources[0]
        return None

    def _base(self, tensor: int) -> tuple[int, int]:
        """The contiguous tensor, and the offset in bytes."""
        offset = 0
        while tensor >= 0:
            to = self.written(tensor)
            if to is not None:
                tensor = to
            elif self.nodes.op[tensor] in VIEW_OPS and self.nodes.src[tensor]:
                if self.nodes.op[tensor] == "VIEW":
                    low, high = [*self.nodes.params[tensor], 0, 0][:2]
                    offset += (low & 0xFFFFFFFF) | (high << 32)
                tensor = self.nodes.src[tensor][0]
            else:
                break
        return tensor, offset

    def _bytes(self, tensor: int) -> list[int]:
        """Four strides in bytes, in ggml's order."""
        if tensor >= 0 and self.nodes.nb is not None:
            nb = list(self.nodes.nb[tensor])
        else:
            type_, ne = self._stored(tensor), self.dims(tensor)
            nb = [type_.block_bytes, type_.row_bytes(ne[0])]
            for n in ne[1:]:
                nb.append(nb[-1] * n)
        return [*nb, *[nb[-1]] * 4][:4]


@dataclass(frozen=True)
class Slices:
    """Reshape the base, slice each dimension, exchange dimensions, reshape."""

    reshape: tuple[int, ...]
    starts: tuple[int, ...]
    ends: tuple[int, ...]
    transpose: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def cut(self) -> list[int]:
        """The dimensions that lack elements."""
        bounds = zip(self.starts, self.ends, self.reshape, strict=True)
        return [axis for axis, (start, end, n) in enumerate(bounds) if (start, end) != (0, n)]

    @property
    def is_base(self) -> bool:
        """Whether every element is selected, in the base's order."""
        return not self.cut and list(self.transpose) == sorted(self.transpose)


def places(offset: int, shape: Sequence[int], strides: Sequence[int]) -> Int64:
    """The position of each element of a view in its flat base, an array of the view's shape."""
    steps = [np.arange(n) * stride for n, stride in zip(shape, strides, strict=True)]
    index: Int64 = reduce(np.add.outer, steps, np.int64(offset))
    return index


def find_slices(
    n_base: int, offset: int, shape: Sequence[int], strides: Sequence[int]
) -> Slices | None:
    """The steps from a contiguous base of `n_base` elements to a view of it, None if only a list of
    positions selects it."""
    axes = [axis for axis, n in enumerate(shape) if n > 1]
    axes.sort(key=lambda axis: -strides[axis])
    if any(strides[axis] < 1 for axis in axes) or 0 in shape:
        return None
    reshape, starts, ends = [], [], []
    whole, rest = n_base, offset
    # the last is what is left of the base below the smallest stride
    for n, step in [*((shape[axis], strides[axis]) for axis in axes), (1, 1)]:
        if whole % step:
            return None
        start, rest = divmod(rest, step)
        reshape.append(whole // step)
        starts.append(start)
        ends.append(start + n)
        whole = step
    if any(end > n for end, n in zip(ends, reshape, strict=True)):
        return None
    order = [axes.index(axis) for axis in sorted(axes)]
    return Slices(tuple(reshape), tuple(starts), tuple(ends), (*order, len(axes)), tuple(shape))
