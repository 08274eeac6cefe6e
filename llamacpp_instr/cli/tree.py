"""`instr tree LOG`: prints where the time, the bytes or the FLOPs of a session went, as a tree."""

from __future__ import annotations

from typing import Any

import click

from llamacpp_instr.cli.report_output import ReportOutput, report_options


@click.command(
    "tree",
    epilog="\b\nExamples:\n"
    "  instr tree session.log --by bytes\n"
    "  instr tree session.log -o session.folded\n"
    "  instr tree session.log -o session.speedscope.json",
)
@click.argument("log")
@click.option(
    "--by",
    type=click.Choice(["time", "bytes", "flops"]),
    default="time",
    show_default=True,
    help="What is added up.",
)
@click.option("--folded", "export", flag_value="folded", help="Print folded stacks.")
@click.option(
    "--speedscope", "export", flag_value="speedscope", help="Print a file for speedscope."
)
@report_options
def tree(log: str, by: Any, export: str | None, output: ReportOutput) -> None:
    """Print where the time, bytes or FLOPs of a log went, as a tree.

    The levels are session, phase, layer, block and op. Each line has its amount and its share of
    the session; parts below 1 % are joined. --json and --csv have every op. Warm-up runs are left
    out.

    FILEs that end in .folded or .speedscope.json are exports: folded stacks for flame graphs, and
    speedscope's format. LOG is a file, plain or compressed (.gz, .zst), or - for standard input.
    """
    from converters.analyses.tree import build_tree
    from converters.report.tree import leaves, outline, render_folded, render_speedscope
    from llamacpp_instr.log.session import load_session
    from llamacpp_instr.progress import progress_bar

    output.check(log)
    with progress_bar(f"Reading {log}") as on_progress:
        session = load_session(log, on_progress)
    found = build_tree(session, by)
    if export is None and output.flag is None:
        export = _export_of(output.path)
    if export == "folded":
        output.write_text(render_folded(found))
    elif export == "speedscope":
        output.write_text(render_speedscope(found, session.path))
    else:
        every = output.form in ("json", "csv", "html")
        output.write([leaves(found) if every else outline(found)])


def _export_of(path: str) -> str | None:
    """The export that the end of a file's name chooses."""
    name = path.lower()
    if name.endswith(".speedscope.json"):
        return "speedscope"
    return "folded" if name.endswith(".folded") else None
