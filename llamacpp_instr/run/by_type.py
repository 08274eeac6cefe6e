"""Quantizes a model to several file types, runs and records each: the work of `compare --types`.

Invariant: every model runs the same prompt with the same settings, and all models take turns, so
that other load on the machine and differences between processes affect all of them alike.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from llamacpp_instr.base.errors import UsageError
from llamacpp_instr.base.output import check_not_input, check_output
from llamacpp_instr.lab.quantize.plan import parse_file_type
from llamacpp_instr.lab.quantize.runner import Quantizer
from llamacpp_instr.model.file import ModelFile, load_model_file
from llamacpp_instr.recording.memory.plan import check_memory
from llamacpp_instr.run.session import RunOptions, run

PREFILL = 512
"""tokens of the prefill that is measured if no prompt is given"""


@dataclass(frozen=True)
class Trial:
    """A model and the logs of its sessions."""

    name: str
    """the file type, or the source's"""
    model: Path
    logs: list[Path]


def run_trials(
    source: ModelFile,
    file_types: Sequence[str],
    directory: Path,
    options: RunOptions,
    rounds: int,
    notice: Callable[[str], None],
    inputs: Collection[Path] = (),
) -> list[Trial]:
    """Write `NAME-TYPE.gguf` and `TYPE-ROUND.log` into `directory` for every file type. A single
    type is compared with the source itself, which comes first. The model and the log in `options`
    are replaced. Its `force` applies to all files except `inputs`, which are read later. `notice`
    is called with a line before each stage.

    Raises `UsageError` for a model that cannot be quantized or run, `InstrError` if that fails.
    """
    options.check()
    if rounds < 1:
        raise UsageError(f"--rounds is {rounds}; it must be 1 or more")
    file_types = [parse_file_type(name) for name in file_types]
    if len(set(file_types)) < len(file_types):
        raise UsageError(f"--types {','.join(file_types)} names a type twice")
    models = {name: directory / f"{source.path.stem}-{name}.gguf" for name in file_types}
    beside = {source.file_type or "source": source.path} if len(file_types) == 1 else {}
    trials = [
        Trial(name, model, [directory / f"{name}-{i + 1}.log" for i in range(rounds)])
        for name, model in (beside | models).items()
    ]
    logs = [log for trial in trials for log in trial.logs]
    for path in (*models.values(), *logs):
        check_not_input(path, *source.headers, *inputs)
    for log in logs:
        check_output(log, options.force)
    with Quantizer(source) as quantizer:
        plans = [quantizer.plan(name) for name in models]
        notice(f"quantizing {source.path.name} to {', '.join(models)}")
        quantizer.write(plans, list(models.values()), force=options.force)
    for trial in trials:
        # each is checked before the first one runs
        check_memory(load_model_file(trial.model), options.context)
    for i in range(rounds):
        notice(f"round {i + 1} of {rounds}: {', '.join(trial.name for trial in trials)}")
        for trial in trials:
            chosen = replace(options, model=str(trial.model), log=trial.logs[i])
            # the generated text is not needed
            run(chosen, io.BytesIO(), notice=lambda _line: None)
    return trials
