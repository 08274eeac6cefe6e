"""`instr stats LOG`: prints time, spread and rates by op, layer, block, tensor, type or phase."""

from __future__ import annotations

from typing import Any

import click

from llamacpp_instr.cli.logs import lenient_option, load_sessions
from llamacpp_instr.cli.report_output import ReportOutput, report_options


@click.command(
    "stats",
    epilog="\b\nExample:\n  instr stats session.log --by block --phase decode",
)
@click.argument("logs", metavar="LOG...", nargs=-1, required=True)
@click.option(
    "--by",
    type=click.Choice(["op", "layer", "block", "tensor", "type", "phase", "thread"]),
    help="What each row is.  [default: op; layer if the log has no ops]",
)
@click.option(
    "--phase", type=click.Choice(["prefill", "decode", "encode"]), help="Only steps of this phase."
)
@click.option("--warmup", is_flag=True, help="Count warm-up runs too.")
@lenient_option
@report_options
def stats(
    logs: tuple[str, ...],
    by: Any,
    phase: str | None,
    warmup: bool,
    lenient: bool,
    output: ReportOutput,
) -> None:
    """Print times and rates of a log by op, layer, block or phase.

    Prints how often each op ran and how long it took: count, total, share, mean, median (p50), 90th
    and 99th percentile, and the rates that it reached. Warm-up runs are left out.

    At the level verbose, also how long each thread waited. LOG is a file, plain or compressed
    (.gz, .zst), or - for standard input. The parts of a rotated log are one session; other logs are
    shown one after the other.
    """
    from converters.analyses.stats import compute_stats
    from converters.report.side_by_side import side_by_side

    output.check(*logs)
    told = []
    for session in load_sessions(logs, lenient):
        reports = compute_stats(session, by, phase, warmup)
        told.append((session.path, reports, reports[0]))
    reports, table = side_by_side(told)
    output.write(reports, table=table)
