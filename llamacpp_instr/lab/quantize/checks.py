"""Checks before and after a quantization: for what llama.cpp's quantizer would refuse, abort on, or
silently get wrong.

Invariant: every failed check raises one line that says what was wrong, where, and what to do.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path

from llamacpp_instr.base.errors import InstrError, UsageError
from llamacpp_instr.base.output import check_model_output, check_not_input
from llamacpp_instr.base.patterns import regular_expression
from llamacpp_instr.base.terminal import first_names
from llamacpp_instr.lab.quantize.plan import (
    EMBEDDINGS,
    OUTPUT,
    QuantizationPlan,
    QuantizeOptions,
    finds,
    row_length,
)
from llamacpp_instr.model.file import ModelFile, load_model_file
from llamacpp_instr.model.imatrix import ImportanceMatrix

GROUP = 16
"""columns that share a scale in Q2_K, Q3_K, Q6_K; in other types at least as many do"""
_WITHOUT_IMPORTANCES = frozenset({"F32", "F16", "BF16", "Q8_0", "MXFP4", "NVFP4", "TQ1_0", "TQ2_0"})
"""types for which ggml does not use importances"""


def check_source(source: ModelFile, options: QuantizeOptions) -> None:
    """Raises `UsageError` if the source cannot be quantized with these options."""
    for pattern, _ in options.tensor_types:
        regular_expression("--tensor-type", pattern)
    if not source.weights:
        raise UsageError(f"{source.path} contains only a vocabulary, no weights to quantize")
    alignment = source.metadata.get("general.alignment", 32)
    if alignment != 32:
        raise UsageError(
            f"{source.path} has general.alignment {alignment}; llama.cpp's quantizer writes 32 only"
        )
    empty = [weight.name for weight in source.weights if not weight.n_elements]
    if empty:
        raise UsageError(f"{source.path} cannot be quantized: {empty[0]!r} has no elements")
    for names, type_ in (((OUTPUT,), options.output_type), (EMBEDDINGS, options.embedding_type)):
        for weight in (source.by_name[name] for name in names if name in source.by_name):
            if type_ and row_length(weight) % type_.block:
                raise UsageError(
                    f"{weight.name} cannot be {type_}: its rows of {row_length(weight)} elements "
                    f"are not divisible into blocks of {type_.block}"
                )
    for pattern, type_ in options.tensor_types:
        if not any(finds(pattern, name) for name in source.by_name):
            raise UsageError(f"no tensor of {source.path} matches {pattern!r} (={type_})")


def check_overrides_used(file_type: str, options: QuantizeOptions) -> None:
    """Raises `UsageError` if llama.cpp would ignore the types given for single tensors."""
    if options.tensor_types and file_type in ("F32", "F16", "BF16"):
        raise UsageError(
            f"llama.cpp accepts types for single tensors only for quantized file types, "
            f"not for {file_type}"
        )


def check_not_requantized(plan: QuantizationPlan) -> None:
    """Raises `UsageError` if tensors that are already quantized would be quantized again."""
    again = [tensor for tensor in plan.tensors if tensor.requantized]
    if again:
        raise UsageError(
            f"{plan.source} is already quantized: {again[0].name!r} is {again[0].weight.type}, "
            f"and quantizing {len(again)} of {len(plan.tensors)} tensors again would lose more; "
            "start from the F16 or F32 model, or use `instr quantize --allow-requantize`"
        )


def check_importances(plan: QuantizationPlan, imatrix: ImportanceMatrix) -> None:
    """Raises `UsageError` if the matrix belongs to another model, or lacks a required tensor."""
    made = [tensor for tensor in plan.tensors if tensor.type != tensor.weight.type]
    if made and not any(tensor.name in imatrix.entries for tensor in made):
        raise UsageError(
            f"{imatrix.path} belongs to another model: it has importances for none of the tensors "
            f"of {plan.source}"
        )
    lost = []
    for tensor in made:
        weight = tensor.weight
        values = imatrix.entries.get(weight.name)
        expected = row_length(weight) * (weight.ne[2] if len(weight.ne) > 2 else 1)
        fits = values is not None and values.size == expected
        if values is not None and not fits and weight.name not in EMBEDDINGS:
            raise UsageError(
                f"{imatrix.path} belongs to another model: it has {values.size} importances for "
                f"{weight.name!r}, which has {expected} columns"
            )
        if tensor.needs_imatrix and not fits:
            raise UsageError(
                f"{imatrix.path} has no importances for {weight.name!r}, which would become "
                f"{tensor.type}; choose another type, or a matrix that has them"
            )
        used = fits and tensor.type.name not in _WITHOUT_IMPORTANCES
        if values is not None and used and not values.reshape(-1, GROUP).any(axis=1).all():
            lost.append(repr(tensor.name))
    if lost:
        raise UsageError(
            f"{imatrix.path} has only zeros for {GROUP} or more columns in a row of "
            f"{first_names(lost)}, whose weights would be lost; compute it again from more text"
        )


def check_outputs(
    source: ModelFile,
    plans: Sequence[QuantizationPlan],
    outputs: Sequence[Path],
    options: QuantizeOptions,
    force: bool,
) -> None:
    """Raises `UsageError` if a file of the plans cannot be written."""
    for plan, output in zip(plans, outputs, strict=True):
        needy = [tensor for tensor in plan.tensors if tensor.needs_imatrix]
        if needy and options.imatrix is None:
            raise UsageError(
                f"{plan.file_type} needs an importance matrix ({needy[0].name!r} would become "
                f"{needy[0].type}); compute one with llama-imatrix for `instr quantize --imatrix`"
            )
        if output.exists() and not output.is_file():
            raise UsageError(f"{output} is not a regular file; models are written only to files")
        check_not_input(output, *source.headers, options.imatrix)
        check_model_output(output, force)
    directory = outputs[0].parent
    needed, free = sum(plan.file_bytes for plan in plans), shutil.disk_usage(directory).free
    if needed > free:
        raise UsageError(f"{needed:,} bytes are needed in {directory}, which has {free:,} left")


def check_came_true(plan: QuantizationPlan, path: Path) -> None:
    """Raises `InstrError` unless the file is a complete model with the planned tensors."""
    try:
        written = {weight.name: weight.type for weight in load_model_file(path).weights}
    except UsageError as error:
        raise InstrError(f"llama.cpp's quantizer wrote an incomplete model: {error}") from None
    for tensor in plan.tensors:
        if written.get(tensor.name) != tensor.type:
            raise InstrError(
                f"llama.cpp's quantizer wrote {tensor.name!r} as {written.get(tensor.name)}, "
                f"although its dry run said {tensor.type}"
            )
