"""`instr roofline LOG`: what each op reached of what the machine can do."""

from __future__ import annotations

from dataclasses import replace

import click

from llamacpp_instr.cli.logs import Logs, log_options
from llamacpp_instr.cli.options import ReportOutput, command, report_options


@command(
    "instr roofline session.log",
    "instr roofline session.log -o roof.html",
)
@click.option(
    "--machine",
    metavar="FILE",
    help="A file of `instr probe`.  [default: the one in the user's cache]",
)
@log_options
@report_options
def roofline(logs: Logs, machine: str | None, output: ReportOutput) -> None:
    """Compare the ops of a log with what the machine can do.

    Prints, by op and phase, the rates, the FLOPs per byte, the rate that is attainable with that
    many, the share of it that was reached, and the limit: memory or the kernel. `instr probe`
    measures the machine.

    The HTML page draws the ops under the roofs. LOG is a file, plain or compressed (.gz, .zst), or
    - for standard input. The parts of a rotated log are one session; other logs are shown one after
    the other.
    """
    from llamacpp_instr.converters.analyses.roofline import roofline as compute_roofline
    from llamacpp_instr.prediction.probe.file import read_probe

    output.check(*logs.names, machine)
    probe = read_probe(machine)
    found = [(session.path, *compute_roofline(session, probe)) for session in logs.sessions()]
    charts = [chart for _, _, chart in found]
    if len(found) > 1:
        charts = [replace(chart, title=f"{path}: {chart.title}") for path, _, chart in found]
    named = [(path, reports, reports[0]) for path, reports, _ in found]
    output.write_several(named, charts=charts, title="Roofline")
