"""`instr requests LOG...`: prints how long each request waited, and for what."""

from __future__ import annotations

import click

from llamacpp_instr.cli.logs import Logs, log_options
from llamacpp_instr.cli.options import ReportOutput, command, report_options


@command("instr requests server.log --top 5")
@click.option(
    "--top",
    type=click.IntRange(1),
    default=20,
    show_default=True,
    metavar="N",
    help="Show the N slowest requests.",
)
@log_options
@report_options
def requests(logs: Logs, top: int, output: ReportOutput) -> None:
    """Print how long the requests of a log took, and why.

    Prints the median, the 90th and the 99th percentile of the time in the queue, to the first
    token, between tokens and in total; how many requests there were at once, over time; then the
    slowest requests.

    A request is a prompt and its tokens in one sequence. Its arrival is known if the application
    marked it; otherwise it begins with its first step. LOG is a file, plain or compressed
    (.gz, .zst), or - for standard input. The parts of a rotated log are one session; other logs are
    shown one after the other.
    """
    from llamacpp_instr.converters.analyses.requests import compute_requests

    output.check(*logs.names)
    found = [(session.path, compute_requests(session, top)) for session in logs.sessions()]
    output.write_several([(path, reports, reports[-1]) for path, reports in found])
