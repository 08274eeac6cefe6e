"""`instr compare A B`: compares models side by side, with the speed measured for each."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import click

from llamacpp_instr.base.errors import NativeError, UsageError
from llamacpp_instr.cli import completion
from llamacpp_instr.cli.logs import (
    GroupedCommand,
    Logs,
    group_option,
    is_model,
    load_run,
)
from llamacpp_instr.cli.options import (
    ReportOutput,
    command,
    given_options,
    lenient_option,
    report_options,
)

if TYPE_CHECKING:
    from llamacpp_instr.converters.analyses.compare.candidate import Candidate
    from llamacpp_instr.model.file import ModelFile


class _Compare(GroupedCommand):
    """Models may follow the logs of --log."""

    def ends(self, value: str) -> bool:
        return is_model(value)


@command(
    "instr compare --types Q8_0,Q4_K_M model-F16.gguf",
    "instr compare a.gguf b.gguf --log a.log --log b.log --reference f16.gguf",
    "instr compare v1.gguf v2.gguf --log v1-*.log --log v2-*.log",
    "instr compare a.log b.log -o comparison.html",
    cls=_Compare,
)
@click.argument("inputs", nargs=-1, required=True, metavar="MODEL|LOG...")
@group_option(
    "--log", "LOG...", "The logs of a MODEL, one or more: once for each MODEL, in their order."
)
@lenient_option
@click.option("--reference", metavar="MODEL", help="Base of the errors.  [default: the first]")
@click.option(
    "--types",
    shell_complete=completion.file_types,
    metavar="A,B,...",
    help="Quantize MODEL to these types, run and compare.",
)
@click.option(
    "-p",
    "--prompt",
    help="Prompt for --types.  [default: 512 tokens of the vocabulary]",
)
@click.option("-n", default=32, show_default=True, help="Tokens that a run of --types generates.")
@click.option(
    "--rounds", default=5, show_default=True, help="Rounds of --types; each runs all types once."
)
@click.option("--threads", type=int, help="Threads for --types.  [default: physical cores]")
@click.option("--keep", metavar="DIR", help="Keep the models and the logs of --types in DIR.")
@report_options
def compare(
    inputs: tuple[str, ...],
    log: list[tuple[str, ...]],
    lenient: bool,
    reference: str | None,
    types: str | None,
    prompt: str | None,
    n: int,
    rounds: int,
    threads: int | None,
    keep: str | None,
    output: ReportOutput,
) -> None:
    """Compare models, or their logs: size, error, speed.

    Prints models side by side, by tensor, role, layer and in total: file and run-time memory,
    types, bits per weight, and error of the weights. With logs, also the time and the rates of
    every op.

    MODEL is a GGUF file, or demo. A LOG means the model that it recorded; the parts of a rotated
    log are one LOG. Several logs of a MODEL are several runs of it, whose steps count together; the
    noise is estimated from all of them. Each model is compared with the first.
    """
    from llamacpp_instr.base.terminal import notice
    from llamacpp_instr.converters.analyses.compare import compute_comparison
    from llamacpp_instr.converters.analyses.compare.candidate import Candidate, recorded_memory
    from llamacpp_instr.converters.analyses.compare.pictures import draw_comparison
    from llamacpp_instr.converters.analyses.stored_weights import stored_in_file
    from llamacpp_instr.llama.engine import ContextOptions
    from llamacpp_instr.log.session import load_session
    from llamacpp_instr.model.file import load_model_file
    from llamacpp_instr.run.by_type import PREFILL, run_trials
    from llamacpp_instr.run.session import RunOptions

    if types is None:
        for option in given_options("prompt", "n", "rounds", "threads", "keep"):
            raise UsageError(f"{option} has no effect without --types; leave it out")
    output.check(*inputs, *(name for group in log for name in group), reference)
    against = load_model_file(reference) if reference else None
    with contextlib.ExitStack() as stack:
        if types is None:
            candidates = list(_given(inputs, log, lenient))
        else:
            if len(inputs) != 1 or log:
                raise UsageError("--types takes one MODEL and no LOG: it quantizes and records")
            source = load_model_file(inputs[0])
            against = against or source
            directory = stack.enter_context(_directory(keep))
            options = RunOptions(
                "",
                [prompt or "Once upon a time"],
                n=n,
                prefill=None if prompt else PREFILL,
                repeat=3,  # the first is warm-up
                context=ContextOptions(threads=threads),
                force=output.force,
            )
            names = types.split(",")
            candidates = []
            # a single type is compared with the source
            for trial in run_trials(
                source, names, directory, options, rounds, notice, against.headers
            ):
                file = load_model_file(trial.model)
                sessions = [load_session(path) for path in trial.logs]
                stored, used = stored_in_file(file), recorded_memory(sessions[-1])
                candidates.append(Candidate(trial.name, stored, file, sessions, used))
        if len(candidates) < 2:
            raise UsageError("only one model is given; name another, or use --types A,B")
        candidates = _with_errors(candidates, against)
        named = against.path.name if against else candidates[0].name
        has_errors = any(of.errors for of in candidates)
        reports = compute_comparison(
            candidates,
            named if has_errors else None,
            every_tensor=output.form in ("csv", "json", "html"),
        )
    # the last table is the one of tensors
    output.write(reports, table=reports[-1], charts=draw_comparison(candidates))


def _given(
    inputs: Sequence[str], logs: Sequence[tuple[str, ...]], lenient: bool
) -> Iterator[Candidate]:
    from llamacpp_instr.converters.analyses.compare.candidate import (
        Candidate,
        check_recorded,
        recorded_memory,
        recorded_model,
        short_names,
    )
    from llamacpp_instr.converters.analyses.stored_weights import (
        recorded_file,
        stored_in_file,
        stored_in_log,
    )
    from llamacpp_instr.llama.engine import ContextOptions
    from llamacpp_instr.log.runs import find_runs
    from llamacpp_instr.model.file import load_model_file
    from llamacpp_instr.recording.memory.plan import LoadError, plan_memory

    recorded = [of for of in inputs if not is_model(of)]
    parts = {run.paths[0]: run for run in find_runs(recorded, repeated=True)}
    inputs = [of for of in inputs if of in parts or is_model(of)]
    files = [load_model_file(of) if is_model(of) else None for of in inputs]
    if logs:
        if not all(files):
            raise UsageError("--log is for models; a LOG argument needs none")
        if len(logs) != len(inputs):
            raise UsageError(
                f"{len(inputs)} models are given, but {len(logs)} --log; each model needs one, with"
                " all its logs"
            )
        if sum(name == "-" for group in logs for name in group) > 1:
            raise UsageError("only one of the logs can be standard input")
        recorded_by = [Logs(group, lenient).sessions() for group in logs]
    else:
        recorded_by = [[load_run(parts[of], lenient)] if of in parts else [] for of in inputs]
    names = short_names(
        [
            Path(recorded_model(sessions[0]).path) if sessions and not file else Path(name)
            for name, file, sessions in zip(inputs, files, recorded_by, strict=True)
        ],
        [Path(group[0]) for group in logs] or [Path(name) for name in inputs],
    )
    for name, file, sessions in zip(names, files, recorded_by, strict=True):
        if not sessions:
            assert file is not None
            memory = None
            with contextlib.suppress(NativeError, LoadError):  # if llama.cpp cannot predict it
                memory = plan_memory(file, ContextOptions())
            yield Candidate(name, stored_in_file(file), file, memory=memory)
            continue
        model = recorded_model(sessions[0])
        if file is not None:
            for session in sessions:
                check_recorded(session, stored_in_file(file))
        else:
            with contextlib.suppress(UsageError):  # if it is not there any more, or another one
                file = recorded_file(sessions[0], model)
        stored = stored_in_log(sessions[0], model, file)
        yield Candidate(name, stored, file, sessions, recorded_memory(sessions[-1]))


def _with_errors(candidates: Sequence[Candidate], against: ModelFile | None) -> list[Candidate]:
    """The candidates with the errors of their weights, if the model files are available."""
    from llamacpp_instr.base.terminal import progress_bar
    from llamacpp_instr.lab.weights.measure import compute_weight_errors

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


@contextlib.contextmanager
def _directory(keep: str | None) -> Iterator[Path]:
    """The directory for the models and logs of --types. The logs contain the models' paths, so
    files that are kept are written to their final place."""
    from llamacpp_instr.base.system import temporary_directory

    if keep is None:
        with temporary_directory("instr-compare-") as directory:
            yield directory
        return
    try:
        Path(keep).mkdir(exist_ok=True)
    except OSError as error:
        raise UsageError(f"--keep {keep}: {error.strerror}; name a directory") from None
    yield Path(keep)
