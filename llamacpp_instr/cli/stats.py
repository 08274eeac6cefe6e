"""`instr stats LOG...`: prints time, spread and rates by op, layer, role, phase, mark, …"""

from __future__ import annotations

import click

from llamacpp_instr.cli import completion
from llamacpp_instr.cli.logs import Logs, log_options
from llamacpp_instr.cli.options import (
    ReportOutput,
    command,
    ops_option,
    phase_option,
    range_option,
    report_options,
)


@command(
    "instr stats session.log --by block --phase decode",
    "instr stats session.log --by layer,op --layers 3-5 --sort p99 --top 20",
    "instr stats session.log --by mark",
    "instr stats session.log --by layer --where 'tensor=*ffn_down*'",
)
@click.option(
    "--by",
    shell_complete=completion.keys,
    metavar="KEY[,KEY]",
    help="What each row is: op, layer, block, role, tensor, type, phase, context, mark, thread.  "
    "[default: op; layer if the log has no ops]",
)
@phase_option
@range_option("--layers", "Only kernels of layers A to B; none: those outside of layers.")
@ops_option
@click.option(
    "--where",
    "wheres",
    multiple=True,
    metavar="KEY=PATTERN",
    help="Only where KEY, one of those of --by, matches PATTERN. The tensors "
    "of a kernel are the weight that it reads and what it computes.",
)
@click.option("--sort", metavar="COLUMN", help="Order the rows by a column.")
@click.option("--top", type=click.IntRange(1), metavar="N", help="Only the first N rows.")
@click.option("--warmup", is_flag=True, help="Count warm-up runs too.")
@log_options
@report_options
def stats(
    logs: Logs,
    by: str | None,
    phase: str | None,
    layers: tuple[int, int] | None,
    ops: str | None,
    wheres: tuple[str, ...],
    sort: str | None,
    top: int | None,
    warmup: bool,
    output: ReportOutput,
) -> None:
    """Print times and rates of a log by op, layer, block or phase.

    Prints how often each op ran and how long it took: count, total, share, mean, median (p50), 90th
    and 99th percentile, and the rates that it reached: in total, and the median (p50). Warm-up runs
    are left out.

    A role is what an op does in its layer: the weight that it reads (ffn_down), or words. A mark is
    the innermost mark of the application that was open on the thread when a step began. A row
    by phase, context or mark counts steps; with another key or a filter of kernels, it counts
    kernels.

    At the level verbose, also how long each thread waited. LOG is a file, plain or compressed
    (.gz, .zst), or - for standard input. The parts of a rotated log are one session; other logs are
    shown one after the other.
    """
    from llamacpp_instr.converters.analyses.stats import compute_stats
    from llamacpp_instr.converters.analyses.stats_keys import (
        Filter,
        layer_filter,
        op_filter,
        where_filter,
    )
    from llamacpp_instr.report.arrange import arrange

    output.check(*logs.names)
    filters: list[Filter] = [where_filter(text) for text in wheres]
    if layers is not None:
        filters.append(layer_filter(*layers))
    if ops is not None:
        filters.append(op_filter(ops))
    named = []
    for session in logs.sessions():
        reports = compute_stats(session, by, phase, warmup, filters)
        reports[0] = arrange(reports[0], sort, top)
        named.append((session.path, reports, reports[0]))
    output.write_several(named)
