"""`instr check LOG...`: prints every error in a log, one line each."""

from __future__ import annotations

import sys
from itertools import chain

import click

from llamacpp_instr.cli.options import command


@command("instr check session.log")
@click.argument("logs", metavar="LOG...", nargs=-1, required=True)
@click.option("--json", "as_json", is_flag=True, help="Print the findings as one JSON array.")
def check(logs: tuple[str, ...], as_json: bool) -> None:
    """Check logs strictly, line by line.

    Checks the schema, references, order, spans and counts. LOG is a file, plain or compressed (.gz,
    .zst), or - for standard input. A part of a rotated log that is missing between two others is a
    finding, too. Prints one line for each finding, with its line number, and stops after 10,000.
    Exits with status 0 if there are no findings, 1 if there are some, 2 if a file cannot be read as
    a log.
    """
    from llamacpp_instr.base.terminal import print_line, printable, render_json, shortened
    from llamacpp_instr.log.check import check_log, missing_parts

    if as_json:
        found = [
            finding._replace(message=shortened(finding.message))._asdict()
            for finding in chain(*map(check_log, logs), missing_parts(logs))
        ]
        print_line(render_json(found).rstrip())
        sys.exit(1 if found else 0)
    clean = True
    for log in logs:
        n_findings = 0
        for finding in check_log(log):
            print_line(printable(shortened(str(finding))))
            n_findings += 1
        if not n_findings:
            print_line(f"{log}: clean")
        clean = clean and not n_findings
    for finding in missing_parts(logs):
        print_line(printable(str(finding)))
        clean = False
    sys.exit(0 if clean else 1)
