"""Quantizes a model with llama.cpp's own quantizer, or predicts the result by its dry run.

Invariant: input that llama.cpp would refuse, abort on, or silently get wrong is refused in one line
before anything is written. A file gets its name once it is complete. A crash of the quantizer does
not end this process.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path

from llamacpp_instr.base.child import Child, ChildDied, ChildFailed
from llamacpp_instr.base.errors import InstrError, UsageError
from llamacpp_instr.base.output import check_model_output, check_not_input, new_model
from llamacpp_instr.base.patterns import regular_expression
from llamacpp_instr.base.terminal import OnProgress, first_names, printable
from llamacpp_instr.lab.quantize.plan import (
    EMBEDDINGS,
    OUTPUT,
    WRITABLE,
    QuantizationPlan,
    QuantizeOptions,
    finds,
    header_bytes,
    parse_file_type,
    read_dry_run,
)
from llamacpp_instr.llama.threads import default_threads
from llamacpp_instr.model.file import ModelFile, Weight, load_model_file
from llamacpp_instr.model.imatrix import ImportanceMatrix, load_imatrix

GROUP = 16
"""columns that share a scale in Q2_K, Q3_K, Q6_K; in other types at least as many do"""
LEAST, MOST = 1e-16, 1e15
"""of an importance: ggml squares sums of them in float32, and stores zeros after an underflow or
overflow"""
_WITHOUT_IMPORTANCES = frozenset({"F32", "F16", "BF16", "Q8_0", "MXFP4", "NVFP4", "TQ1_0", "TQ2_0"})
"""types for which ggml does not use importances"""


def check_source(source: ModelFile, options: QuantizeOptions) -> None:
    """Raises `UsageError` if the source cannot be quantized with these options."""
    for pattern, _ in options.tensor_types:
        regular_expression("--tensor-type", pattern)
    source.check_has_weights(" to quantize")
    alignment = source.metadata.get("general.alignment", 32)
    if alignment != 32:
        raise UsageError(
            f"{source.path} has general.alignment {alignment}; llama.cpp's quantizer writes only 32"
        )
    empty = [weight.name for weight in source.weights if not weight.n_elements]
    if empty:
        raise UsageError(f"{source.path} cannot be quantized: {empty[0]!r} has no elements")
    for names, type_ in (((OUTPUT,), options.output_type), (EMBEDDINGS, options.embedding_type)):
        for weight in (source.by_name[name] for name in names if name in source.by_name):
            if type_ and weight.row_length % type_.block:
                raise UsageError(
                    f"{weight.name} cannot be {type_}: its rows of {weight.row_length} elements "
                    f"are not divisible into blocks of {type_.block}"
                )
    for pattern, type_ in options.tensor_types:
        if not any(finds(pattern, name) for name in source.by_name):
            raise UsageError(f"no tensor of {source.path} matches {pattern!r} (={type_})")


def check_importances(plan: QuantizationPlan, imatrix: ImportanceMatrix) -> None:
    """Raises `UsageError` if the matrix belongs to another model, or lacks a required tensor."""
    known = {tensor.name: tensor.weight for tensor in plan.tensors}
    made = [tensor for tensor in plan.tensors if tensor.type != tensor.weight.type]
    if made and not any(tensor.name in imatrix.entries for tensor in made):
        raise UsageError(
            f"{imatrix.path} belongs to another model: it has importances for none of the tensors "
            f"of {plan.source}"
        )
    if others := [name for name in imatrix.entries if name not in known]:
        raise UsageError(
            f"{imatrix.path} belongs to another model: it has importances for "
            f"{first_names(list(map(repr, others)))}, which {plan.source} does not have"
        )
    for name, values in imatrix.entries.items():
        expected = _columns(known[name])
        if values.size != expected and name not in EMBEDDINGS:
            raise UsageError(
                f"{imatrix.path} belongs to another model: it has {values.size} importances for "
                f"{name!r}, which has {expected} columns"
            )
    lost = []
    for tensor in made:
        weight, found = tensor.weight, imatrix.entries.get(tensor.name)
        fits = found is not None and found.size == _columns(weight)
        if tensor.needs_imatrix and not fits:
            raise UsageError(
                f"{imatrix.path} has no importances for {weight.name!r}, which would become "
                f"{tensor.type}; choose another type, or a matrix that has them"
            )
        used = fits and tensor.type.name not in _WITHOUT_IMPORTANCES
        if found is not None and used:
            largest = found.reshape(-1, GROUP).max(axis=1)
            if not ((largest >= LEAST) & (largest <= MOST)).all():
                lost.append(repr(tensor.name))
    if lost:
        raise UsageError(
            f"{imatrix.path}: {GROUP} or more columns in a row of {first_names(lost)} have only "
            f"zeros, or importances below {LEAST:g} or above {MOST:g}, so their weights would be "
            "lost; compute it again from more text"
        )


def _columns(weight: Weight) -> int:
    """The columns of all its experts together."""
    return weight.row_length * (weight.ne[2] if len(weight.ne) > 2 else 1)


def doubts(plans: Sequence[QuantizationPlan], imatrix: ImportanceMatrix) -> list[str]:
    """Sentences, without a capital and a period, about what a matrix says too little about. It is
    not expected to have the embeddings or the output."""
    without = {
        tensor.name: None
        for plan in plans
        for tensor in plan.tensors
        if tensor.type != tensor.weight.type
        and tensor.type.name not in _WITHOUT_IMPORTANCES
        and tensor.name not in (*imatrix.entries, *EMBEDDINGS, OUTPUT)
    }
    lacking = [f"it has no importances for {first_names([*without])}"] if without else []
    return [*imatrix.poor_coverage(), *lacking]


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


_ERROR = 4  # GGML_LOG_LEVEL_ERROR
_DEFAULT = QuantizeOptions()


class Quantizer(Child):
    """llama.cpp's quantizer in a child process, for one source; a context manager."""

    def __init__(self, source: ModelFile, options: QuantizeOptions = _DEFAULT) -> None:
        super().__init__(f"{__package__}.worker")
        self.source = source
        self.options = options
        self.imatrix = load_imatrix(options.imatrix) if options.imatrix else None
        check_source(source, options)

    def plan(self, file_type: str) -> QuantizationPlan:
        """The file that `write` would write. Raises `UsageError` if it cannot be written."""
        file_type = parse_file_type(file_type)
        if self.options.tensor_types and file_type in ("F32", "F16", "BF16"):
            raise UsageError(
                f"llama.cpp accepts types for single tensors only for quantized file types, "
                f"not for {file_type}"
            )
        lines = [line for _, line in self._run(file_type, None)]
        plan = QuantizationPlan(
            self.source.path,
            self.source.n_bytes,
            file_type,
            read_dry_run(self.source, file_type, self.options, lines),
            header_bytes(self.source, self.imatrix.metadata() if self.imatrix else {}),
        )
        again = [tensor for tensor in plan.tensors if tensor.requantized]
        if again and not self.options.allow_requantize:
            raise UsageError(
                f"{plan.source} is already quantized: {again[0].name!r} is {again[0].weight.type}, "
                f"and quantizing {len(again)} of {len(plan.tensors)} tensors again would lose more;"
                " start from the F16 or F32 model, or use `instr quantize --allow-requantize`"
            )
        if self.imatrix:
            check_importances(plan, self.imatrix)
        return plan

    def write(
        self,
        plans: Sequence[QuantizationPlan],
        outputs: Sequence[Path],
        *,
        force: bool = False,
        on_progress: OnProgress = lambda *_: None,
    ) -> None:
        """Write the file of each plan to the path of `outputs` with the same index.

        Raises `UsageError`, before the first file is started, for what cannot be done and for what
        llama.cpp refuses; `InstrError` if the quantizer fails; `NativeError` without the library.
        """
        self.check_outputs(plans, outputs, force)
        total = sum(plan.n_elements for plan in plans)
        done = [0]
        for plan, output in zip(plans, outputs, strict=True):
            sizes = (tensor.weight.n_elements for tensor in plan.tensors)
            done = list(accumulate(sizes, initial=done[-1]))

            def on_tensor(index: int, _count: int, done: list[int] = done) -> None:
                on_progress(done[max(index - 1, 0)], total)

            with new_model(output, force) as temporary:
                self._run(plan.file_type, temporary, on_tensor)
                check_came_true(plan, temporary)

    def check_outputs(
        self, plans: Sequence[QuantizationPlan], outputs: Sequence[Path], force: bool
    ) -> None:
        """Raises `UsageError` if a file of the plans cannot be written."""
        for plan, output in zip(plans, outputs, strict=True):
            needy = [tensor for tensor in plan.tensors if tensor.needs_imatrix]
            if needy and self.options.imatrix is None:
                raise UsageError(
                    f"{plan.file_type} needs an importance matrix ({needy[0].name!r} would become "
                    f"{needy[0].type}); compute one with `instr imatrix` or llama-imatrix for "
                    "`instr quantize --imatrix`"
                )
            if output.exists() and not output.is_file():
                raise UsageError(
                    f"{output} is not a regular file; models are written only to files"
                )
            check_not_input(output, *self.source.headers, self.options.imatrix)
            check_model_output(output, force)
        directory = outputs[0].parent
        needed, free = sum(plan.file_bytes for plan in plans), shutil.disk_usage(directory).free
        if needed > free:
            raise UsageError(f"{needed:,} bytes are needed in {directory}, which has {free:,} left")

    def _run(
        self, file_type: str, output: Path | None, on_tensor: OnProgress = lambda *_: None
    ) -> list[tuple[int, str]]:
        """The log of a quantization (a dry run without `output`), as (level, text); raises an error
        if it failed."""
        options = self.options
        request = {
            "source": str(self.source.path),
            "output": str(output or Path()),
            "imatrix": str(options.imatrix) if options.imatrix else None,
            "tensor_types": [
                [regular_expression("--tensor-type", pattern), type_.number]
                for pattern, type_ in options.tensor_types
            ],
            # fields of `llama_model_quantize_params`; None is the default
            "params": {
                "nthread": options.threads or default_threads(),
                "ftype": WRITABLE[file_type],
                "output_tensor_type": options.output_type and options.output_type.number,
                "token_embedding_type": options.embedding_type and options.embedding_type.number,
                "pure": options.pure,
                "allow_requantize": options.allow_requantize,
                "dry_run": output is None,
            },
        }
        log: list[tuple[int, str]] = []
        what = f"{self.source.path}: llama.cpp's quantizer to {file_type}"
        try:
            status = self.ask(request, on_tensor, lambda *line: log.append(line))
        except ChildDied as died:
            raise InstrError(f"{what} died {died}") from None
        except ChildFailed as failed:
            raise InstrError(f"{what} failed: {failed}") from None
        if status:
            raise self._failure(log, file_type)
        return log

    def _failure(self, log: list[tuple[int, str]], file_type: str) -> InstrError:
        """The error if llama.cpp refused: its own reason."""
        errors = [line.strip(" =") for level, line in log if level == _ERROR]
        reason = errors[-1] if errors else "llama.cpp gave no reason"
        if "failed to load model" in reason:
            reason = errors[0].partition(": ")[2]  # the reason, after the name of a function
        reason = printable(reason.partition("failed to quantize: ")[2] or reason)
        if "iostream error" in reason:
            return InstrError(f"the {file_type} file could not be written: is the disk full?")
        for pattern, _ in self.options.tensor_types:
            try:
                re.compile(regular_expression("--tensor-type", pattern))
            except re.error:
                return UsageError(f"--tensor-type: {pattern!r} is not a valid pattern: {reason}")
        return UsageError(f"{self.source.path} cannot be quantized to {file_type}: {reason}")
