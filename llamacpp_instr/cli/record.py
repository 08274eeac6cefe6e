"""The commands that run a model or a program: to record it, or to stop it between two ops."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click import Choice, IntRange

from llamacpp_instr.base.errors import UsageError
from llamacpp_instr.base.terminal import notice
from llamacpp_instr.cli import options as cli
from llamacpp_instr.converters.live.show import watched
from llamacpp_instr.log.schema import LEVELS

if TYPE_CHECKING:
    from llamacpp_instr.llama.devices import Placement
    from llamacpp_instr.llama.engine import ContextOptions
    from llamacpp_instr.llama.generate import Sampling
    from llamacpp_instr.model.adapter import Adapter

_LEVEL = cli.option("How much is recorded.", default="detailed", type=Choice(LEVELS))
_STATS = cli.option(
    "Record the values of tensors whose names match: * is any text, re: begins a regular "
    "expression. "
    "Do not compare the times of such a session.",
    "PATTERN",
)
_ON_LOG_ERROR = cli.option(
    "What to do when a log can no longer be written.",
    default="continue",
    type=Choice(["continue", "stop"]),
)
_LIVE = cli.flag("Open a page that shows the session while it is recorded (instr live).")


def _sampling(**given: Any) -> Sampling:
    from llamacpp_instr.llama.generate import Sampling

    return Sampling(**given).with_seed()


@cli.command(
    'instr run demo --prompt "Once upon a time" -n 64',
    'instr run model.gguf --chat -p "Why is the sky blue?" --temp 0.7 --log sky.log',
    "instr run model.gguf --prompt-file prompt.txt --repeat 5 --force",
    'instr run demo --prompt "Once upon a time" --perfetto session.pftrace',
    'instr run model.gguf --lora adapter.gguf:0.5 -p "Why is the sky blue?"',
    'instr run model.gguf --gpu-layers 0 -p "Why is the sky blue?"    # on the CPU alone',
    'instr run demo --prompt "Once upon a time" --capture "l_out-*" -o activations',
    'echo "a sentence" | instr run encoder.gguf --embed --prompt -',
)
def run(
    model: str = cli.argument(),
    prompts: tuple[str, ...] = cli.option(
        "The prompt; - is standard input. With --embed it may be repeated.",
        "-p --prompt TEXT",
        multiple=True,
    ),
    prompt_file: Path | None = cli.option(
        "Read the prompt from a file, without the newline at its end; - is standard input.",
        "FILE",
        cli.PATH,
    ),
    n: int = cli.option("Maximum tokens to generate.", "-n", default=128),
    level: str = _LEVEL,
    log: Path | None = cli.option(
        "The log to write; - is standard output.  "
        "[default: session.log, or session-2.log and so on if that exists]",
        "FILE",
        cli.PATH,
    ),
    force: bool = cli.FORCE,
    sampling: Sampling = cli.gathered(
        _sampling,
        temp=cli.option("Temperature; 0 is greedy.", default=0.0),
        top_k=cli.option("Sample from the K most probable tokens.", type=int),
        top_p=cli.option("Sample from the fewest tokens that have this probability.", type=float),
        min_p=cli.option("Drop tokens below this share of the best probability.", type=float),
        seed=cli.option("Seed of the sampling.  [default: random, kept in the log]", type=int),
    ),
    context: ContextOptions = cli.CONTEXT,
    lora: list[Adapter] = cli.LORA,
    placement: Placement = cli.PLACEMENT,
    no_mmap: bool = cli.flag("Read the model into memory instead of mapping it."),
    more: dict[str, Any] = cli.gathered(
        dict,
        chat=cli.CHAT,
        embed=cli.flag("Print the embedding of each prompt as a JSON array, not normalized."),
        stats=_STATS,
        stop_on_nan=cli.flag("Stop when a --stats tensor contains a NaN."),
        capture=cli.option(
            "Write the values of the ops whose names match, such as l_out-*, to the directory of "
            "-o.",
            "PATTERN",
        ),
        output=cli.option(
            "Directory for --capture: shards of safetensors, and an index.",
            "-o --output DIR",
            cli.PATH,
        ),
        repeat=cli.option(
            "Run N times in one session; the first run is marked as warm-up.", "N", default=1
        ),
    ),
    live: bool = _LIVE,
    perfetto: str | None = cli.option(
        "At the end, also write the session as a Perfetto trace.", "TRACE"
    ),
    on_log_error: Any = _ON_LOG_ERROR,
) -> None:
    r"""
    MODEL is a GGUF file, demo for the demo model, or a folder that instr import accepts, which is
    imported into the cache once. The text goes to standard output as it is
    generated, everything else, including a summary, to standard error. On a terminal, control
    characters of the text are escaped, as \x1b; a pipe or a file gets them unchanged.

    With --log - the log goes to standard output and the text to standard error, without a summary.
    With --perfetto - the trace goes to standard output, the text to standard error.
    """
    from llamacpp_instr.base.output import check_not_input, check_output
    from llamacpp_instr.debugger.capture import capturing
    from llamacpp_instr.lab.importer.source import imported
    from llamacpp_instr.run.exec import identity
    from llamacpp_instr.run.session import DEFAULT_LOG, RunOptions, default_log
    from llamacpp_instr.run.session import run as run_model

    inputs = [model, prompt_file, "-" if "-" in prompts else None, *(of.path for of in lora)]
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
        log = default_log(force)
    if Path(model).is_dir():
        model = str(imported(Path(model), notice))
    options = RunOptions(
        model,
        _read_prompts(prompts, prompt_file),
        log,
        n,
        level,
        sampling=sampling,
        context=context,
        lora=lora,
        placement=placement,
        mmap=not no_mmap,
        on_log_error=on_log_error,
        force=force,
        **more,
    )
    options.check()

    def started_log() -> Path | None:
        return log if log and identity(log) not in ("0:0", before) else None

    before = identity(log) if log else ""
    out = sys.stderr.buffer if "-" in (str(log), perfetto) else sys.stdout.buffer
    with (
        watched(live, started_log),
        capturing(options.capture, options.output, force, notice)
        if options.capture and options.output
        else nullcontext() as debugger,
    ):
        written = run_model(options, out, debugger=debugger)
    if str(written) == "-":
        return
    from llamacpp_instr.converters.analyses.summary import compute_summary
    from llamacpp_instr.log.session import load_session
    from llamacpp_instr.report.render import render_text

    click.echo(render_text(compute_summary(load_session(written))), err=True)
    notice(f"log: {written}")
    if perfetto is not None:
        from llamacpp_instr.cli.logs import Logs

        cure = f"convert some of its steps with `instr to-perfetto {written} --steps A-B`"
        Logs((str(written),)).write_trace(perfetto, cure, force=force)
        notice(f"trace: {perfetto}")


def _read_prompts(prompts: tuple[str, ...], file: Path | None) -> list[str]:
    if file is not None and prompts:
        raise UsageError("give --prompt or --prompt-file, not both")
    if file is not None:
        return [cli.read_text(str(file), "prompt file")]
    try:
        # as UTF-8, even if Python decoded the argument with another encoding
        return [
            cli.read_text(prompt) if prompt == "-" else os.fsencode(prompt).decode()
            for prompt in prompts
        ]
    except UnicodeError as error:
        raise UsageError("the prompt is not UTF-8") from error


@cli.command(
    "instr exec -- python app.py --port 8080",
    "instr exec --level verbose --log server-%p.log -- uvicorn app:app --workers 4",
    "instr exec --rotate 1GB -- python app.py --port 8080",
    "instr exec --live -- python app.py --port 8080",
    # all options after the command's name belong to the command
    context_settings={"allow_interspersed_args": False},
)
def exec_(
    log: str | None = cli.option(
        "The log to write; %p is the process id.  [default: the command's name-%p.log]", "FILE"
    ),
    recorded: dict[str, Any] = cli.gathered(
        dict,
        level=_LEVEL,
        stats=_STATS,
        on_log_error=_ON_LOG_ERROR,
        rotate=cli.option(
            "Continue in another file, .part2 and so on, beyond this size; each is a complete log.",
            "SIZE",
            callback=cli.bytes_of_size,
        ),
        force=cli.flag("Replace the log and its parts if they exist."),
        keep_args=cli.flag("Keep arguments that look like secrets; redact nothing."),
    ),
    live: bool = _LIVE,
    command: tuple[str, ...] = cli.argument(nargs=-1, type=click.UNPROCESSED),
) -> None:
    """
    Every process of COMMAND that uses llama-cpp-python writes a log. Input, output and exit status
    are those of COMMAND. The paths of the logs go to standard error, with what is missing from an
    incomplete log. --force replaces only files that begin like a log. An old log is kept until the
    command has started a new one.

    A log contains the arguments of its process without secrets. [redacted] replaces the VALUE of
    --NAME VALUE, NAME=VALUE and NAME: VALUE if NAME ends in, or contains as a word, key, token,
    secret, password, passwd, passphrase, credential(s), auth or authorization. It also replaces
    words that begin with sk-, hf_, gh?_ or github_pat_, and passwords in URLs.
    """
    from llamacpp_instr.recording.session import logs_of
    from llamacpp_instr.run.exec import execute, log_target

    target = log_target(command, log)
    before = logs_of(target)

    def first_log() -> Path | None:
        return next((path for path, of in logs_of(target).items() if before.get(path) != of), None)

    with watched(live, first_log):
        status = execute(command, log, **recorded)
    sys.exit(status)


@cli.command(
    "instr bench model.gguf",
    "instr bench model.gguf -p 256 -n 64 --depth 0,256 --threads 1,2",
    "instr bench model-F16.gguf --types Q8_0,Q4_K_M --json -o bench.json",
)
def bench(
    models: tuple[str, ...] = cli.argument(nargs=-1, required=True, metavar="MODEL..."),
    prompts: list[int] = cli.numbers(
        "Tokens of a prompt; a test for each number, 0 for none.", "-p --n-prompt N,...", 0,
        default="512",
    ),
    tokens: list[int] = cli.numbers(
        "Tokens that are decoded one by one; a test for each number, 0 for none.",
        "-n --n-gen N,...", 0, default="128",
    ),
    depths: list[int] = cli.numbers(
        "Tokens in the context before each test.", "-d --depth N,...", 0, default="0"
    ),
    threads: list[int] = cli.numbers("Numbers of threads.  [default: physical cores]"),
    types: str | None = cli.option(
        "Quantize MODEL to these types first; one type is measured beside MODEL itself.",
        "A,B,...",
        shell_complete=cli.complete_names,
    ),
    rounds: int = cli.option("Rounds; each runs all configurations once.", default=5),
    logs: Path | None = cli.option(
        "Directory for the logs.  [default: bench, or bench-2 and so on if that exists]",
        "DIR",
        cli.PATH,
    ),
    output: cli.ReportOutput = cli.REPORT,
) -> None:  # fmt: skip
    """
    Measures tokens per second as llama-bench does: of a prompt, and of tokens that are decoded one
    by one, without a sampler. Each model, number of threads and depth is a configuration. All take
    turns, and each is compared with the first: the ratio of their speeds with its 95 % interval,
    and whether it is noise. Warm-up runs do not count.

    Each round of each configuration has a log in DIR, which `instr summary` and `instr diff` read.
    Ctrl-C prints what was measured. MODEL is a GGUF file, or demo for the demo model.
    """
    from llamacpp_instr.base.terminal import progress_bar
    from llamacpp_instr.converters.analyses.bench import compare_configurations
    from llamacpp_instr.run.bench import BenchOptions, machine_facts, run_bench

    output.check(*models)
    options = BenchOptions(prompts, tokens, depths, threads, rounds, output.force)
    names = types.split(",") if types is not None else []
    with progress_bar("Measuring") as on_progress:
        measured, interrupted = run_bench(models, names, options, logs, notice, on_progress)
    if measured:
        output.write(compare_configurations(measured, machine_facts(), output.form == "json"))
    if interrupted:
        raise KeyboardInterrupt


class _Debug(click.Command):
    """Everything after -- belongs to the program."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        at = args.index("--") if "--" in args else len(args)
        ctx.meta["program"] = args[at + 1 :] if at < len(args) else None
        return super().parse_args(ctx, args[:at])


