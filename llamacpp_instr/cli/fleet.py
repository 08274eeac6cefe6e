"""The commands about many logs: `instr collect` makes a data set of them, `instr sql` asks it."""

from __future__ import annotations

from pathlib import Path

from llamacpp_instr.base.system import need
from llamacpp_instr.base.terminal import counted, notice, progress_bar
from llamacpp_instr.cli import options as cli
from llamacpp_instr.cli.logs import LOGS, Logs


@cli.command(
    "instr collect session.log server.log -o fleet",
    "instr collect session.log --host rack-7 -o fleet",
)
def collect(
    output: str = cli.DATASET,
    host: str | None = cli.option(
        "Name of the machine that recorded.  [default: its processor, cores and memory]", "NAME"
    ),
    dask: str | None = cli.option(
        "Read the logs on the workers of this Dask scheduler.", "ADDRESS"
    ),
    logs: Logs = LOGS,
) -> None:
    """Reads steps, requests and the times of ops of each log, and adds them to DATASET, for `instr
    sql` or any engine that reads Parquet. Logs that it has are skipped, logs that have grown are
    read again. A log that is damaged is named and left out; the exit status is then 1. It may be
    interrupted at any time: each log is in DATASET as a whole or not at all.

    LOG is a file, plain or compressed (.gz, .zst), a folder, a pattern in quotes, or a URL that
    fsspec knows, such as s3://bucket/logs. Each part of a rotated log counts as a log.
    """
    from collections import Counter
    from functools import partial

    from llamacpp_instr.converters.fleet.collect import FATES, find_sources, on_dask
    from llamacpp_instr.converters.fleet.collect import collect as collect_logs

    if dask:
        need("dask")
    spread = partial(on_dask, dask) if dask else map
    sources = find_sources(logs.names)
    fates: Counter[str] = Counter()
    kernels = 0
    with progress_bar(f"Collecting into {output}") as on_progress:
        for taken in collect_logs(sources, Path(output), host, logs.lenient, on_progress, spread):
            fates[taken.fate] += 1
            kernels += taken.kernels
            if taken.fate == "damaged":
                notice(f"left out: {taken.message}")
            elif taken.message:
                notice(f"{taken.source}: {taken.message}")
    counts = ", ".join(f"{fates[fate]:,} {fate}" for fate in FATES if fates[fate])
    notice(f"{output}: logs: {counts}; {counted(kernels, 'kernel')} read")
    if fates["damaged"]:
        raise SystemExit(1)


@cli.command(
    "instr sql fleet",
    "instr sql fleet regressions",
    "instr sql fleet \"select host, median(ns) from steps where phase = 'decode' group by host\"",
)
def sql(
    dataset: Path = cli.argument(metavar="DATASET", type=cli.PATH),
    query: str | None = cli.argument(required=False),
    output: cli.ReportOutput = cli.REPORT,
) -> None:
    """
    `instr collect` makes data sets. QUERY is a SELECT, as DuckDB knows it, or the name of a query;
    without one, the names are listed. The tables are logs, steps, requests, ops, hosts and
    op_percentiles. A column whose name ends in ns holds nanoseconds; times are UTC. In ops, a row
    counts the kernels of one op whose durations differ by at most 2 %, and the percentiles
    of op_percentiles are within 1 %.
    """
    from llamacpp_instr.converters.fleet.queries import answer, named_queries, open_database

    output.check()
    with open_database(dataset) as connection:
        output.write([answer(connection, query) if query else named_queries()])
