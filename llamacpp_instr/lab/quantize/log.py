"""Reads the type of each tensor from the log of llama.cpp's quantizer.

Only a dry run of the quantizer itself determines these types, and it only prints them. Invariant:
one line for each tensor of the model, with its name and type, or an error. No tensor is guessed or
left out.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from llamacpp_instr.base.errors import InstrError
from llamacpp_instr.lab.quantize.plan import (
    EMBEDDINGS,
    OUTPUT,
    QuantizeOptions,
    TensorPlan,
    finds,
    needs_imatrix,
    row_length,
)
from llamacpp_instr.model.file import ModelFile, Weight
from llamacpp_instr.model.types import BY_NAME, GgmlType

PROGRESS = re.compile(r"\[ *(\d+)/ *(\d+)\] ")
"""the beginning of a tensor's line: its number, and the number of tensors"""

_TENSOR = re.compile(
    r"\[ *\d+/ *\d+\] (?P<name>.+?) *- \[[ \d,]*\], type = *(?P<type>\w+), "
    r"size = *[\d.]+ MiB(?: -> *[\d.]+ MiB \((?P<new>\w+)\))?"
)
_OUTPUT_IN_Q5_K = {"IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ2_M", "IQ3_XXS"}
_FALLBACK = re.compile(
    r"warning: (?P<name>.+?) *- ncols *\d+ not divisible by *\d+ "
    r"\(required for type *(?P<wanted>\w+)\).*-> falling back to *\w+ *"
)


def read_dry_run(
    source: ModelFile, file_type: str, options: QuantizeOptions, lines: Iterable[str]
) -> list[TensorPlan]:
    """The plan of each tensor of `source`, in the order of writing; `lines` are the log of a dry
    run. Raises `InstrError` if they do not list every tensor."""
    wanted: dict[str, GgmlType] = {}
    plans: dict[str, TensorPlan] = {}
    for line in lines:
        if match := _FALLBACK.fullmatch(line):
            wanted[match["name"]] = _type(match["wanted"])
        elif match := _TENSOR.fullmatch(line):
            name, type_ = match["name"], _type(match["new"] or match["type"])
            weight = source.by_name.get(name)
            if weight is None or name in plans or weight.type != _type(match["type"]):
                raise InstrError(f"llama.cpp's dry run and the file differ in {name!r}")
            plans[name] = TensorPlan(
                weight,
                type_,
                wanted.get(name) or _silently_replaced(weight, type_, file_type, options),
                needs_imatrix(weight, type_, file_type),
            )
    missing = [name for name in source.by_name if name not in plans]
    if missing:
        raise InstrError(f"llama.cpp's dry run does not list {missing[0]!r}")
    return list(plans.values())


def _silently_replaced(
    weight: Weight, type_: GgmlType, file_type: str, options: QuantizeOptions
) -> GgmlType | None:
    """The type that the output tensor (or the embeddings used as output) would have if its blocks
    divided the rows; only here llama.cpp silently uses Q8_0 (llama_tensor_get_type_impl)."""
    chosen = options.pure or options.output_type or options.embedding_type
    if (
        weight.name not in (OUTPUT, *EMBEDDINGS)
        or chosen
        or any(finds(pattern, weight.name) for pattern, _ in options.tensor_types)
        or type_ == weight.type
        or type_.name != "Q8_0"
        or row_length(weight) % 256 == 0
        or file_type in ("Q8_0", "MXFP4_MOE")
    ):
        return None
    return BY_NAME["Q5_K" if file_type in _OUTPUT_IN_Q5_K else "Q6_K"]


def _type(name: str) -> GgmlType:
    try:
        return BY_NAME[name.upper()]
    except KeyError:
        raise InstrError(f"llama.cpp's dry run names the type {name!r}, which is unknown") from None
