"""The stack of a stop, from the op outwards (op, block, layer, step), and its variables: scopes,
tensors, their rows and elements, page by page.

A reference is valid until the compute goes on, and is never reused. A tensor's values are read when
a client asks for what is in it. Rows are its outermost dimension in numpy's order, the tokens.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import takewhile
from typing import Annotated, Any, Literal, NamedTuple

import msgspec
import numpy as np

from llamacpp_instr.base.errors import UsageError
from llamacpp_instr.base.terminal import counted
from llamacpp_instr.debugger import tensors
from llamacpp_instr.debugger.changes import set_to
from llamacpp_instr.debugger.commands import Commands
from llamacpp_instr.debugger.graph import Node, Source, Ubatch
from llamacpp_instr.debugger.stop import PARTS, Stop
from llamacpp_instr.debugger.tensors import Array
from llamacpp_instr.model.types import TYPES

PAGE = 100  # elements in one group, for a client that does not ask page by page
MOST = 1 << 26  # values of a tensor that is read
MOST_AT_ONCE = 1 << 16  # variables in one answer
OP = 1  # the id of the innermost frame
_KEPT = 4  # tensors whose values are kept while a compute is stopped
_SHOWN = 4  # values in the line of a row
_N_FIGURES = 1 + len(tensors.COUNTS) + len(tensors.FIGURES)

Json = dict[str, Any]
Cells = Annotated[int, msgspec.Meta(ge=1, le=1024)]


class Frame(NamedTuple):
    """A frame: its first line in the listing, and the nodes that have run in it."""

    name: str
    line: int
    nodes: Sequence[Node]


def frames_of(stop: Stop) -> list[Frame]:
    """The frames of a stop, the innermost first; their ids count from `OP`. The op's frame is at
    the op's line; the others begin where the op's block, layer and graph begin."""
    at, line_of = stop.node, stop.graph.listing.line_of
    ran = [node for node in stop.graph.nodes[: at.index + 1] if node.runs]

    def frame(name: str, part: Callable[[Node], object]) -> Frame:
        nodes = list(takewhile(lambda node: part(node) == part(at), reversed(ran)))[::-1]
        return Frame(name, line_of[nodes[0].index], nodes)

    names = (
        f"{at.name} = {at.op}",
        at.block,
        f"layer {at.layer}" if at.layer >= 0 else "outside the layers",
        f"step {stop.step}: {counted(stop.n_tokens, 'token')}",
    )
    return list(map(frame, names, PARTS.values()))


@dataclass(frozen=True)
class Part:
    """What lies at `index` of the tensor at `address`; valid while the compute is stopped."""

    name: str
    address: int
    index: tuple[int, ...] = ()
    some: range | None = None
    """those of its rows, or elements, that are meant; None for all"""

    @property
    def shape(self) -> tuple[int, ...]:
        return tensors.shape_of(tensors.tensor_at(self.address))[len(self.index) :]

    @property
    def rows(self) -> range:
        return range(self.shape[0]) if self.some is None else self.some

    @property
    def type(self) -> str:
        """Such as `F32[5×256]`."""
        dims = "×".join(str(n) for n in self.shape)
        return TYPES[tensors.tensor_at(self.address).type].name + (f"[{dims}]" if dims else "")

    @property
    def has_figures(self) -> bool:
        return not self.index and self.some is None

    def at(self, *index: int) -> Part:
        """The part at `index` of this one."""
        return Part(self.name, self.address, (*self.index, *index))


Content = Part | tuple[Part, ...] | Callable[[], list[Json]]
"""what a reference stands for"""


class Variables:
    """The variables of one stop after the other; `stopped` returns it, or raises `UsageError`. A
    `paged` client asks for elements by page, others get groups of `PAGE`; `typed` ones, types."""

    def __init__(self, commands: Commands, stopped: Callable[[], Stop]) -> None:
        self.paged = self.typed = False
        self._commands, self._stopped = commands, stopped
        self.frames: list[Frame] = []
        self._begin = 1  # the first reference of this stop
        self._contents: list[Content] = []
        self._values = lru_cache(_KEPT)(tensors.read)

    def begin(self, stop: Stop | None) -> None:
        """From now on everything is about `stop`, and earlier references are invalid; None if the
        compute has gone on, and nothing can be asked."""
        self.frames = frames_of(stop) if stop is not None else []
        self._begin += len(self._contents)
        self._contents = []
        self.forget_values()

    def do_scopes(self, frame_id: int) -> Json:
        node, ubatch = self._stopped().node, self._stopped().ubatch
        if not OP <= frame_id < OP + len(self.frames):
            raise UsageError(f"there is no frame {frame_id}")
        if frame_id != OP:
            nodes = self.frames[frame_id - OP].nodes
            return {"scopes": [self._scope("Results", tuple(map(_whole, nodes)))]}
        named = {source.address: source for source in node.sources}.values()
        facts = {"purpose": node.purpose, **node.params}
        contents: dict[str, Content] = {
            "Result": _whole(node),
            "Sources": tuple(_whole(source) for source in named if source.kind != "weight"),
            "Weights": tuple(_whole(source) for source in named if source.kind == "weight"),
            "Op": lambda: [_plain(name, value) for name, value in facts.items()],
            "Tokens": lambda: self._tokens(ubatch),
        }
        parts = [self._scope(name, content) for name, content in contents.items() if content]
        return {"scopes": parts}

    def do_variables(
        self,
        variables_reference: int,
        filter: Literal["indexed", "named"] | None = None,
        start: int = 0,
        count: int = 0,
    ) -> Json:
        """What a reference stands for; of elements, `count` from `start` on, 0 for all."""
        content = self._content(variables_reference)
        found: list[Json] = []
        if isinstance(content, tuple):
            found = list(map(self._of_tensor, content))
        elif not isinstance(content, Part):
            found = content()
        else:
            if content.has_figures and filter != "indexed":
                found += self._figures(content)
            if filter != "named":
                found += self._indexed(content, max(start, 0), count)
        return {"variables": list(map(self.known, found))}

    def known(self, variable: Json, *without: str) -> Json:
        """The keys of a variable that the client takes."""
        if not self.typed:
            without += ("type",)
        return {key: value for key, value in variable.items() if key not in without}

    def do_setVariable(self, variables_reference: int, name: str, value: str) -> Json:
        """Sets an element, or all elements of a row or a tensor, to a number."""
        content = self._content(variables_reference)
        if isinstance(content, Part):
            match = re.fullmatch(r"\[(\d{1,18})\]", name)
            if not match or int(match[1]) not in content.rows:
                raise UsageError(f"{name[:60]!r} cannot be set; an element, such as [0], can")
            part = content.at(int(match[1]))
        else:
            named = content if isinstance(content, tuple) else ()
            found = [one for one in named if one.name == name and self._intact(one)]
            if not found:
                raise UsageError(f"{name[:60]!r} cannot be set: not a tensor in memory")
            part = found[-1]
        number = _number(value, self._read(part).dtype)
        self._commands.apply(self._stopped(), set_to(number), part.name, part.index, part.address)
        self.forget_values()
        return self.known(self._variable(part, ""), "name")

    def forget_values(self) -> None:
        """Read values again: some have changed, and other tensors may be views of those."""
        self._values.cache_clear()

    def named(self, expression: str) -> Json:
        """The tensor of a name, or a row or an element of it: `name[3][5]`. Raises `UsageError` if
        its values are not at hand, or it has no such element."""
        found = re.fullmatch(r"(.*?)((?:\[\d{1,9}\])*)", expression, re.DOTALL)
        assert found is not None
        name, index = found[1], tuple(map(int, re.findall(r"\d+", found[2])))
        tensor, values = self.values(name)
        sizes = zip(index, values.shape, strict=False)
        if len(index) > values.ndim or any(i >= size for i, size in sizes):
            raise UsageError(f"{expression[:60]!r} does not exist: {name} is {tensor.type}")
        return self._variable(tensor.at(*index), name)

    def values(self, name: str | None) -> tuple[Part, Array]:
        """The result of the op, or the tensor called `name`, and its values. Raises `UsageError`
        if they are not at hand."""
        tensor = Part(name or self._stopped().node.name, self._stopped().address(name))
        return tensor, self._read(tensor)

    def do_instr_tensor(
        self,
        name: str | None = None,
        slice: str = "",
        rows: Cells = 64,
        columns: Cells = 256,
        bins: Cells = 40,
    ) -> Json:
        """A request of our own, with which a client draws the result of the op, the tensor called
        `name`, or a `slice` of it, such as `[3, :8]`."""
        tensor, values = self.values(name)
        drawn = picture(values, slice, rows, columns, bins)
        return {"name": tensor.name, "type": tensor.type, **drawn}

    # --- what is shown ---

    def _scope(self, name: str, content: Content) -> Json:
        scope: Json = {"name": name, "expensive": name == "Weights"}
        if isinstance(content, Part):
            return scope | self._into(content)
        return scope | {"variablesReference": self._add(content)}

    def _intact(self, tensor: Part) -> bool:
        return self._stopped().graph.intact(tensor.address, self._stopped().node.index)

    def _of_tensor(self, tensor: Part) -> Json:
        if not self._intact(tensor):
            gone = f"{tensor.type}, gone: a later op uses its memory"
            return _plain(tensor.name, gone, tensor.type)
        variable = _plain(tensor.name, tensor.type, tensor.type) | self._into(tensor)
        return variable | _evaluated(self._name(tensor), ())

    def _name(self, tensor: Part) -> str:
        """What `named` knows the tensor by; empty if another one has the same name."""
        try:
            return tensor.name if self._stopped().address(tensor.name) == tensor.address else ""
        except UsageError:
            return ""

    def _tokens(self, ubatch: Ubatch) -> list[Json]:
        return [
            _plain(f"position {at}", f"{token} {self._commands.text(token)!r}", "token")
            for _, at, token in ubatch.numbered()
        ]

    def _figures(self, tensor: Part) -> list[Json]:
        hint = {"presentationHint": {"attributes": ["readOnly"]}}
        return [
            _plain(name, f"{value:.6g}" if kind == "float" else value, kind) | hint
            for name, value in tensors.figures_of(self._read(tensor)).items()
            for kind in [type(value).__name__]
        ]

    def _indexed(self, part: Part, start: int, count: int) -> list[Json]:
        rows = part.rows[start:]
        rows = rows[:count] if count > 0 else rows
        n = len(rows)
        if not self.paged and n > PAGE:
            step = PAGE
            while n > step * PAGE:
                step *= PAGE
            return [
                {"name": f"[{some[0]}…{some[-1]}]", "value": "", **self._into(group)}
                for some in (rows[at : at + step] for at in range(0, n, step))
                for group in [replace(part, some=some)]
            ]
        if n > MOST_AT_ONCE:
            raise UsageError(f"{n} variables at once; ask for at most {MOST_AT_ONCE}")
        name = self._name(part)
        return [self._variable(part.at(i), name) for i in rows]

    def _variable(self, part: Part, known_as: str) -> Json:
        """The variable of an element, or of a row or tensor, whose line has its first values."""
        index = part.index
        values = self._read(part)[index]
        name = f"[{index[-1]}]" if index else part.name
        first = ", ".join(str(value) for value in values.reshape(-1)[:_SHOWN])
        more = ", …" if values.size > _SHOWN else ""
        variable = _plain(name, f"{first}{more}", part.type)
        if np.ndim(values):
            variable |= self._into(part)
        return variable | _evaluated(known_as, index)

    def _into(self, part: Part) -> Json:
        """The reference to a part, and how much is in it."""
        into: Json = {"variablesReference": self._add(part)}
        if self.paged:
            into["namedVariables"] = _N_FIGURES if part.has_figures else 0
            into["indexedVariables"] = len(part.rows)
        return into

    # --- references and values ---

    def _add(self, content: Content) -> int:
        self._contents.append(content)
        return self._begin + len(self._contents) - 1

    def _content(self, reference: int) -> Content:
        self._stopped()
        at = reference - self._begin
        if not 0 <= at < len(self._contents):
            raise UsageError(f"variables {reference} do not belong to this stop")
        return self._contents[at]

    def _read(self, of: Part) -> Array:
        """The values of the whole tensor."""
        if (n := math.prod(tensors.shape_of(tensors.tensor_at(of.address)))) > MOST:
            raise UsageError(f"{of.name} has {n} values; at most {MOST} are shown")
        return self._values(of.address)


def _whole(tensor: Node | Source) -> Part:
    return Part(tensor.name, tensor.address)


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


def picture(values: Array, part: str, rows: int, columns: int, bins: int) -> Json:
    """Figures, histogram and heat map of a part of a tensor's values. `heatMap.cells` has a list
    for each row of cells; a cell is the value furthest from zero, null for NaN and infinity. Edges
    are numbers of rows and columns, or values. Raises `UsageError` for a wrong slice."""
    values = np.atleast_1d(values[tensors.parse_slice(part, values.shape)])
    counts, edges = tensors.histogram(values, bins)
    cells, down, across = (of.tolist() for of in tensors.heat_map(values, rows, columns))
    return {
        "shape": list(values.shape),
        "figures": tensors.figures_of(values),
        "histogram": {"edges": edges.tolist(), "counts": counts.tolist()},
        "heatMap": {"cells": cells, "rowEdges": down, "columnEdges": across},
    }
