"""`instr to-parquet`, both formats."""

from __future__ import annotations

import tempfile
from pathlib import Path

from converters.exports.table_files import write_csv, write_parquet
from converters.exports.tables import stream_tables

KIND = "log"


def attempt(path: Path) -> None:
    with tempfile.TemporaryDirectory(dir=path.parent) as name:
        write_csv(stream_tables(path), Path(name))
        write_parquet(stream_tables(path), Path(name))
