"""`instr collect LOG... -o DATASET`: many logs as one data set."""

from __future__ import annotations

from pathlib import Path

import click

from llamacpp_instr.base.system import need
from llamacpp_instr.cli.logs import Logs, log_options
from llamacpp_instr.cli.options import command


@command(
    "instr collect session.log server.log -o fleet",
    "instr collect session.log --host rack-7 -o fleet",
)
@click.option("-o", "--output", required=True, metavar="DATASET", help="Directory of the data set.")
@click.option(
    "--host",
    metavar="NAME",
    help="Name of the machine that recorded.  [default: its processor, cores and memory]",
)
@click.option(
    "--dask", metavar="ADDRESS", help="Read the logs on the workers of this Dask scheduler."
)
@log_options
def collect(logs: Logs, output: str, host: str | None, dask: str | None) -> None:
    """Collect many logs into one data set of Parquet files.

    Reads steps, requests and the times of ops of each log, and adds them to DATASET, for `instr
    sql` or any engine that reads Parquet. Logs that it has are skipped, logs that have grown are
    read again. A log that is damaged is named and left out; the exit status is then 1. It may be
    interrupted at any time: each log is in DATASET as a whole or not at all.

    LOG is a file, plain or compressed (.gz, .zst), a folder, a pattern in quotes, or a URL that
    fsspec knows, such as s3://bucket/logs. Each part of a rotated log counts as a log.
    """
    from collections import Counter
    from functools import partial

    from llamacpp_instr.base.terminal import counted, notice, progress_bar
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
