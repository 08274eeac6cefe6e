"""A model with the chosen types: the quantizer's options, and the two files that say how to make it
again.

`NAME.types.txt` is what `llama-quantize --tensor-type-file` reads. `NAME.json` also has the file
type and the importance matrix, so it alone gives the same model to the byte.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import msgspec

from llamacpp_instr.base.errors import InstrError, UsageError, reason
from llamacpp_instr.lab.quantize.plan import (
    QuantizationPlan,
    QuantizeOptions,
    parse_file_type,
    parse_tensor_type,
)
from llamacpp_instr.lab.quantize.runner import Quantizer
from llamacpp_instr.model.file import ModelFile
from llamacpp_instr.model.types import GgmlType

VERSION = 1


class Recipe(msgspec.Struct, omit_defaults=True):
    """How to make a model."""

    recipe: int
    """VERSION"""
    source: str
    """the name of the file"""
    source_bytes: int
    """of its weights"""
    file_type: str
    """the quantizer's; tensors that are not in `tensors` have their types in this mixture"""
    tensors: dict[str, str]
    imatrix: str | None = None
    """the name of the file"""
    cache_type_k: str = "f16"
    """of the cache that it was chosen for"""
    cache_type_v: str = "f16"


def options_of(recipe: Recipe, options: QuantizeOptions) -> QuantizeOptions:
    """The quantizer's options; `options` has those that are not part of a recipe. Raises
    `UsageError` for an unknown type."""
    types = [
        (f"re:^{re.escape(name)}$", parse_tensor_type(of)) for name, of in recipe.tensors.items()
    ]
    return replace(options, tensor_types=types)


@contextmanager
def planned(
    source: ModelFile, recipe: Recipe, options: QuantizeOptions
) -> Iterator[tuple[Quantizer, QuantizationPlan]]:
    """The quantizer, and what it will write. Raises `UsageError` if the recipe belongs to another
    model."""
    wrong = [name for name in recipe.tensors if name not in source.by_name]
    if wrong or recipe.source_bytes != source.n_bytes:
        what = f"its weights take {source.n_bytes:,} bytes, not {recipe.source_bytes:,}"
        if wrong:
            what = f"it has no tensor {wrong[0]!r}"
        raise UsageError(f"{source.path} is not the model of the recipe, {recipe.source}: {what}")
    if recipe.imatrix is not None and options.imatrix is None:
        raise UsageError(
            f"the recipe was made with the importance matrix {recipe.imatrix}; give it with"
            " --imatrix"
        )
    if recipe.imatrix is None and options.imatrix is not None:
        raise UsageError("the recipe was made without an importance matrix; leave out --imatrix")
    with Quantizer(source, options_of(recipe, options)) as quantizer:
        plan = quantizer.plan(recipe.file_type)
        for tensor in plan.tensors:
            wanted = recipe.tensors.get(tensor.name)
            if wanted is not None and tensor.type.name != wanted:
                raise InstrError(
                    f"llama.cpp would write {tensor.name!r} as {tensor.type}, not {wanted}"
                )
        yield quantizer, plan


def read_recipe(path: Path) -> Recipe:
    """Raises `UsageError` if the file is not a recipe."""
    try:
        found = msgspec.json.decode(path.read_bytes(), type=Recipe)
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {reason(error)}") from None
    except msgspec.DecodeError as error:
        raise UsageError(f"{path} is not a recipe: {error}") from None
    if found.recipe != VERSION:
        raise UsageError(f"{path} is a recipe of version {found.recipe}; this is version {VERSION}")
    parse_file_type(found.file_type)
    return found


def recipe_json(recipe: Recipe) -> bytes:
    """The recipe as indented JSON."""
    return msgspec.json.format(msgspec.json.encode(recipe)) + b"\n"


def tensor_type_file(types: Mapping[str, GgmlType]) -> bytes:
    """What `llama-quantize --tensor-type-file` reads (tools/quantize/quantize.cpp): a pattern and a
    type for each tensor."""
    lines = [f"^{re.escape(name)}$={of.name.lower()}" for name, of in types.items()]
    return "".join(f"{line}\n" for line in lines).encode()
