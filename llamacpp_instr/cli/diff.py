"""`instr diff A B`: tells whether B is faster or slower than A, and where."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from llamacpp_instr.cli.logs import lenient_option
from llamacpp_instr.cli.report_output import ReportOutput, report_options
from llamacpp_instr.errors import UsageError

if TYPE_CHECKING:
    from llamacpp_instr.log.session import Session


class _Groups(click.Command):
    """Lets --before and --after take every value up to the next option, for A*.log in a shell."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        told: list[str] = []
        group = ""
        for arg in args:
            if arg in ("--before", "--after"):
                group = arg
            elif group and (arg == "-" or not arg.startswith("-")):
                told += [group, arg]
            else:
                group = ""
                told.append(arg)
        return super().parse_args(ctx, told)


@click.command(
    "diff",
    cls=_Groups,
    epilog="\b\nExamples:\n  instr diff before.log after.log\n"
    "  instr diff before.log after.log --by tensor --phase decode\n"
    "  instr diff main.log branch.log --fail-above 5%\n"
    "  instr diff --before main-*.log --after branch-*.log",
)
@click.argument("logs", nargs=-1, metavar="[A B]")
@click.option(
    "--before", multiple=True, metavar="A.log...", help="The logs of group A, two or more."
)
@click.option(
    "--after", multiple=True, metavar="B.log...", help="The logs of group B, two or more."
)
@click.option(
    "--by",
    type=click.Choice(["phase", "block", "layer", "op", "tensor"]),
    help="How to break down the steps.  [default: block and op]",
)
@click.option("--phase", type=click.Choice(["prefill", "decode", "encode"]), help="Only one phase.")
@click.option(
    "--fail-above",
    metavar="PERCENT",
    help="Exit with status 1 if the steps of a phase are slower in B by more than this, beyond the"
    " noise: the lower end of the interval exceeds it.",
)
@lenient_option
@report_options
@click.pass_context
def diff(
    ctx: click.Context,
    logs: tuple[str, ...],
    before: tuple[str, ...],
    after: tuple[str, ...],
    by: str | None,
    phase: str | None,
    fail_above: str | None,
    lenient: bool,
    output: ReportOutput,
) -> None:
    """Compare the times of two logs.

    Compares B with A: first the differences in their settings, then the medians with their
    intervals. A step is called slower or faster only if its interval excludes 1.

    A and B are logs, plain or compressed (.gz, .zst); one of them may be - for standard input.
    Record both with `instr run ... --repeat 11`, because the noise is estimated from the runs.

    With --before and --after, each side is a group of logs of several processes. The interval then
    has what really changes from process to process, instead of an assumed 2 %.
    """
    from converters.analyses.diff import VIEWS, compute_diff
    from converters.analyses.diff.groups import compute_group_diff
    from llamacpp_instr.terminal import notice

    threshold = _parse_percent(fail_above) if fail_above is not None else None
    sides = (before, after) if before or after else tuple((log,) for log in logs)
    if (logs and (before or after)) or len(sides) != 2 or not all(sides):
        raise UsageError("give two logs, or groups of logs with --before and --after")
    if sum(log == "-" for side in sides for log in side) > 1:
        raise UsageError("only one of the logs can be standard input")
    output.check(*before, *after, *logs)
    of_a, of_b = ([_load(log, lenient) for log in side] for side in sides)
    if before:
        found = compute_group_diff(of_a, of_b, by, phase)
    else:
        view = next((view for view in VIEWS if view == by), None)
        found = compute_diff(of_a[0], of_b[0], view, phase)
    output.write(found.reports, table=found.reports[1])
    if threshold is not None and (slower := found.slower_by(threshold)):
        notice(f"slower by more than {100 * threshold:g} %: {', '.join(slower)}")
        ctx.exit(1)


def _load(log: str, lenient: bool) -> Session:
    from llamacpp_instr.log.session import load_session
    from llamacpp_instr.progress import progress_bar

    with progress_bar(f"Reading {log}") as on_progress:
        return load_session(log, on_progress, lenient)


def _parse_percent(text: str) -> float:
    try:
        percent = float(text.strip().removesuffix("%"))
    except ValueError:
        percent = -1.0
    if not 0 <= percent < float("inf"):
        raise UsageError(f"--fail-above {text}: give a percentage, such as 5% or 2.5")
    return percent / 100
