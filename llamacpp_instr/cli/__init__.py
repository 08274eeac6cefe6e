"""The command `instr`: a function for each command, which parses, calls and prints.

The default of a parameter of that function declares its option. `_MODULES` names the module of a
command; a command that it lacks is in the module of its own name. Modules are imported when they
are used, which keeps `instr --help` fast. Exit status: 0 for success, 1 for a failure, 2 for wrong
input, 130 if interrupted.
"""

from __future__ import annotations

import contextlib
import difflib
import errno
import importlib
import os
import signal
import sys
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

import click

from llamacpp_instr import __version__
from llamacpp_instr.base import terminal
from llamacpp_instr.base.errors import InstrError
from llamacpp_instr.base.terminal import handled

SHOW_TRACEBACK = "LLAMACPP_INSTR_TRACEBACK"
"""the environment variable with which an unexpected error shows its traceback, as in our tests"""

GROUPS: dict[str, dict[str, str]] = {
    "Record": {
        "build": "Build and install the instrumented llama.cpp.",
        "doctor": "Show what is installed and what is missing.",
        "run": "Run a model and record the session as a log.",
        "exec": "Run any program and record its models as logs.",
        "bench": "Measure the speed of models and settings, interleaved.",
    },
    "Look": {
        "summary": "Summarize a log: speed, time, memory.",
        "stats": "Print times and rates of a log by op, layer, block or phase.",
        "requests": "Print how long the requests of a log took, and why.",
        "tree": "Print where the time, bytes or FLOPs of a log went, as a tree.",
        "cat": "Print the events of a log, all or selected.",
        "page": "Write one HTML page about a log, to look at or to send.",
        "live": "Watch a log while it is written.",
        "check": "Check logs strictly, line by line.",
        "merge": "Join the log of a client with those of its servers.",
        "view": "Open a log or a trace in Perfetto's UI.",
    },
    "Explain": {
        "diff": "Compare the times of two or more logs.",
        "compare": "Compare models, or their logs: size, error, speed.",
        "values": "Print the values that a log recorded, or compare two logs.",
        "debug": "Stop a model between two ops, to read and change values.",
        "probe": "Measure this machine, for roofline and predict.",
        "roofline": "Compare the ops of a log with what the machine can do.",
        "predict": "Predict how fast a model runs, without running it.",
        "schedule": "Schedule the ops of a log or a model on other engines.",
        "capacity": "Simulate the server of a log with more clients.",
    },
    "Models": {
        "import": "Convert a model folder to a GGUF model.",
        "inspect": "Print what is in a model file, from its headers alone.",
        "ops": "Print every distinct op of a model or a log.",
        "validate": "Check every op, or every layer, of a model.",
        "memory": "Print the memory that a model takes, or that a log recorded.",
        "imatrix": "Compute the importance matrix of a model from a text.",
        "quantize": "Quantize a model, or print the sizes that it would have.",
        "recipe": "Choose the quantization of a model, or the type of each tensor.",
        "quality": "Compare quantized models with the model they come from.",
        "diverge": "Find where two models part, op by op, and why.",
        "blocks": "Print the blocks of a quantized tensor of a model.",
        "weights": "Print, show or export the weights of a model.",
    },
    "Exchange": {
        "to-flashinfer": "Export the ops of a log as workloads of flashinfer-bench.",
        "to-onnx": "Write the graph of a model or a log as ONNX.",
        "to-otlp": "Write or send the requests of a log as OpenTelemetry traces.",
        "to-parquet": "Convert a log to tables in Parquet or CSV files.",
        "to-perfetto": "Convert a log to a Perfetto trace.",
        "to-torch": "Convert a log for TensorBoard and PyTorch's trace analysis.",
    },
    "Fleet": {
        "collect": "Collect many logs into one data set of Parquet files.",
        "sql": "Query the logs in a data set.",
    },
}
"""purpose -> commands: name -> the first line of its help"""
COMMANDS = {name: text for group in GROUPS.values() for name, text in group.items()}
_MODULES = {
    name: module
    for module, names in {
        "build": "build doctor",
        "record": "run exec bench debug",
        "look": "summary stats requests tree cat page live check merge view",
        "explain": "diff compare values probe roofline predict schedule",
        "models": "import inspect ops memory validate",
        "quantization": "imatrix quantize quality diverge blocks weights",
        "exchange": "to-flashinfer to-onnx to-otlp to-parquet to-perfetto to-torch collect sql",
    }.items()
    for name in names.split()
}
ALIASES = {"report": "memory"}
"""former names of commands, which still work but are not in the help"""
OLD_OPTIONS: dict[str, dict[str, str]] = {
    "cat": {"--layer": "--layers", "--step": "--steps"},
    "roofline": {"--probe": "--machine"},
    "stats": {"--layer": "--layers", "--op": "--ops"},
    "validate": {"--against": "--reference"},
    "weights": {"--against": "--reference"},
}
"""former names of options, which work for one more release but are not in the help"""

_EPILOG = """\b
Start with:
  instr build
  instr run demo --prompt "Once upon a time"
"""


