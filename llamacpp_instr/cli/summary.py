"""`instr summary LOG...`: prints where the time and the memory of a session went."""

from __future__ import annotations

import click

from llamacpp_instr.cli.logs import lenient_option, load_sessions
from llamacpp_instr.cli.options import command
from llamacpp_instr.cli.report_output import ReportOutput, report_options


@command(
    "instr summary session.log",
    "instr summary server.log server.part*.log",
)
@click.argument("logs", metavar="LOG...", nargs=-1, required=True)
@lenient_option
@report_options
def summary(logs: tuple[str, ...], lenient: bool, output: ReportOutput) -> None:
    """Summarize a log: speed, time, memory.

    Prints the speed and its spread, time by block, layer and op, memory by kind, and the overhead
    of the recording. LOG is a file, plain or compressed (.gz, .zst), or - for standard input. The
    parts of a rotated log are one session; other logs are shown one after the other.
    """
    from converters.analyses.summary import compute_summary
    from converters.report.side_by_side import side_by_side
    from llamacpp_instr.probe.file import known_probe

    output.check(*logs)
    probe = known_probe()
    told = []
    for session in load_sessions(logs, lenient):
        sections = compute_summary(session, probe)
        speed = next((section for section in sections if section.title == "Speed"), None)
        told.append((session.path, sections, speed))
    reports, table = side_by_side(told)
    output.write(reports, table=table)
