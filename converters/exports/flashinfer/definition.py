"""What flashinfer-bench calls a definition: an op with its axes, tensors and a reference; and one
use of it by a graph.

The format is that of flashinfer-bench 0.1.2 (`flashinfer_bench.data.Definition`).
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

Axes = dict[str, int]
HALF = "f16"
"""the stored type that the format also has; the others are exported as float32"""


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
    """An op; nodes of a graph with the same definition differ in the variable axes only."""

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
    constraints: tuple[str, ...] = ()

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
        """The shape of an input or an output, () for a scalar."""
        names = (self.inputs | self.outputs)[tensor].shape or ()
        return tuple((self.fixed | axes)[name] for name in names)


class Catalog(dict[str, Definition]):
    """The definitions of one data set. If several have the same name, the first keeps it; the
    others get their variant at the end."""

    def add(self, definition: Definition) -> str:
        """The name under which the data set has the definition; its tags are united."""
        name = definition.name
        there = self.get(name)
        if there is not None and not _same(there, definition):
            name = f"{name}_{definition.variant}"
            there = self.get(name)
            assert there is None or _same(there, replace(definition, name=name)), name
        tags = definition.tags | (there.tags if there else frozenset())
        self[name] = replace(definition, name=name, tags=tags)
        return name


def _same(a: Definition, b: Definition) -> bool:
    return replace(a, tags=frozenset(), about="") == replace(b, tags=frozenset(), about="")


@dataclass(frozen=True, eq=False)
class Use:
    """Nodes of a graph that compute a definition."""

    definition: Definition
    axes: Axes
    nodes: tuple[int, ...]
    """the last has the output"""
    reads: dict[str, int]
    """the tensor of each input, named as the log names sources"""
    indices: dict[str, int] = field(default_factory=dict)
    """inputs whose integers are restricted: they lie below this, or count up if it is 0"""
    attention: bool = False
    """whether sizes and definition depend on the masks of a compute"""


def dtype_of(type_: str) -> str:
    """The format's type for a stored one."""
    return "float16" if type_ == HALF else "float32"


def type_tags(kind: str, type_: str) -> frozenset[str]:
    """`quantization:q4_k`, or `weights:f16` for floats that are not float32."""
    if type_ == "f32":
        return frozenset()
    floats = type_ in ("f16", "bf16")
    return frozenset({f"{kind if floats else 'quantization'}:{type_.lower()}"})
