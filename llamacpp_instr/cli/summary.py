"""`instr summary LOG`: prints where the time and the memory of a session went."""

from __future__ import annotations

import click


@click.command(
    "summary",
    epilog="\b\nExample:\n  instr summary session.log",
)
@click.argument("log")
@click.option("--json", "as_json", is_flag=True, help="Print the numbers, in ns and bytes.")
def summary(log: str, as_json: bool) -> None:
    """Summarize a log: speed, time, memory.

    Prints the speed and its spread, time by block, layer and op, memory by kind, and what the
    recording itself cost. LOG is a file, plain or compressed (.gz, .zst), or - for standard input.
    """
    from converters.analyses.summary import compute_summary
    from converters.report.report import render_text
    from llamacpp_instr.log.session import load_session
    from llamacpp_instr.progress import progress_bar
    from llamacpp_instr.terminal import render_json

    with progress_bar(f"Reading {log}") as on_progress:
        session = load_session(log, on_progress)
    sections = compute_summary(session)
    if as_json:
        click.echo(render_json([section.to_json() for section in sections]), nl=False)
    else:
        click.echo(render_text(sections), nl=False)
