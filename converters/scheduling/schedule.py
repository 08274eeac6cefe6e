"""A schedule: when and where each task runs, what tasks cost, and schedules by rule.

What makes a schedule valid is stated here, and only here:

- An engine does one thing at a time. A task takes its time on the kind of engine that runs it.
- A task begins when its sources have ended. If a source ran on another engine, it begins at least
  the hand-over later.
- With transfers, a task that has a load and runs on an engine with local memory is fed: a DMA
  engine brings the load into one of the engine's two buffers of half the local memory. The buffer
  is occupied from the start of the transfer to the end of the task. The task begins when the
  transfer has ended. So the next load is brought while a task runs (double buffering).
- A load that is larger than a buffer streams through it: the task and its transfer begin together,
  and the task takes at least as long as the transfer.
- Weights can be brought at any time. A transfer waits, however, for those sources of its task that
  write the cache (block `kv`), and for their hand-over.

Equal inputs give equal schedules: ties go to the lower number of a task or an engine.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from heapq import heappop, heappush
from itertools import pairwise
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from llamacpp_instr.base.errors import UsageError
from llamacpp_instr.converters.scheduling.tasks import (
    MAX_ENGINES,
    EngineKind,
    Engines,
    Int32,
    Int64,
    Tasks,
    check_usable,
)

MAX_NS = 1 << 50
"""the most for all tasks in sequence on their slowest engines: 13 days"""


@dataclass(frozen=True)
class Schedule:
    """Columns have a value for each task; times are ns from the start of the schedule."""

    tasks: Tasks
    engines: Engines
    policy: str
    """program, list or optimal"""
    engine: Int32
    begin: Int64
    end: Int64
    transfer_engine: Int32
    """-1 if nothing is brought for the task"""
    transfer_begin: Int64
    transfer_end: Int64
    proven: int | None = None
    """ns: no schedule is shorter; None if nothing was proven"""

    @property
    def makespan(self) -> int:
        """ns until everything has ended."""
        return int(self.end.max(initial=0))

    @cached_property
    def activities(self) -> Activities:
        """What the engines do and wait for."""
        return Activities(self)


After = Literal["start", "source", "transfer", "engine", "buffer", "order"]
_PREFERRED: tuple[After, ...] = ("start", "buffer", "engine", "transfer", "source")
"""of causes that ended at the same time, the last in this order is reported"""


class Cause(NamedTuple):
    """What an activity waited for."""

    time: int
    """ns: the earliest start that it allows, with the hand-over"""
    after: After
    of: int
    """the activity that ended; -1 for the start"""


class Activities:
    """The tasks of a schedule by number, then the transfers that bring the loads of tasks; and why
    each begins when it does."""

    def __init__(self, made: Schedule) -> None:
        self._made, self._n = made, len(made.tasks)
        fed = np.flatnonzero(made.transfer_engine >= 0)
        self.task: list[int] = [*range(self._n), *fed.tolist()]
        self.engine: list[int] = made.engine.tolist() + made.transfer_engine[fed].tolist()
        self.begin: list[int] = made.begin.tolist() + made.transfer_begin[fed].tolist()
        self.end: list[int] = made.end.tolist() + made.transfer_end[fed].tolist()
        moved = made.tasks.bytes.copy()
        moved[fed] -= made.tasks.load[fed]
        self.moved = np.concatenate((moved, made.tasks.load[fed]))
        """bytes"""
        self.transfer_of = {task: i for i, task in enumerate(self.task) if i >= self._n}
        """by task that is fed"""
        self._before = {
            other: one
            for one, other in pairwise(np.lexsort((self.begin, self.engine)).tolist())
            if self.engine[one] == self.engine[other]
        }
        """what the same engine did before"""
        self._held: dict[int, int] = {}
        """of transfers: the task whose load was in the buffer before"""
        buffers: dict[int, list[int]] = {}
        """the two tasks that each engine was fed last, first the one that ends first"""
        for transfer in sorted(
            self.transfer_of.values(), key=lambda of: (self.begin[of], self._streams(of))
        ):
            task = self.task[transfer]
            held = buffers.setdefault(self.engine[task], [])
            if len(held) == 2:
                self._held[transfer] = held.pop(0)
            held.append(task)
            held.sort(key=self.end.__getitem__)

    def waits(self, of: int) -> Iterator[tuple[After, int, int]]:
        """The activities that must have ended before one begins: why, which, and for how long it
        is handed over, in ns. A task begins together with the transfer that streams its load, so
        both wait for the same."""
        tasks, task = self._made.tasks, self.task[of]
        transfer = self.transfer_of.get(task, -1)
        streams = self._streams(transfer)
        for one in (task, transfer) if streams else (of,):
            if one in self._before:
                yield "engine", self._before[one], 0
            for source in tasks.sources[tasks.first[task] : tasks.first[task + 1]].tolist():
                if one == task or tasks.label_of(source).block == "kv":
                    apart = self.engine[source] != self.engine[one]
                    yield "source", source, self._made.engines.handover_ns if apart else 0
            if one in self._held:
                yield "buffer", self._held[one], 0
        if of == task and transfer >= 0 and not streams:
            yield "transfer", transfer, 0

    def _streams(self, of: int) -> bool:
        return of >= self._n and self.begin[of] == self.begin[self.task[of]]

    def cause(self, of: int) -> Cause:
        """The latest of what an activity waited for."""
        task, begin = self.task[of], self.begin[of]
        found = self._latest(of)
        in_order = self._made.policy == "program" and begin == self.begin[task]
        while in_order and found.time < begin:
            task -= 1
            if task < 0 or self.begin[task] < begin:
                break
            found = self._latest(task)._replace(after="order")
        return found

    def _latest(self, of: int) -> Cause:
        waits = (Cause(self.end[one] + ns, after, one) for after, one, ns in self.waits(of))
        causes = [Cause(0, "start", -1), *waits]
        return max(causes, key=lambda cause: (cause.time, _PREFERRED.index(cause.after)))

    def shifted_left(self) -> Schedule:
        """The schedule with the same engines and orders, and everything as early as possible: each
        activity begins at the end of something that it waited for, or at zero."""
        begin, end = self.begin.copy(), self.end.copy()
        # of those that begin together, a task may wait for its transfer
        for of in sorted(range(len(begin)), key=lambda of: (self.begin[of], of < self._n)):
            begin[of] = max((end[one] + ns for _, one, ns in self.waits(of)), default=0)
            end[of] = begin[of] + self.end[of] - self.begin[of]
        transfer_begin, transfer_end = np.zeros((2, self._n), np.int64)
        for task, transfer in self.transfer_of.items():
            transfer_begin[task], transfer_end[task] = begin[transfer], end[transfer]
        return replace(
            self._made,
            begin=np.array(begin[: self._n], np.int64),
            end=np.array(end[: self._n], np.int64),
            transfer_begin=transfer_begin,
            transfer_end=transfer_end,
        )


@dataclass(frozen=True)
class Costs:
    """What tasks cost on each kind of engine, in the order of the kinds."""

    ns: list[Int64]
    """of each task; 0 where the kind cannot run it"""
    transfer_ns: list[Int64]
    """of each task's load; 0 if it has none, or if the kind brings no loads"""
    fed: list[bool]
    """whether loads are brought to engines of the kind"""
    streamed: list[NDArray[np.bool_]]
    """of fed kinds: whether the load is larger than a buffer"""
    writes_cache: list[bool]
    """by label: transfers wait for such sources"""


