"""The variables of a stop: scopes, tensors, their rows and elements, page by page.

A reference is valid until the compute goes on, and is never used again. A tensor's values are read
when a client first asks for what is in it. Rows are the tensor's outermost dimension in numpy's
order, tokens first.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields, replace
from functools import partial
from typing import Annotated, Any, Literal

import msgspec
import numpy as np

from llamacpp_instr.base.errors import UsageError
from llamacpp_instr.debugger.changes import Edit, set_to
from llamacpp_instr.debugger.dap.sources import OP, Frame
from llamacpp_instr.debugger.figures import (
    Figures,
    Slice,
    figures_of,
    heat_map,
    histogram,
    parse_slice,
)
from llamacpp_instr.debugger.ggml import tensor_at
from llamacpp_instr.debugger.graph import Node, Source, Ubatch
from llamacpp_instr.debugger.stop import Stop
from llamacpp_instr.debugger.tensors import Array, read, shape_of
from llamacpp_instr.model.types import TYPES

PAGE = 100
"""elements in one group, for a client that does not ask page by page"""
MOST = 1 << 26
"""values of a tensor that is read"""
MOST_AT_ONCE = 1 << 16
"""variables in one answer"""
_KEPT = 4  # tensors whose values are kept while a compute is stopped
_SHOWN = 4  # values in the line of a row

Json = dict[str, Any]
Change = Callable[[Stop, Edit, str, Slice, int], None]
"""changes a part of the tensor with a name and an address, and says so in the log"""


class VariablesArguments(msgspec.Struct, rename="camel"):
    variables_reference: int
    filter: Literal["indexed", "named"] | None = None
    start: int = 0
    count: int = 0
    """0 for all"""


class SetVariableArguments(msgspec.Struct, rename="camel"):
    variables_reference: int
    name: str
    value: str


Cells = Annotated[int, msgspec.Meta(ge=1, le=1024)]


class TensorArguments(msgspec.Struct, rename="camel"):
    """Of `instr/tensor`, our one request beside the protocol's, with which a client draws the
    result of the op, or the tensor called `name`; of it a `slice` as `[3, :8]`."""

    name: str | None = None
    slice: str = ""
    rows: Cells = 64
    columns: Cells = 256
    bins: Cells = 40


@dataclass(frozen=True)
class Tensor:
    """A tensor by its address, which is valid while the compute is stopped."""

    name: str
    address: int

    @property
    def shape(self) -> tuple[int, ...]:
        return shape_of(tensor_at(self.address))

    @property
    def type(self) -> str:
        return self.type_at(())

    def type_at(self, index: tuple[int, ...]) -> str:
        """Of an element, or of what is at `index`, as `F32[5×256]`."""
        dims = "×".join(str(n) for n in self.shape[len(index) :])
        return TYPES[tensor_at(self.address).type].name + (f"[{dims}]" if dims else "")


@dataclass(frozen=True)
class Part:
    """The rows, or elements, from `begin` to `end` of what lies at `index` of a tensor."""

    tensor: Tensor
    index: tuple[int, ...]
    begin: int
    end: int

    @property
    def has_figures(self) -> bool:
        return not self.index and (self.begin, self.end) == (0, self.tensor.shape[0])


Content = Part | tuple[Tensor, ...] | Callable[[], list[Json]]
"""what a reference stands for"""


class Variables:
    """The variables of one stop after the other. `paged` clients ask for elements by page; others
    get more than `PAGE` of them in groups."""

    def __init__(self, change: Change, text: Callable[[int], str]) -> None:
        """`text` returns the text of a token."""
        self.paged = False
        self._change, self._text = change, text
        self._stop: Stop | None = None
        self._begin = 1  # the first reference of this stop
        self._contents: list[Content] = []
        self._values: dict[int, Array] = {}

    def stopped(self, stop: Stop | None) -> None:
        """From now on everything is about `stop`, and earlier references are wrong; None if the
        compute has gone on, and nothing can be asked."""
        self._stop = stop
        self._begin += len(self._contents)
        self._contents, self._values = [], {}

    def scopes(self, stop: Stop, frame: Frame) -> list[Json]:
        """`Scope`s of a frame."""
        [*_, node] = frame.nodes
        if frame.id != OP:
            return [self._scope("Results", tuple(_tensor(one) for one in frame.nodes))]
        named = {source.address: source for source in node.sources}.values()
        weights = tuple(_tensor(source) for source in named if source.kind == "weight")
        others = tuple(_tensor(source) for source in named if source.kind != "weight")
        scopes = [{"name": "Result", "expensive": False, **self._into(whole(_tensor(node)))}]
        for name, tensors in (("Sources", others), ("Weights", weights)):
            if tensors:
                scopes.append(self._scope(name, tensors))
        facts = {"purpose": node.purpose, **node.params}
        scopes.append(self._scope("Op", lambda: [_plain(k, v) for k, v in facts.items()]))
        scopes.append(self._scope("Tokens", partial(self._tokens, stop.ubatch)))
        return scopes

    def children(self, wanted: VariablesArguments) -> list[Json]:
        """`Variable`s in what a reference stands for. Raises `UsageError` for a reference that is
        not valid, and for values that cannot be read."""
        content = self._content(wanted.variables_reference)
        if not isinstance(content, Part):
            return list(map(self._of_tensor, content)) if isinstance(content, tuple) else content()
        found: list[Json] = []
        if content.has_figures and wanted.filter != "indexed":
            found += self._figures(content.tensor)
        if wanted.filter != "named":
            found += self._indexed(content, max(wanted.start, 0), wanted.count)
        return found

    def set(self, wanted: SetVariableArguments) -> Json:
        """Set an element, or all elements of a row or a tensor, to a number; returns the variable
        as it is then. Raises `UsageError`."""
        content = self._content(wanted.variables_reference)
        if isinstance(content, Part):
            match = re.fullmatch(r"\[(\d{1,18})\]", wanted.name)
            if not match or not content.begin <= int(match[1]) < content.end:
                raise UsageError(f"{wanted.name[:60]!r} cannot be set; an element, as [0], can")
            tensor, index = content.tensor, (*content.index, int(match[1]))
        else:
            named = content if isinstance(content, tuple) else ()
            found = [one for one in named if one.name == wanted.name and self._intact(one)]
            if not found:
                raise UsageError(f"{wanted.name[:60]!r} cannot be set: not a tensor in memory")
            tensor, index = found[-1], ()
        number = _number(wanted.value, self._read(tensor).dtype)
        self._change(self._now, set_to(number), tensor.name, index, tensor.address)
        self.forget_values()
        return self._at(tensor, index, "")

    def forget_values(self) -> None:
        """Read values again: some have changed, and other tensors may be views of those."""
        self._values = {}

    def named(self, expression: str) -> Json:
        """The tensor of a name, or a row or an element of it, as `name[3][5]`. Raises `UsageError`
        if its values are not at hand, or it has no such element."""
        found = re.fullmatch(r"(.*?)((?:\[\d{1,9}\])*)", expression, re.DOTALL)
        assert found is not None
        name, index = found[1], tuple(map(int, re.findall(r"\d+", found[2])))
        tensor, values = self.values(name)
        sizes = zip(index, values.shape, strict=False)
        if len(index) > values.ndim or any(i >= size for i, size in sizes):
            raise UsageError(f"{expression[:60]!r} is not in it: {name} is {tensor.type}")
        return self._at(tensor, index, name)

    def values(self, name: str | None) -> tuple[Tensor, Array]:
        """The result of the op, or the tensor called `name`, and its values. Raises `UsageError`
        if they are not at hand."""
        stop = self._now
        tensor = Tensor(name or stop.node.name, stop.address(name))
        return tensor, self._read(tensor)

    # --- what is shown ---

    def _scope(self, name: str, content: Content) -> Json:
        expensive = name == "Weights"
        return {"name": name, "expensive": expensive, "variablesReference": self._add(content)}

    @property
    def _now(self) -> Stop:
        assert self._stop is not None
        return self._stop

    def _intact(self, tensor: Tensor) -> bool:
        return self._now.graph.intact(tensor.address, self._now.node.index)

    def _of_tensor(self, tensor: Tensor) -> Json:
        if not self._intact(tensor):
            gone = f"{tensor.type}, gone: a later op uses its memory"
            return _plain(tensor.name, gone, tensor.type)
        variable = _plain(tensor.name, tensor.type, tensor.type) | self._into(whole(tensor))
        return variable | _evaluated(self._name(tensor), ())

    def _name(self, tensor: Tensor) -> str:
        """What `named` knows the tensor by; empty if its name is that of another one, too."""
        try:
            return tensor.name if self._now.address(tensor.name) == tensor.address else ""
        except UsageError:
            return ""

    def _tokens(self, ubatch: Ubatch) -> list[Json]:
        if ubatch.tokens is None:
            return []
        positions = range(ubatch.n_tokens) if ubatch.positions is None else ubatch.positions
        return [
            _plain(f"position {at}", f"{token} {self._text(int(token))!r}", "token")
            for at, token in zip(positions, ubatch.tokens, strict=True)
        ]

    def _figures(self, tensor: Tensor) -> list[Json]:
        hint = {"presentationHint": {"attributes": ["readOnly"]}}
        return [
            _plain(name, f"{value:.6g}" if kind == "float" else value, kind) | hint
            for name, value in asdict(figures_of(self._read(tensor))).items()
            for kind in [type(value).__name__]
        ]

    def _indexed(self, part: Part, start: int, count: int) -> list[Json]:
        begin = min(part.begin + start, part.end)
        end = min(begin + count, part.end) if count > 0 else part.end
        if not self.paged and end - begin > PAGE:
            step = PAGE
            while (end - begin) > step * PAGE:
                step *= PAGE
            groups = [(at, min(at + step, end)) for at in range(begin, end, step)]
            return [
                {
                    "name": f"[{at}…{to - 1}]", "value": "",
                    **self._into(replace(part, begin=at, end=to)),
                }
                for at, to in groups
            ]  # fmt: skip
        if end - begin > MOST_AT_ONCE:
            raise UsageError(f"{end - begin} variables at once; ask for at most {MOST_AT_ONCE}")
        name = self._name(part.tensor)
        return [self._at(part.tensor, (*part.index, i), name) for i in range(begin, end)]

    def _at(self, tensor: Tensor, index: tuple[int, ...], known_as: str) -> Json:
        """The variable of an element, or of a row or tensor, whose line has its first values."""
        values = self._read(tensor)[index]
        name = f"[{index[-1]}]" if index else tensor.name
        first = ", ".join(str(value) for value in values.reshape(-1)[:_SHOWN])
        more = ", …" if values.size > _SHOWN else ""
        variable = _plain(name, f"{first}{more}", tensor.type_at(index))
        if np.ndim(values):
            variable |= self._into(Part(tensor, index, 0, values.shape[0]))
        return variable | _evaluated(known_as, index)

    def _into(self, part: Part) -> Json:
        """The reference to a part, and how much is in it."""
        into: Json = {"variablesReference": self._add(part)}
        if self.paged:
            into["namedVariables"] = len(fields(Figures)) if part.has_figures else 0
            into["indexedVariables"] = part.end - part.begin
        return into

    # --- references and values ---

    def _add(self, content: Content) -> int:
        self._contents.append(content)
        return self._begin + len(self._contents) - 1

    def _content(self, reference: int) -> Content:
        at = reference - self._begin
        if not 0 <= at < len(self._contents):
            raise UsageError(f"variables {reference} are not those of this stop")
        return self._contents[at]

    def _read(self, tensor: Tensor) -> Array:
        if (known := self._values.get(tensor.address)) is not None:
            return known
        if (n := math.prod(tensor.shape)) > MOST:
            raise UsageError(f"{tensor.name} has {n} values; at most {MOST} are shown")
        while len(self._values) >= _KEPT:
            del self._values[next(iter(self._values))]
        self._values[tensor.address] = values = read(tensor.address)
        return values


def _tensor(of: Node | Source) -> Tensor:
    return Tensor(of.name, of.address)


def whole(tensor: Tensor) -> Part:
    """All rows of a tensor."""
    return Part(tensor, (), 0, tensor.shape[0])


def _number(text: str, of: np.dtype[Any]) -> float:
    """The number in a text. Raises `UsageError` if it is none, or does not fit."""
    try:
        if of.kind == "f":
            return float(text)
        return int(of.type(int(text)))
    except (ValueError, OverflowError):
        kind = "a number" if of.kind == "f" else f"a whole number that fits into {of}"
        raise UsageError(f"{text[:60]!r} is not {kind}") from None


def _evaluated(name: str, index: tuple[int, ...]) -> Json:
    """The expression that gives a part of the tensor called `name`, if it has one."""
    return {"evaluateName": name + "".join(f"[{i}]" for i in index)} if name else {}


def _plain(name: str, value: object, type_: str = "") -> Json:
    variable = {"name": name, "value": str(value), "type": type_ or type(value).__name__}
    return {**variable, "variablesReference": 0}


def picture(wanted: TensorArguments, values: Array) -> dict[str, Any]:
    """Figures, histogram and heat map of the part of a tensor's `values` that the client wants.

    `heatMap.cells` has a list for each row of cells; a cell is the value furthest from zero, null
    for NaN and infinity. Edges are numbers of rows and columns of the matrix, or values. Raises
    `UsageError` for a wrong slice.
    """
    part = np.atleast_1d(values[parse_slice(wanted.slice, values.shape)])
    counted, seen = histogram(part, wanted.bins), heat_map(part, wanted.rows, wanted.columns)
    return {
        "shape": list(part.shape),
        "figures": asdict(figures_of(part)),
        "histogram": {"edges": counted.edges.tolist(), "counts": counted.counts.tolist()},
        "heatMap": {
            "cells": seen.cells.tolist(),
            "rowEdges": seen.row_edges.tolist(),
            "columnEdges": seen.column_edges.tolist(),
        },
    }
