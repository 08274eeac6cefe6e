"""What flashinfer-bench calls a definition: an op with its axes, tensors and a reference.

The format is that of flashinfer-bench 0.1.2 (`flashinfer_bench.data.Definition`).
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

Axes = dict[str, int]


@dataclass(frozen=True)
class Tensor:
    """An input or an output."""

    shape: tuple[str, ...] | None
    """names of axes; None for a scalar"""
    dtype: str = "float32"
    about: str = ""

    def as_json(self) -> dict[str, Any]:
        shape = None if self.shape is None else list(self.shape)
        about = {"description": self.about} if self.about else {}
        return {"shape": shape, "dtype": self.dtype, **about}


@dataclass(frozen=True)
class Definition:
    """An op; two nodes of a graph that have the same one differ in the variable axes only."""

    name: str
    op_type: str
    about: str
    fixed: dict[str, int]
    """axes with a value"""
    variable: tuple[str, ...]
    """axes whose values a workload has"""
    inputs: dict[str, Tensor]
    outputs: dict[str, Tensor]
    reference: str
    """Python source with a function `run`"""
    variant: str = ""
    """what the name does not include, for a second definition of the same name"""
    tags: frozenset[str] = frozenset()
    constraints: tuple[str, ...] = field(default=())

    def as_json(self) -> dict[str, Any]:
        """The content of its file."""
        axes: dict[str, Any] = {name: {"type": "var"} for name in self.variable}
        axes |= {name: {"type": "const", "value": n} for name, n in self.fixed.items()}
        return {
            "name": self.name,
            "op_type": self.op_type,
            "description": self.about,
            "tags": sorted(self.tags),
            "axes": axes,
            "constraints": list(self.constraints),
            "inputs": {name: of.as_json() for name, of in self.inputs.items()},
            "outputs": {name: of.as_json() for name, of in self.outputs.items()},
            "reference": self.reference,
        }

    def shape(self, tensor: str, axes: Axes) -> tuple[int, ...]:
        """The shape of an input or an output, () of a scalar."""
        names = (self.inputs | self.outputs)[tensor].shape or ()
        return tuple((self.fixed | axes)[name] for name in names)


class Catalog:
    """The definitions of one data set. Of several with one name, the first keeps it; the others
    get their variant at the end."""

    def __init__(self) -> None:
        self._by_name: dict[str, Definition] = {}

    def add(self, definition: Definition) -> str:
        """The name under which the data set has the definition; its tags are united."""
        name = definition.name
        there = self._by_name.get(name)
        if there is not None and not _same(there, definition):
            name = f"{name}_{definition.variant}"
            there = self._by_name.get(name)
            assert there is None or _same(there, replace(definition, name=name)), name
        tags = definition.tags | (there.tags if there else frozenset())
        self._by_name[name] = replace(definition, name=name, tags=tags)
        return name

    def __getitem__(self, name: str) -> Definition:
        return self._by_name[name]

    def __iter__(self) -> Any:
        return iter(self._by_name.values())

    def __len__(self) -> int:
        return len(self._by_name)


def _same(a: Definition, b: Definition) -> bool:
    return replace(a, tags=frozenset(), about="") == replace(b, tags=frozenset(), about="")
