"""`instr stats LOG`: prints time, spread and rates by op, layer, block, tensor, type or phase."""

from __future__ import annotations

from typing import Any

import click

from llamacpp_instr.cli.report_output import ReportOutput, report_options


@click.command(
    "stats",
    epilog="\b\nExample:\n  instr stats session.log --by block --phase decode",
)
@click.argument("log")
@click.option(
    "--by",
    type=click.Choice(["op", "layer", "block", "tensor", "type", "phase", "thread"]),
    help="What each row is.  [default: op; layer if the log has no ops]",
)
@click.option(
    "--phase", type=click.Choice(["prefill", "decode", "encode"]), help="Only steps of this phase."
)
@click.option("--warmup", is_flag=True, help="Count warm-up runs too.")
@report_options
def stats(
    log: str,
    by: Any,
    phase: str | None,
    warmup: bool,
    output: ReportOutput,
) -> None:
    """Print times and rates of a log by op, layer, block or phase.

    Prints how often each op ran and how long it took: count, total, share, mean, median (p50), 90th
    and 99th percentile, and the rates that it reached. Warm-up runs are left out.

    At the level verbose, also how long each thread waited. LOG is a file, plain or compressed
    (.gz, .zst), or - for standard input.
    """
    from converters.analyses.stats import compute_stats
    from llamacpp_instr.log.session import load_session
    from llamacpp_instr.progress import progress_bar

    output.check(log)
    with progress_bar(f"Reading {log}") as on_progress:
        session = load_session(log, on_progress)
    output.write(compute_stats(session, by, phase, warmup))