class LazyGroup(click.Group):
    """A group that imports its commands when they are used."""

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:  # noqa: ARG002
        if cmd_name not in COMMANDS:
            return None
        name = cmd_name.replace("-", "_")
        module = importlib.import_module(f"{__name__}.{_MODULES.get(cmd_name, name)}")
        # Python has an `exec` and an `import` of its own
        command = getattr(module, name, None) or getattr(module, f"{name}_")
        assert isinstance(command, click.Command)
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        name = ALIASES.get(args[0], args[0])
        if name not in COMMANDS and not name.startswith("-"):
            close = difflib.get_close_matches(name, COMMANDS, n=1)
            hint = f"did you mean {close[0]!r}?" if close else f"choose from {', '.join(COMMANDS)}"
            raise click.UsageError(f"no command {name!r} ({hint})", ctx)
        return super().resolve_command(ctx, [name, *_with_new_names(name, args[1:])])

    def format_commands(
        self,
        ctx: click.Context,  # noqa: ARG002
        formatter: click.HelpFormatter,
    ) -> None:
        width = max(map(len, COMMANDS))
        for purpose, commands in GROUPS.items():
            with formatter.section(purpose):
                formatter.write_dl([(name.ljust(width), text) for name, text in commands.items()])

    def make_context(self, *args: Any, **extra: Any) -> click.Context:
        with _reader_may_leave():
            return super().make_context(*args, **extra)

    def invoke(self, ctx: click.Context) -> Any:
        with _reader_may_leave():
            return super().invoke(ctx)

    def main(  # type: ignore[override]
        self, args: Sequence[str] | None = None, prog_name: str | None = None, **extra: Any
    ) -> NoReturn:
        """Run the command line and exit with its status; an error is one line."""
        extra["standalone_mode"] = False
        _fill_standard_streams()
        terminal.replace_what_cannot_be_shown()
        interruptions: list[int] = []

        def interrupt(number: int, frame: FrameType | None) -> None:
            interruptions.append(number)
            signal.default_int_handler(number, frame)

        try:
            with handled(interrupt, "SIGINT", only=lambda of: of is signal.default_int_handler):
                status = super().main(args, prog_name or "instr", **extra)
        except click.Abort:
            # click raises this for Ctrl-C, and for the end of input in a prompt
            _leave("Interrupted", 130)
        except click.UsageError as error:
            ctx = error.ctx
            see = f"; see {ctx.command_path} --help" if ctx is not None else ""
            _leave(f"Error: {error.format_message().rstrip('.')}{see}", 2)
        except click.ClickException as error:
            _leave(f"Error: {error.format_message()}", error.exit_code)
        except InstrError as error:
            _leave(f"Error: {error}", error.exit_code)
        except Exception as error:
            if interruptions:  # C code, such as matplotlib's, turns it into an error of its own
                _leave("Interrupted", 130)
            if os.environ.get(SHOW_TRACEBACK) and not isinstance(error, OSError):
                raise
            _leave(*_line_about(error))
        # only `ctx.exit(status)` returns a number: commands return None
        sys.exit(status if isinstance(status, int) else 0)


def _with_new_names(command: str, args: Sequence[str]) -> Iterator[str]:
    """The arguments of a command, with former names of options replaced."""
    renamed = OLD_OPTIONS.get(command, {})
    before = ""
    for arg in args:
        option, equals, value = arg.partition("=")
        if before == "--layer" in renamed and arg == "-1":
            yield "none"  # what lies outside of layers had this number
        else:
            yield renamed.get(option, option) + equals + value
        before = arg


@contextlib.contextmanager
def _reader_may_leave() -> Iterator[None]:
    """Exit with status 0 if the reader closes the pipe, as in `instr cat session.log | head`; click
    would exit with status 1."""
    try:
        yield
    except BrokenPipeError:
        terminal.abandon_standard_output()
        raise click.exceptions.Exit(0) from None


def _line_about(error: Exception) -> tuple[str, int]:
    """The line and the exit status of an error that no command expected."""
    if isinstance(error, OSError) and error.errno == errno.ENOSPC and not error.filename:
        terminal.abandon_standard_output()
        return f"Error: standard output cannot be written: {error.strerror}", 1
    if isinstance(error, OSError) and isinstance(error.filename, str | bytes):
        return f"Error: {os.fsdecode(error.filename)}: {error.strerror}", 2
    if isinstance(error, MemoryError):
        return "Error: there is not enough memory for this", 1
    place = traceback.extract_tb(error.__traceback__)[-1]
    what = " ".join(f"{type(error).__name__}: {error}".split())[:200]
    line = (
        f"Error: a bug in instr: {what} ({Path(place.filename).name}:{place.lineno}); please"
        f" report it with the traceback that {SHOW_TRACEBACK}=1 shows"
    )
    return line, 1


def _fill_standard_streams() -> None:
    """Open /dev/null for each closed standard stream (`>&-`, some services). Otherwise the next
    file to be opened would get its number, and output of C code would go into a log."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, Path(os.devnull).open(mode))  # noqa: SIM115


def _leave(line: str, status: int) -> NoReturn:
    terminal.notice(line)  # it may quote a log or a model
    sys.exit(status)


@click.command(
    "instr",
    cls=LazyGroup,
    epilog=_EPILOG,
    invoke_without_command=True,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
@click.version_option(__version__, prog_name="instr", message="%(prog)s %(version)s")
@click.pass_context
def main(ctx: click.Context) -> None:
    """Record what llama.cpp does, and show where the time and the memory go.

    A recording is a log of a real session: every decode, layer and op with its compute time.
    """
    if ctx.invoked_subcommand is None:
        click.echo(ctx.get_help())
        ctx.exit(2)
