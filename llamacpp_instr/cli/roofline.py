"""`instr roofline LOG`: what each op reached of what the machine can do."""

from __future__ import annotations

import click

from llamacpp_instr.cli.report_output import ReportOutput, report_options


@click.command(
    "roofline",
    epilog="\b\nExamples:\n  instr roofline session.log\n  instr roofline session.log -o roof.html",
)
@click.argument("log")
@click.option(
    "--probe",
    "probe_file",
    metavar="FILE",
    help="A file of `instr probe`.  [default: the one in the user's cache]",
)
@report_options
def roofline(log: str, probe_file: str | None, output: ReportOutput) -> None:
    """Compare the ops of a log with what the machine can do.

    Prints, by op and phase, the rates, the FLOPs per byte, what is attainable with so many, and
    what was reached of it: memory or the kernel is the limit. `instr probe` measures the machine.

    The HTML page draws the ops under the roofs. LOG is a file, plain or compressed (.gz, .zst), or
    - for standard input.
    """
    from converters.analyses.roofline import roofline as compute_roofline
    from llamacpp_instr.log.session import load_session
    from llamacpp_instr.probe.file import read_probe
    from llamacpp_instr.progress import progress_bar

    output.check(log, probe_file)
    probe = read_probe(probe_file)
    with progress_bar(f"Reading {log}") as on_progress:
        session = load_session(log, on_progress)
    reports, chart = compute_roofline(session, probe)
    output.write(reports, charts=[chart], title="Roofline")
