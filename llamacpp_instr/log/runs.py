"""Which logs belong together: the parts of a rotated log are one run, every other log is one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from llamacpp_instr.base.errors import UsageError
from llamacpp_instr.log.reader import LogReader
from llamacpp_instr.log.schema import Mark, SessionStart
from llamacpp_instr.log.source import is_pipe


@dataclass(frozen=True)
class Run:
    """A session: the paths of its parts in order; of a log that is not rotated, one path."""

    paths: tuple[str, ...]
    numbers: tuple[int, ...] = ()
    """of the parts"""
    marks: tuple[frozenset[int], ...] = ()
    """for each part the marks that are open when it begins"""

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
    given twice is one too if `repeated`, else an error. Raises UsageError for that and if standard
    input is given twice, LogError for a file that is not a log.
    """
    if len(paths) == 1:
        return [Run((str(paths[0]),))]
    if list(map(str, paths)).count("-") > 1:
        raise UsageError("only one of the logs can be standard input")
    groups: dict[str, list[tuple[int, str, frozenset[int]]]] = {}
    for path in map(str, paths):
        start, marks = (None, frozenset()) if is_pipe(path) else _head(path)
        key = start.id if start and start.id and _counts_on(start) else f"\0{path}"
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


def _counts_on(start: SessionStart) -> bool:
    """Whether ids count through all parts, as they do since ABI 2 of the recorder."""
    return start.producer.abi >= 2 and not start.args.get("dialect")


def _head(path: str) -> tuple[SessionStart | None, frozenset[int]]:
    """The first event, and the marks that begin directly after it, as they do after a rotation."""
    events = (event for _, event in LogReader(path, "skip"))
    start = next(events, None)
    if not isinstance(start, SessionStart):
        return None, frozenset()
    marks = set()
    for event in events:
        if not isinstance(event, Mark) or event.phase != "begin":
            break
        marks.add(event.mark)
    return start, frozenset(marks)
