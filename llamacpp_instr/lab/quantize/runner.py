"""Quantizes a model with llama.cpp's own quantizer, or predicts the result by its dry run.

Invariant: input that llama.cpp would refuse or abort on is refused before anything is written. A
file gets its name once it is complete. A crash of the quantizer does not end this process.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from llamacpp_instr.base.child import Child, ChildDied, ChildFailed
from llamacpp_instr.base.errors import InstrError, UsageError
from llamacpp_instr.base.output import new_model
from llamacpp_instr.base.patterns import regular_expression
from llamacpp_instr.base.terminal import OnProgress, printable
from llamacpp_instr.lab.quantize.checks import (
    check_came_true,
    check_importances,
    check_not_requantized,
    check_outputs,
    check_overrides_used,
    check_source,
)
from llamacpp_instr.lab.quantize.log import read_dry_run
from llamacpp_instr.lab.quantize.plan import (
    WRITABLE,
    QuantizationPlan,
    QuantizeOptions,
    QuantizeResult,
    header_bytes,
    parse_file_type,
)
from llamacpp_instr.llama.threads import default_threads
from llamacpp_instr.model.file import ModelFile
from llamacpp_instr.model.imatrix import load_imatrix

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
        check_overrides_used(file_type, self.options)
        lines = [line for _, line in self._run(file_type, Path(), dry_run=True)]
        plan = QuantizationPlan(
            self.source.path,
            self.source.n_bytes,
            file_type,
            read_dry_run(self.source, file_type, self.options, lines),
            header_bytes(self.source, self.imatrix.metadata() if self.imatrix else {}),
        )
        if not self.options.allow_requantize:
            check_not_requantized(plan)
        if self.imatrix:
            check_importances(plan, self.imatrix)
        return plan

    def write(
        self,
        plans: Sequence[QuantizationPlan],
        outputs: Sequence[Path],
        *,
        force: bool = False,
        on_progress: OnProgress | None = None,
    ) -> list[QuantizeResult]:
        """Write the file of each plan to the path of `outputs` with the same index.

        Raises `UsageError`, before the first file is started, for what cannot be done and for what
        llama.cpp refuses; `InstrError` if the quantizer fails; `NativeError` without the library.
        """
        check_outputs(self.source, plans, outputs, self.options, force)
        total = sum(plan.n_elements for plan in plans)
        before = 0
        results = []
        for plan, output in zip(plans, outputs, strict=True):
            done = [before]
            for tensor in plan.tensors:
                done.append(done[-1] + tensor.weight.n_elements)
            before = done[-1]

            def on_tensor(index: int, _count: int, done: list[int] = done) -> None:
                if on_progress:
                    on_progress(done[max(index - 1, 0)], total)

            with new_model(output, force) as temporary:
                self._run(plan.file_type, temporary, dry_run=False, on_tensor=on_tensor)
                check_came_true(plan, temporary)
                results.append(QuantizeResult(output, temporary.stat().st_size, plan))
        return results

    def _run(
        self,
        file_type: str,
        output: Path,
        *,
        dry_run: bool,
        on_tensor: OnProgress = lambda _index, _count: None,
    ) -> list[tuple[int, str]]:
        """The log of a quantization, as (level, text); raises an error if it failed."""
        options = self.options
        request = {
            "source": str(self.source.path),
            "output": str(output),
            "file_type": WRITABLE[file_type],
            "dry_run": dry_run,
            "threads": options.threads or default_threads(),
            "tensor_types": [
                [regular_expression("--tensor-type", pattern), type_.number]
                for pattern, type_ in options.tensor_types
            ],
            "output_type": options.output_type.number if options.output_type else None,
            "embedding_type": options.embedding_type.number if options.embedding_type else None,
            "imatrix": str(options.imatrix) if options.imatrix else None,
            "pure": options.pure,
            "allow_requantize": options.allow_requantize,
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
            if _is_bad(pattern):
                return UsageError(f"--tensor-type: {pattern!r} is not a valid pattern: {reason}")
        return UsageError(f"{self.source.path} cannot be quantized to {file_type}: {reason}")


def _is_bad(pattern: str) -> bool:
    try:
        re.compile(regular_expression("--tensor-type", pattern))
    except re.error:
        return True
    return False
