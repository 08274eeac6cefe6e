"""`instr stats LOG`: prints time, spread and rates by op, layer, block, tensor, type or phase."""

from __future__ import annotations

from typing import Any

import click


@click.command(
    "stats",
    epilog="\b\nExample:\n  instr stats session.log --by block --phase decode",
)
@click.argument("log")
@click.option(
    "--by",
    type=click.Choice(["op", "layer", "block", "tensor", "type", "phase", "thread"]),
    help="What a row is of.  [default: op; layer where the log has no ops]",
)
@click.option(
    "--phase", type=click.Choice(["prefill", "decode", "encode"]), help="Only steps of this phase."
)
@click.option("--warmup", is_flag=True, help="Count warm-up runs too.")
@click.option("--json", "form", flag_value="json", help="Print JSON: numbers in ns and bytes.")
@click.option("--csv", "form", flag_value="csv", help="Print CSV: the first table, in ns, bytes.")
@click.option("--md", "form", flag_value="md", help="Print Markdown.")
@click.option("--html", "form", flag_value="html", help="Print one HTML page.")
@click.option(
    "-o",
    "--output",
    default="-",
    metavar="FILE",
    help="Write here, not to stdout; .json, .csv, .md, .html say the form.",
)
@click.option("--force", is_flag=True, help="Overwrite FILE if it exists.")
def stats(
    log: str,
    by: Any,
    phase: str | None,
    warmup: bool,
    form: str | None,
    output: str,
    force: bool,
) -> None:
    """Print times and rates of a log by op, layer, block or phase.

    Prints how often each op ran and how long: count, total, share, mean, median (p50), 90th and
    99th percentile, and the rates that it reached. Warm-up runs are left out.

    At the level verbose also how long each thread waited. LOG is a file, plain or compressed
    (.gz, .zst), or - for standard input.
    """
    from converters.analyses.stats import compute_stats
    from converters.report.render import form_of, render
    from llamacpp_instr.log.session import load_session
    from llamacpp_instr.output import check_not_input, check_output, open_output
    from llamacpp_instr.progress import progress_bar

    check_output(output, force)
    check_not_input(output, log)
    with progress_bar(f"Reading {log}") as on_progress:
        session = load_session(log, on_progress)
    reports = compute_stats(session, by, phase, warmup)
    text = render(form_of(form, output), reports)
    with open_output(output, force) as file:
        file.write(text.encode())