@cli.command(
    'instr debug demo --prompt "Once upon a time" --break "l_out-3"',
    'instr debug model.gguf -p "Hello" --break "ffn_out-* if absmax > 60 or nan"',
    'instr debug --break "block=attention layer=2" -- app.py --port 8080',
    'instr debug demo --prompt "Once upon a time" --page',
    "instr debug demo --dap-port 4711",
    cls=_Debug,
)
def debug(
    model: str | None = cli.argument(required=False),
    prompt: str | None = cli.option("The prompt; - is not possible here.", "-p --prompt TEXT"),
    n: int = cli.option("Maximum tokens to generate.", "-n", default=16),
    breakpoints: tuple[str, ...] = cli.option(
        "A breakpoint, as `help break` describes it; may be repeated.  [default: the first op]",
        "-b --break TEXT",
        multiple=True,
    ),
    log: Path | None = cli.option(
        "The log to write.  [default: debug.log, or debug-2.log and so on if that exists]",
        "FILE",
        cli.PATH,
    ),
    force: bool = cli.FORCE,
    chat: bool = cli.CHAT,
    context: ContextOptions = cli.CONTEXT,
    lora: list[Adapter] = cli.LORA,
    dap: bool = cli.flag(
        "Speak the Debug Adapter Protocol with an editor over standard input and output."
    ),
    dap_port: int | None = cli.option(
        "The same over TCP, at a port of 127.0.0.1; 0 takes a free one.", "PORT", IntRange(0, 65535)
    ),
    page: bool = cli.flag("Stop, look and change in the browser."),
    serving: cli.Serving = cli.serving_options(" of the page"),
) -> None:
    """
    MODEL is a GGUF file, or demo for the demo model; or give a Python program after --, which runs
    in this process. A compute stops after an op, when its result is ready. Commands are read from
    standard input; `help` lists them. The generated text goes to standard output, everything else
    to standard error.

    With --dap or --dap-port an editor gives the commands, and its launch configuration the options.
    With --page a browser gives them, at an address of 127.0.0.1.
    """
    ctx = click.get_current_context()
    program: Sequence[str] | None = ctx.meta["program"]
    for_editor = dap or dap_port is not None
    if not page and cli.given_options("port", "no_browser"):
        raise UsageError("--port and --no-browser are for --page")
    if for_editor:
        for given in cli.given_options():
            if given not in ("--prompt", "--dap", "--dap-port"):
                raise UsageError(f"{given} is not for --dap; set it in the launch configuration")
        if program is not None:
            raise UsageError("--dap is for models; leave out the program after --")
        if dap and dap_port is not None:
            raise UsageError("--dap and --dap-port exclude each other")
    elif str(log) == "-":
        raise UsageError("the log must be a file; give --log the name of one")
    elif program is not None and (model is not None or prompt is not None):
        raise UsageError("give a model with --prompt, or a program after --, not both")
    elif program is None and (model is None or prompt is None):
        raise UsageError("give a model and --prompt TEXT, or a program after --")
    from llamacpp_instr.debugger.commands import Terminal
    from llamacpp_instr.run import debugging
    from llamacpp_instr.run.session import RunOptions, default_log

    if for_editor:
        debugging.serve_editor(model, prompt, dap_port)
        return
    log = log or default_log(force, debugging.DEBUG_LOG)
    to = serving.port or 0, serving.show
    if program is None:
        assert model is not None
        assert prompt is not None
        options = RunOptions(
            model, [prompt], log, n, chat=chat, context=context, lora=lora, force=force
        )
        if page:
            ctx.exit(debugging.debug_model_on_page(options, breakpoints, *to))
        debugging.debug_model(options, Terminal(breakpoints))
    elif page:
        debugging.debug_program_on_page(program, log, force, breakpoints, *to)
    else:
        debugging.debug_program(program, Terminal(breakpoints), log, force)
