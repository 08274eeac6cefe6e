"""Which logs belong together, and how the parts of a rotated log are read as one.

Invariant: several parts give the events that one file would have, except that each part repeats the
graphs and plans that it uses, with new ids (`schema`, Lifetimes). Ids count through all parts, so
nothing is renumbered except the `index` of a token, which begins at 0 again in each part. A log
that is followed while it is written gives the same events, each soon after it was written. The
recorder never waits for a reader.
"""

from __future__ import annotations

import os
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Container, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import count, pairwise
from pathlib import Path

from llamacpp_instr.base.errors import LogError, UsageError
from llamacpp_instr.base.terminal import OnProgress
from llamacpp_instr.log import schema
from llamacpp_instr.log.numbers import Numbers
from llamacpp_instr.log.reader import (
    EventReader,
    LogEnd,
    LogReader,
    file_size,
    is_pipe,
    open_log,
    read_events,
)
from llamacpp_instr.log.schema import Event, Mark, SessionEnd, SessionStart


@dataclass(frozen=True)
class Run:
    """A session: the paths of its parts in order; one path for a log that is not rotated."""

    paths: tuple[str, ...]
    numbers: tuple[int, ...] = ()
    """of the parts"""
    marks: tuple[frozenset[int], ...] = ()
    """for each part, the marks that are open when it begins"""

    @property
    def name(self) -> str:
        """What a heading calls it."""
        others = len(self.paths) - 1
        more = f" and {others} more part{'s' * (others > 1)}" if others else ""
        return ("standard input" if self.paths[0] == "-" else self.paths[0]) + more

    @property
    def missing(self) -> list[int]:
        """The numbers of the parts that are missing between the first and the last."""
        return [n for a, b in pairwise(self.numbers) for n in range(a + 1, b)]


def find_runs(paths: Sequence[str | Path], repeated: bool = False) -> list[Run]:
    """The sessions of several logs in the order in which they are first named.

    Rotated parts of one session are one run, whatever the order of the paths. Every other log is a
    run of its own, and so are standard input and pipes, which can be read only once. A part that is
    given twice also is one if `repeated`, else an error. Raises UsageError for that and if standard
    input is given twice, LogError for a file that is not a log.
    """
    if len(paths) == 1:
        return [Run((str(paths[0]),))]
    if list(map(str, paths)).count("-") > 1:
        raise UsageError("only one of the logs can be standard input")
    groups: dict[str, list[tuple[int, str, frozenset[int]]]] = {}
    for path in map(str, paths):
        start, marks, _ = (None, frozenset(), False) if is_pipe(path) else _head(path)
        # since ABI 2 of the recorder, ids count through all parts
        joins = start and start.id and start.producer.abi >= 2 and not start.args.get("dialect")
        key = start.id if start and joins else f"\0{path}"
        number = start.part if start else 1
        same = [other for n, other, _ in groups.get(key, ()) if n == number]
        if same and not repeated:
            raise UsageError(
                f"{same[0]} and {path} are the same part of one session; leave one out"
            )
        groups.setdefault(f"{key}\0{len(groups)}" if same else key, []).append(
            (number, path, marks)
        )
    runs = []
    for parts in groups.values():
        numbers, named, open_marks = zip(*sorted(parts, key=lambda part: part[0]), strict=True)
        runs.append(Run(named, numbers, open_marks))
    return runs


def _head(path: str | Path) -> tuple[SessionStart | None, frozenset[int], bool]:
    """The first event, the marks that begin directly after it, as they do after a rotation, and
    whether another event follows them."""
    events = (event for _, event in LogReader(path, "skip"))
    start = next(events, None)
    marks: set[int] = set()
    if isinstance(start, SessionStart):
        for event in events:
            if not isinstance(event, Mark) or event.phase != "begin":
                return start, frozenset(marks), True
            marks.add(event.mark)
        return start, frozenset(marks), False
    return None, frozenset(), False


def read_run(run: Run, lenient: bool = False, on_progress: OnProgress | None = None) -> EventReader:
    """The events of a run as (line number, event), as `read_events` gives those of a log."""
    if len(run.paths) == 1:
        return read_events(run.paths[0], lenient, on_progress)
    return _Parts(run, lenient, on_progress)


