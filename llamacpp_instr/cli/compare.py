"""`instr compare A B`: holds models side by side, with the speed that was measured with them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import click
from click.core import ParameterSource

from llamacpp_instr.cli.report_output import ReportOutput, report_options

if TYPE_CHECKING:
    from converters.analyses.compare.candidate import Candidate
    from llamacpp_instr.log.session import Session
    from llamacpp_instr.memory.breakdown import MemoryBreakdown
    from llamacpp_instr.model.file import ModelFile
    from llamacpp_instr.run.session import RunOptions


@click.command(
    "compare",
    epilog="\b\nExamples:\n"
    "  instr compare --types Q8_0,Q4_K_M model-F16.gguf\n"
    "  instr compare a.gguf b.gguf --log a.log --log b.log --reference f16.gguf\n"
    "  instr compare a.log b.log -o comparison.html",
)
@click.argument("inputs", nargs=-1, required=True, metavar="MODEL|LOG...")
@click.option(
    "--log", "logs", multiple=True, metavar="LOG", help="A session of each MODEL, in order."
)
@click.option("--reference", metavar="MODEL", help="What errors are against.  [default: the first]")
@click.option("--types", metavar="A,B,...", help="Quantize MODEL to these, run them, compare.")
@click.option(
    "-p", "--prompt", default="Once upon a time", show_default=True, help="What --types runs."
)
@click.option("-n", default=32, show_default=True, help="Tokens that a run of --types generates.")
@click.option(
    "--rounds", default=5, show_default=True, help="Rounds, in each of which all --types run."
)
@click.option("--threads", type=int, help="Threads of these runs.  [default: physical cores]")
@click.option("--keep", metavar="DIR", help="Keep the models and the logs of --types in DIR.")
@report_options
@click.pass_context
def compare(
    ctx: click.Context,
    inputs: tuple[str, ...],
    logs: tuple[str, ...],
    reference: str | None,
    types: str | None,
    prompt: str,
    n: int,
    rounds: int,
    threads: int | None,
    keep: str | None,
    output: ReportOutput,
) -> None:
    """Compare models, or their logs: size, error, speed.

    Prints models side by side, by tensor, role, layer and as a whole: file and run-time memory,
    types, bits per weight, error of the weights; with logs the time and the rates of every op.

    MODEL is a GGUF file, or demo; a LOG stands for the model that it recorded. Every other one is
    held against the first.
    """
    from converters.analyses.compare import compute_comparison
    from converters.analyses.compare.pictures import draw_comparison
    from llamacpp_instr.errors import UsageError
    from llamacpp_instr.llama.engine import ContextOptions
    from llamacpp_instr.model.file import load_model_file
    from llamacpp_instr.run.session import RunOptions

    if types is None:
        _check_no_effect(ctx, "prompt", "n", "rounds", "threads", "keep")
    output.check(*inputs, *logs, reference)
    against = load_model_file(reference) if reference else None
    with contextlib.ExitStack() as stack:
        if types is None:
            candidates = list(_given(inputs, logs))
        else:
            if len(inputs) != 1 or logs:
                raise UsageError("--types takes one MODEL and no LOG: it quantizes and records")
            source = load_model_file(inputs[0])
            against = against or source
            directory = stack.enter_context(_directory(keep))
            options = RunOptions(
                "",
                [prompt],
                n=n,
                repeat=3,  # one to warm up
                context=ContextOptions(threads=threads),
                force=output.force,
            )
            candidates = list(_tried(source, directory, types.split(","), options, rounds, against))
        if len(candidates) < 2:
            raise UsageError("there is one model only; name another, or --types A,B")
        candidates = _with_errors(candidates, against)
        named = against.path.name if against else candidates[0].name
        has_errors = any(of.errors for of in candidates)
        reports = compute_comparison(
            candidates,
            named if has_errors else None,
            every_tensor=output.form in ("csv", "json", "html"),
        )
    # the last table is that of the tensors
    output.write(reports, table=reports[-1], charts=draw_comparison(candidates))


def _check_no_effect(ctx: click.Context, *names: str) -> None:
    """Raise `UsageError` when one of these options was given: they are those of --types."""
    from llamacpp_instr.errors import UsageError

    for name in names:
        if ctx.get_parameter_source(name) is not ParameterSource.DEFAULT:
            option = f"-{name}" if len(name) == 1 else f"--{name}"
            raise UsageError(f"{option} has no effect without --types; leave it out")


def _given(inputs: Sequence[str], logs: Sequence[str]) -> Iterator[Candidate]:
    """The models and logs that were named."""
    from converters.analyses.compare.candidate import (
        Candidate,
        check_recorded,
        recorded_memory,
        recorded_model,
        short_names,
    )
    from converters.analyses.stored_weights import stored_in_file, stored_in_log
    from llamacpp_instr.errors import UsageError
    from llamacpp_instr.log.session import load_session
    from llamacpp_instr.model.file import load_model_file
    from llamacpp_instr.progress import progress_bar

    files = [load_model_file(of) if _is_model(of) else None for of in inputs]
    paths: list[str | None] = [None if f else of for f, of in zip(files, inputs, strict=True)]
    if logs:
        if not all(files):
            raise UsageError("--log is for models; a log that is named by itself needs none")
        if len(logs) != len(inputs):
            raise UsageError(f"there are {len(inputs)} models and {len(logs)} of --log; one each")
        paths = list(logs)
    sessions = []
    for log in paths:
        with progress_bar(f"Reading {log}") as on_progress:
            sessions.append(load_session(log, on_progress) if log is not None else None)
    names = short_names(
        [
            Path(recorded_model(session).path) if session and not file else Path(name)
            for name, file, session in zip(inputs, files, sessions, strict=True)
        ],
        [Path(log or name) for name, log in zip(inputs, paths, strict=True)],
    )
    for name, file, session in zip(names, files, sessions, strict=True):
        if session is None:
            assert file is not None
            yield Candidate(name, stored_in_file(file), file, memory=_planned(file))
            continue
        if file is not None:
            check_recorded(session, stored_in_file(file))
        file = file or _recorded_file(session)
        stored = stored_in_log(session, recorded_model(session), file)
        yield Candidate(name, stored, file, [session], recorded_memory(session))


def _tried(
    source: ModelFile,
    directory: Path,
    types: Sequence[str],
    options: RunOptions,
    rounds: int,
    against: ModelFile,
) -> Iterator[Candidate]:
    """What quantizing, running and recording gives; a single type is held against the source."""
    from converters.analyses.compare.candidate import Candidate, recorded_memory
    from converters.analyses.stored_weights import stored_in_file
    from llamacpp_instr.log.session import load_session
    from llamacpp_instr.model.file import load_model_file
    from llamacpp_instr.run.turns import run_trials
    from llamacpp_instr.terminal import notice

    trials = run_trials(source, types, directory, options, rounds, notice, against.headers)
    for trial in trials:
        file, sessions = load_model_file(trial.model), [load_session(log) for log in trial.logs]
        memory = recorded_memory(sessions[-1])
        yield Candidate(trial.name, stored_in_file(file), file, sessions, memory)


def _with_errors(candidates: Sequence[Candidate], against: ModelFile | None) -> list[Candidate]:
    """The candidates with the errors of their weights, where there are files to compute them of."""
    from llamacpp_instr.progress import progress_bar
    from llamacpp_instr.weights.compare import compute_weight_errors

    against = against or candidates[0].file
    if against is None:
        return list(candidates)
    found = []
    for of in candidates:
        if of.file is None:
            found.append(of)
        elif of.file.path == against.path:
            found.append(replace(of, is_reference=True))
        else:
            with progress_bar(f"Errors of {of.name}") as on_progress:
                errors = compute_weight_errors(against, of.file, on_progress=on_progress)
            found.append(replace(of, errors={error.name: error for error in errors}))
    return found


def _planned(model: ModelFile) -> MemoryBreakdown | None:
    """What a context of `instr run` would hold; None where llama.cpp cannot tell."""
    from llamacpp_instr.errors import NativeError
    from llamacpp_instr.llama.engine import ContextOptions
    from llamacpp_instr.memory.dry_run import LoadError
    from llamacpp_instr.memory.plan import plan_memory

    try:
        return plan_memory(model, ContextOptions())
    except (NativeError, LoadError):
        return None


def _recorded_file(session: Session) -> ModelFile | None:
    """The file that a session ran, when it is still there and still the same model."""
    from converters.analyses.compare.candidate import recorded_model
    from converters.analyses.stored_weights import recorded_file
    from llamacpp_instr.errors import UsageError

    try:
        return recorded_file(session, recorded_model(session))
    except UsageError:
        return None


@contextlib.contextmanager
def _directory(keep: str | None) -> Iterator[Path]:
    """Where the models and logs of --types are written. The logs name the models, so those that
    are kept stay where they were written."""
    from llamacpp_instr.errors import UsageError
    from llamacpp_instr.temporary import temporary_directory

    if keep is None:
        with temporary_directory("instr-compare-") as directory:
            yield directory
        return
    try:
        Path(keep).mkdir(exist_ok=True)
    except OSError as error:
        raise UsageError(f"--keep {keep}: {error.strerror}; name a directory") from None
    yield Path(keep)


def _is_model(name: str) -> bool:
    """Whether this names a model, not a log; what cannot be read is what its name says."""
    from llamacpp_instr.output import begins_as_model

    return name == "demo" or name.endswith(".gguf") or begins_as_model(name)
