"""`instr roofline LOG`: what each op reached of what the machine can do."""

from __future__ import annotations

import click

from llamacpp_instr.cli.logs import lenient_option, load_one_session
from llamacpp_instr.cli.report_output import ReportOutput, report_options


@click.command(
    "roofline",
    epilog="\b\nExamples:\n  instr roofline session.log\n  instr roofline session.log -o roof.html",
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
    - for standard input, or all parts of a rotated log.
    """
    from converters.analyses.roofline import roofline as compute_roofline
    from llamacpp_instr.probe.file import read_probe

    output.check(*logs, probe_file)
    probe = read_probe(probe_file)
    session = load_one_session(logs, lenient, "a roofline")
    reports, chart = compute_roofline(session, probe)
    output.write(reports, charts=[chart], title="Roofline")
