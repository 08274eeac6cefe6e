"""`instr to-perfetto LOG`: writes a session as a Perfetto trace."""

from __future__ import annotations

import sys

import click

from llamacpp_instr.cli.ranges import parse_range
from llamacpp_instr.cli.report_output import default_name
from llamacpp_instr.errors import UsageError


@click.command(
    "to-perfetto",
    epilog="""\b
Examples:
  instr to-perfetto session.log
  instr to-perfetto session.log --steps 1:3 --layers 0 --flows -o block.pftrace
""",
)
@click.argument("log")
@click.option(
    "-o", "--output", metavar="TRACE", help="Output; - is stdout.  [default: LOG's name, .pftrace]"
)
@click.option("--force", is_flag=True, help="Overwrite TRACE if it exists.")
@click.option("--steps", metavar="A[:B]", help="Only steps A to B, inclusive.")
@click.option("--layers", metavar="A[-B]", help="Only layers A to B, inclusive.")
@click.option("--ops", metavar="OP,…", help="Only kernels of these ops, such as MUL_MAT,ROPE.")
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
@click.option("--gzip", "compress", is_flag=True, help="Compress; Perfetto can open the result.")
@click.option(
    "--lenient",
    is_flag=True,
    help="Leave out damaged lines and events that refer to them; count them.",
)
def to_perfetto(
    log: str,
    output: str | None,
    force: bool,
    steps: str | None,
    layers: str | None,
    ops: str | None,
    no_threads: bool,
    flows: bool,
    form: str,
    compress: bool,
    lenient: bool,
) -> None:
    """Convert a log to a Perfetto trace.

    The trace is for Perfetto's UI (ui.perfetto.dev). It shows the steps with their tokens, the
    layers with their blocks and ops, threads, the sampler and counters. LOG is a file, plain or
    compressed (.gz, .zst), or - for standard input.
    """
    from llamacpp_instr.graph.timeline import Selection
    from llamacpp_instr.log.reader import read_events
    from llamacpp_instr.output import check_not_input, check_output, open_output
    from llamacpp_instr.progress import progress_bar
    from llamacpp_instr.terminal import notice, print_line

    selection = Selection(
        parse_range("--steps", steps),
        parse_range("--layers", layers, "-"),
        frozenset(op.strip().upper() for op in ops.split(",")) if ops is not None else None,
    )
    if form == "json" and flows:
        raise UsageError("--flows needs --format protobuf")
    kind = "json" if form == "json" else "pftrace"
    output = output or default_name(log, kind + ".gz" * compress, "trace")
    check_output(output, force)
    check_not_input(output, log)
    if output == "-" and sys.stdout.isatty():
        raise UsageError("a trace is binary and the output is a terminal; name a file, or pipe it")
    with progress_bar(f"Converting {log}") as on_progress:
        reader = read_events(log, lenient, on_progress)
        with open_output(output, force) as file:
            if form == "json":
                from converters.exports.chrome import write_chrome

                left_out = write_chrome(reader, file, selection, not no_threads, compress, lenient)
            else:
                from converters.exports.perfetto import Options, write_perfetto

                options = Options(selection, not no_threads, flows, compress, lenient)
                left_out = write_perfetto(reader, file, options).left_out
    if reader.end is not None and (said := reader.end.sentence()):
        notice(f"{reader.path}: {said}")
    if left_out:
        notice(f"{reader.path}: left out {left_out} events that refer to missing ones")
    if output != "-":
        print_line(output)
