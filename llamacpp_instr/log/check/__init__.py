"""Checks a log strictly: every line by itself, then the lines against each other.

Invariant: the check streams, each error gives a finding with its line, and memory is bounded. Only
an event that is whole by the rules that all readers share (`log.resolve`) is checked further:

    event      one event by itself
    facts      the session and its static facts: levels, counts
    measures   steps, computes and all that is measured: spans inside spans, order, equal sums
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import NamedTuple

from llamacpp_instr.log.check.event import OF_ONE
from llamacpp_instr.log.check.facts import Facts
from llamacpp_instr.log.check.measures import Measures
from llamacpp_instr.log.reader import BadLine, LogEnd, LogReader
from llamacpp_instr.log.resolve import Resolver
from llamacpp_instr.log.runs import find_runs
from llamacpp_instr.log.schema import Event, SessionEnd, event_name

MAX_FINDINGS = 10_000
"""in one log; a file with more errors is not a log"""


class Finding(NamedTuple):
    """One error of a log."""

    path: str
    line: int
    message: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.message}"


def check_log(path: str | Path) -> Iterator[Finding]:
    """The findings of the log at `path` (`-` is standard input) in the order of its lines; none
    if it is clean. After MAX_FINDINGS one more says that the rest was not checked. Raises LogError
    for a file that is not a log."""
    found = _findings(path)
    for finding in islice(found, MAX_FINDINGS):
        latest = finding
        yield finding
    if next(found, None):
        message = f"more than {MAX_FINDINGS:,} findings: the rest of the log was not checked"
        yield latest._replace(message=message)


def missing_parts(paths: Sequence[str | Path]) -> Iterator[Finding]:
    """A finding for each part that is missing between two parts of one rotated log (`log.runs`)."""
    for run in find_runs(paths, repeated=True):
        for number in run.missing:
            after = next(p for n, p in zip(run.numbers, run.paths, strict=True) if n > number)
            yield Finding(after, 1, f"session_start: part {number} of this session is missing")


def _findings(path: str | Path) -> Iterator[Finding]:
    reader = LogReader(path, "give")
    if reader.dialect:
        name = reader.dialect.name
        message = f"in the {name} dialect of an earlier fork: it converts, but cannot be checked"
        yield Finding(reader.path, 1, message)
        return
    checker = _Checker()
    for line, event in reader.items():
        if isinstance(event, BadLine):
            yield Finding(reader.path, line, event.reason)
            continue
        for message in checker.findings(line, event):
            yield Finding(reader.path, line, f"{event_name(event)}: {message}")
    assert reader.end is not None
    for line, message in checker.end_findings(reader.end):
        yield Finding(reader.path, line, message)


class _Checker:
    """The rules of all events, and the order and the counts of all lines."""

    def __init__(self) -> None:
        self._refs = Resolver()
        facts = Facts(self._refs)
        self._rules = OF_ONE, facts.rules, Measures(self._refs, facts).rules
        self._counts: Counter[str] = Counter()
        self._latest = 0
        self._end: tuple[int, SessionEnd] | None = None

    def findings(self, line: int, event: Event) -> Iterator[str]:
        """The errors of the event of `line`, by itself and given the events before it."""
        if self._end:
            yield f"comes after session_end (line {self._end[0]})"
        problems = list(self._refs.problems(event))
        self._refs.take(line, event)
        yield from problems
        if not problems:
            for rules in self._rules:
                if rule := rules.get(type(event)):
                    yield from rule(event)
        if isinstance(event, SessionEnd):
            self._end = (line, event)
            yield from self._totals(event)
        self._counts[event_name(event)] += 1
        self._latest = max(self._latest, event.t)

    def end_findings(self, end: LogEnd) -> Iterator[tuple[int, str]]:
        """Findings that are known only at the end of the log, each with its line."""
        if end.state == "truncated":
            yield end.lines + 1, "was not closed and ends in the middle of this line"
        if end.state == "unclosed" and self._end is None:
            yield end.lines, "was not closed: no session_end"
        if end.state != "closed" or self._end is None:
            return
        stated, seen = self._end[1].bytes, end.bytes_before_last
        if stated != seen:
            yield end.lines, f"session_end: `bytes` is {stated}, {seen} come before this line"
        for line, mark in self._refs.open_marks.values():
            yield line, f"mark: mark {mark.mark} (`{mark.name}`) is never ended"
        for step in self._refs.open_steps.values():
            yield step.line, f"step_begin: step {step.event.step} is never ended"

    def _totals(self, event: SessionEnd) -> Iterator[str]:
        for name in sorted({*event.events, *self._counts}):
            stated, seen = event.events.get(name, 0), self._counts[name]
            if stated != seen:
                yield f"`events` has {stated} {name}, the log has {seen}"
        if event.t < self._latest:
            yield f"`t` is {self._latest - event.t} ns before the latest event"
