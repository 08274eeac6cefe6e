"""What declares a command: its name and examples, its options, the options that several commands
share, and the values that a shell completes. It is the only place that writes a report.

`eval "$(_INSTR_COMPLETE=bash_source instr)"` turns completion on.
"""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import click
from click import Choice, IntRange
from click.core import ParameterSource
from click.shell_completion import CompletionItem

from llamacpp_instr.base.errors import UsageError
from llamacpp_instr.base.terminal import print_line
from llamacpp_instr.cli import COMMANDS

if TYPE_CHECKING:
    from llamacpp_instr.report.charts import Chart
    from llamacpp_instr.report.page import Figure
    from llamacpp_instr.report.render import Form
    from llamacpp_instr.report.report import Report

LAST = 2**63
MOST_TOKENS = 1 << 16
"""the most that an option may ask for, where memory or time grow with it without another limit"""
PATH = click.Path(path_type=Path)


class _Declared(NamedTuple):
    """The default of a parameter of a command: it declares what the command line gives for it."""

    declare: Callable[[str], list[click.Parameter]]
    """returns its options or its argument, by the name of the parameter"""
    make: Callable[..., Any] | None = None
    """makes one value of those of several options"""


def command(
    *examples: str, cls: type[click.Command] = click.Command, **settings: Any
) -> Callable[[Callable[..., None]], click.Command]:
    """Makes a command from a function. The name gets dashes; the help is its line of `COMMANDS`,
    its docstring and the examples. The default of each parameter is what `option`, `flag`,
    `argument` or another function below returns. The other arguments are those of `cls`."""
    heading = "Examples:" if len(examples) > 1 else "Example:"
    epilog = "\n  ".join([f"\b\n{heading}", *examples])

    def decorate(function: Callable[..., None]) -> click.Command:
        declared = {name: of.default for name, of in inspect.signature(function).parameters.items()}
        params = {name: of.declare(name) for name, of in declared.items()}

        def call(**values: Any) -> None:
            for name, of in declared.items():
                if of.make is not None:
                    keys = {str(param.name) for param in params[name]}
                    values[name] = of.make(**{key: values.pop(key) for key in keys})
            function(**values)

        name = function.__name__.strip("_").replace("_", "-")
        return cls(
            name,
            params=[param for of in params.values() for param in of],
            callback=call,
            help=f"{COMMANDS.get(name)}\n\n{inspect.cleandoc(function.__doc__ or '')}",
            epilog=epilog,
            **settings,
        )

    return decorate


def argument(**settings: Any) -> Any:
    """The arguments are those of `click.Argument`."""
    return _Declared(lambda name: [click.Argument([name], **settings)])


def option(text: str, usage: str = "", type: Any = None, **settings: Any) -> Any:
    """An option with a help text. `usage` is as the help shows it: names, if they are not just
    --PARAMETER, and a word for the value, as in `-o --output FILE`. A default is shown. The other
    arguments are those of `click.Option`."""
    names = [word for word in usage.split() if word.startswith("-")]
    metavar = next((word for word in usage.split() if word not in names), None)
    settings = {"show_default": "default" in settings, **settings}

    def declare(name: str) -> list[click.Parameter]:
        found = names or [f"--{name.replace('_', '-')}"]
        return [click.Option([name, *found], help=text, metavar=metavar, type=type, **settings)]

    return _Declared(declare)


def flag(text: str, names: str = "") -> Any:
    """An option without a value: True or False."""
    return option(text, names, is_flag=True)


def flags(**texts: str) -> Any:
    """An option --NAME for each text. The value is the name of the last that is given, or None."""

    def declare(name: str) -> list[click.Parameter]:
        return [
            click.Option([name, f"--{value}"], flag_value=value, help=text)
            for value, text in texts.items()
        ]

    return _Declared(declare)


def gathered(make: Callable[..., Any], **parts: Any) -> Any:
    """Several options in one parameter: what `make` returns for their values."""
    return _Declared(lambda _: [of for name in parts for of in parts[name].declare(name)], make)


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


def range_option(text: str) -> Any:
    """An option whose value is a range: `A`, `A-B`, `A-` or `-B`, also with a colon. The command
    gets (first, last), both inclusive, or None. `--layers none` is what lies outside of layers."""
    return option(text, "A[-B]", callback=_parse_range)


