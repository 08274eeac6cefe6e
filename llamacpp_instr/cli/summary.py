"""`instr summary LOG`: prints where the time and the memory of a session went."""

from __future__ import annotations

import click

from llamacpp_instr.cli.report_output import ReportOutput, report_options


@click.command(
    "summary",
    epilog="\b\nExample:\n  instr summary session.log",
)
@click.argument("log")
@report_options
def summary(log: str, output: ReportOutput) -> None:
    """Summarize a log: speed, time, memory.

    Prints the speed and its spread, time by block, layer and op, memory by kind, and the overhead
    of the recording. LOG is a file, plain or compressed (.gz, .zst), or - for standard input.
    """
    from converters.analyses.summary import compute_summary
    from llamacpp_instr.log.session import load_session
    from llamacpp_instr.progress import progress_bar

    output.check(log)
    with progress_bar(f"Reading {log}") as on_progress:
        session = load_session(log, on_progress)
    sections = compute_summary(session)
    speed = next((section for section in sections if section.title == "Speed"), None)
    output.write(sections, table=speed)
