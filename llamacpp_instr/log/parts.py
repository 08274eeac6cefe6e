"""Reads the parts of a rotated log as one log.

Invariant: several parts give the events that one file would have, except that each part has the
graphs and plans that it uses again, with new ids (`schema`, Lifetimes). Ids count through all
parts, so nothing is renamed but the `index` of a token, which each part counts anew.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Container, Iterator
from dataclasses import replace

from llamacpp_instr.base.progress import OnProgress
from llamacpp_instr.log import schema
from llamacpp_instr.log.ids import Numbers
from llamacpp_instr.log.reader import EventReader, LogEnd, LogReader, read_events
from llamacpp_instr.log.runs import Run
from llamacpp_instr.log.source import file_size, open_log


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
        self._ends: list[LogEnd] = []

    def __iter__(self) -> Iterator[tuple[int, schema.Event]]:
        paths = self._run.paths
        sizes = [_size(path) for path in paths]
        joiner = Joiner()
        for i, path in enumerate(paths):
            self.path = path
            reader = LogReader(path, "skip" if self._lenient else "raise", self._progress(i, sizes))
            joiner.last = i + 1 == len(paths)
            joiner.begin_part(() if joiner.last else self._run.marks[i + 1])
            yield from ((line, event) for line, event in reader if joiner.take(event))
            assert reader.end is not None
            self._ends.append(reader.end)
        self.path = paths[0]
        self.end = self._joined_end()

    def _progress(self, i: int, sizes: list[int]) -> OnProgress | None:
        report = self._on_progress
        if report is None:
            return None
        before, total = sum(sizes[:i]), sum(sizes)
        return lambda done, _size: report(before + done, total)

    def _joined_end(self) -> LogEnd:
        *earlier, last = self._ends
        problems = [f"part {number} is missing" for number in self._run.missing]
        for path, end in zip(self._run.paths, earlier, strict=False):
            if end.state != "closed":
                problems.append(f"{path} was not closed")
        skipped = sum(end.skipped for end in self._ends)
        return replace(last, skipped=skipped, parts=tuple(problems))


class Joiner:
    """Leaves out what a part repeats of earlier ones. Takes the events of all parts, in order."""

    def __init__(self) -> None:
        self.last = True
        """no other part follows"""
        self._part = 0
        self._go_on: Container[int] = ()
        self._given: defaultdict[str, Numbers] = defaultdict(Numbers)
        """models, contexts and marks"""
        self._repeated: set[int] = set()
        """models whose tensors the part repeats"""
        self._tokens: Counter[int] = Counter()
        """sampled in each context, so far and in earlier parts"""
        self._earlier: Counter[int] = Counter()
        self._sum: schema.SessionEnd | None = None

    def begin_part(self, go_on: Container[int]) -> None:
        """The next events are those of the next part; the marks `go_on` are open in the one after
        it."""
        self._part += 1
        self._go_on = go_on
        self._repeated.clear()
        self._earlier = self._tokens.copy()

    def take(self, event: schema.Event) -> bool:
        """Whether the whole has the event; counts the index of a token through the parts."""
        if isinstance(event, schema.SessionStart):
            return self._part == 1
        if isinstance(event, schema.SessionEnd):
            return self._session_end(event)
        if isinstance(event, schema.Mark):
            return self._mark(event)
        if isinstance(event, schema.Model):
            if not self._is_new("model", event.model):
                self._repeated.add(event.model)
                return False
        elif isinstance(event, schema.Tensor):
            return event.model not in self._repeated
        elif isinstance(event, schema.Context):
            return self._is_new("ctx", event.ctx)
        elif isinstance(event, schema.Token):
            event.index += self._earlier[event.ctx]
            self._tokens[event.ctx] = event.index + 1
        return True

    def _is_new(self, what: str, number: int) -> bool:
        """Whether no part gave it before."""
        given = number in self._given[what]
        self._given[what].add(number)
        return not given

    def _mark(self, event: schema.Mark) -> bool:
        """A rotation ends the open marks, and begins them again in the next part."""
        if event.phase == "end":
            return not (event.mark in self._go_on and event.mark in self._given["mark"])
        return self._is_new("mark", event.mark)

    def _session_end(self, event: schema.SessionEnd) -> bool:
        """The last one has the totals of all parts."""
        if before := self._sum:
            event.events = dict(Counter(before.events) + Counter(event.events))
            for total in ("bytes", "dropped", "dropped_ops", "decode_ns", "overhead_ns"):
                setattr(event, total, getattr(before, total) + getattr(event, total))
        self._sum = event
        return self.last


def _size(path: str) -> int:
    with open_log(path, path) as file:
        return file_size(file)
