"""What no schedule can beat, and the shortest schedule, or the best that was found.

Bounds of the makespan come from the longest path, the work and the bandwidth. The solver is
OR-Tools' CP-SAT (extra `schedule`), which gets the rules of a valid schedule (`schedule`) as
constraints.

Invariants: every bound is one of every valid schedule. Every solution of the constraints is a valid
schedule that takes at most as long as a known one, and every such schedule is a solution; engines
of one kind share a place where it makes no difference which of them runs a task. What is returned
is no worse than the schedules by rule.
"""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from llamacpp_instr.base.errors import UsageError
from llamacpp_instr.base.machine import usable_cpus
from llamacpp_instr.base.system import need
from llamacpp_instr.base.terminal import OnProgress
from llamacpp_instr.converters.scheduling.schedule import (
    Costs,
    Schedule,
    costs_of,
    kinds_of,
    schedule_list,
    schedule_program,
)
from llamacpp_instr.converters.scheduling.tasks import Engines, Tasks, check_usable

MOST_SETS = 64
"""sets of kinds of engine whose work is bounded"""


@dataclass(frozen=True)
class Bound:
    kind: Literal["path", "work", "bandwidth"]
    name: str
    """what binds, in words"""
    ns: int


def compute_bounds(tasks: Tasks, engines: Engines) -> list[Bound]:
    """The largest lower bound of the makespan of each kind, the largest first; those that need a
    bandwidth only if there is one. Raises UsageError for engines that do not fit the tasks.

    - path: the longest path, with each task on the engine where it is shortest, and a hand-over
      between two tasks that no kind of engine can both run;
    - work: for sets of kinds of engine, the time that the tasks that run only there need, if all
      these engines were busy all the time;
    - bandwidth: the same for the bytes that these engines move, and that DMA engines bring.
    """
    check_usable(tasks, engines)
    costs = costs_of(tasks, engines)
    of_label = kinds_of(tasks, engines)
    found = [_path(tasks, engines, costs, of_label)]
    mask_of_label = np.array([sum(1 << k for k in kinds) for kinds in of_label], np.int64)
    masks = mask_of_label[tasks.label]
    for chosen in _unions(sorted(set(masks.tolist()))):
        inside = (masks & ~chosen) == 0
        kinds = [k for k in range(len(engines.kinds)) if chosen >> k & 1]
        found.append(_work(engines, costs, kinds, inside))
        if all(engines.kinds[k].bandwidth is not None for k in kinds):
            brought = any(costs.fed[k] for k in kinds)
            moved = int((tasks.bytes - tasks.load if brought else tasks.bytes)[inside].sum())
            found.append(_bandwidth(engines, kinds, moved, "the bandwidth of "))
    if bring := [k for k, ns in enumerate(costs.transfer_ns) if ns.any()]:
        # the loads of the tasks that only engines with local memory can run
        fed = sum(1 << k for k, is_fed in enumerate(costs.fed) if is_fed)
        load = int(tasks.load[(masks & ~fed) == 0].sum())
        found.append(_bandwidth(engines, bring, load, "loads, by the bandwidth of "))
    best: dict[str, Bound] = {}
    for bound in sorted(found, key=lambda bound: -bound.ns):
        best.setdefault(bound.kind, bound)
    return list(best.values())


def _path(tasks: Tasks, engines: Engines, costs: Costs, of_label: list[tuple[int, ...]]) -> Bound:
    brings = [ns for ns in costs.transfer_ns if ns.any()]
    # for each task's load, with the fastest DMA engine
    least = np.minimum.reduce(brings) if brings else np.zeros_like(costs.ns[0])
    shortest = np.full(len(tasks), np.iinfo(np.int64).max)
    all_fed = tasks.load > 0
    for ns, fed, streamed in zip(costs.ns, costs.fed, costs.streamed, strict=True):
        own = np.where(streamed, np.maximum(ns, least), ns) if fed else ns
        shortest = np.where(ns > 0, np.minimum(shortest, own), shortest)
        all_fed &= (ns == 0) | (~streamed if fed else False)
    # a load that must be brought whole is available when its transfer has ended, not before
    earliest: list[int] = np.where(all_fed, least, 0).tolist()
    own_ns = shortest.tolist()
    # tasks that the same kinds can run; there are few such sets, and many labels
    number = {kinds: i for i, kinds in enumerate(dict.fromkeys(of_label))}
    group = np.array([number[kinds] for kinds in of_label], np.int64)[tasks.label].tolist()
    apart = [[not set(a) & set(b) for b in number] for a in number]
    handover = engines.handover_ns
    first, sources = tasks.first.tolist(), tasks.sources.tolist()
    end = [0] * len(tasks)
    for task in range(len(tasks)):
        begin, far = earliest[task], apart[group[task]]
        for source in sources[first[task] : first[task + 1]]:
            ended = end[source]
            if handover and far[group[source]]:
                ended += handover
            if ended > begin:
                begin = ended
        end[task] = begin + own_ns[task]
    return Bound("path", "the longest path", max(end, default=0))


