"""`instr tree LOG`: prints where the time, the bytes or the FLOPs of a session went, as a tree."""

from __future__ import annotations

from typing import Any

import click

from llamacpp_instr.cli.logs import lenient_option, load_sessions
from llamacpp_instr.cli.options import command
from llamacpp_instr.cli.report_output import ReportOutput, report_options
from llamacpp_instr.errors import UsageError


@command(
    "instr tree session.log --by bytes",
    "instr tree session.log -o session.folded",
    "instr tree session.log -o session.speedscope.json",
)
@click.argument("logs", metavar="LOG...", nargs=-1, required=True)
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
@lenient_option
@report_options
def tree(
    logs: tuple[str, ...], by: Any, export: str | None, lenient: bool, output: ReportOutput
) -> None:
    """Print where the time, bytes or FLOPs of a log went, as a tree.

    The levels are session, phase, layer, block and op. Each line has its amount and its share of
    the session; parts below 1 % are joined. --json and --csv have every op. Warm-up runs are left
    out.

    FILEs that end in .folded or .speedscope.json are exports: folded stacks for flame graphs, and
    speedscope's format. LOG is a file, plain or compressed (.gz, .zst), or - for standard input.
    The parts of a rotated log are one session; other logs are shown one after the other.
    """
    from converters.analyses.tree import build_tree
    from converters.report.side_by_side import side_by_side
    from converters.report.tree import leaves, outline, render_folded, render_speedscope

    output.check(*logs, exports=(".folded",))
    sessions = load_sessions(logs, lenient)
    if export is None and output.flag is None:
        export = _export_of(output.path)
    if export and len(sessions) > 1:
        raise UsageError(f"--{export} takes one session, and these logs are {len(sessions)}")
    trees = [build_tree(session, by) for session in sessions]
    if export == "folded":
        output.write_text(render_folded(trees[0]))
    elif export == "speedscope":
        output.write_text(render_speedscope(trees[0], sessions[0].path))
    else:
        every = output.form in ("json", "csv", "html")
        told = []
        for session, found in zip(sessions, trees, strict=True):
            report = leaves(found) if every else outline(found)
            told.append((session.path, [report], report))
        reports, table = side_by_side(told)
        output.write(reports, table=table)


def _export_of(path: str) -> str | None:
    """The export that the end of a file's name chooses."""
    name = path.lower()
    if name.endswith(".speedscope.json"):
        return "speedscope"
    return "folded" if name.endswith(".folded") else None
