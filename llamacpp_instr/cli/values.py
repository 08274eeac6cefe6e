"""`instr values LOG [OTHER]`: prints the values that --stats read, or those of two sessions."""

from __future__ import annotations

import click

from llamacpp_instr.cli.logs import lenient_option, load_sessions
from llamacpp_instr.cli.report_output import ReportOutput, report_options
from llamacpp_instr.errors import UsageError


@click.command(
    "values",
    epilog="\b\nExamples:\n  instr values f16.log\n  instr values f16.log q4.log -o values.html",
)
@click.argument("logs", metavar="LOG [OTHER]", nargs=-1, required=True)
@lenient_option
@report_options
def values(logs: tuple[str, ...], lenient: bool, output: ReportOutput) -> None:
    """Print the values that a log recorded, or compare two logs.

    Prints each tensor that --stats read, by op and layer, over all computes: smallest, largest,
    mean, standard deviation, zeros, and whether there are NaN or infinite values. An HTML page has
    maps of the deviation by layer and compute.

    With OTHER, compares the means and the deviations, for example of F16 and Q4_K. Record both with
    the same prompt: `instr run MODEL --stats PATTERN`. LOG is a file, plain or compressed (.gz,
    .zst), or - for standard input; the parts of a rotated log are one.
    """
    from converters.analyses.value_maps import chart_values
    from converters.analyses.values import compare_values, compute_values

    output.check(*logs)
    sessions = load_sessions(logs, lenient)
    if len(sessions) > 2:
        raise UsageError(f"{len(sessions)} sessions are given; values compares two")
    report = compare_values(*sessions) if len(sessions) == 2 else compute_values(sessions[0])
    charts = []
    if output.form == "html":
        names = ["A: ", "B: "] if len(sessions) == 2 else [""]
        shown = zip(sessions, names, strict=True)
        charts = [chart for session, name in shown for chart in chart_values(session, name)]
    output.write([report], charts=charts)
