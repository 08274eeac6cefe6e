"""Builds an ONNX graph from the nodes of a graph of llama.cpp, one after the other.

Values have four dimensions in numpy's order, but weights keep their own shape. Floats are computed
in float32. What is stored in another type (a cache in float16) is rounded to it when it is written.

Invariant: a read of a tensor that is written to (a cache) gives the state after the last write, in
the order in which the nodes run.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray
from onnx import NodeProto, TensorProto, ValueInfoProto, helper, numpy_helper

from llamacpp_instr.base.errors import UsageError
from llamacpp_instr.converters.exports.tensors import (
    Place,
    Slices,
    Tensors,
    find_slices,
    places,
)
from llamacpp_instr.log.schema import Graph

ELEMENTS = {
    "f32": TensorProto.FLOAT,
    "f16": TensorProto.FLOAT16,
    "i32": TensorProto.INT32,
    "i64": TensorProto.INT64,
}
"""of values that keep their type; all others are float32"""
MOST = 1 << 26
"""elements of a constant"""
CUSTOM = "ggml"
"""the domain of ops that no standard operators express"""


class Builder:
    """The graph so far."""

    def __init__(self, graph: Graph) -> None:
        if graph.nodes is None or graph.nodes.nb is None:
            raise UsageError("the log has no strides; record with --level verbose")
        self.tensors = Tensors(graph)
        self.nodes: list[NodeProto] = []
        self.inputs: dict[int, ValueInfoProto] = {}
        """leafs that are not weights"""
        self.constants: list[TensorProto] = []
        self.weights: dict[int, str] = {}
        """leafs that are weights, with the names of their values"""
        self._values: dict[int, str] = {}
        """the latest value of each tensor that has memory of its own"""
        self._names: set[str] = set()
        self._known: dict[tuple[bytes, str, tuple[int, ...]], str] = {}
        self._added: dict[tuple[Any, ...], list[str]] = {}
        self._prefix, self._n_before = "", 0
        self._meta: dict[str, str] = {}
        self.written: dict[int, str] = {}
        """leafs that were written to, with the names of their latest values"""

    def begin(self, prefix: str, meta: dict[str, str]) -> None:
        """Sets what the operators that are added from now on belong to."""
        self._prefix, self._meta, self._n_before = prefix, meta, len(self.nodes)

    # --- operators ---

    def add(self, operator: str, *inputs: str, domain: str = "", **attributes: Any) -> str:
        """Adds an operator with one output; returns the output's name."""
        return self.add_many(operator, inputs, 1, domain, **attributes)[0]

    def add_many(
        self,
        operator: str,
        inputs: Sequence[str],
        outputs: int,
        domain: str = "",
        **attributes: Any,
    ) -> list[str]:
        """Adds an operator with several outputs. The same operator on the same inputs is added
        once."""
        key = (operator, domain, tuple(inputs), outputs, repr(sorted(attributes.items())))
        if key not in self._added:
            names = [self.unique(f"{self._prefix}/{operator}") for _ in range(outputs)]
            node = helper.make_node(
                operator, list(inputs), names, name=names[0], domain=domain, **attributes
            )
            for name, value in self._meta.items():
                node.metadata_props.add(key=name, value=value)
            self.nodes.append(node)
            self._added[key] = names
        return self._added[key]

    def rename(self, value: str, name: str) -> str:
        """Renames a value if it is that of the operator that was added last; returns its name."""
        last = self.nodes[-1] if self.nodes else None
        if last is None or last.output[0] != value or self._n_before == len(self.nodes):
            return value
        new = self.unique(name)
        last.output[0] = last.name = new
        next(reversed(self._added.values()))[0] = new
        return new

    def unique(self, name: str) -> str:
        """The name, with a number if it is taken."""
        found, n = name, 1
        while found in self._names:
            n += 1
            found = f"{name}#{n}"
        self._names.add(found)
        return found

    def constant(self, values: Any, dtype: Any = np.float32) -> str:
        """A value that is part of the graph."""
        array: NDArray[Any] = np.asarray(values, dtype)
        key = (array.tobytes(), array.dtype.str, array.shape)
        if key not in self._known:
            self._known[key] = self.unique(f"constant {len(self._known)}")
            self.constants.append(numpy_helper.from_array(array, self._known[key]))
        return self._known[key]

    def filled(self, shape: Sequence[int], value: float) -> str:
        """A constant of one number. Raises `ValueError` for an impossible size."""
        if prod(shape) > MOST:
            raise ValueError
        return self.constant(np.full(shape, value))

    def ints(self, values: Sequence[int]) -> str:
        """A vector of int64."""
        return self.constant(values, np.int64)

    # --- tensors ---

    def read(self, tensor: int) -> str:
        """The value of a tensor as it is computed with: float32, int32 or int64. A weight has its
        own shape, everything else four dimensions."""
        base = self.tensors.place(tensor).base
        value = self.stored(tensor)
        return self.add("Cast", value, to=TensorProto.FLOAT) if self.is_half(base) else value

    def stored(self, tensor: int) -> str:
        """The value of a tensor in the type that it is stored in."""
        place = self.tensors.place(tensor)
        value = self._base(place.base)
        whole = self.tensors.shape(place.base)
        if tensor == place.base:
            return value
        steps = find_slices(prod(whole), place.offset, place.shape, place.strides)
        if steps is not None:
            return self._slices(value, steps, whole)
        flat = self.reshape(value, (prod(whole),))
        return self.add("Gather", flat, self._places(place), axis=0)

    def is_half(self, tensor: int) -> bool:
        """Whether a tensor is stored in float16."""
        return self.tensors.type(tensor) == "f16"

    def _slices(self, value: str, steps: Slices, whole: Sequence[int]) -> str:
        if steps.is_base:
            return value if steps.shape == whole else self.reshape(value, steps.shape)
        value = self.reshape(value, steps.reshape)
        if cut := steps.cut:
            value = self.add(
                "Slice", value, self.ints([steps.starts[a] for a in cut]),
                self.ints([steps.ends[a] for a in cut]), self.ints(cut),
            )  # fmt: skip
        if list(steps.transpose) != sorted(steps.transpose):
            value = self.add("Transpose", value, perm=steps.transpose)
        return self.reshape(value, steps.shape)

    def _places(self, place: Place) -> str:
        """The position of each element of a view, as a constant."""
        if prod(place.shape) > MOST:
            raise ValueError
        return self.constant(places(place.offset, place.shape, place.strides), np.int64)

    def reshape(self, value: str, shape: Sequence[int]) -> str:
        return self.add("Reshape", value, self.ints(shape))

    def as_stored(self, node: int, value: str) -> str:
        """A value in the type that a node is stored in; rows that are set already have it."""
        if not self.is_half(node) or self.tensors.nodes.op[node] == "SET_ROWS":
            return value
        return self.add("Cast", value, to=TensorProto.FLOAT16)

    def write(self, node: int, value: str) -> None:
        """Sets the stored value of a node: of its own memory, or of the tensor that it writes
        to."""
        to = self.tensors.written(node)
        if to is None:
            self._values[node] = value
            return
        place = self.tensors.place(to)
        whole = self.tensors.shape(place.base)
        steps = find_slices(prod(whole), place.offset, place.shape, place.strides)
        if steps is None or not steps.is_base:
            flat = self.reshape(self._base(place.base), (prod(whole),))
            index = self.reshape(self._places(place), (prod(place.shape),))
            value = self.reshape(value, (prod(place.shape),))
            value = self.add("ScatterElements", flat, index, value, axis=0)
        self._values[place.base] = self.reshape(value, whole)
        if place.base < 0:
            self.written[place.base] = self._values[place.base]

    def _base(self, base: int) -> str:
        if base not in self._values:
            name = self.unique(self.tensors.name(base))
            self._values[base] = name
            if self.tensors.is_weight(base):
                self.weights[base] = name
            else:
                self.inputs[base] = self.info(base, name)
        return self._values[base]

    def info(self, tensor: int, value: str) -> ValueInfoProto:
        """Type and shape of a value in the type that its tensor is stored in."""
        kind = ELEMENTS.get(self.tensors.type(tensor), TensorProto.FLOAT)
        return helper.make_tensor_value_info(value, kind, self.tensors.shape(tensor))
