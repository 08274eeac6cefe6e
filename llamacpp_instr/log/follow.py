"""Reads a log while it is written, with the parts into which it rotates, as one log.

Invariant: it gives the events that a reader of the finished log gives, each soon after it was
written. It only reads, so the recorder never waits for it.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from itertools import count
from pathlib import Path

from llamacpp_instr.base.errors import LogError
from llamacpp_instr.log.parts import Joiner
from llamacpp_instr.log.reader import LogEnd, LogReader
from llamacpp_instr.log.schema import Event, Mark, SessionEnd, SessionStart
from llamacpp_instr.log.source import is_pipe

LOOK_S = 0.05
"""how often it looks for new lines; the recorder writes ten times a second"""
SILENT_S = 3.0
"""after which it looks whether the program that writes the log still runs"""
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
            raise LogError("only a file can be followed; name the log that is written", str(path))
        self._start = _start_of(Path(path))
        self._first = _first_part(Path(path), self._start.part)
        self._part = self._earliest_part()
        self.path = str(part_path(self._first, self._part))
        self._grew = time.monotonic()
        self._closed = False
        if not self._is_written(_newest(self._first, self._part)):
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

    def parts_between(self, begin: int, end: int) -> list[Path]:
        """The parts that may have events of that time (`t`), in order, as far as they still
        exist. May be called while another thread iterates."""
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
        another machine or container is not seen here; the age of the file decides then."""
        if _ends(newest):
            return False
        return _runs(self._start.process.pid) or time.time() - newest.stat().st_mtime < SILENT_S

    def _earliest_part(self) -> int:
        """The first part to read: the newest, and those before it up to CATCH_UP bytes."""
        newest = _number_of_newest(self._first, self._start.part)
        number, size = newest, 0
        while number > 1:
            earlier = part_path(self._first, number - 1)
            if not earlier.exists() or (size := size + earlier.stat().st_size) > CATCH_UP:
                break
            number -= 1
        return number


def part_path(first: Path, number: int) -> Path:
    """The file of a part, as the recorder names it."""
    return first if number == 1 else first.with_stem(f"{first.stem}.part{number}")


def _first_part(path: Path, number: int) -> Path:
    return path.with_stem(path.stem.removesuffix(f".part{number}"))


def _number_of_newest(first: Path, number: int) -> int:
    return next(n for n in count(number) if not part_path(first, n + 1).exists())


def _newest(first: Path, number: int) -> Path:
    return part_path(first, _number_of_newest(first, number))


def _start_of(path: Path) -> SessionStart:
    _, start = next(iter(LogReader(path, "skip")), (0, None))
    if not isinstance(start, SessionStart):
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
        return True
    return True


class _OpenMarks:
    """The marks that are open when a part begins; none while it does not exist. A rotation creates
    the next part before it ends the marks in this one, and begins them there again."""

    def __init__(self, path: Path, stop: threading.Event) -> None:
        self._path = path
        self._stop = stop
        self._marks: set[int] | None = None

    def __contains__(self, mark: object) -> bool:
        while self._marks is None and self._path.exists():
            self._marks = self._look()
            if self._marks is None and self._stop.wait(LOOK_S):
                break
        return mark in (self._marks or ())

    def _look(self) -> set[int] | None:
        """None if the part does not yet have the event after them."""
        marks = set()
        with suppress(LogError):  # it is still empty
            for _, event in LogReader(self._path, "skip"):
                if isinstance(event, Mark):
                    marks.add(event.mark)
                elif not isinstance(event, SessionStart):
                    return marks
        return None
