"""`instr to-parquet LOG... -o DIR`: writes a log's tables, one file each."""

from __future__ import annotations

from pathlib import Path

import click

from llamacpp_instr.cli.logs import lenient_option
from llamacpp_instr.errors import UsageError


@click.command(
    "to-parquet",
    epilog="\b\nExample:\n  instr to-parquet session.log -o tables",
)
@click.argument("logs", metavar="LOG...", nargs=-1, required=True)
@click.option("-o", "--output", required=True, metavar="DIR", help="Directory for the files.")
@click.option("--csv", "as_csv", is_flag=True, help="Write CSV, which needs no pyarrow.")
@lenient_option
@click.option("--force", is_flag=True, help="Replace the files of an earlier call in DIR.")
def to_parquet(
    logs: tuple[str, ...], output: str, as_csv: bool, lenient: bool, force: bool
) -> None:
    """Convert a log to tables in Parquet or CSV files.

    Writes one file for each table: steps, requests, layers, ops, nodes, tensors, tokens, kv,
    memory, marks, machine, computes, messages, notes, tensor_stats. Times are ns, sizes bytes.

    LOG is a file, plain or compressed (.gz, .zst), or - for standard input. Several are the parts
    of a rotated log; another session needs a directory of its own. DIR appears when all its files
    are complete.
    """
    from converters.exports.table_files import check_pyarrow, write_csv, write_parquet
    from converters.exports.tables import NAMES, stream_tables
    from llamacpp_instr.log.reader import LogEnd
    from llamacpp_instr.log.runs import find_runs
    from llamacpp_instr.output import check_not_input, open_output_directory
    from llamacpp_instr.progress import progress_bar
    from llamacpp_instr.terminal import notice

    if not as_csv:
        check_pyarrow()
    names = [f"{table}.{suffix}" for table in NAMES for suffix in ("parquet", "csv")]
    for name in names:
        check_not_input(Path(output) / name, *logs)
    run, *others = find_runs(logs)
    if others:
        raise UsageError(
            f"{run.name} and {others[0].name} are different sessions; convert each into its own DIR"
        )
    ends: list[LogEnd] = []
    with (
        open_output_directory(output, names, force) as directory,
        progress_bar(f"Reading {run.name}") as on_progress,
    ):
        write = write_csv if as_csv else write_parquet
        n_rows = write(stream_tables(run, on_progress, ends.append, lenient), directory)
    if said := ends[0].sentence():
        notice(f"{run.name}: {said}")
    notice(f"{output}: " + ", ".join(f"{n_rows[name]:,} {name}" for name in NAMES))
