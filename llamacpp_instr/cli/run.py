"""`instr run`: runs a model and records the session."""

from __future__ import annotations

import os
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import click

from llamacpp_instr.base.errors import UsageError
from llamacpp_instr.cli import recording
from llamacpp_instr.cli.options import (
    chat_option,
    command,
    context_options,
    force_option,
    read_text,
)


@command(
    'instr run demo --prompt "Once upon a time" -n 64',
    'instr run model.gguf --chat -p "Why is the sky blue?" --temp 0.7 --log sky.log',
    "instr run model.gguf --prompt-file prompt.txt --repeat 5 --force",
    'instr run demo --prompt "Once upon a time" --perfetto session.pftrace',
    'instr run demo --prompt "Once upon a time" --capture "l_out-*" -o activations',
    'echo "a sentence" | instr run encoder.gguf --embed --prompt -',
)
@click.argument("model")
@click.option(
    "-p",
    "--prompt",
    "prompts",
    multiple=True,
    metavar="TEXT",
    help="The prompt; - is standard input. With --embed it may be repeated.",
)
@click.option(
    "--prompt-file",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Read the prompt from a file, without the newline at its end; - is standard input.",
)
@click.option("-n", default=128, show_default=True, help="Tokens to generate at most.")
@recording.level_option
@click.option(
    "--log",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="The log to write; - is standard output.  "
    "[default: session.log, or session-2.log and so on if that exists]",
)
@force_option
@click.option("--temp", default=0.0, show_default=True, help="Temperature; 0 is greedy.")
@click.option("--top-k", type=int, help="Sample from the K most probable tokens.")
@click.option("--top-p", type=float, help="Sample from the fewest tokens with this probability.")
@click.option("--min-p", type=float, help="Drop tokens below this share of the best probability.")
@click.option("--seed", type=int, help="Seed of the sampling.  [default: random, kept in the log]")
@context_options
@click.option("--no-mmap", is_flag=True, help="Read the model into memory, do not map it.")
@chat_option
@click.option(
    "--embed",
    is_flag=True,
    help="Print the embedding of each prompt as a JSON array, not normalized.",
)
@recording.stats_option
@click.option("--stop-on-nan", is_flag=True, help="Stop when a --stats tensor contains a NaN.")
@click.option(
    "--capture",
    metavar="PATTERN",
    help="Write the values of the ops whose names match, such as l_out-*, to the directory of -o.",
)
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path),
    metavar="DIR",
    help="Directory for --capture: shards of safetensors, and an index.",
)
@click.option(
    "--repeat",
    default=1,
    show_default=True,
    metavar="N",
    help="Run N times in one session; the first run is marked as warm-up.",
)
@recording.live_option
@click.option(
    "--perfetto",
    metavar="TRACE",
    help="At the end, also write the session as a Perfetto trace.",
)
@recording.log_error_option
def run(
    model: str,
    prompts: tuple[str, ...],
    prompt_file: Path | None,
    log: Path | None,
    force: bool,
    temp: float,
    top_k: int | None,
    top_p: float | None,
    min_p: float | None,
    seed: int | None,
    no_mmap: bool,
    live: bool,
    perfetto: str | None,
    **recorded: Any,
) -> None:
    r"""Run a model and record the session as a log.

    MODEL is a GGUF file, demo for the demo model, or a folder that instr import accepts, which is
    imported into the cache once. The text goes to standard output as it is
    generated, everything else, including a summary, to standard error. On a terminal, control
    characters of the text are escaped, as \x1b; a pipe or a file gets them unchanged.

    With --log - the log goes to standard output and the text to standard error, without a summary.
    With --perfetto - the trace goes to standard output, the text to standard error.
    """
    from llamacpp_instr.base.output import check_not_input, check_output, open_output
    from llamacpp_instr.base.terminal import notice
    from llamacpp_instr.debugger.shards import capturing
    from llamacpp_instr.lab.importer.source import imported
    from llamacpp_instr.llama.generate import Sampling
    from llamacpp_instr.recording.session import fresh_log
    from llamacpp_instr.run.session import DEFAULT_LOG, RunOptions
    from llamacpp_instr.run.session import run as run_model

    inputs = [model, prompt_file, "-" if "-" in prompts else None]
    if log is not None:
        check_not_input(log, *inputs)
    if perfetto is not None:
        check_output(perfetto, force, *inputs)
        if str(log) == "-":
            raise UsageError("--perfetto needs a log that is a file; leave out --log -")
        if Path(perfetto).resolve() == (log or DEFAULT_LOG).resolve():
            raise UsageError(f"{perfetto} cannot contain both the log and the trace")
    if live and str(log) == "-":
        raise UsageError("--live needs a log that is a file; leave out --log -")
    if live and log is None:
        log = DEFAULT_LOG if force else fresh_log(DEFAULT_LOG)
    if Path(model).is_dir():
        model = str(imported(Path(model), notice))
    options = RunOptions(
        model=model,
        prompts=_read_prompts(prompts, prompt_file),
        log=log,
        sampling=Sampling(temp, top_k, top_p, min_p, seed).with_seed(),
        mmap=not no_mmap,
        force=force,
        **recorded,
    )
    options.check()
    before = _identity(log)
    out = sys.stderr.buffer if "-" in (str(log), perfetto) else sys.stdout.buffer
    with (
        recording.watched(live, lambda: log if _identity(log) not in (None, before) else None),
        capturing(options.capture, options.output, force, notice)
        if options.capture and options.output
        else nullcontext() as debugger,
    ):
        written = run_model(options, out, debugger=debugger)
    if str(written) == "-":
        return
    from llamacpp_instr.converters.analyses.summary import compute_summary
    from llamacpp_instr.log.session import load_session
    from llamacpp_instr.report.text import render_text

    click.echo(render_text(compute_summary(load_session(written))), err=True)
    notice(f"log: {written}")
    if perfetto is not None:
        from llamacpp_instr.cli import size_bound
        from llamacpp_instr.cli.logs import Logs
        from llamacpp_instr.converters.exports.perfetto import Options, write_perfetto

        cure = f"convert some of its steps with `instr to-perfetto {written} --steps A-B`"
        bound = size_bound.SizeBound(size_bound.MAX_TRACE, whole=True, cure=cure)
        logs = Logs((str(written),), lenient=False)
        with logs.converting(bound) as (events,), open_output(perfetto, force) as file:
            write_perfetto(events, bound.counted(file), Options())
        notice(f"trace: {perfetto}")


def _identity(log: Path | None) -> tuple[int, int] | None:
    """Changes if the file is replaced; None if it does not exist."""
    if log is None:
        return None
    try:
        found = log.stat()
    except OSError:
        return None
    return found.st_dev, found.st_ino


def _read_prompts(prompts: tuple[str, ...], file: Path | None) -> list[str]:
    if file is not None and prompts:
        raise UsageError("give --prompt or --prompt-file, not both")
    if file is not None:
        return [read_text(str(file), "prompt file")]
    return [read_text(prompt) if prompt == "-" else _as_typed(prompt) for prompt in prompts]


def _as_typed(prompt: str) -> str:
    """The prompt as UTF-8, even if Python decoded the argument with another encoding."""
    try:
        return os.fsencode(prompt).decode()
    except UnicodeError as error:
        raise UsageError("the prompt is not UTF-8") from error
