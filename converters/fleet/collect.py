"""Puts logs into a data set, each once; logs that have grown replace what was there of them."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Literal, get_args

from llamacpp_instr.base.errors import InstrError, LogError, UsageError
from llamacpp_instr.base.terminal import OnProgress
from llamacpp_instr.converters.exports.names import LONGEST_HOST, host_of, id_of, name_of
from llamacpp_instr.converters.fleet.dataset import (
    LogFiles,
    Place,
    folder_of_host,
    known_logs,
    only_decider,
    only_writer,
    open_dataset,
)
from llamacpp_instr.converters.fleet.rows import LogRows
from llamacpp_instr.converters.fleet.sources import Source
from llamacpp_instr.log.reader import LogEnd, read_events

Fate = Literal["new", "grown", "unchanged", "copy", "conflict", "damaged"]
FATES: tuple[Fate, ...] = get_args(Fate)


@dataclass(frozen=True)
class Taken:
    """What became of a source."""

    source: str
    fate: Fate
    message: str = ""
    """of a damaged log, what is wrong; of others, what a reader should know"""
    kernels: int = 0


@dataclass(frozen=True)
class Task:
    """All that is needed to take one source, also in another process."""

    source: Source
    dataset: Path
    host: str | None
    lenient: bool


Spread = Callable[[Callable[[Task], Taken], Sequence[Task]], Iterable[Taken]]
"""runs a function on each task, in any order"""


def collect(
    sources: Sequence[Source],
    dataset: Path,
    host: str | None,
    lenient: bool,
    on_progress: OnProgress,
    spread: Spread = map,
) -> Iterator[Taken]:
    """Takes every source that is new or has changed; yields what became of each. `on_progress` gets
    sources done and in total. Raises UsageError for a host whose name no folder can have, and if
    `dataset` is something else; InstrError if it cannot be written."""
    if host is not None and not 0 < len(folder_of_host(host)) <= LONGEST_HOST:
        raise UsageError(
            f"--host {host}: give a name of 1 to {LONGEST_HOST} bytes, as a URL has it"
        )
    open_dataset(dataset)
    with only_writer(dataset):
        known = known_logs(dataset).values()
        same = {(of.source, of.size, of.version) for of in known}
        tasks = []
        done = 0
        for source in sources:
            if (source.name, source.size, source.version) in same:
                done += 1
                yield Taken(source.name, "unchanged")
            else:
                tasks.append(Task(source, dataset, host, lenient))
        for taken in spread(take, tasks):
            done += 1
            on_progress(done, len(sources))
            yield taken


def take(task: Task) -> Taken:
    """Takes one source. Raises InstrError if the data set cannot be written."""
    name = task.source.name
    try:
        with task.source.local() as path:
            try:
                return _take(task, path)
            except LogError as error:
                return Taken(name, "damaged", str(error).replace(str(path), name))
            except OSError as error:
                # pyarrow's own text names its functions
                reason = os.strerror(error.errno) if error.errno else str(error)
                raise InstrError(f"{task.dataset}: {reason}") from None
    except LogError as error:
        return Taken(name, "damaged", str(error))


def _take(task: Task, path: Path) -> Taken:
    source = task.source
    _, first_event = next(iter(read_events(path)), (0, None))
    first = id_of(first_event, source.name)
    for number in itertools.count(1):
        log = first if number == 1 else f"{first}~{number}"
        with LogFiles(task.dataset) as files, ExitStack() as stack:
            rows = LogRows(files.write, log)
            reader = read_events(path, task.lenient)
            left_out = rows.read(reader, task.lenient)
            assert reader.end is not None
            stack.enter_context(only_decider(task.dataset))
            known = known_logs(task.dataset, log).get(log)
            if known is not None:
                if not files.is_of_session(known.place):
                    continue  # another log with the same id
                counts = (rows.n_steps, rows.n_ops, rows.n_requests)
                had = (known.steps, known.kernels, known.requests)
                if known.source != source.name and counts <= had:
                    return Taken(source.name, "copy", f"the data set has it from {known.source}")
            start = rows.refs.start
            date = datetime.fromtimestamp(start.wall // 10**9, timezone.utc).date()
            place = Place(date.isoformat(), task.host or host_of(start), log)
            files.write("logs", [_log_row(rows, source, log, reader.end, left_out)])
            files.place(place, known.place if known else None)
        notes = [reader.end.sentence()] if reader.end.sentence() else []
        fate: Fate = "grown" if known else "new"
        if number > 1:
            fate = "conflict" if known is None else fate
            notes.append(f"another log of the data set has its id, {first}; this one is {log}")
        return Taken(source.name, fate, "; ".join(notes), rows.n_ops)
    raise AssertionError


def _log_row(
    rows: LogRows, source: Source, log: str, end: LogEnd, left_out: int
) -> dict[str, object]:
    start = rows.refs.start
    return {
        "log": log,
        "source": source.name,
        "size": source.size,
        "version": source.version,
        "part": start.part,
        "time": start.wall // 1000,
        "cpu": start.host.cpu,
        "cores": start.host.cores,
        "memory": start.host.memory,
        "os": start.host.os,
        "level": start.level,
        "perturbed": start.perturbed,
        "build": start.producer.llama_cpp,
        "llama_cpp": start.producer.commit,
        "patches": start.producer.patches,
        "models": sorted({name_of(model.event) for model in rows.refs.models.values()}),
        "state": end.state,
        "left_out": end.skipped + left_out,
        "steps": rows.n_steps,
        "failed": rows.n_failed,
        "warm_up": rows.n_warm_up,
        "kernels": rows.n_ops,
        "requests": rows.n_requests,
    }
