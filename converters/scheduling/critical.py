"""Why a schedule takes as long as it does: what each begin waited for, from the end back.

Invariant: the parts of a critical path follow each other without a gap from 0 to the makespan, so
their times add up to it.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np

from llamacpp_instr.converters.scheduling.schedule import Schedule

After = Literal["start", "source", "transfer", "engine", "buffer", "order"]
_PREFERRED: tuple[After, ...] = ("start", "buffer", "engine", "transfer", "source")
"""of what ended at the same time, the last is reported"""


@dataclass(frozen=True)
class Part:
    """A stretch of the critical path."""

    what: Literal["task", "transfer", "hand-over", "wait"]
    """wait: the schedule begins later than it has to"""
    task: int
    """the number of the task that runs, that is fed, or that waits"""
    engine: int
    """-1 of a hand-over or wait"""
    begin: int
    end: int
    after: After
    """what ended when a task or transfer began; order: in program order it began with a task that
    it may not overtake, and the path goes on with what that one waited for"""


class Activity(NamedTuple):
    """A task, or the transfer that brings its load."""

    task: int
    transfer: bool


class Cause(NamedTuple):
    """What something waited for."""

    time: int
    """ns: when it could begin because of that, with the hand-over"""
    after: After
    of: Activity | None
    """what ended; None for the start"""


def critical_path(made: Schedule) -> list[Part]:
    """The parts of the critical path, in time; empty without tasks. If several tasks end last, or
    a start has several causes, one of them is followed: a source rather than an engine."""
    if not len(made.tasks):
        return []
    look = Causes(made)
    parts: list[Part] = []
    now: Activity | None = Activity(int(np.argmax(made.end)), False)
    while now is not None:
        begin, end = look.span(now)
        cause = look.cause(now)
        what: Literal["task", "transfer"] = "transfer" if now.transfer else "task"
        parts.append(Part(what, now.task, look.engine(now), begin, end, cause.after))
        if cause.time < begin:
            parts.append(Part("wait", now.task, -1, cause.time, begin, cause.after))
        ended = look.span(cause.of)[1] if cause.of else 0
        if ended < cause.time:
            parts.append(Part("hand-over", now.task, -1, ended, cause.time, cause.after))
        now = cause.of
    return parts[::-1]


class Causes:
    """Looks up why tasks and transfers of a schedule begin when they do."""

    def __init__(self, made: Schedule) -> None:
        self._made = made
        self._in_order = made.policy == "program"
        tasks = made.tasks
        self._first, self._sources = tasks.first, tasks.sources
        self._writes = [label.block == "kv" for label in tasks.labels]
        self._streams = (made.transfer_engine >= 0) & (made.transfer_begin == made.begin)
        fed = np.flatnonzero(made.transfer_engine >= 0)
        n = len(tasks)
        # activities: tasks, then transfers
        engine = np.concatenate((made.engine, made.transfer_engine[fed]))
        begin = np.concatenate((made.begin, made.transfer_begin[fed]))
        of = np.concatenate((np.arange(n), fed))
        order = np.lexsort((begin, engine))
        self._before: dict[Activity, Activity] = {}
        if len(tasks):
            pairs = zip(order[:-1].tolist(), order[1:].tolist(), strict=True)
            for one, other in pairs:
                if engine[one] == engine[other]:
                    key = Activity(int(of[other]), other >= n)
                    self._before[key] = Activity(int(of[one]), one >= n)
        self._emptied: dict[int, list[tuple[int, int]]] = {}
        for task in fed.tolist():
            emptied = self._emptied.setdefault(int(made.engine[task]), [])
            emptied.append((int(made.end[task]), task))
        for emptied in self._emptied.values():
            emptied.sort()

    def span(self, of: Activity) -> tuple[int, int]:
        """Begin and end."""
        made = self._made
        if of.transfer:
            return int(made.transfer_begin[of.task]), int(made.transfer_end[of.task])
        return int(made.begin[of.task]), int(made.end[of.task])

    def engine(self, of: Activity) -> int:
        """Where it runs."""
        made = self._made
        return int((made.transfer_engine if of.transfer else made.engine)[of.task])

    def cause(self, of: Activity) -> Cause:
        """The latest of what an activity waited for."""
        if self._streams[of.task]:
            of = Activity(of.task, False)  # the two begin together
        begin = self.span(of)[0]
        found = self._own_cause(of)
        other = of.task
        while self._in_order and not of.transfer and found.time < begin:
            other -= 1
            if other < 0 or self._made.begin[other] < begin:
                break
            found = self._own_cause(Activity(other, False))._replace(after="order")
        return found

    def _own_cause(self, of: Activity) -> Cause:
        causes = [Cause(0, "start", None)]
        if of in self._before:
            before = self._before[of]
            causes.append(Cause(self.span(before)[1], "engine", before))
        if not of.transfer:
            causes += self._ended(of.task, self.engine(of), False)
            if self._made.transfer_engine[of.task] >= 0 and not self._streams[of.task]:
                brought = Activity(of.task, True)
                causes.append(Cause(self.span(brought)[1], "transfer", brought))
        if of.transfer or self._streams[of.task]:
            causes += self._for_transfer(of.task)
        return max(causes, key=lambda cause: (cause.time, _PREFERRED.index(cause.after)))

    def _for_transfer(self, task: int) -> list[Cause]:
        begin, by = int(self._made.transfer_begin[task]), int(self._made.transfer_engine[task])
        causes = self._ended(task, by, True)
        of = Activity(task, True)
        if of in self._before:
            before = self._before[of]
            causes.append(Cause(self.span(before)[1], "engine", before))
        emptied = self._emptied[int(self._made.engine[task])]
        at = bisect_right(emptied, (begin, len(self._made.begin))) - 1
        if at >= 0:
            ended, holder = emptied[at]
            causes.append(Cause(ended, "buffer", Activity(holder, False)))
        return causes

    def _ended(self, task: int, on: int, written: bool) -> list[Cause]:
        """The sources of a task, or those that write the cache."""
        made, tasks = self._made, self._made.tasks
        causes = []
        for source in self._sources[self._first[task] : self._first[task + 1]].tolist():
            if not written or self._writes[tasks.label[source]]:
                later = made.engines.handover_ns if made.engine[source] != on else 0
                causes.append(
                    Cause(int(made.end[source]) + later, "source", Activity(source, False))
                )
        return causes
