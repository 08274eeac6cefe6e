"""Where a task ends first, given what the engines have already been given.

Invariant: an engine's work is only appended to, so everything that has a place keeps it. Inner
loops use flat lists of integers: a million tasks take seconds.
"""

from __future__ import annotations

from heapq import heappop, heappush, heapreplace

import numpy as np

from llamacpp_instr.converters.scheduling.engines import MAX_ENGINES, Engines
from llamacpp_instr.converters.scheduling.schedule import Costs, Schedule
from llamacpp_instr.converters.scheduling.tasks import Tasks

_SHIFT = MAX_ENGINES.bit_length()
_MASK = (1 << _SHIFT) - 1
_NEVER = 1 << 62


class Places:
    """Engines to which tasks are given one by one, each after its sources."""

    def __init__(self, tasks: Tasks, engines: Engines, costs: Costs) -> None:
        n = len(tasks)
        self._tasks, self._engines = tasks, engines
        self._first: list[int] = tasks.first.tolist()
        self._sources: list[int] = tasks.sources.tolist()
        self._handover = engines.handover_ns
        self._kind_of = engines.kind_numbers()
        self.free = [0] * len(self._kind_of)
        """when each engine has ended all that it was given"""
        self._heaps: list[list[int]] = [[] for _ in engines.kinds]
        for engine, kind in enumerate(self._kind_of):
            self._heaps[kind].append(engine)
        self.next_engine = [heap[0] for heap in self._heaps]
        """of each kind: the engine that is free first"""
        self.next_free = [0] * len(engines.kinds)
        """and when"""
        self._ns: list[list[int]] = [column.tolist() for column in costs.ns]
        self.kinds: list[tuple[int, ...]] = kinds_of(tasks, engines)
        """by label: the kinds of engine that can run it"""
        self._label: list[int] = tasks.label.tolist()
        self._fed = costs.fed
        self._streamed = [
            column.tolist() if fed else []
            for column, fed in zip(costs.streamed, costs.fed, strict=True)
        ]
        self._load: list[int] = tasks.load.tolist() if any(costs.fed) else [0] * n
        self._dma = {k: ns.tolist() for k, ns in enumerate(costs.transfer_ns) if ns.any()}
        self._writes_cache = costs.writes_cache
        self._buffers = [[0, 0] for _ in self._kind_of]
        """of each engine: when its buffers are empty, the earlier first"""
        self.engine, self.begin, self.end = [-1] * n, [0] * n, [0] * n
        self.transfers: dict[int, tuple[int, int, int]] = {}
        """of the tasks that are fed: engine, begin, end"""

    def wait(self, task: int) -> tuple[int, int, int]:
        """When a task can begin on any engine; an engine without one of its hand-overs, or -1; and
        when it can begin there."""
        end, engine = self.end, self.engine
        latest, other, at = 0, 0, -1
        for source in self._sources[self._first[task] : self._first[task + 1]]:
            ended = end[source]
            if engine[source] == at:
                latest = max(latest, ended)
            elif ended > latest:
                latest, other, at = ended, max(other, latest), engine[source]
            else:
                other = max(other, ended)
        if not self._handover or at < 0:
            return latest, -1, 0
        return latest + self._handover, at, max(latest, other + self._handover if other else 0)

    def place(self, task: int, ready: int, near: int = -1, near_ready: int = 0) -> int:
        """Gives the task to the engine where it ends first; returns when it begins.

        It can begin at `ready`, on the engine `near` already at `near_ready`.
        """
        best_end, best_begin, best, brought = _NEVER, 0, 0, None
        kinds, fed = self.kinds[self._label[task]], self._load[task]
        if near >= 0 and self._kind_of[near] in kinds:
            kind = self._kind_of[near]
            best_begin, best_end, brought = self._times(task, kind, near, near_ready)
            best = near
        for kind in kinds:
            if fed and self._fed[kind]:
                engine = self.next_engine[kind]
                begin, end, transfer = self._times(task, kind, engine, ready)
                if end < best_end:
                    best_end, best_begin, best, brought = end, begin, engine, transfer
                continue
            begin = self.next_free[kind]
            if begin < ready:
                begin = ready
            end = begin + self._ns[kind][task]
            if end < best_end:
                best_end, best_begin, best, brought = end, begin, self.next_engine[kind], None
        self._give(best, best_end)
        if brought is not None:
            self.transfers[task] = brought
            self._give(brought[0], brought[2])
            slots = self._buffers[best]
            slots[0] = best_end
            slots.sort()
        self.engine[task], self.begin[task], self.end[task] = best, best_begin, best_end
        return best_begin

    def _give(self, engine: int, until: int) -> None:
        kind, free = self._kind_of[engine], self.free
        heap = self._heaps[kind]
        free[engine] = until
        if engine == self.next_engine[kind]:
            heapreplace(heap, until << _SHIFT | engine)
            top = heap[0]
            # what was pushed before an engine was given more is no longer true
            while free[top & _MASK] != top >> _SHIFT:
                heappop(heap)
                top = heap[0]
            self.next_engine[kind] = top & _MASK
            self.next_free[kind] = top >> _SHIFT
        else:
            heappush(heap, until << _SHIFT | engine)

    def _times(
        self, task: int, kind: int, engine: int, ready: int
    ) -> tuple[int, int, tuple[int, int, int] | None]:
        """Begin and end of a task there, and the transfer that it needs."""
        ns, begin = self._ns[kind][task], max(ready, self.free[engine])
        if not (self._fed[kind] and self._load[task]):
            return begin, begin + ns, None
        empty = self._buffers[engine][0]
        best: tuple[int, int, tuple[int, int, int]] | None = None
        for brings, column in self._dma.items():
            dma = self.next_engine[brings]
            bring = max(self.free[dma], empty, self._written(task, dma))
            if self._streamed[kind][task]:
                bring = max(bring, begin)
                begins, ends = bring, bring + max(ns, column[task])
            else:
                begins = max(begin, bring + column[task])
                ends = begins + ns
            if best is None or ends < best[1]:
                best = begins, ends, (dma, bring, bring + column[task])
        assert best is not None, "engines with transfers have a DMA engine"
        return best

    def _written(self, task: int, dma: int) -> int:
        """When the cached keys and values that the task loads have been written."""
        return max(
            (
                self.end[source] + (self._handover if self.engine[source] != dma else 0)
                for source in self._sources[self._first[task] : self._first[task + 1]]
                if self._writes_cache[self._label[source]]
            ),
            default=0,
        )

    def schedule(self, policy: str) -> Schedule:
        """What was placed."""
        n = len(self.engine)
        transfer_engine = np.full(n, -1, np.int32)
        transfer_begin, transfer_end = np.zeros(n, np.int64), np.zeros(n, np.int64)
        if self.transfers:
            which = np.fromiter(self.transfers, np.int64)
            columns = np.array(list(self.transfers.values()))
            transfer_engine[which], transfer_begin[which], transfer_end[which] = columns.T
        return Schedule(
            self._tasks,
            self._engines,
            policy,
            np.array(self.engine, np.int32),
            np.array(self.begin, np.int64),
            np.array(self.end, np.int64),
            transfer_engine,
            transfer_begin,
            transfer_end,
        )


def kinds_of(tasks: Tasks, engines: Engines) -> list[tuple[int, ...]]:
    """For each label, the numbers of the kinds of engine that can run it."""
    return [
        tuple(k for k, kind in enumerate(engines.kinds) if kind.can_run(label))
        for label in tasks.labels
    ]