def _unions(masks: list[int]) -> list[int]:
    """The sets and their unions, the small ones first; at most MOST_SETS."""
    found = set(masks)
    todo = list(masks)
    while todo and len(found) < MOST_SETS:
        one = todo.pop()
        new = {one | other for other in masks} - found
        found |= new
        todo += new
    return sorted(found, key=lambda mask: (mask.bit_count(), mask))


def _work(engines: Engines, costs: Costs, kinds: list[int], inside: NDArray[np.bool_]) -> Bound:
    """A feasible solution of the dual of the linear program that spreads the tasks over the
    engines: with weights y of the kinds for which the sum of count * y is 1, the sum over tasks of
    the least y * ns is a lower bound. The weights are the kinds' mean speeds: exact if each kind is
    faster by the same factor for all tasks; otherwise still a bound."""
    ns = np.array([costs.ns[k][inside] for k in kinds])
    able = ns > 0
    shortest = np.where(able, ns, np.iinfo(np.int64).max).min(axis=0)
    counts = [engines.kinds[k].count for k in kinds]
    name = "the work of " + _names(engines, kinds)
    own = ns.sum(axis=1).tolist()
    weights = [
        int(shortest[of].sum()) / total if total else 1.0
        for of, total in zip(able, own, strict=True)
    ]
    if len(set(weights)) == 1 and bool(((ns == shortest) | ~able).all()):
        return Bound("work", name, -(-int(shortest.sum()) // sum(counts)))
    total = sum(count * y for count, y in zip(counts, weights, strict=True))
    weighted = np.where(able, ns * np.array(weights)[:, None], np.inf)
    return Bound("work", name, _floor(float(weighted.min(axis=0).sum()) / total))


def _bandwidth(engines: Engines, kinds: list[int], moved: int, what: str) -> Bound:
    total = sum(engines.kinds[k].count * (engines.kinds[k].bandwidth or 0.0) for k in kinds)
    return Bound("bandwidth", what + _names(engines, kinds), _floor(moved * 1e9 / total))


def _names(engines: Engines, kinds: list[int]) -> str:
    if len(kinds) == len(engines.kinds):
        return "all engines"
    return " and ".join(engines.kinds[k].name for k in kinds) + " engines"


def _floor(ns: float) -> int:
    """Rounded down, by more than floating-point sums can be wrong."""
    return max(math.floor(ns * (1 - 1e-11)), 0)


class Constraints:
    """Built from a known schedule, which gives the hint and the horizon."""

    def __init__(self, known: Schedule, costs: Costs) -> None:
        from ortools.sat.python import cp_model

        self._known, self._costs = known, costs
        self._tasks, self._engines = known.tasks, known.engines
        self._horizon = known.makespan
        self.model = cp_model.CpModel()
        kind_of = self._engines.kind_numbers()
        single = self._engines.handover_ns > 0 or self._engines.transfers
        # a place is one engine, or all engines of a kind
        self._place_kind = kind_of if single else list(range(len(self._engines.kinds)))
        room = [1 if single else kind.count for kind in self._engines.kinds]
        self._place_of = list(range(len(kind_of))) if single else kind_of
        self._intervals: list[list[Any]] = [[] for _ in self._place_kind]
        self._buffers: list[list[Any]] = [[] for _ in self._place_kind]
        self._on: list[dict[int, Any]] = []
        """of each task: the literals of the places where it may run"""
        self._begin: list[Any] = []
        self._end: list[Any] = []
        self._bring: dict[int, tuple[dict[int, Any], Any, Any]] = {}
        """of tasks that may be fed: the literals of the DMA engines, begin, end"""
        of_label = kinds_of(self._tasks, self._engines)
        for task in range(len(self._tasks)):
            self._add_task(task, of_label[self._tasks.label[task]])
        for task in range(len(self._tasks)):
            self._add_sources(task)
        for kind, intervals, buffers in zip(
            self._place_kind, self._intervals, self._buffers, strict=True
        ):
            if room[kind] == 1:
                self.model.add_no_overlap(intervals)
            else:
                self.model.add_cumulative(intervals, [1] * len(intervals), room[kind])
            if buffers:
                self.model.add_cumulative(buffers, [1] * len(buffers), 2)
        makespan = self._time(known.makespan)
        self.model.add_max_equality(makespan, self._end)
        self.model.add(makespan >= (known.proven or 0))
        self.model.minimize(makespan)

    def _time(self, hint: int) -> Any:
        variable = self.model.new_int_var(0, self._horizon, "")
        self.model.add_hint(variable, hint)
        return variable

    def _literal(self, hint: bool) -> Any:
        variable = self.model.new_bool_var("")
        self.model.add_hint(variable, hint)
        return variable

    def _interval(self, begin: Any, size: Any, end: Any, literal: Any) -> Any:
        return self.model.new_optional_interval_var(begin, size, end, literal, "")

    def _add_task(self, task: int, kinds: tuple[int, ...]) -> None:
        known, costs = self._known, self._costs
        begin, end = self._time(int(known.begin[task])), self._time(int(known.end[task]))
        self._begin.append(begin)
        self._end.append(end)
        hinted = self._place_of[known.engine[task]]
        places = [place for place, kind in enumerate(self._place_kind) if kind in kinds]
        on = {place: self._literal(place == hinted) for place in places}
        self._on.append(on)
        self.model.add_exactly_one(on.values())
        fed = {p for p in places if costs.fed[self._place_kind[p]] and self._tasks.load[task] > 0}
        if fed:
            self._add_transfer(task, [on[place] for place in sorted(fed)])
        for place, literal in on.items():
            kind = self._place_kind[place]
            ns = int(costs.ns[kind][task])
            size: Any = ns
            if place in fed and costs.streamed[kind][task]:
                size = self._stream(task, ns, literal)
            elif place in fed:
                self.model.add(self._bring[task][2] <= begin).only_enforce_if(literal)
            self._intervals[place].append(self._interval(begin, size, end, literal))
            if place in fed:
                occupied = self.model.new_int_var(0, self._horizon, "")
                buffer = self._interval(self._bring[task][1], occupied, end, literal)
                self._buffers[place].append(buffer)

    def _add_transfer(self, task: int, fed: list[Any]) -> None:
        known = self._known
        bring = self._time(int(known.transfer_begin[task]))
        brought = self._time(int(known.transfer_end[task]))
        by: dict[int, Any] = {}
        for place, kind in enumerate(self._place_kind):
            if self._costs.transfer_ns[kind].any():
                by[place] = literal = self._literal(int(known.transfer_engine[task]) == place)
                ns = int(self._costs.transfer_ns[kind][task])
                self._intervals[place].append(self._interval(bring, ns, brought, literal))
        self.model.add(sum(by.values()) == sum(fed))
        self._bring[task] = by, bring, brought

    def _stream(self, task: int, ns: int, literal: Any) -> Any:
        """The duration of a task whose load streams."""
        by, bring, _ = self._bring[task]
        size = self.model.new_int_var(ns, self._horizon, "")
        for place, dma in by.items():
            transfer = int(self._costs.transfer_ns[self._place_kind[place]][task])
            self.model.add(size == max(ns, transfer)).only_enforce_if(literal, dma)
        self.model.add(bring == self._begin[task]).only_enforce_if(literal)
        return size

    def _add_sources(self, task: int) -> None:
        handover, tasks = self._engines.handover_ns, self._tasks
        writes, label = self._costs.writes_cache, tasks.label
        for source in np.unique(tasks.sources[tasks.first[task] : tasks.first[task + 1]]).tolist():
            self.model.add(self._begin[task] >= self._end[source])
            if handover:
                self._hand_over(self._begin[task], self._on[task], source)
            if task in self._bring and writes[label[source]]:
                by, bring, _ = self._bring[task]
                for literal in by.values():
                    self.model.add(bring >= self._end[source]).only_enforce_if(literal)
                if handover:
                    self._hand_over(bring, by, source)

    def _hand_over(self, begin: Any, on: dict[int, Any], source: int) -> None:
        """`begin`, on one of these places, is later unless the source also ran there."""
        later = begin >= self._end[source] + self._engines.handover_ns
        for place, literal in on.items():
            there = self._on[source].get(place)
            if there is None:
                self.model.add(later).only_enforce_if(literal)
            else:
                self.model.add(later).only_enforce_if(literal, there.negated())

    def read(self, solver: Any) -> Schedule:
        begin = np.array([solver.value(v) for v in self._begin], np.int64)
        end = np.array([solver.value(v) for v in self._end], np.int64)
        engine = np.zeros(len(begin), np.int32)
        free = [0] * self._engines.count()
        for task in np.argsort(begin, kind="stable").tolist():
            place = next(p for p, v in self._on[task].items() if solver.boolean_value(v))
            own = (e for e, p in enumerate(self._place_of) if p == place)
            engine[task] = chosen = next(e for e in own if free[e] <= begin[task])
            free[chosen] = end[task]
        by = np.full(len(begin), -1, np.int32)
        bring, brought = np.zeros_like(begin), np.zeros_like(begin)
        for task, (literals, begins, ends) in self._bring.items():
            for place, literal in literals.items():
                if solver.boolean_value(literal):
                    by[task], bring[task] = place, solver.value(begins)
                    brought[task] = solver.value(ends)
        return replace(
            self._known, engine=engine, begin=begin, end=end,
            transfer_engine=by, transfer_begin=bring, transfer_end=brought,
        )  # fmt: skip


MOST_TASKS = 5000
MOST_CHOICES = 200_000
"""of an engine for a task, where engines of a kind must be told apart"""


def schedule_optimal(
    tasks: Tasks, engines: Engines, seconds: float, on_progress: OnProgress | None = None
) -> Schedule:
    """The best schedule that CP-SAT finds within `seconds`, with the lower bound that it proves. It
    is the shortest if `proven` is its makespan. `on_progress` gets the milliseconds so far and in
    total. A search that proves the optimum gives the same makespan each time; one that runs out of
    time may not. Raises UsageError if OR-Tools is missing or there are too many tasks."""
    need("schedule")
    if len(tasks) > MOST_TASKS:
        raise UsageError(
            f"{len(tasks)} tasks are too many for the optimum, which takes up to {MOST_TASKS};"
            " choose one layer, or list scheduling"
        )
    choices = len(tasks) * engines.count()
    if (engines.handover_ns or engines.transfers) and choices > MOST_CHOICES:
        raise UsageError(
            f"{len(tasks)} tasks on {engines.count()} engines are too many for the optimum with"
            f" hand-over or transfers: at most {MOST_CHOICES} choices, not {choices};"
            " choose one layer, or list scheduling"
        )
    started = time.monotonic()
    known = min(
        (schedule_list(tasks, engines), schedule_program(tasks, engines)),
        key=lambda made: made.makespan,
    )
    known = replace(known, policy="optimal", proven=compute_bounds(tasks, engines)[0].ns)
    if known.makespan == known.proven:
        return known
    with _ticking(started, seconds, on_progress):
        return _solve(known, started + seconds)


def _solve(known: Schedule, until: float) -> Schedule:
    from ortools.sat.python import cp_model

    rules = Constraints(known, costs_of(known.tasks, known.engines))
    solver = cp_model.CpSolver()
    solver.parameters.max_time_in_seconds = max(until - time.monotonic(), 0.01)
    solver.parameters.random_seed = 0
    # OR-Tools 9.15 finds models infeasible that are not, if it probes them (or-tools issue 5274)
    solver.parameters.cp_model_probing_level = 0
    solver.parameters.num_workers = usable_cpus()
    status = solver.solve(rules.model)
    assert status != cp_model.MODEL_INVALID, rules.model.validate()
    if status == cp_model.INFEASIBLE:
        return known  # it contradicts the known solution, so nothing of it is believed
    proven = max(known.proven or 0, math.ceil(solver.best_objective_bound - 1e-6))
    if status == cp_model.UNKNOWN:
        return replace(known, proven=proven)
    found = rules.read(solver).activities.shifted_left()
    best = found if found.makespan < known.makespan else known
    return replace(best, proven=min(proven, best.makespan))


@contextlib.contextmanager
def _ticking(started: float, seconds: float, on_progress: OnProgress | None) -> Iterator[None]:
    """Reports the time that has passed, twice a second: the solver itself reports nothing."""
    if on_progress is None:
        yield
        return
    done = threading.Event()

    def tick() -> None:
        while not done.wait(0.5):
            on_progress(int(1000 * (time.monotonic() - started)), int(1000 * seconds))

    thread = threading.Thread(target=tick, daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
