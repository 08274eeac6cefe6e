"""Writes tables into a directory, piece by piece: CSV, or Parquet with a row group for each piece.

Invariant: all pieces of a table have one schema, and only one piece is in memory.
"""

from __future__ import annotations

import csv
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from llamacpp_instr.base.system import need
from llamacpp_instr.base.terminal import OnProgress, printable
from llamacpp_instr.converters.exports.tables import stream_tables
from llamacpp_instr.log.reader import LogEnd
from llamacpp_instr.log.runs import Run

Pieces = Iterable[tuple[str, pd.DataFrame]]
_NS = (
    "t", "begin", "end", "dur", "prepare", "readback", "recorder", "arrival", "first_token",
    "queued", "wait", "delay", "steal", "apply", "alloc", "inputs",
)  # fmt: skip
_ANYWHERE = dict.fromkeys(_NS, "ns") | {
    "bytes": "bytes", "bytes_moved": "bytes", "rss": "bytes", "flops": "FLOP",
    "gb_per_s": "GB/s", "gflop_per_s": "GFLOP/s", "tokens_per_s": "1/s",
    "bits_per_weight": "bits", "used": "cells", "size": "cells", "n_kv": "cells",
}  # fmt: skip
_OF_TABLE = {
    ("machine", "cpu"): "ns", ("computes", "build"): "ns", ("sessions", "memory"): "bytes",
    **dict.fromkeys((("memory", of) for of in ("model", "context", "compute")), "bytes"),
}  # fmt: skip


def write_parquet(pieces: Pieces, directory: Path) -> dict[str, int]:
    """Appends each `(name, rows)` to NAME.parquet, and returns the number of rows by name.

    Categorical columns become dictionaries of strings, which pandas reads as categorical again.
    Raises UsageError if pyarrow is missing.
    """
    need("parquet")
    import pyarrow as pa
    from pyarrow.parquet import ParquetWriter

    writers: dict[str, Any] = {}
    n_rows: dict[str, int] = {}
    try:
        for name, frame in pieces:
            if name not in writers:
                schema = _schema(name, frame)
                path = directory / f"{name}.parquet"
                writers[name] = ParquetWriter(path, schema, compression="zstd")
                n_rows[name] = 0
            writer = writers[name]
            writer.write_table(pa.Table.from_pandas(frame, writer.schema, preserve_index=False))
            n_rows[name] += len(frame)
        for writer in writers.values():
            writer.close()
    except BaseException:
        for writer in writers.values():
            writer.is_open = False  # or its destructor writes a footer
        raise
    return n_rows


def write_csv(pieces: Pieces, directory: Path) -> dict[str, int]:
    """Appends each `(name, rows)` to NAME.csv, and returns the number of rows by name.

    UTF-8 with one line of headings. Text is in quotes, and a missing value is empty.
    """
    n_rows: dict[str, int] = {}
    for name, frame in pieces:
        first = name not in n_rows
        # a model's text may contain any control character, so all text is quoted
        frame.to_csv(
            directory / f"{name}.csv",
            mode="w" if first else "a",
            header=first,
            index=False,
            quoting=csv.QUOTE_NONNUMERIC,
            lineterminator="\n",
        )
        n_rows[name] = n_rows.get(name, 0) + len(frame)
    return n_rows


def _schema(name: str, frame: pd.DataFrame) -> Any:
    """The Arrow schema of a table, which must not depend on the rows of its first piece. The
    metadata of a field has its unit."""
    import pyarrow as pa

    schema = pa.Schema.from_pandas(frame, preserve_index=False)
    fields = []
    for field in schema:
        if pa.types.is_dictionary(field.type):
            field = pa.field(field.name, pa.dictionary(pa.int32(), pa.string()))
        elif pa.types.is_large_string(field.type):
            field = pa.field(field.name, pa.string())
        unit = unit_of(name, field.name)
        fields.append(field.with_metadata({"unit": unit}) if unit else field)
    return pa.schema(fields, schema.metadata)


def stream_runs(
    runs: Sequence[Run],
    on_progress: OnProgress | None = None,
    on_end: Callable[[Run, LogEnd], object] = lambda _run, _end: None,
    lenient: bool = False,
) -> Iterator[tuple[str, pd.DataFrame]]:
    """Yields the tables of each run as `stream_tables` does, one run after the other. The rows of
    several runs have a first column `log` with the run's name, because ids, such as those of steps,
    start again in each. `on_end` is called after each. Raises like `stream_tables`."""
    for run in runs:
        ends: list[LogEnd] = []
        for name, frame in stream_tables(run, on_progress, ends.append, lenient):
            if len(runs) > 1:
                name_of_log = printable(run.name)
                logs = pd.Categorical([name_of_log] * len(frame), categories=[name_of_log])
                frame.insert(0, "log", pd.Series(logs, frame.index))
            yield name, frame
        on_end(run, *ends)


def unit_of(table: str, column: str) -> str | None:
    """The unit of a column, None for a name, a word or a count."""
    return _OF_TABLE.get((table, column), _ANYWHERE.get(column))
