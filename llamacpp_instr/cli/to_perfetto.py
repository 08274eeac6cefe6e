"""`instr to-perfetto`: Convert a log to a Perfetto trace."""

from __future__ import annotations

import sys

import click

from llamacpp_instr.base.errors import UsageError
from llamacpp_instr.cli.logs import Logs, log_options
from llamacpp_instr.cli.options import command, default_name, force_option, ops_option, range_option
from llamacpp_instr.cli.size_bound import SizeBound, max_size_option


@command(
    "instr to-perfetto session.log",
    "instr to-perfetto session.log --steps 1-3 --layers 0 --flows -o block.pftrace",
)
@click.option(
    "-o", "--output", metavar="TRACE", help="Output; - is stdout.  [default: LOG's name, .pftrace]"
)
@force_option
@range_option("--steps", "Only steps A to B, inclusive.")
@range_option("--layers", "Only layers A to B, inclusive; none: what lies outside of layers.")
@ops_option
@click.option("--no-threads", is_flag=True, help="Leave out the tracks of single threads.")
@click.option("--flows", is_flag=True, help="Draw arrows from ops to readers, tokens to decodes.")
@click.option(
    "--format",
    "form",
    type=click.Choice(["protobuf", "json"]),
    default="protobuf",
    show_default=True,
    help="json is Chrome's format for other tools: larger, and without flows.",
)
@max_size_option
@click.option("--gzip", "compress", is_flag=True, help="Compress; Perfetto can open the result.")
@log_options
def to_perfetto(
    logs: Logs,
    output: str | None,
    force: bool,
    steps: tuple[int, int] | None,
    layers: tuple[int, int] | None,
    ops: str | None,
    no_threads: bool,
    flows: bool,
    form: str,
    compress: bool,
    max_size: int,
) -> None:
    """Convert a log to a Perfetto trace.

    The trace is for Perfetto's UI (ui.perfetto.dev). It shows the steps with their tokens, the
    layers with their blocks and ops, threads, the sampler and counters. LOG is a file, plain or
    compressed (.gz, .zst), or - for standard input. The parts of a rotated log are one session;
    other logs have tracks of their own below.
    """
    from llamacpp_instr.base.output import check_output, open_output
    from llamacpp_instr.base.terminal import print_line
    from llamacpp_instr.log.graph.timeline import Selection

    selection = Selection(
        steps,
        layers,
        frozenset(op.strip().upper() for op in ops.split(",")) if ops is not None else None,
    )
    if form == "protobuf" and output and output.lower().endswith((".json", ".json.gz")):
        raise UsageError(f"-o {output}: give --format json too, or a name that ends in .pftrace")
    if form == "json" and flows:
        raise UsageError("--flows needs --format protobuf")
    kind = "json" if form == "json" else "pftrace"
    output = output or default_name(logs.names[0], kind + ".gz" * compress, "trace")
    check_output(output, force, *logs.names)
    if output == "-" and sys.stdout.isatty():
        raise UsageError("a trace is binary and the output is a terminal; name a file, or pipe it")
    bound = SizeBound(max_size, whole=steps is None)
    with logs.converting(bound) as (first, *others), open_output(output, force) as whole:
        file = bound.counted(whole)
        if form == "json":
            from llamacpp_instr.converters.exports.chrome import write_chrome

            write_chrome(first, file, selection, not no_threads, compress, logs.lenient, others)
        else:
            from llamacpp_instr.converters.exports.perfetto import Options, write_perfetto

            options = Options(selection, not no_threads, flows, compress, logs.lenient)
            write_perfetto(first, file, options, others)
    if output != "-":
        print_line(output)
