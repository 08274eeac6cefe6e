"""`instr page LOG -o session.html`: writes one page about a session."""

from __future__ import annotations

from pathlib import Path

import click

from llamacpp_instr.base.errors import UsageError
from llamacpp_instr.cli.logs import Logs, log_options
from llamacpp_instr.cli.options import command, force_option


@command("instr page session.log -o session.html")
@click.option(
    "-o", "--output", metavar="FILE", help="Output; - is stdout.  [default: LOG's name, .html]"
)
@force_option
@log_options
def page(logs: Logs, output: str | None, force: bool) -> None:
    """Write one HTML page about a log, to look at or to send.

    Shows speed, time by layer and op, memory and KV cache over time, the tokens with their times,
    and the settings. The page is one file that loads nothing. It contains the generated text and
    the command line.

    LOG is a file, plain or compressed (.gz, .zst), or - for standard input. The parts of a rotated
    log are one session; several sessions follow each other, below a table of their figures.
    """
    from llamacpp_instr.base.terminal import print_line
    from llamacpp_instr.cli.options import ReportOutput, default_name
    from llamacpp_instr.converters.analyses.page import compute_page
    from llamacpp_instr.prediction.probe.file import known_probe
    from llamacpp_instr.report.page import render_page

    output = output or default_name(logs.names[0], "html", "page")
    to = ReportOutput("html", output, force)
    to.check(*logs.names)
    if Path(output).suffix.lower() not in ("", ".html", ".htm"):
        raise UsageError(f"-o {output}: a page is FILE.html")
    to.write_text(render_page(*compute_page(logs.sessions(), known_probe())))
    if output != "-":
        print_line(output)
