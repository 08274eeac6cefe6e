"""`instr to-parquet`: Convert a log to tables in Parquet or CSV files."""

from __future__ import annotations

from pathlib import Path

from llamacpp_instr.base.system import need
from llamacpp_instr.base.terminal import notice, progress_bar
from llamacpp_instr.cli import options as cli
from llamacpp_instr.cli.logs import LOGS, Logs


@cli.command(
    "instr to-parquet session.log -o tables",
    "instr to-parquet session.log server.log --csv -o tables",
)
def to_parquet(
    output: str = cli.DIRECTORY,
    as_csv: bool = cli.flag("Write CSV, which needs no pyarrow.", "--csv"),
    logs: Logs = LOGS,
    force: bool = cli.REPLACE,
) -> None:
    """
    Writes one file for each table: sessions, steps, requests, layers, ops, nodes, tensors, tokens,
    kv, memory, marks, machine, computes, messages, notes, tensor_stats. Times are ns, sizes bytes;
    the fields of Parquet have their unit as metadata. The id in sessions is that of `instr
    collect`, and its wall is the time of day at its start, so logs can be joined.

    LOG is a file, plain or compressed (.gz, .zst), or - for standard input. The parts of a rotated
    log are one session. The tables of several sessions have a first column `log` with the name of
    each row's log. DIR appears when all its files are complete.
    """
    from llamacpp_instr.base.output import check_not_input, open_output_directory
    from llamacpp_instr.converters.exports.table_files import stream_runs, write_csv, write_parquet
    from llamacpp_instr.converters.exports.tables import NAMES
    from llamacpp_instr.log.reader import LogEnd
    from llamacpp_instr.log.runs import Run, find_runs

    if not as_csv:
        need("parquet", hint="or use --csv")
    names = [f"{table}.{suffix}" for table in NAMES for suffix in ("parquet", "csv")]
    for name in names:
        check_not_input(Path(output) / name, *logs.names)
    runs = find_runs(logs.names)
    notices: list[str] = []

    def on_end(run: Run, end: LogEnd) -> None:
        if sentence := end.sentence():
            notices.append(f"{run.name}: {sentence}")

    with (
        open_output_directory(output, names, force) as directory,
        progress_bar(f"Reading {', '.join(run.name for run in runs)}") as on_progress,
    ):
        write = write_csv if as_csv else write_parquet
        n_rows = write(stream_runs(runs, on_progress, on_end, logs.lenient), directory)
    for line in notices:
        notice(line)
    notice(f"{output}: " + ", ".join(f"{name} {n_rows[name]:,}" for name in NAMES))
