"""The files of a data set: DATASET/<table>/date=YYYY-MM-DD/host=NAME/<log>.parquet.

Invariant: a log is in the data set if and only if its file in `logs` is there, which is written
last and removed first. A file has its name only when it is complete; a name that begins with `.`
or `_` does not belong to the data set; Spark and Hive also skip such files.

The durations of ops are in buckets whose limits grow by a fixed ratio, so that many logs add up in
few rows. Every duration of a bucket is within RELATIVE_ERROR of its middle, so a percentile of
counted durations is equally exact (Masson, Rim and Lee, DDSketch, VLDB 2019).
"""

from __future__ import annotations

import contextlib
import math
import secrets
from collections.abc import Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote, unquote

import numpy as np
from numpy.typing import NDArray

from llamacpp_instr.base.errors import InstrError, UsageError
from llamacpp_instr.base.output import file_mode
from llamacpp_instr.base.system import need

Int64 = NDArray[np.int64]

RELATIVE_ERROR = 0.01
GROWTH = (1 + RELATIVE_ERROR) / (1 - RELATIVE_ERROR)
_LOG = math.log(GROWTH)
N_BUCKETS = 2 + math.ceil(math.log(2**63) / _LOG)


def bucket_of(ns: NDArray[np.signedinteger[Any]]) -> Int64:
    """The bucket of each duration, at least 0: bucket 0 is for durations below 1 ns, bucket i for
    those up to GROWTH to the power of i - 1."""
    found: Int64 = np.ceil(np.log(np.maximum(ns, 1)) / _LOG).astype(np.int64) + 1
    found[ns < 1] = 0
    return found


if TYPE_CHECKING:
    import pyarrow as pa

FORMAT = "llamacpp-instr fleet 2"
_TIME = "timestamp"
"""in UTC and µs: not every engine reads ns"""
_COLUMNS: dict[str, dict[str, str]] = {
    "logs": {
        "log": "text", "source": "text", "size": "int", "version": "text", "part": "int",
        "time": _TIME, "cpu": "text", "cores": "int", "memory": "int", "os": "text",
        "level": "text", "perturbed": "bool", "build": "text", "llama_cpp": "text",
        "patches": "text", "models": "texts", "state": "text", "left_out": "int",
        "steps": "int", "failed": "int", "warm_up": "int", "kernels": "int", "requests": "int",
    },
    "steps": {
        "log": "text", "ctx": "int", "model": "text", "threads": "int", "step": "int",
        "phase": "text", "tokens": "int", "outputs": "int", "sequences": "int", "position": "int",
        "time": _TIME, "ns": "int", "prepare_ns": "int", "readback_ns": "int", "counted": "bool",
    },
    "ops": {
        "log": "text", "ctx": "int", "model": "text", "threads": "int", "phase": "text",
        "op": "text", "block": "text", "bucket": "int", "kernels": "int", "ns": "int",
    },
    "requests": {
        "log": "text", "ctx": "int", "model": "text", "threads": "int", "sequence": "int",
        "name": "text", "time": _TIME, "ns": "int", "queued_ns": "int", "first_token_ns": "int",
        "between_tokens_ns": "float", "prompt": "int", "reused": "int", "output": "int",
    },
}  # fmt: skip
TABLES = tuple(_COLUMNS)


@dataclass(frozen=True)
class Place:
    """Where the files of a log are."""

    date: str
    host: str
    log: str

    def path(self, dataset: Path, table: str) -> Path:
        folder = dataset / table / f"date={self.date}" / f"host={quote(self.host, safe='')}"
        return folder / f"{self.log}.parquet"


def schema_of(table: str) -> pa.Schema:
    """The columns of a table, without those of its folders (date and host)."""
    import pyarrow as pa

    types = {
        "text": pa.string(), "texts": pa.list_(pa.string()), "int": pa.int64(),
        "float": pa.float64(), "bool": pa.bool_(), _TIME: pa.timestamp("us", "UTC"),
    }  # fmt: skip
    units = {"ns": {"unit": "ns"}, "memory": {"unit": "bytes"}}
    return pa.schema(
        pa.field(name, types[kind], metadata=units.get(name.rpartition("_")[2]))
        for name, kind in _COLUMNS[table].items()
    )


def open_dataset(path: Path) -> None:
    """Creates a data set, or checks that `path` is one. Raises UsageError if it is something else,
    or if pyarrow is missing."""
    need("fleet", "pyarrow")
    if is_dataset(path):
        return
    mark, unfinished = path / "_format", path / "_format.part"
    if path.exists() and (not path.is_dir() or set(path.iterdir()) - {unfinished}):
        raise UsageError(f"{path} exists and is not a data set of instr collect; name another")
    try:
        path.mkdir(exist_ok=True)
        unfinished.write_text(FORMAT)
        unfinished.replace(mark)
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}") from None