def _parse_range(
    _ctx: click.Context, param: click.Parameter, value: str | None
) -> tuple[int, int] | None:
    if value is None:
        return None
    if param.name == "layers" and value == "none":
        return -1, -1
    match = re.fullmatch(r"(\d{1,18})|(\d{0,18})[-:](\d{0,18})", value)
    if match is None:
        raise UsageError(f"--{param.name} {value}: give 7, 7-9, 7- or -9")
    first = int(match[1] or match[2] or 0)
    last = first if match[1] else int(match[3] or LAST)
    if first > last:
        raise UsageError(f"--{param.name} {value}: the first is greater than the last")
    return first, last


def numbers(text: str, usage: str = "N,...", least: int = 1, **settings: Any) -> Any:
    """An option whose value is a list of numbers, none below `least`; empty if it is not given."""

    def parse(_ctx: click.Context, param: click.Parameter, value: str | None) -> list[int]:
        if value is None:
            return []
        try:
            found = list(dict.fromkeys(int(word) for word in value.split(",")))
        except ValueError:
            found = []
        if not found or min(found) < least:
            raise UsageError(f"{param.opts[-1]} is {value!r}; it must be numbers such as 1,2,4")
        return found

    return option(text, usage, callback=parse, **settings)


def bytes_of_size(_ctx: click.Context, _param: click.Parameter, value: str | None) -> int | None:
    """Bytes of a size such as 500MB, for an option; at least 1MB."""
    if value is None:
        return None
    match = re.fullmatch(r"(\d{1,19}(?:\.\d{1,9})?)\s*(|KB|MB|GB|TB)", value.strip(), re.IGNORECASE)
    if match is None:
        raise click.BadParameter(f"{value!r} is not a size; write it like 500MB or 2GB")
    n_bytes = int(Decimal(match[1]) * 1000 ** ("", "KB", "MB", "GB", "TB").index(match[2].upper()))
    # every part of a rotated log repeats the models and the graphs, which would fill smaller parts
    if not 10**6 <= n_bytes < 2**63:
        raise click.BadParameter(f"{value!r} is not between 1MB and 9000000TB")
    return n_bytes


