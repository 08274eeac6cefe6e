"""`instr to-perfetto`: Convert a log to a Perfetto trace."""

from __future__ import annotations

import sys

from click import Choice

from llamacpp_instr.base.errors import UsageError
from llamacpp_instr.base.terminal import print_line
from llamacpp_instr.cli import options as cli
from llamacpp_instr.cli.logs import LOGS, MAX_SIZE, Logs, SizeBound


@cli.command(
    "instr to-perfetto session.log",
    "instr to-perfetto session.log --steps 1-3 --layers 0 --flows -o block.pftrace",
)
def to_perfetto(
    output: str | None = cli.option(
        "Output; - is stdout.  [default: LOG's name, .pftrace]", "-o --output TRACE"
    ),
    force: bool = cli.FORCE,
    steps: tuple[int, int] | None = cli.range_option("Only steps A to B, inclusive."),
    layers: tuple[int, int] | None = cli.range_option(
        "Only layers A to B, inclusive; none: what lies outside of layers."
    ),
    ops: str | None = cli.OPS,
    no_threads: bool = cli.flag("Leave out the tracks of single threads."),
    flows: bool = cli.flag("Draw arrows from ops to readers, tokens to decodes."),
    form: str = cli.option(
        "json is Chrome's format for other tools: larger, and without flows.",
        "--format",
        Choice(["protobuf", "json"]),
        default="protobuf",
    ),
    max_size: int = MAX_SIZE,
    compress: bool = cli.flag("Compress; Perfetto can open the result.", "--gzip"),
    logs: Logs = LOGS,
) -> None:
    """The trace is for Perfetto's UI (ui.perfetto.dev). It shows the steps with their tokens, the
    layers with their blocks and ops, threads, the sampler and counters. LOG is a file, plain or
    compressed (.gz, .zst), or - for standard input. The parts of a rotated log are one session;
    other logs have tracks of their own below.
    """
    from llamacpp_instr.base.output import check_output, open_output
    from llamacpp_instr.converters.exports.traced import Options
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
    if form == "json":
        from llamacpp_instr.converters.exports.chrome import write_chrome as write
    else:
        from llamacpp_instr.converters.exports.perfetto import write_perfetto as write
    kind = "json" if form == "json" else "pftrace"
    output = output or cli.default_name(logs.names[0], kind + ".gz" * compress, "trace")
    check_output(output, force, *logs.names)
    if output == "-" and sys.stdout.isatty():
        raise UsageError("a trace is binary and the output is a terminal; name a file, or pipe it")
    bound = SizeBound(max_size, whole=steps is None)
    options = Options(selection, not no_threads, flows, compress, logs.lenient)
    with logs.converting(bound) as (first, *others), open_output(output, force) as whole:
        write(first, bound.counted(whole), options, others)
    if output != "-":
        print_line(output)
