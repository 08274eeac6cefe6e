"""Whether two models can be compared node by node: the first difference that forbids it."""

from __future__ import annotations

from collections.abc import Sequence

from llamacpp_instr.base.errors import UsageError
from llamacpp_instr.base.terminal import first_names
from llamacpp_instr.lab.quality.logits import OutputOptions, check_comparison
from llamacpp_instr.model.file import ModelFile

_FREE = ("context_length", "vocab_size")
"""hyper-parameters that change no node of a graph; the vocabulary is compared token by token"""


def check_pair(a: ModelFile, b: ModelFile, options: OutputOptions) -> list[str]:
    """Raise `UsageError` with the first difference in the architecture, a hyper-parameter, the
    shape of a weight, or the vocabulary. Returns sentences about what only one of them has, which
    forbids nothing."""
    arch = a.architecture
    if arch != b.architecture:
        raise UsageError(
            f"{a.path} and {b.path} have different architectures: {arch} and {b.architecture}"
        )
    one, other = (
        {k: v for k, v in of.metadata.items() if k.startswith(f"{arch}.")} for of in (a, b)
    )
    for key in one:
        if key in other and one[key] != other[key] and key.removeprefix(f"{arch}.") not in _FREE:
            raise UsageError(
                f"{a.path} and {b.path} have different hyper-parameters: {key} is {one[key]} and"
                f" {other[key]}"
            )
    for weight in a.weights:
        twin = b.by_name.get(weight.name)
        if twin is not None and twin.ne != weight.ne:
            raise UsageError(
                f"{a.path} and {b.path} have different shapes: {weight.name} is"
                f" {_dims(weight.ne)} and {_dims(twin.ne)}"
            )
    check_comparison([a, b], options)
    return [
        f"Only {name} has the {what} {first_names(few)}."
        for name, what, few in (
            ("A", "hyper-parameter", sorted(one.keys() - other.keys())),
            ("B", "hyper-parameter", sorted(other.keys() - one.keys())),
            ("A", "weight", [w.name for w in a.weights if w.name not in b.by_name]),
            ("B", "weight", [w.name for w in b.weights if w.name not in a.by_name]),
        )
        if few
    ]


def _dims(ne: Sequence[int]) -> str:
    return " × ".join(str(n) for n in ne)
