"""The models that `instr compare` puts side by side: the given ones with their sessions or, with
--types, one model quantized to several file types, with the sessions that each ran.

Invariant: every type runs the same prompt with the same settings, and all types take turns, so
that other load on the machine and differences between processes affect all of them alike.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from llamacpp_instr.base.errors import NativeError, UsageError
from llamacpp_instr.base.output import check_not_input, check_output
from llamacpp_instr.base.system import temporary_directory
from llamacpp_instr.base.terminal import progress_bar
from llamacpp_instr.converters.analyses.compare import (
    Candidate,
    check_recorded,
    recorded_memory,
    recorded_model,
    short_names,
)
from llamacpp_instr.converters.analyses.memory import (
    recorded_file,
    stored_in_file,
    stored_in_log,
)
from llamacpp_instr.lab.quantize.plan import parse_file_type
from llamacpp_instr.lab.quantize.runner import Quantizer
from llamacpp_instr.lab.weights.measure import compute_weight_errors
from llamacpp_instr.llama.engine import ContextOptions
from llamacpp_instr.log.session import Session, load_session
from llamacpp_instr.model.file import ModelFile, load_model_file
from llamacpp_instr.recording.memory.plan import LoadError, check_memory, plan_memory
from llamacpp_instr.run.session import RunOptions, run

PREFILL = 512
"""tokens of the prefill that is measured if no prompt is given"""


class Trial(NamedTuple):
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
    check_rounds(rounds)
    models = models_of_types(source, file_types, directory)
    trials = [
        Trial(name, model, [directory / f"{name}-{i + 1}.log" for i in range(rounds)])
        for name, model in models.items()
    ]
    logs = [log for trial in trials for log in trial.logs]
    for path in (*models.values(), *logs):
        if path != source.path:
            check_not_input(path, *source.headers, *inputs)
    for log in logs:
        check_output(log, options.force)
    quantize_models(source, models, options.force, notice)
    for trial in trials:
        # each is checked before the first one runs
        check_memory(load_model_file(trial.model), options.context)

    def once(i: int, turn: int) -> None:
        chosen = replace(options, model=str(trials[i].model), log=trials[i].logs[turn])
        # the generated text is not needed
        run(chosen, io.BytesIO(), notice=lambda _line: None)

    take_turns([trial.name for trial in trials], rounds, once, notice)
    return trials


def check_rounds(rounds: int) -> None:
    """Raise `UsageError` if there are none."""
    if rounds < 1:
        raise UsageError(f"--rounds is {rounds}; it must be 1 or more")


def take_turns(
    names: Sequence[str],
    rounds: int,
    once: Callable[[int, int], object],
    notice: Callable[[str], None],
) -> None:
    """Call `once` with the index of a name and that of the round: in each round, for every name in
    turn. `notice` is called with a line before each round."""
    for turn in range(rounds):
        notice(f"round {turn + 1} of {rounds}: {', '.join(names)}")
        for i in range(len(names)):
            once(i, turn)


def models_of_types(
    source: ModelFile, file_types: Sequence[str], directory: Path
) -> dict[str, Path]:
    """The models of file types, by their names, as `quantize_models` writes them to `directory`. A
    single type comes after the source itself. Raises `UsageError` for an unknown type, or one that
    is named twice."""
    file_types = [parse_file_type(name) for name in file_types]
    if len(set(file_types)) < len(file_types):
        raise UsageError(f"--types {','.join(file_types)} names a type twice")
    beside = {source.file_type or "source": source.path} if len(file_types) == 1 else {}
    return beside | {name: directory / f"{source.path.stem}-{name}.gguf" for name in file_types}


def quantize_models(
    source: ModelFile, models: Mapping[str, Path], force: bool, notice: Callable[[str], None]
) -> None:
    """Write `models_of_types`. Raises `UsageError` for a model that cannot be quantized."""
    made = {name: path for name, path in models.items() if path != source.path}
    with Quantizer(source) as quantizer:
        plans = [quantizer.plan(name) for name in made]
        notice(f"quantizing {source.path.name} to {', '.join(made)}")
        quantizer.write(plans, list(made.values()), force=force)


def trial_directory(keep: str | None) -> AbstractContextManager[Path]:
    """The directory for the models and logs of --types. The logs contain the models' paths, so
    files that are kept are written to their final place."""
    return (
        temporary_directory("instr-compare-")
        if keep is None
        else nullcontext(kept_in("--keep", keep))
    )


def kept_in(option: str, directory: str | Path) -> Path:
    """The directory that an option names, which is created unless it exists."""
    try:
        Path(directory).mkdir(exist_ok=True)
    except OSError as error:
        raise UsageError(f"{option} {directory}: {error.strerror}; name a directory") from None
    return Path(directory)


def trial_options(prompt: str | None, n: int, threads: int | None, force: bool) -> RunOptions:
    """The settings of all trials, whose models and logs `run_trials` fills in."""
    return RunOptions(
        "", [prompt or "Once upon a time"], n=n, prefill=None if prompt else PREFILL,
        repeat=3,  # the first is warm-up
        context=ContextOptions(threads=threads), force=force,
    )  # fmt: skip


def candidates_of_trials(trials: Sequence[Trial]) -> list[Candidate]:
    """Each type with the sessions that were recorded."""
    candidates = []
    for trial in trials:
        file = load_model_file(trial.model)
        sessions = [load_session(path) for path in trial.logs]
        stored, used = stored_in_file(file), recorded_memory(sessions[-1])
        candidates.append(Candidate(trial.name, stored, file, sessions, used))
    return candidates


def candidates_of(
    names: Sequence[str],
    files: Sequence[ModelFile | None],
    recorded_by: Sequence[Sequence[Session]],
    logs: Sequence[str],
) -> list[Candidate]:
    """Models, by their files or sessions, with their memory: measured or, without a session,
    predicted. `names` are the arguments that name each, `logs` its first log, or its name.

    Raises `UsageError` for a session of several models, or of a model other than its file.
    """
    shown = short_names(
        [
            Path(recorded_model(sessions[0]).path) if sessions and not file else Path(name)
            for name, file, sessions in zip(names, files, recorded_by, strict=True)
        ],
        [Path(log) for log in logs],
    )
    candidates = []
    for name, file, sessions in zip(shown, files, recorded_by, strict=True):
        if not sessions:
            assert file is not None
            memory = None
            with suppress(NativeError, LoadError):  # if llama.cpp cannot predict it
                memory = plan_memory(file, ContextOptions())
            candidates.append(Candidate(name, stored_in_file(file), file, memory=memory))
            continue
        model = recorded_model(sessions[0])
        if file is not None:
            for session in sessions:
                check_recorded(session, stored_in_file(file))
        else:
            with suppress(UsageError):  # if it no longer exists, or is another model
                file = recorded_file(sessions[0], model)
        stored, memory = stored_in_log(sessions[0], model, file), recorded_memory(sessions[-1])
        candidates.append(Candidate(name, stored, file, sessions, memory))
    return candidates


def with_errors(candidates: Sequence[Candidate], against: ModelFile | None) -> list[Candidate]:
    """The candidates with the errors of their weights, if the model files are available."""
    against = against or candidates[0].file
    found = []
    for of in candidates:
        if of.file is None or against is None:
            found.append(of)
        elif of.file.path == against.path:
            found.append(replace(of, is_reference=True))
        else:
            with progress_bar(f"Errors of {of.name}") as on_progress:
                errors = compute_weight_errors(against, of.file, on_progress=on_progress)
            found.append(replace(of, errors={error.name: error for error in errors}))
    return found
