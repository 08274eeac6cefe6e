"""`instr roofline LOG`: what each op reached of what the machine can do."""

from __future__ import annotations

from dataclasses import replace

import click

from llamacpp_instr.cli.logs import lenient_option, load_sessions
from llamacpp_instr.cli.options import command
from llamacpp_instr.cli.report_output import ReportOutput, report_options


@command(
    "instr roofline session.log",
    "instr roofline session.log -o roof.html",
)
@click.argument("logs", metavar="LOG...", nargs=-1, required=True)
@click.option(
    "--probe",
    "probe_file",
    metavar="FILE",
    help="A file of `instr probe`.  [default: the one in the user's cache]",
)
@lenient_option
@report_options
def roofline(
    logs: tuple[str, ...], probe_file: str | None, lenient: bool, output: ReportOutput
) -> None:
    """Compare the ops of a log with what the machine can do.

    Prints, by op and phase, the rates, the FLOPs per byte, what is attainable with so many, and
    what was reached of it: memory or the kernel is the limit. `instr probe` measures the machine.

    The HTML page draws the ops under the roofs. LOG is a file, plain or compressed (.gz, .zst), or
    - for standard input. The parts of a rotated log are one session; other logs are shown one after
    the other.
    """
    from converters.analyses.roofline import roofline as compute_roofline
    from converters.report.side_by_side import side_by_side
    from llamacpp_instr.probe.file import read_probe

    output.check(*logs, probe_file)
    probe = read_probe(probe_file)
    told, charts = [], []
    for session in load_sessions(logs, lenient):
        reports, chart = compute_roofline(session, probe)
        told.append((session.path, reports, reports[0]))
        charts.append(replace(chart, title=f"{session.path}: {chart.title}"))
    found, table = side_by_side(told)
    if len(charts) == 1:
        charts = [chart]
    output.write(found, table=table, charts=charts, title="Roofline")
