"""`instr tree LOG`: prints where the time, the bytes or the FLOPs of a session went, as a tree."""

from __future__ import annotations

from typing import Any

import click

from llamacpp_instr.base.errors import UsageError
from llamacpp_instr.cli.logs import Logs, log_options
from llamacpp_instr.cli.options import ReportOutput, command, report_options


@command(
    "instr tree session.log --by bytes",
    "instr tree session.log -o session.folded",
    "instr tree session.log -o session.speedscope.json",
)
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
@log_options
@report_options
def tree(logs: Logs, by: Any, export: str | None, output: ReportOutput) -> None:
    """Print where the time, bytes or FLOPs of a log went, as a tree.

    The levels are session, phase, layer, block and op. Each line has its amount and its share of
    the session; parts below 1 % are joined. --json and --csv have every op. Warm-up runs are left
    out.

    FILEs that end in .folded or .speedscope.json are exports: folded stacks for flame graphs, and
    speedscope's format. LOG is a file, plain or compressed (.gz, .zst), or - for standard input.
    The parts of a rotated log are one session; other logs are shown one after the other.
    """
    from llamacpp_instr.converters.analyses.tree import build_tree
    from llamacpp_instr.report.tree import leaves, outline, render_folded, render_speedscope

    output.check(*logs.names, exports=(".folded",))
    if export is None and output.flag is None:
        export = _export_of(output.path)
    if export is None:
        show = leaves if output.form in ("json", "csv", "html") else outline
        found = [(session.path, show(build_tree(session, by))) for session in logs.sessions()]
        output.write_several([(path, [report], report) for path, report in found])
        return
    sessions = logs.sessions()
    if len(sessions) > 1:
        raise UsageError(f"--{export} takes one session, and these logs are {len(sessions)}")
    tree = build_tree(sessions[0], by)
    if export == "folded":
        output.write_text(render_folded(tree))
    else:
        output.write_text(render_speedscope(tree, sessions[0].path))


def _export_of(path: str) -> str | None:
    """The export that the end of a file's name chooses."""
    name = path.lower()
    if name.endswith(".speedscope.json"):
        return "speedscope"
    return "folded" if name.endswith(".folded") else None
