"""`instr schedule LOG|FILE.toml|MODEL`: a graph's tasks on engines that may not exist."""

from __future__ import annotations

from typing import Any

import click

from llamacpp_instr.base.errors import UsageError
from llamacpp_instr.cli.logs import Logs, is_model
from llamacpp_instr.cli.options import (
    LAST,
    ReportOutput,
    command,
    given_options,
    lenient_option,
    range_option,
    report_options,
)

MOST_SWEPT = 1024


@command(
    "instr schedule session.log --engines 4",
    "instr schedule session.log --engines 4 --split heads --layers 0 -o heads.html",
    "instr schedule session.log --engines chip.toml --perfetto chip.pftrace",
    "instr schedule session.log --sweep 1-64 --split rows",
    "instr schedule graph.toml --engines 2 --policy optimal --seconds 10",
)
@click.argument("source", metavar="LOG|GRAPH.toml|MODEL")
@click.option(
    "--engines",
    default="4",
    show_default=True,
    metavar="N|FILE",
    help="How many equal engines, or a TOML file that describes them.",
)
@click.option(
    "--split",
    type=click.Choice(["none", "heads", "rows", "tiles"]),
    default="none",
    show_default=True,
    help="Divide ops into parts that may run at the same time.",
)
@click.option(
    "--policy",
    type=click.Choice(["program", "list", "optimal"]),
    default="list",
    show_default=True,
    help="In order, by critical path, or the shortest that can be found.",
)
@click.option(
    "--seconds",
    type=click.FloatRange(min=0, min_open=True, max=86400),
    default=60,
    show_default=True,
    help="How long --policy optimal may search.",
)
@click.option(
    "--phase",
    type=click.Choice(["prefill", "decode", "encode"]),
    help="Steps of this phase: the median of each op.  [default: decode]",
)
@click.option("--step", type=click.IntRange(min=0), help="This step alone.")
@range_option("--layers", "Only layers A to B; 0: only the first.")
@click.option(
    "--sequences",
    type=click.IntRange(1, 1024),
    default=1,
    show_default=True,
    help="Independent sequences in flight.",
)
@click.option(
    "--tokens",
    type=click.IntRange(1, 1024),
    default=1,
    show_default=True,
    help="Tokens of each sequence, one after the other.",
)
@click.option("--beside-prefill", is_flag=True, help="Add the log's prefill, independent of it.")
@click.option(
    "--machine",
    metavar="FILE",
    help="For a model: a file of `instr probe`.  [default: the one in the user's cache]",
)
@range_option("--sweep", "Print a curve: from A to B equal engines.")
@click.option("--perfetto", metavar="FILE", help="Also write the schedule as a Perfetto trace.")
@lenient_option
@report_options
def schedule(
    source: str,
    engines: str,
    machine: str | None,
    sweep: tuple[int, int] | None,
    perfetto: str | None,
    lenient: bool,
    output: ReportOutput,
    **how: Any,
) -> None:
    """Schedule the ops of a log or a model on other engines.

    Prints how long the ops of a decode would take on engines that may not exist, what these do,
    the critical path by layer and block, and the lower bound that binds. The times are those that a
    log recorded, the median of each op, divided by the speeds of the engines.

    --split heads makes parts for each head, of flash attention dot products, three passes of a
    soft-max and a weighted sum, and of a fused kernel its ops, each timed on this machine. --split
    rows divides ops as ggml divides them among threads, --split tiles divides matrix products into
    tiles.

    LOG is a file, plain or compressed (.gz, .zst), or - for standard input. GRAPH.toml has tasks by
    hand. For a MODEL (a GGUF file or demo) the times are predicted: a decode after 512 tokens, or a
    prefill of 512, on one thread.
    """
    from llamacpp_instr.base.output import check_output, open_output
    from llamacpp_instr.converters.scheduling.report import (
        gantt_chart,
        schedule_reports,
        sweep_chart,
        sweep_reports,
    )
    from llamacpp_instr.converters.scheduling.sources import (
        Wanted,
        tasks_by_hand,
        tasks_of_model,
        tasks_of_session,
    )
    from llamacpp_instr.converters.scheduling.sources import sweep as sweep_engines
    from llamacpp_instr.converters.scheduling.tasks import equal_engines, parse_engines
    from llamacpp_instr.converters.scheduling.trace import write_trace
    from llamacpp_instr.prediction.probe.file import read_probe
    from llamacpp_instr.prediction.probe.measure import time_all
    from llamacpp_instr.prediction.steps import usual_steps

    if sweep is not None:
        for other in given_options("engines", "perfetto"):
            raise UsageError(f"--sweep has its own numbers of engines; leave out {other}")
        if sweep[0] < 1 or sweep[1] == LAST or sweep[1] - sweep[0] >= MOST_SWEPT:
            last = "" if sweep[1] == LAST else sweep[1]
            raise UsageError(
                f"--sweep {sweep[0]}-{last}: give A-B, from 1, at most {MOST_SWEPT} numbers"
            )
    wanted = Wanted(**how)
    if wanted.step is not None and wanted.phase is not None:
        raise UsageError("give --phase or --step, not both")
    read = engines if not engines.isdecimal() else None
    output.check(source, read, machine)
    if perfetto is not None:
        check_output(perfetto, output.force, source, read, machine)
        if perfetto == "-" and output.path == "-":
            raise UsageError("--perfetto -: name the report with -o, or the trace")
    hardware = parse_engines(engines) if sweep is None else equal_engines(sweep[0])
    if is_model(source):
        if wanted.step is not None or wanted.phase == "encode":
            raise UsageError(f"{source} is a model: choose --phase prefill or decode")
        probe = read_probe(machine)
        make = tasks_of_model(source, probe, usual_steps(source, probe), wanted, time_all)
    elif machine is not None:
        raise UsageError(f"{source} is not a GGUF model; --machine is for models")
    elif source.lower().endswith(".toml"):
        make = tasks_by_hand(source, wanted)
    else:
        (session,) = Logs((source,), lenient).sessions()
        make = tasks_of_session(session, wanted, time_all)
    if sweep is not None:
        points, notes = sweep_engines(make, wanted, range(sweep[0], sweep[1] + 1))
        title = f"Schedules of {source}"
        output.write(sweep_reports(points, notes), charts=[sweep_chart(points, title)], title=title)
        return
    tasks, notes = make(hardware)
    made, title = wanted.plan(tasks, hardware), f"Schedule of {source}"
    if perfetto is not None:
        with open_output(perfetto, output.force) as file:
            write_trace(made, file.write, title)
    chart = gantt_chart(made, title)
    charts = [chart] if chart is not None else []
    output.write(schedule_reports(made, notes), charts=charts, title=title)
