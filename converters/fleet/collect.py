"""Puts logs into a data set, each once; logs that have grown replace their earlier state.

Logs come from files, folders, globs, and object stores that fsspec knows. The workers of a Dask
scheduler may take them; they must see the same files under the same names.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from datetime import datetime, timezone
from functools import partial
from pathlib import Path
from typing import Any, Literal, get_args
from urllib.parse import quote

from llamacpp_instr.base.errors import InstrError, LogError, UsageError, reason
from llamacpp_instr.base.system import need, temporary_directory
from llamacpp_instr.base.terminal import OnProgress
from llamacpp_instr.converters.exports.names import LONGEST_HOST, host_of, id_of, name_of
from llamacpp_instr.converters.fleet.dataset import (
    LogFiles,
    Place,
    known_logs,
    only_decider,
    only_writer,
    open_dataset,
)
from llamacpp_instr.converters.fleet.rows import LogRows, write_rows
from llamacpp_instr.log.reader import read_events

SUFFIXES = tuple(
    suffix + packed for suffix in (".log", ".ndjson", ".jsonl") for packed in ("", ".gz", ".zst")
)


@dataclass(frozen=True)
class Source:
    """A file that may be a log."""

    name: str
    """path, or URL"""
    size: int
    """bytes"""
    version: str
    """changes when the file changes"""

    @contextmanager
    def local(self) -> Iterator[Path]:
        """The file on this machine; an object is copied for the duration of the block. Raises
        LogError if that fails."""
        if "://" not in self.name:
            yield Path(self.name)
            return
        with temporary_directory("instr-collect-") as folder:
            path = folder / self.name.rpartition("/")[2]
            system, inner = _opened(self.name)
            try:
                system.get_file(inner, str(path))
            except Exception as error:  # every store has errors of its own
                raise LogError(f"cannot be fetched: {reason(error)}", self.name) from None
            yield path


def find_sources(names: Sequence[str]) -> list[Source]:
    """The files that the names mean, each once, in order: files, all logs in folders and below
    them (.log, .ndjson, .jsonl, also .gz and .zst), globs (**, *, ?), and the same for URLs. Raises
    UsageError for a name that matches no file."""
    found: dict[str, Source] = {}
    for name in names:
        matched = list(_remote(name) if "://" in name else _local(name))
        if not matched:
            raise UsageError(f"{name}: no such file, or a folder without logs")
        found.update((source.name, source) for source in matched)
    return list(found.values())


def _local(name: str) -> Iterator[Source]:
    path = Path(name)
    if path.is_dir():
        paths = sorted(of for of in path.rglob("*") if of.name.endswith(SUFFIXES) and of.is_file())
    elif path.exists():
        paths = [path]
    else:
        root = Path(path.anchor)
        paths = sorted(of for of in root.glob(str(path.relative_to(root))) if of.is_file())
    for of in paths:
        status = of.stat()
        yield Source(str(of), status.st_size, f"{status.st_mtime_ns}")


def _remote(name: str) -> Iterator[Source]:
    system, inner = _opened(name)
    scheme = name.partition("://")[0]
    try:
        if any(mark in inner for mark in "*?["):
            details = system.glob(inner, detail=True).values()
        elif system.isdir(inner):
            details = system.find(inner, detail=True).values()
            details = [of for of in details if of["name"].endswith(SUFFIXES)]
        else:
            details = [system.info(inner)] if system.exists(inner) else []
    except Exception as error:  # every store has errors of its own
        raise UsageError(f"{name}: {reason(error)}") from None
    for of in sorted(details, key=lambda of: str(of["name"])):
        if of["type"] == "file":
            marks = [of[key] for key in ("ETag", "etag", "mtime", "LastModified", "created")
                     if key in of]  # fmt: skip
            url = str(of["name"])
            if "://" not in url:
                url = f"{scheme}://{url if scheme == 'file' else url.lstrip('/')}"
            yield Source(url, int(of["size"] or 0), ",".join(map(str, marks)))


def _opened(url: str) -> tuple[Any, str]:
    need("fleet", "fsspec")
    from fsspec.core import url_to_fs

    try:
        system, inner = url_to_fs(url)
    except (ImportError, ValueError) as error:
        raise UsageError(f"{url}: {error}") from None
    return system, inner


def on_dask(
    address: str, take: Callable[[Source], Taken], sources: Sequence[Source]
) -> Iterator[Taken]:
    """Yields each result when it arrives. Raises UsageError if no scheduler answers at `address`,
    or if Dask is missing."""
    from distributed import Client, as_completed

    try:
        client: Any = Client(address, timeout=10)  # type: ignore[no-untyped-call]
    except (OSError, ValueError, TimeoutError) as error:
        raise UsageError(f"--dask {address}: no scheduler answers ({reason(error)})") from None
    with client:
        futures = client.map(take, sources, pure=False)
        try:
            for future in as_completed(futures):  # type: ignore[no-untyped-call]
                yield future.result()
        finally:
            client.cancel(futures)


Fate = Literal["new", "grown", "unchanged", "copy", "conflict", "damaged"]
FATES: tuple[Fate, ...] = get_args(Fate)


@dataclass(frozen=True)
class Taken:
    source: str
    fate: Fate
    message: str = ""
    """for a damaged log, what is wrong; for others, what a reader should know"""
    kernels: int = 0


Spread = Callable[[Callable[[Source], Taken], Sequence[Source]], Iterable[Taken]]
"""runs a function on each source, in any order, also in other processes"""


def collect(
    sources: Sequence[Source],
    dataset: Path,
    host: str | None,
    lenient: bool,
    on_progress: OnProgress,
    spread: Spread = map,
) -> Iterator[Taken]:
    """Takes every source that is new or has changed; yields the result for each. `on_progress` gets
    sources done and in total. Raises UsageError for a host whose name no folder can have, and if
    `dataset` is something else; InstrError if it cannot be written."""
    if host is not None and not 0 < len(quote(host, safe="")) <= LONGEST_HOST:
        raise UsageError(
            f"--host {host}: give a name of 1 to {LONGEST_HOST} bytes, encoded as in a URL"
        )
    open_dataset(dataset)
    with only_writer(dataset):
        known = known_logs(dataset).values()
        same = {(of.source, of.size, of.version) for of in known}
        changed = []
        for source in sources:
            if (source.name, source.size, source.version) in same:
                yield Taken(source.name, "unchanged")
            else:
                changed.append(source)
        done = itertools.count(len(sources) - len(changed) + 1)
        for taken in spread(partial(take, dataset, host, lenient), changed):
            on_progress(next(done), len(sources))
            yield taken


def take(dataset: Path, host: str | None, lenient: bool, source: Source) -> Taken:
    """Takes one source. Raises InstrError if the data set cannot be written."""
    name = source.name
    try:
        with source.local() as path:
            try:
                return _take(dataset, host, lenient, source, path)
            except LogError as error:
                return Taken(name, "damaged", str(error).replace(str(path), name))
            except OSError as error:
                # pyarrow's own text names its functions
                reason = os.strerror(error.errno) if error.errno else str(error)
                raise InstrError(f"{dataset}: {reason}") from None
    except LogError as error:
        return Taken(name, "damaged", str(error))


def _take(dataset: Path, host: str | None, lenient: bool, source: Source, path: Path) -> Taken:
    _, first_event = next(iter(read_events(path)), (0, None))
    first = id_of(first_event, source.name)
    for number in itertools.count(1):
        log = first if number == 1 else f"{first}~{number}"
        with LogFiles(dataset) as files, ExitStack() as stack:
            rows = write_rows(path, log, files.write, lenient)
            end = rows.session.log_end
            stack.enter_context(only_decider(dataset))
            known = known_logs(dataset, log).get(log)
            if known is not None:
                if not files.is_of_session(known.place):
                    continue  # another log with the same id
                counts = (rows.steps, rows.kernels, rows.requests)
                had = (known.steps, known.kernels, known.requests)
                if known.source != source.name and counts <= had:
                    return Taken(source.name, "copy", f"the data set has it from {known.source}")
            start = rows.session.start
            date = datetime.fromtimestamp(start.wall // 10**9, timezone.utc).date()
            place = Place(date.isoformat(), host or host_of(start), log)
            files.write("logs", [_log_row(rows, source, log)])
            files.place(place, known.place if known else None)
        notes = [end.sentence()] if end.sentence() else []
        fate: Fate = "grown" if known else "new"
        if number > 1:
            fate = "conflict" if known is None else fate
            notes.append(f"another log of the data set has its id, {first}; this one is {log}")
        return Taken(source.name, fate, "; ".join(notes), rows.kernels)
    raise AssertionError


def _log_row(rows: LogRows, source: Source, log: str) -> dict[str, object]:
    start, end = rows.session.start, rows.session.log_end
    models = sorted({name_of(model) for model in rows.session.models.values()})
    return {
        "log": log, "source": source.name, "size": source.size, "version": source.version,
        "part": start.part, "time": start.wall // 1000,
        "cpu": start.host.cpu, "cores": start.host.cores, "memory": start.host.memory,
        "os": start.host.os, "level": start.level, "perturbed": start.perturbed,
        "build": start.producer.llama_cpp, "llama_cpp": start.producer.commit,
        "patches": start.producer.patches, "models": models,
        "state": end.state, "left_out": end.skipped + end.left_out,
        "steps": rows.steps, "failed": rows.failed, "warm_up": rows.warm_up,
        "kernels": rows.kernels, "requests": rows.requests,
    }  # fmt: skip