class _Parts:
    """Reads the parts one after the other; `path` is the one that is being read, for errors."""

    dialect = None

    def __init__(self, run: Run, lenient: bool, on_progress: OnProgress | None) -> None:
        self.path = run.paths[0]
        self.end: LogEnd | None = None
        self._run = run
        self._lenient = lenient
        self._on_progress = on_progress

    def __iter__(self) -> Iterator[tuple[int, schema.Event]]:
        paths, joiner = self._run.paths, Joiner()
        sizes = []
        for path in paths:
            with open_log(path, path) as file:
                sizes.append(file_size(file))
        ends: list[LogEnd] = []
        for i, path in enumerate(paths):
            self.path = path
            on_progress = self._progress(sum(sizes[:i]), sum(sizes))
            reader = LogReader(path, "skip" if self._lenient else "raise", on_progress)
            joiner.last = i + 1 == len(paths)
            joiner.begin_part(() if joiner.last else self._run.marks[i + 1])
            yield from ((line, event) for line, event in reader if joiner.take(event))
            assert reader.end is not None
            ends.append(reader.end)
        self.path = paths[0]
        problems = [f"part {number} is missing" for number in self._run.missing]
        for path, end in zip(paths, ends[:-1], strict=False):
            if end.state != "closed":
                problems.append(f"{path} was not closed")
        skipped = sum(end.skipped for end in ends)
        self.end = replace(ends[-1], skipped=skipped, parts=tuple(problems))

    def _progress(self, before: int, total: int) -> OnProgress | None:
        report = self._on_progress
        return report and (lambda done, _size: report(before + done, total))


class Joiner:
    """Leaves out what a part repeats of earlier ones. Takes the events of all parts, in order."""

    def __init__(self) -> None:
        self.last = True
        """no other part follows"""
        self._part = 0
        self._go_on: Container[int] = ()
        self._given: defaultdict[str, Numbers] = defaultdict(Numbers)
        """models, contexts, connections and marks"""
        self._repeated: set[int] = set()
        """models whose tensors the part repeats"""
        self._tokens: Counter[int] = Counter()
        """sampled in each context, so far and in earlier parts"""
        self._earlier: Counter[int] = Counter()
        self._sum: schema.SessionEnd | None = None

    def begin_part(self, go_on: Container[int]) -> None:
        """The next events are of the next part; the marks `go_on` are open in the one after it."""
        self._part += 1
        self._go_on = go_on
        self._repeated.clear()
        self._earlier = self._tokens.copy()

    def take(self, event: schema.Event) -> bool:
        """Whether the joined log has the event; counts the index of a token through the parts."""
        if isinstance(event, schema.SessionStart):
            return self._part == 1
        if isinstance(event, schema.SessionEnd):  # the last one has the totals of all parts
            if before := self._sum:
                event.events = dict(Counter(before.events) + Counter(event.events))
                for total in ("bytes", "dropped", "dropped_ops", "decode_ns", "overhead_ns"):
                    setattr(event, total, getattr(before, total) + getattr(event, total))
            self._sum = event
            return self.last
        if isinstance(event, schema.Mark):
            # a rotation ends the open marks, and begins them again in the next part
            if event.phase == "end":
                return not (event.mark in self._go_on and event.mark in self._given["mark"])
            return self._given["mark"].add(event.mark)
        if isinstance(event, schema.Model):
            if not self._given["model"].add(event.model):
                self._repeated.add(event.model)
                return False
        elif isinstance(event, schema.Tensor):
            return event.model not in self._repeated
        elif isinstance(event, schema.Context):
            return self._given["ctx"].add(event.ctx)
        elif isinstance(event, schema.Connection):
            return self._given["connection"].add(event.connection)
        elif isinstance(event, schema.Token):
            event.index += self._earlier[event.ctx]
            self._tokens[event.ctx] = event.index + 1
        return True


LOOK_S = 0.05
"""how often it looks for new lines; the recorder writes ten times a second"""
SILENT_S = 3.0
"""after which it checks whether the program that writes the log is still running"""
CATCH_UP = 64 << 20
"""bytes of finished parts that it reads before the part that is being written"""


class NotWritten(LogError):
    """The log is closed, or the program that wrote it has ended."""