def costs_of(tasks: Tasks, engines: Engines) -> Costs:
    """The duration of each task on each kind: the recorded one divided by the kind's speed, but no
    less than its bandwidth allows for the task's bytes; rounded up, at least 1. The bytes of a load
    that a transfer brings are not moved again. Raises UsageError if all together take too long."""
    fed = [engines.transfers and kind.local_memory is not None for kind in engines.kinds]
    ns, transfer_ns, streamed = [], [], []
    for kind, is_fed in zip(engines.kinds, fed, strict=True):
        ns.append(_task_ns(tasks, kind, is_fed))
        brings = engines.transfers and kind.transfers and kind.bandwidth is not None
        transfer_ns.append(_moving_ns(tasks.load, kind.bandwidth if brings else None))
        streamed.append(tasks.load > (kind.local_memory or 0) // 2)
    total = sum(float(column.sum(dtype=float)) for column in (*ns, *transfer_ns))
    if total > MAX_NS:
        raise UsageError(
            f"the tasks take up to {total / 1e9:.0f} s in sequence on these engines;"
            f" at most {MAX_NS / 1e9:.0f} s can be scheduled"
        )
    writes_cache = [label.block == "kv" for label in tasks.labels]
    return Costs(ns, transfer_ns, fed, streamed, writes_cache)


def _task_ns(tasks: Tasks, kind: EngineKind, fed: bool) -> Int64:
    can_run = np.array([kind.can_run(label) for label in tasks.labels], bool)[tasks.label]
    speed = np.array([kind.speed_of(label) for label in tasks.labels])[tasks.label]
    ns = np.ceil(np.minimum(tasks.ns / speed, float(MAX_NS) * 2)).astype(np.int64)
    # a product by one is exact, also for the integers that a float cannot hold
    ns = np.where(speed == 1, tasks.ns, ns)
    moved = tasks.bytes - tasks.load if fed else tasks.bytes
    ns = np.maximum(np.maximum(ns, _moving_ns(moved, kind.bandwidth)), 1)
    return np.where(can_run, ns, 0)


def _moving_ns(amount: Int64, bandwidth: float | None) -> Int64:
    if bandwidth is None:
        return np.zeros(len(amount), np.int64)
    ns = np.ceil(np.minimum(amount * 1e9 / bandwidth, float(MAX_NS) * 2)).astype(np.int64)
    return np.where(amount > 0, np.maximum(ns, 1), 0)


_SHIFT = MAX_ENGINES.bit_length()
_MASK = (1 << _SHIFT) - 1
_NEVER = 1 << 62


class Places:
    """Engines to which tasks are given one by one, each after its sources; what has a place keeps
    it. Inner loops use flat lists of integers: a million tasks take seconds."""

    def __init__(self, tasks: Tasks, engines: Engines, costs: Costs) -> None:
        n = len(tasks)
        self._tasks, self._engines = tasks, engines
        self._first: list[int] = tasks.first.tolist()
        self._sources: list[int] = tasks.sources.tolist()
        self._handover = engines.handover_ns
        self._kind_of = engines.kind_numbers()
        self.free = [0] * len(self._kind_of)
        """when each engine has ended all that it was given"""
        self._queues: list[list[int]] = [[] for _ in engines.kinds]
        """of each kind: when its engines are free, and their numbers, sorted"""
        for engine, kind in enumerate(self._kind_of):
            self._queues[kind].append(engine)
        self.next_engine = [queue[0] for queue in self._queues]
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
        """Gives the task to the engine where it ends first; returns when it begins. It can begin at
        `ready`, on the engine `near` already at `near_ready`."""
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
        kind = self._kind_of[engine]
        queue = self._queues[kind]
        del queue[bisect_left(queue, self.free[engine] << _SHIFT | engine)]
        insort(queue, until << _SHIFT | engine)
        self.free[engine] = until
        self.next_engine[kind] = queue[0] & _MASK
        self.next_free[kind] = queue[0] >> _SHIFT

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
        n = len(self.engine)
        transfer_engine = np.full(n, -1, np.int32)
        transfer_begin, transfer_end = np.zeros(n, np.int64), np.zeros(n, np.int64)
        if self.transfers:
            which = np.fromiter(self.transfers, np.int64)
            columns = np.array(list(self.transfers.values()))
            transfer_engine[which], transfer_begin[which], transfer_end[which] = columns.T
        return Schedule(
            self._tasks, self._engines, policy, np.array(self.engine, np.int32),
            np.array(self.begin, np.int64), np.array(self.end, np.int64),
            transfer_engine, transfer_begin, transfer_end,
        )  # fmt: skip


def kinds_of(tasks: Tasks, engines: Engines) -> list[tuple[int, ...]]:
    """For each label, the numbers of the kinds of engine that can run it."""
    return [
        tuple(k for k, kind in enumerate(engines.kinds) if kind.can_run(label))
        for label in tasks.labels
    ]


def schedule_program(tasks: Tasks, engines: Engines) -> Schedule:
    """Tasks begin in their order, each on the engine where it ends first; none overtakes. Raises
    UsageError for engines that do not fit the tasks."""
    check_usable(tasks, engines)
    places = Places(tasks, engines, costs_of(tasks, engines))
    last_begin = 0
    for task in range(len(tasks)):
        ready, near, near_ready = places.wait(task)
        last_begin = places.place(task, max(ready, last_begin), near, max(near_ready, last_begin))
    return places.schedule("program")


def schedule_list(tasks: Tasks, engines: Engines) -> Schedule:
    """List scheduling: whenever an engine is idle, the task with the longest path to the end, of
    those that are ready and that it can run, is given to the engine where it ends first. That may
    be a faster engine that is still busy.

    On equal engines without hand-over, no engine is idle while a task is ready. So Graham's bound
    holds: the makespan is at most work / m + (1 - 1/m) * path, on m engines (R. L. Graham, Bounds
    on Multiprocessing Timing Anomalies, SIAM J. Appl. Math. 17, 1969). The order is that of HEFT's
    upward ranks (H. Topcuoglu et al., IEEE TPDS 13, 2002). Raises UsageError for engines that do
    not fit the tasks.
    """
    check_usable(tasks, engines)
    costs = costs_of(tasks, engines)
    order = np.argsort(-upward_ranks(tasks, engines, costs), kind="stable")
    places = Places(tasks, engines, costs)
    n = len(tasks)
    by_position: list[int] = order.tolist()
    positions: list[int] = np.argsort(order).tolist()
    counts = np.diff(tasks.first)
    missing: list[int] = counts.tolist()
    by_source = np.argsort(tasks.sources, kind="stable")
    readers: list[int] = np.repeat(np.arange(n), counts)[by_source].tolist()
    first_reader = np.searchsorted(tasks.sources[by_source], np.arange(n + 1)).tolist()
    # tasks that the same kinds of engine can run wait in one heap
    groups = sorted(set(places.kinds))
    group_of_label = [groups.index(kinds) for kinds in places.kinds]
    group = np.array(group_of_label)[tasks.label].tolist()
    ready: list[list[int]] = [[] for _ in groups]
    for task in np.flatnonzero(counts == 0).tolist():
        heappush(ready[group[task]], positions[task])
    plain = not engines.handover_ns and not engines.transfers
    shift, end, place, wait = n.bit_length(), places.end, places.place, places.wait
    mask, nothing = (1 << shift) - 1, n
    events: list[int] = []
    """ends: the time, and the task, or `nothing` for a transfer"""
    now, next_free = 0, places.next_free
    waiting = list(zip(ready, groups, strict=True))
    while True:
        while True:
            best, chosen = nothing, None
            for heap, kinds in waiting:
                if heap and heap[0] < best:
                    for kind in kinds:
                        if next_free[kind] <= now:
                            best, chosen = heap[0], heap
                            break
            if chosen is None:
                break
            task = by_position[heappop(chosen)]
            if plain:
                place(task, now)
            else:
                place(task, *wait(task))
                if task in places.transfers:
                    heappush(events, places.transfers[task][2] << shift | nothing)
            heappush(events, end[task] << shift | task)
        if not events:
            return places.schedule("list")
        now = events[0] >> shift
        while events and events[0] >> shift == now:
            task = heappop(events) & mask
            if task == nothing:
                continue
            for reader in readers[first_reader[task] : first_reader[task + 1]]:
                missing[reader] -= 1
                if not missing[reader]:
                    heappush(ready[group[reader]], positions[reader])


def upward_ranks(tasks: Tasks, engines: Engines, costs: Costs) -> Int64:
    """HEFT's upward ranks, ns: the longest path from a task's start to the end of all, with the
    mean time of each task over the engines that can run it, and the mean hand-over."""
    n = engines.count()
    counts = [kind.count for kind in engines.kinds]
    able = sum(np.where(ns > 0, count, 0) for count, ns in zip(counts, costs.ns, strict=True))
    total = sum(count * ns for count, ns in zip(counts, costs.ns, strict=True))
    own: list[int] = (total // np.maximum(able, 1)).tolist()
    handover = engines.handover_ns * (n - 1) // n
    first, sources = tasks.first.tolist(), tasks.sources.tolist()
    ranks = [0] * len(tasks)
    for task in range(len(tasks) - 1, -1, -1):
        ranks[task] = rank = ranks[task] + own[task]
        rank += handover
        for source in sources[first[task] : first[task + 1]]:
            if ranks[source] < rank:
                ranks[source] = rank
    return np.array(ranks, np.int64)
