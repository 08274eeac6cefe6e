"""`instr diff A B`: shows whether B is faster or slower than A, and where; with more logs, where it
changed."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

import click

from llamacpp_instr.base.errors import UsageError
from llamacpp_instr.cli.logs import (
    GroupedCommand,
    Logs,
    group_option,
    load_run,
)
from llamacpp_instr.cli.options import (
    ReportOutput,
    command,
    lenient_option,
    phase_option,
    report_options,
)

if TYPE_CHECKING:
    from llamacpp_instr.log.session import Session


@command(
    "instr diff before.log after.log",
    "instr diff before.log after.log --by tensor --phase decode",
    "instr diff main.log branch.log --fail-above 5%",
    "instr diff --before main-*.log --after branch-*.log",
    "instr diff v1.log v2.log v3.log",
    "instr diff --before v1-*.log --after v2-*.log --after v3-*.log",
    cls=GroupedCommand,
)
@click.argument("logs", nargs=-1, metavar="[A B...]")
@group_option("--before", "A.log...", "The logs of group A, two or more.")
@group_option(
    "--after", "B.log...", "The logs of group B, two or more; again for each later group."
)
@click.option(
    "--by",
    type=click.Choice(["phase", "block", "layer", "op", "tensor"]),
    help="How to break down the steps.  [default: block and op]",
)
@phase_option
@click.option(
    "--fail-above",
    metavar="PERCENT",
    help="Exit with status 1 if the steps of a phase are slower in B, or in the last group, by more"
    " than this, beyond the noise: the lower end of the interval exceeds it.",
)
@lenient_option
@report_options
def diff(
    logs: tuple[str, ...],
    before: list[tuple[str, ...]],
    after: list[tuple[str, ...]],
    by: str | None,
    phase: str | None,
    fail_above: str | None,
    lenient: bool,
    output: ReportOutput,
) -> None:
    """Compare the times of two or more logs.

    Compares B with A: first the differences in their settings, then the medians with their
    intervals. A step is called slower or faster only if its interval excludes 1.

    A and B are logs, plain or compressed (.gz, .zst); one of them may be - for standard input.
    Record both with `instr run ... --repeat 11`, because the noise is estimated from the runs.

    With --before and --after, each side is a group of logs of several processes. With at least five
    logs a side, the interval contains the measured variation between processes instead of an
    assumed 2 %. Logs of both sides that were recorded in turns are compared in pairs.

    More than two logs or groups are a trend, in the order given: each is compared with the first
    and with the one before it. Parts of a rotated log are one log, unless all logs are parts of it.
    """
    from llamacpp_instr.base.terminal import notice
    from llamacpp_instr.converters.analyses.diff import compute_diff
    from llamacpp_instr.converters.analyses.diff.trend import compute_trend

    threshold = _parse_percent(fail_above) if fail_above is not None else None
    if bool(logs) is bool(before or after) or len(before) > 1 or bool(before) is not bool(after):
        raise UsageError("give two or more logs, or groups of them: --before once, then --after")
    named = [*logs, *(log for group in (*before, *after) for log in group)]
    if named.count("-") > 1:
        raise UsageError("only one of the logs can be standard input")
    output.check(*named)
    sides = (
        _of_logs(logs, lenient)
        if logs
        else [Logs(group, lenient).sessions() for group in (*before, *after)]
    )
    if len(sides) > 2:
        found = compute_trend(sides, by, phase)
    else:
        found = compute_diff(sides[0], sides[1], by, phase)
    output.write(found.reports, table=found.reports[1], charts=found.charts)
    if threshold is not None and (slower := found.slower_by(threshold)):
        notice(f"slower by more than {100 * threshold:g} %: {', '.join(slower)}")
        sys.exit(1)


def _of_logs(logs: Sequence[str], lenient: bool) -> list[list[Session]]:
    """Each log, or each rotated one with its parts, is a side."""
    from llamacpp_instr.log.runs import Run, find_runs

    runs = find_runs(logs, repeated=True)
    if len(runs) == 1:
        runs = [Run((log,)) for log in logs]
    if len(runs) == 1:
        raise UsageError("only one log is given; give two or more")
    return [[load_run(run, lenient)] for run in runs]


def _parse_percent(text: str) -> float:
    try:
        percent = float(text.strip().removesuffix("%"))
    except ValueError:
        percent = -1.0
    if not 0 <= percent < float("inf"):
        raise UsageError(f"--fail-above {text}: give a percentage, such as 5% or 2.5")
    return percent / 100