class FollowedLog:
    """An iterable of (line number, event) that waits for more until the log is closed, until the
    program that writes it has ended, or until `stop` is set.

    `path` is the part that is being read, `end` is None until the iteration is over.
    `is_catching_up` says whether it has not yet seen the end of what was written.
    """

    dialect = None

    def __init__(self, path: str | Path, stop: threading.Event) -> None:
        """Raises LogError if the file is not a log, NotWritten if no process writes it."""
        self.end: LogEnd | None = None
        self.is_catching_up = True
        self._stop = stop
        if is_pipe(path):
            raise LogError("only a file can be followed; name the log being written", str(path))
        self._start = _start_of(Path(path))
        number = self._start.part
        self._first = Path(path).with_stem(Path(path).stem.removesuffix(f".part{number}"))
        newest = next(n for n in count(number) if not part_path(self._first, n + 1).exists())
        self._part = self._earliest_part(newest)
        self.path = str(part_path(self._first, self._part))
        self._grew = time.monotonic()
        self._closed = False
        if not self._is_written(part_path(self._first, newest)):
            raise NotWritten(
                "no longer written, so there is nothing to follow; instr summary and instr page"
                " show it",
                str(path),
            )

    def __iter__(self) -> Iterator[tuple[int, Event]]:
        joiner = Joiner()
        while True:
            self._closed = False
            following = part_path(self._first, self._part + 1)
            reader = LogReader(self.path, "skip", more=self._more)
            joiner.begin_part(_OpenMarks(following, self._stop))
            rotated = False
            for line, event in reader:
                self._grew = time.monotonic()
                if isinstance(event, SessionEnd):
                    self._closed = True
                    rotated = event.reason == "rotated"
                    joiner.last = not rotated
                if joiner.take(event):
                    yield line, event
            if not rotated or self._stop.is_set():
                self.end = reader.end
                return
            self._part += 1
            self.path = str(following)

    @property
    def is_stopped(self) -> bool:
        """Whether `stop` is set: the log may go on."""
        return self._stop.is_set()

    def parts_between(self, begin: int, end: int) -> list[Path]:
        """The parts that still exist and may have events of that time (`t`), in order. May run
        while another thread iterates."""
        found: list[Path] = []
        for number in range(self._part, 0, -1):
            path = part_path(self._first, number)
            if not path.exists():
                break
            t = _start_of(path).t
            if t <= end:
                found.insert(0, path)
            if t <= begin:
                break
        return found

    def _more(self) -> bool:
        if self._closed or self._stop.is_set():
            return False
        self.is_catching_up = False
        if time.monotonic() - self._grew > SILENT_S:
            self._grew = time.monotonic()
            if not self._is_written(Path(self.path)):
                return False
        self._stop.wait(LOOK_S)
        return True

    def _is_written(self, newest: Path) -> bool:
        """Whether a process may still write to the log, whose newest part is given. A process of
        another machine or container is not visible here; then the age of the file decides."""
        if _ends(newest):
            return False
        return _runs(self._start.process.pid) or time.time() - newest.stat().st_mtime < SILENT_S

    def _earliest_part(self, number: int) -> int:
        """The first part to read, given the newest: up to CATCH_UP bytes before that."""
        size = 0
        while number > 1:
            earlier = part_path(self._first, number - 1)
            if not earlier.exists() or (size := size + earlier.stat().st_size) > CATCH_UP:
                break
            number -= 1
        return number


def part_path(first: Path, number: int) -> Path:
    """The file of a part, as the recorder names it."""
    return first if number == 1 else first.with_stem(f"{first.stem}.part{number}")


def _start_of(path: Path) -> SessionStart:
    start, _, _ = _head(path)
    if start is None:
        raise LogError("its session_start is damaged", str(path), 1)
    return start


def _ends(path: Path) -> bool:
    """Whether the file's last line closes the log for good."""
    with path.open("rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - (1 << 16)))
        last = file.read().rstrip(b"\n").rpartition(b"\n")[2]
    return last.startswith(b'{"event":"session_end"') and b'"reason":"rotated"' not in last


def _runs(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except (PermissionError, OverflowError):
        pass
    return True


class _OpenMarks:
    """The marks that are open when a part begins; none while it does not exist. A rotation creates
    the next part before it ends the marks in this one, and begins them there again."""

    def __init__(self, path: Path, stop: threading.Event) -> None:
        self._path = path
        self._stop = stop
        self._marks: frozenset[int] | None = None

    def __contains__(self, mark: object) -> bool:
        while self._marks is None and self._path.exists():
            with suppress(LogError):  # it is still empty
                _, marks, all_are_there = _head(self._path)
                self._marks = marks if all_are_there else None
            if self._marks is None and self._stop.wait(LOOK_S):
                break
        return mark in (self._marks or ())
