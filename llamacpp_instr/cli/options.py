"""What declares a command: its name and examples, and the options that several commands have, with
what they read from them. It is the only place that writes a report."""

from __future__ import annotations

import functools
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from llamacpp_instr.base.errors import UsageError
from llamacpp_instr.cli import completion

if TYPE_CHECKING:
    from llamacpp_instr.report.charts import Chart
    from llamacpp_instr.report.page import Figure
    from llamacpp_instr.report.render import Form
    from llamacpp_instr.report.report import Report

LAST = 2**63
MOST_TOKENS = 1 << 16
"""what an option may ask for, where memory or time grow with it and nothing else limits it"""
_UNITS = {"KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}

_Decorator = Callable[[Callable[..., Any]], Callable[..., Any]]


def command(
    *examples: str, cls: type[click.Command] = click.Command, **settings: Any
) -> Callable[[Callable[..., Any]], click.Command]:
    """Makes a command of a function: its name with dashes, its docstring as the help, and below it
    the examples. The other arguments are those of `click.command`."""
    heading = "Examples:" if len(examples) > 1 else "Example:"
    epilog = "\n  ".join([f"\b\n{heading}", *examples])

    def decorate(function: Callable[..., Any]) -> click.Command:
        name = function.__name__.strip("_").replace("_", "-")
        return click.command(name, cls, epilog=epilog, **settings)(function)

    return decorate


def gathered(name: str, make: Callable[..., Any], *options: _Decorator) -> _Decorator:
    """Adds options to a command, which gets them as one argument `name`: what `make` returns for
    their values."""

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def with_options(*args: Any, **values: Any) -> None:
            values[name] = make(**{key: values.pop(key) for key in keys})
            function(*args, **values)

        for option in reversed(options):
            option(with_options)
        declared: list[click.Parameter] = with_options.__click_params__  # type: ignore[attr-defined]
        keys = {str(parameter.name) for parameter in declared[-len(options) :]}
        return with_options

    return decorate


def given_options(*names: str) -> list[str]:
    """The options of the running command, as --NAME, that were given; only those of `names`, if
    there are any."""
    ctx = click.get_current_context()
    return [
        option.opts[-1]
        for option in ctx.command.params
        if isinstance(option, click.Option)
        and (not names or option.name in names)
        and ctx.get_parameter_source(str(option.name)) is ParameterSource.COMMANDLINE
    ]


def range_option(name: str, text: str) -> _Decorator:
    """An option whose value is a range: `A`, `A-B`, `A-` or `-B`, also with a colon. The command
    gets (first, last), both inclusive, or None. `--layers none` is what lies outside of layers."""

    def parse(
        _ctx: click.Context, _param: click.Parameter, value: str | None
    ) -> tuple[int, int] | None:
        if value is None:
            return None
        if name == "--layers" and value == "none":
            return -1, -1
        match = re.fullmatch(r"(\d{1,18})|(\d{0,18})[-:](\d{0,18})", value)
        if match is None:
            raise UsageError(f"{name} {value}: give 7, 7-9, 7- or -9")
        first = int(match[1] or match[2] or 0)
        last = first if match[1] else int(match[3] or LAST)
        if first > last:
            raise UsageError(f"{name} {value}: the first is greater than the last")
        return first, last

    return click.option(name, metavar="A[-B]", callback=parse, help=text)


def bytes_of_size(_ctx: click.Context, _param: click.Parameter, value: str | None) -> int | None:
    """Bytes of a size such as 500MB, for an option; at least 1MB."""
    if value is None:
        return None
    match = re.fullmatch(r"(\d{1,19})\s*(|KB|MB|GB|TB)", value.strip(), re.IGNORECASE)
    if match is None:
        raise click.BadParameter(f"{value!r} is not a size; write it like 500MB or 2GB")
    n_bytes = int(match[1]) * _UNITS.get(match[2].upper(), 1)
    # every part of a rotated log repeats the models and the graphs, which would fill smaller parts
    if not 10**6 <= n_bytes < 2**63:
        raise click.BadParameter(f"{value!r} is not between 1MB and 9000000TB")
    return n_bytes


def read_text(name: str, what: str = "text") -> str:
    """The text of a file without the newline at its end, as llama-perplexity reads it; `-` is
    standard input. Raises `UsageError`, which says `what`, for one that cannot be read."""
    source = "standard input" if name == "-" else name
    try:
        data = sys.stdin.buffer.read() if name == "-" else Path(name).read_bytes()
        return data.decode().removesuffix("\n")
    except OSError as error:
        raise UsageError(f"the {what} {source} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise UsageError(f"{source} is not UTF-8: byte {error.start} is wrong") from None


def _context(**given: Any) -> Any:
    from llamacpp_instr.llama.engine import ContextOptions

    return ContextOptions(**given)


force_option = click.option("--force", is_flag=True, help="Overwrite files that exist.")
chat_option = click.option(
    "--chat", is_flag=True, help="Apply the model's own chat template to the prompt."
)
threads_option = click.option("--threads", type=int, help="Threads.  [default: physical cores]")
context_options = gathered(
    "context",
    _context,
    click.option(
        "--ctx",
        type=int,
        metavar="TOKENS",
        help="Size of the context.  [default: the model's own, at most 4096]",
    ),
    click.option(
        "--batch", type=int, metavar="TOKENS", help="Tokens of one decode at most.  [default: 2048]"
    ),
    click.option(
        "--ubatch", type=int, metavar="TOKENS", help="Tokens of one graph at most.  [default: 512]"
    ),
    threads_option,
    *(
        click.option(
            f"--cache-type-{of}",
            default="f16",
            show_default=True,
            metavar="TYPE",
            help=f"Storage type of the {of.upper()} cache.",
        )
        for of in ("k", "v")
    ),
    click.option(
        "--flash-attn",
        default="auto",
        show_default=True,
        type=click.Choice(["auto", "on", "off"]),
        help="Flash attention.",
    ),
)
"""for every command that makes or plans a context, which it gets as `context: ContextOptions`"""

lenient_option = click.option(
    "--lenient",
    is_flag=True,
    help="Leave out damaged lines and events that refer to them; count them.",
)
past_option = click.option(
    "--past",
    type=click.IntRange(0, 1 << 24),
    metavar="N",
    help="Tokens in the cache of a model before the step.  [default: 0]",
)
"""for commands that take a model or a log"""

_FORMS = (
    click.option("--json", "flag", flag_value="json", help="Print JSON: raw numbers with units."),
    click.option("--csv", "flag", flag_value="csv", help="Print CSV: one table, raw numbers."),
    click.option("--md", "flag", flag_value="md", help="Print Markdown."),
    click.option("--html", "flag", flag_value="html", help="Print one HTML page."),
)
_WRITTEN_BY = {
    ".pftrace": ("--perfetto", "`instr to-perfetto`"),
    ".png": ("--heat-map", "`instr blocks --heat-map`"),
    ".svg": ("--heat-map", "`instr blocks --heat-map`"),
}
"""the option of the same command, or the command, that writes files with a suffix"""


@dataclass(frozen=True)
class ReportOutput:
    """Where a report goes, and in which format."""

    flag: str | None
    path: str = "-"
    force: bool = False

    @property
    def form(self) -> Form:
        from llamacpp_instr.report.render import form_of

        return form_of(self.flag, self.path)

    def check(self, *inputs: str | Path | None, exports: Sequence[str] = ()) -> None:
        """Raise `UsageError` if the output cannot be written, is one of `inputs`, or has the suffix
        of something else; `exports` are those of the command beside its report."""
        from llamacpp_instr.base.output import check_output
        from llamacpp_instr.report.render import SUFFIXES

        check_output(self.path, self.force, *inputs)
        suffix = Path(self.path).suffix.lower()
        if self.flag is None and suffix not in ("", ".txt", *SUFFIXES, *exports):
            mine = {name for of in click.get_current_context().command.params for name in of.opts}
            meant = [name for name in _WRITTEN_BY.get(suffix, ()) if name[0] != "-" or name in mine]
            raise UsageError(
                f"-o {self.path}: a report is .txt, {', '.join(SUFFIXES)}"
                + (f"; {suffix} is written by {meant[0]}" if meant else "")
            )

    def write(
        self,
        reports: Sequence[Report],
        *,
        table: Report | None = None,
        charts: Sequence[Chart | Figure] = (),
        title: str | None = None,
    ) -> None:
        """Write the reports in the chosen format; the arguments are those of `render`. A file is
        not as wide as the terminal that it was written from."""
        from llamacpp_instr.base.terminal import PIPE
        from llamacpp_instr.report.render import render

        width = None if self.path == "-" else PIPE
        self.write_text(
            render(self.form, reports, table=table, charts=charts, title=title, width=width)
        )

    def write_several(
        self, named: Sequence[tuple[str, Sequence[Report], Report | None]], **more: Any
    ) -> None:
        """Write the reports of several logs, with the arguments of `side_by_side` and `write`."""
        from llamacpp_instr.report.arrange import side_by_side

        reports, table = side_by_side(named)
        self.write(reports, table=table, **more)

    def write_text(self, text: str) -> None:
        """Write what was rendered, whole."""
        from llamacpp_instr.base.output import open_output
        from llamacpp_instr.base.terminal import abandon_standard_output

        try:
            with open_output(self.path, self.force) as file:
                file.write(text.encode())
        except BrokenPipeError:
            abandon_standard_output()  # the reader closed the pipe; a verdict may still follow


def default_name(log: str, suffix: str, what: str) -> str:
    """The name of an output beside its log. Raises UsageError for standard input; `what` is what
    to name."""
    if log == "-":
        raise UsageError(f"name the {what} with -o: standard input has no name")
    name = Path(log)
    while name.suffix in (".gz", ".zst", ".log", ".ndjson", ".jsonl"):
        name = name.with_suffix("")
    return f"{name}.{suffix}"


report_options = gathered(
    "output",
    ReportOutput,
    *_FORMS,
    click.option(
        "-o",
        "--output",
        "path",
        default="-",
        metavar="FILE",
        help="Write to FILE; .json, .csv, .md and .html choose the format.",
    ),
    force_option,
)
"""adds --json, --csv, --md, --html, -o and --force to a command, as the argument `output`"""

form_options = gathered("report", ReportOutput, *_FORMS)
"""adds --json, --csv, --md and --html to a command, as the argument `report`"""

ops_option = click.option(
    "--ops",
    metavar="OP,…",
    shell_complete=completion.ops,
    help="Only kernels of these ops, such as MUL_MAT,ROPE.",
)
phase_option = click.option(
    "--phase", type=click.Choice(["prefill", "decode", "encode"]), help="Only steps of this phase."
)
