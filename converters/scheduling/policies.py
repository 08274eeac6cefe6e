"""Schedules by rule: in the program's order, or by the longest path to the end.

Invariant: equal input gives the equal schedule: ties go to the smaller number of task and engine.
"""

from __future__ import annotations

from heapq import heappop, heappush

import numpy as np

from llamacpp_instr.converters.scheduling.engines import Engines, check_usable
from llamacpp_instr.converters.scheduling.places import Places, kinds_of
from llamacpp_instr.converters.scheduling.schedule import Costs, Schedule, costs_of
from llamacpp_instr.converters.scheduling.tasks import Int64, Tasks


def schedule_program(tasks: Tasks, engines: Engines) -> Schedule:
    """Tasks begin in their order, each on the engine where it ends first; none overtakes.

    Raises UsageError for engines that do not fit the tasks.
    """
    check_usable(tasks, engines)
    places = Places(tasks, engines, costs_of(tasks, engines))
    last_begin = 0
    for task in range(len(tasks)):
        ready, near, near_ready = places.wait(task)
        last_begin = places.place(task, max(ready, last_begin), near, max(near_ready, last_begin))
    return places.schedule("program")


def schedule_list(tasks: Tasks, engines: Engines) -> Schedule:
    """List scheduling: whenever an engine is idle, of the tasks that are ready and that it can run
    the one with the longest path to the end is given to the engine where it ends first. That may
    be a faster engine that is still busy.

    On equal engines without hand-over no engine is idle while a task is ready. So Graham's bound
    holds: the makespan is at most work / m + (1 - 1/m) * path, on m engines (R. L. Graham, Bounds
    on Multiprocessing Timing Anomalies, SIAM J. Appl. Math. 17, 1969). The order is that of HEFT's
    upward ranks (H. Topcuoglu et al., IEEE TPDS 13, 2002). Raises UsageError for engines that do
    not fit the tasks.
    """
    check_usable(tasks, engines)
    costs = costs_of(tasks, engines)
    order = np.argsort(-upward_ranks(tasks, engines, costs), kind="stable")
    places = Places(tasks, engines, costs)
    _place_by(order, tasks, engines, places)
    return places.schedule("list")


def upward_ranks(tasks: Tasks, engines: Engines, costs: Costs) -> Int64:
    """HEFT's upward ranks, ns: the longest path from a task's begin to the end of all, with the
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


def _place_by(order: Int64, tasks: Tasks, engines: Engines, places: Places) -> None:
    """Places all tasks, as time passes; of those that are ready the first in `order` first."""
    n = len(tasks)
    position = np.empty(n, np.int64)
    position[order] = np.arange(n)
    by_position: list[int] = order.tolist()
    positions: list[int] = position.tolist()
    counts = np.diff(tasks.first)
    missing: list[int] = counts.tolist()
    by_source = np.argsort(tasks.sources, kind="stable")
    readers: list[int] = np.repeat(np.arange(n), counts)[by_source].tolist()
    first_reader = np.searchsorted(tasks.sources[by_source], np.arange(n + 1)).tolist()
    # tasks that the same kinds of engine can run wait in one heap
    of_label = kinds_of(tasks, engines)
    groups = sorted(set(of_label))
    group_of_label = [groups.index(kinds) for kinds in of_label]
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
            return
        now = events[0] >> shift
        while events and events[0] >> shift == now:
            task = heappop(events) & mask
            if task == nothing:
                continue
            for reader in readers[first_reader[task] : first_reader[task + 1]]:
                missing[reader] -= 1
                if not missing[reader]:
                    heappush(ready[group[reader]], positions[reader])
