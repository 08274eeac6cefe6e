"""`instr page LOG -o session.html`: writes one page about a session."""

from __future__ import annotations

import click


@click.command(
    "page",
    epilog="\b\nExample:\n  instr page session.log -o session.html",
)
@click.argument("log")
@click.option(
    "-o", "--output", metavar="FILE", help="Output; - is stdout.  [default: LOG's name, .html]"
)
@click.option("--force", is_flag=True, help="Overwrite FILE if it exists.")
def page(log: str, output: str | None, force: bool) -> None:
    """Write one HTML page about a log, to look at or to send.

    Shows speed, time by layer and op, memory and KV cache over time, the tokens with their times,
    and the settings. The page is one file that loads nothing. It contains the generated text and
    the command line.

    LOG is a file, plain or compressed (.gz, .zst), or - for standard input.
    """
    from converters.analyses.page import compute_page
    from converters.report.page import render_page
    from llamacpp_instr.cli.report_output import ReportOutput, default_name
    from llamacpp_instr.log.session import load_session
    from llamacpp_instr.progress import progress_bar
    from llamacpp_instr.terminal import print_line

    output = output or default_name(log, "html", "page")
    to = ReportOutput("html", output, force)
    to.check(log)
    with progress_bar(f"Reading {log}") as on_progress:
        session = load_session(log, on_progress)
    to.write_text(render_page(*compute_page(session)))
    if output != "-":
        print_line(output)
