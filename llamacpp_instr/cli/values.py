"""`instr values LOG [OTHER]`: prints the values that --stats read, or those of two sessions."""

from __future__ import annotations

from llamacpp_instr.base.errors import UsageError
from llamacpp_instr.cli.logs import Logs, log_options_of
from llamacpp_instr.cli.options import ReportOutput, command, report_options


@command(
    "instr values f16.log",
    "instr values f16.log q4.log -o values.html",
)
@log_options_of("LOG [OTHER]")
@report_options
def values(logs: Logs, output: ReportOutput) -> None:
    """Print the values that a log recorded, or compare two logs.

    Prints each tensor that --stats read, by op and layer, over all computes: smallest, largest,
    mean, standard deviation, zeros, and whether there are NaN or infinite values. An HTML page has
    maps of the deviation by layer and token.

    With OTHER, compares the means and the deviations, for example of F16 and Q4_K: by tensor, and
    token by token, as long as the tokens of both logs are the same. Record both with the same
    prompt: `instr run MODEL --stats PATTERN`. LOG is a file, plain or compressed (.gz,
    .zst), or - for standard input; the parts of a rotated log are one.
    """
    from llamacpp_instr.converters.analyses.value_comparison import (
        compare_values,
        map_shifts,
        map_values,
    )
    from llamacpp_instr.converters.analyses.values import compute_values

    output.check(*logs.names)
    sessions = logs.sessions()
    if len(sessions) > 2:
        raise UsageError(f"{len(sessions)} sessions are given; values compares two")
    compares = len(sessions) == 2
    reports = compare_values(*sessions) if compares else [compute_values(sessions[0])]
    charts = []
    if output.form == "html":
        charts = map_shifts(*sessions) if compares else map_values(sessions[0])
    output.write(reports, charts=charts)
