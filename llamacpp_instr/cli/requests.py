"""`instr requests LOG`: prints how long each request waited, and for what."""

from __future__ import annotations

import click

from llamacpp_instr.cli.report_output import ReportOutput, report_options


@click.command(
    "requests",
    epilog="\b\nExample:\n  instr requests server.log --top 5",
)
@click.argument("log")
@click.option(
    "--top",
    type=click.IntRange(1),
    default=20,
    show_default=True,
    metavar="N",
    help="Show the N slowest requests.",
)
@report_options
def requests(log: str, top: int, output: ReportOutput) -> None:
    """Print how long the requests of a log took, and what they waited for.

    Prints the median, the 90th and the 99th percentile of the time in the queue, to the first
    token, between tokens and in total; then the slowest requests.

    A request is a prompt and its tokens in one sequence. Its arrival is known if the application
    marked it; otherwise it begins with its first step. LOG is a file, plain or compressed
    (.gz, .zst), or - for standard input.
    """
    from converters.analyses.requests import compute_requests
    from llamacpp_instr.log.session import load_session
    from llamacpp_instr.progress import progress_bar

    output.check(log)
    with progress_bar(f"Reading {log}") as on_progress:
        session = load_session(log, on_progress)
    output.write(compute_requests(session, top))