def is_dataset(path: Path) -> bool:
    """Whether a path is a data set. Raises UsageError if it is one of another version, or if no
    file can have this name."""
    mark = path / "_format"
    if file_mode(mark) is None:
        return False
    if mark.read_text() != FORMAT:
        raise UsageError(f"{path}: a data set of another version; collect into a new one")
    return True


class LogFiles:
    """The files of one log while they are written; `with` removes what is not complete."""

    def __init__(self, dataset: Path) -> None:
        self._dataset = dataset
        self._writers: dict[str, Any] = {}
        self._parts: dict[str, Path] = {}

    def __enter__(self) -> LogFiles:
        return self

    def write(self, table: str, rows: list[dict[str, Any]]) -> None:
        import pyarrow as pa
        from pyarrow.parquet import ParquetWriter

        schema = schema_of(table)
        if table not in self._writers:
            part = self._dataset / f".{table}-{secrets.token_hex(8)}.part"
            self._parts[table] = part
            self._writers[table] = ParquetWriter(part, schema, compression="zstd")
        self._writers[table].write_table(pa.Table.from_pylist(rows, schema))

    def is_of_session(self, known: Place) -> bool:
        """Whether the log and a known one are states of one session: the steps of one are among
        those of the other. Call it when all is written."""
        self._close()
        ours, theirs = _steps(self._parts.get("steps")), _steps(known.path(self._dataset, "steps"))
        return ours <= theirs or theirs <= ours

    def place(self, place: Place, replaced: Place | None) -> None:
        """Gives the files their names. Those of an earlier state of the log are removed."""
        self._close()
        if replaced is not None:
            remove(self._dataset, replaced)
        for table in reversed(TABLES):  # `logs` last
            if table in self._parts:
                path = place.path(self._dataset, table)
                path.parent.mkdir(parents=True, exist_ok=True)
                self._parts.pop(table).replace(path)

    def _close(self) -> None:
        for writer in self._writers.values():
            writer.close()

    def __exit__(self, *_: object) -> None:
        for writer in self._writers.values():
            writer.is_open = False  # or its destructor writes a footer
        for part in self._parts.values():
            part.unlink(missing_ok=True)


def _steps(path: Path | None) -> set[tuple[Any, ...]]:
    """Each step, and when it began."""
    if path is None or not path.exists():
        return set()
    columns = _read(path, ["ctx", "step", "time"]).columns
    return set(zip(*(column.to_pylist() for column in columns), strict=True))


def _read(path: Path, names: list[str]) -> pa.Table:
    """Columns of a file. Raises InstrError if it is damaged, or not ours."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        return pq.ParquetFile(path).read(columns=names).select(names)
    except (OSError, KeyError, ValueError, pa.ArrowException):
        raise InstrError(
            f"{path}: damaged, or not from instr collect; remove it and collect again"
        ) from None


def remove(dataset: Path, place: Place) -> None:
    for table in TABLES:  # `logs` first
        place.path(dataset, table).unlink(missing_ok=True)


@dataclass(frozen=True)
class Known:
    place: Place
    source: str
    size: int
    version: str
    steps: int
    kernels: int
    requests: int


def known_logs(dataset: Path, log: str = "*") -> dict[str, Known]:
    """The logs of the data set, or one of them, by id. Raises InstrError for a damaged file."""
    names = [field.name for field in fields(Known) if field.name != "place"]
    found = {}
    for path in sorted((dataset / "logs").glob(f"date=*/host=*/{log}.parquet")):
        host, date = path.parent.name, path.parent.parent.name
        place = Place(date.partition("=")[2], unquote(host.partition("=")[2]), path.stem)
        for row in _read(path, names).to_pylist():
            found[path.stem] = Known(place, **row)
    return found


@contextlib.contextmanager
def only_decider(dataset: Path) -> Iterator[None]:
    """Meanwhile, no other worker of the same collect decides whether the data set has a log."""
    import fcntl

    with (dataset / "_format").open("r+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


@contextlib.contextmanager
def only_writer(dataset: Path) -> Iterator[None]:
    """Meanwhile, no other process collects into the data set. Removes what a killed process left.
    Raises UsageError if another one is collecting."""
    import fcntl

    with (dataset / "_lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise UsageError(f"{dataset}: another instr collect is writing to it") from None
        for part in dataset.glob(".*.part"):
            part.unlink(missing_ok=True)
        yield