def read_text(name: str, what: str = "text") -> str:
    """The text of a file without the newline at its end, as llama-perplexity reads it; `-` is
    standard input. Raises `UsageError`, which names `what`, for one that cannot be read."""
    source = "standard input" if name == "-" else name
    try:
        data = sys.stdin.buffer.read() if name == "-" else Path(name).read_bytes()
        return data.decode().removesuffix("\n")
    except OSError as error:
        raise UsageError(f"the {what} {source} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise UsageError(f"{source} is not UTF-8: byte {error.start} is wrong") from None


def complete_names(_ctx: click.Context, param: click.Parameter, typed: str) -> list[CompletionItem]:
    """The names that complete what follows the last separator, in upper or lower case, each with
    the text before it: a shell replaces the whole word."""
    names: Iterable[str]
    separator = ","
    if param.name == "by":
        from llamacpp_instr.converters.analyses.stats import BYS as names
    elif param.name == "ops":
        from llamacpp_instr.log.graph.words import OPS as names
    elif param.name == "types":
        from llamacpp_instr.lab.quantize.plan import WRITABLE as names
    else:
        from llamacpp_instr.lab.quantize.plan import TENSOR_TYPES as names

        separator = "="  # as in --tensor-type PATTERN=TYPE
    before, found, last = typed.rpartition(separator)
    return [
        CompletionItem(f"{before}{found}{name}")
        for name in names
        if name.lower().startswith(last.lower()) and name not in before.split(separator)
    ]


def _context(**given: Any) -> Any:
    from llamacpp_instr.llama.engine import ContextOptions

    return ContextOptions(**given)


def _placement(
    device: str | None,
    tensor_split: str | None,
    override_tensor: Sequence[str],
    rpc: str | None,
    **given: Any,
) -> Any:
    from llamacpp_instr.llama.devices import Placement

    try:
        shares = tuple(float(share) for share in (tensor_split or "").split(",") if share)
    except ValueError:
        shares = (-1.0,)
    if any(not 0 <= share < float("inf") for share in shares) or (shares and not any(shares)):
        raise UsageError(f"--tensor-split {tensor_split} is not a list of shares, such as 3,1")
    names = tuple(name for name in (device or "").split(",") if name)
    servers = tuple(dict.fromkeys(server for server in (rpc or "").split(",") if server))
    return Placement(
        device=names, tensor_split=shares, override_tensor=tuple(override_tensor), rpc=servers,
        **given,
    )  # fmt: skip


def _adapters(values: Sequence[str]) -> list[Any]:
    from llamacpp_instr.model.adapter import parse_adapter

    return [parse_adapter(value) for value in values]


# options of several commands

FORCE = flag("Overwrite files that exist.")
CHAT = flag("Apply the model's own chat template to the prompt.")
LENIENT = flag("Leave out damaged lines and events that refer to them; count them.")
THREADS = option("Threads.  [default: physical cores]", type=int)
PAST = option(
    "Tokens in the cache of a model before the step.  [default: 0]", "N", IntRange(0, 1 << 24)
)
OPS = option(
    "Only kernels of these ops, such as MUL_MAT,ROPE.", "OP,…", shell_complete=complete_names
)
PHASE = option("Only steps of this phase.", type=Choice(["prefill", "decode", "draft", "encode"]))
DATASET = option("Directory of the data set.", "-o --output DATASET", required=True)
DIRECTORY = option("Directory for the files.", "-o --output DIR", required=True)
REPLACE = flag("Replace the files of an earlier call in DIR.")
CONTEXT = gathered(
    _context,
    ctx=option("Size of the context.  [default: the model's own, at most 4096]", "TOKENS", int),
    batch=option("Maximum tokens per decode.  [default: 2048]", "TOKENS", int),
    ubatch=option("Maximum tokens per graph.  [default: 512]", "TOKENS", int),
    threads=THREADS,
    cache_type_k=option("Storage type of the K cache.", "TYPE", default="f16"),
    cache_type_v=option("Storage type of the V cache.", "TYPE", default="f16"),
    flash_attn=option("Flash attention.", default="auto", type=Choice(["auto", "on", "off"])),
)
"""for every command that makes or plans a context, which it gets as `ContextOptions`"""

LORA = option(
    "A LoRA adapter, and the factor for what it adds, 1 by default; may be repeated.",
    "--lora FILE[:SCALE]",
    multiple=True,
    callback=lambda _ctx, _param, values: _adapters(values),
)

PLACEMENT = gathered(
    _placement,
    gpu_layers=option(
        "Layers on devices, the last ones; the output counts as one more.  [default: all]",
        "N",
        IntRange(0),
    ),
    device=option("Devices that get layers, as `instr doctor` names them; or none.", "NAME,…"),
    tensor_split=option("Shares of the layers for the devices, such as 3,1.", "SHARE,…"),
    override_tensor=option(
        "Tensors whose names match go to a buffer, such as ffn_.*_exps=CPU; may be repeated.",
        "PATTERN=BUFFER",
        multiple=True,
    ),
    rpc=option("RPC servers, whose devices are added to this machine's.", "HOST:PORT,…"),
)
"""which parts of a model go to which device, as `Placement`"""

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
        of something else. `exports` are suffixes that the command can write besides reports."""
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
        """Write the reports in the chosen format; the arguments are those of `render`. The width of
        a file does not depend on the terminal."""
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
        from llamacpp_instr.report.report import side_by_side

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
    """The name of an output beside its log. For standard input, raises a UsageError that asks for
    the name of `what`."""
    if log == "-":
        raise UsageError(f"name the {what} with -o: standard input has no name")
    name = Path(log)
    while name.suffix in (".gz", ".zst", ".log", ".ndjson", ".jsonl"):
        name = name.with_suffix("")
    return f"{name}.{suffix}"


_FLAG = flags(
    json="Print JSON: raw numbers with units.",
    csv="Print CSV: one table, raw numbers.",
    md="Print Markdown.",
    html="Print one HTML page.",
)
FORM = gathered(ReportOutput, flag=_FLAG)
"""a report on standard output, as `ReportOutput`"""
REPORT = gathered(
    ReportOutput,
    flag=_FLAG,
    path=option(
        "Write to FILE; .json, .csv, .md and .html choose the format.",
        "-o --output FILE",
        default="-",
        show_default=False,
    ),
    force=FORCE,
)
"""a report, as `ReportOutput`"""


@dataclass(frozen=True)
class Serving:
    """Where a page is served, and whether a browser opens it."""

    port: int | None = None
    no_browser: bool = False

    def show(self, address: str) -> None:
        """Print the address of a page that is served, and open it."""
        import threading
        import webbrowser

        print_line(address)
        if not self.no_browser:
            # `open` waits for some browsers, and they wait for the page
            threading.Thread(target=webbrowser.open, args=(address,), daemon=True).start()


def serving_options(of: str = "") -> Any:
    """For a command that serves a page: `Serving`."""
    return gathered(
        Serving,
        port=option(f"Port{of}.  [default: any free]", type=IntRange(0, 65535)),
        no_browser=flag("Print the address and open no browser."),
    )
