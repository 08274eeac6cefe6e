"""`instr diff A B`: tells whether B is faster or slower than A, and where."""

from __future__ import annotations

import click

from llamacpp_instr.cli.logs import lenient_option
from llamacpp_instr.cli.report_output import ReportOutput, report_options
from llamacpp_instr.errors import UsageError


@click.command(
    "diff",
    epilog="\b\nExamples:\n  instr diff before.log after.log\n"
    "  instr diff before.log after.log --by tensor --phase decode\n"
    "  instr diff main.log branch.log --fail-above 5%",
)
@click.argument("a")
@click.argument("b")
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
    a: str,
    b: str,
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
    """
    from converters.analyses.diff import VIEWS, compute_diff
    from llamacpp_instr.log.session import load_session
    from llamacpp_instr.progress import progress_bar
    from llamacpp_instr.terminal import notice

    threshold = _parse_percent(fail_above) if fail_above is not None else None
    if a == b == "-":
        raise UsageError("only one of the logs can be standard input")
    output.check(a, b)
    view = next((view for view in VIEWS if view == by), None)
    with progress_bar(f"Reading {a}") as on_progress:
        of_a = load_session(a, on_progress, lenient)
    with progress_bar(f"Reading {b}") as on_progress:
        of_b = load_session(b, on_progress, lenient)
    found = compute_diff(of_a, of_b, view, phase)
    output.write(found.reports, table=found.reports[1])
    if threshold is not None and (slower := found.slower_by(threshold)):
        notice(f"slower by more than {100 * threshold:g} %: {', '.join(slower)}")
        ctx.exit(1)


def _parse_percent(text: str) -> float:
    try:
        percent = float(text.strip().removesuffix("%"))
    except ValueError:
        percent = -1.0
    if not 0 <= percent < float("inf"):
        raise UsageError(f"--fail-above {text}: give a percentage, such as 5% or 2.5")
    return percent / 100
