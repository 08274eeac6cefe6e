"""The rules of a valid schedule as constraints of OR-Tools' CP-SAT.

Invariant: every solution is a valid schedule (`schedule`) that takes at most as long as a known
one, and every such schedule is a solution. Engines of one kind share a place where it makes no
difference which of them runs a task.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
from ortools.sat.python import cp_model

from llamacpp_instr.converters.scheduling.places import kinds_of
from llamacpp_instr.converters.scheduling.schedule import Costs, Schedule
from llamacpp_instr.converters.scheduling.tasks import Tasks


class Constraints:
    """Built from a schedule that is known, which is its hint and its horizon."""

    def __init__(self, known: Schedule, costs: Costs) -> None:
        self._known, self._costs = known, costs
        self._tasks: Tasks = known.tasks
        self._engines = known.engines
        self._horizon = known.makespan
        self.model = cp_model.CpModel()
        kind_of = self._engines.kind_numbers()
        single = self._engines.handover_ns > 0 or self._engines.transfers
        # a place is one engine, or all engines of a kind
        self._place_kind = kind_of if single else list(range(len(self._engines.kinds)))
        self._room = [1 if single else kind.count for kind in self._engines.kinds]
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
        self._add_capacities()
        makespan = self._time("makespan", known.makespan)
        self.model.add_max_equality(makespan, self._end)
        self.model.add(makespan >= (known.proven or 0))
        self.model.minimize(makespan)

    def _time(self, name: str, hint: int) -> Any:
        variable = self.model.new_int_var(0, self._horizon, name)
        self.model.add_hint(variable, hint)
        return variable

    def _literal(self, name: str, hint: bool) -> Any:
        variable = self.model.new_bool_var(name)
        self.model.add_hint(variable, hint)
        return variable

    def _add_task(self, task: int, kinds: tuple[int, ...]) -> None:
        known, costs = self._known, self._costs
        begin = self._time(f"begin {task}", int(known.begin[task]))
        end = self._time(f"end {task}", int(known.end[task]))
        self._begin.append(begin)
        self._end.append(end)
        hinted = self._place_of[known.engine[task]]
        places = [place for place, kind in enumerate(self._place_kind) if kind in kinds]
        on = {place: self._literal(f"on {task} {place}", place == hinted) for place in places}
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
            interval = self.model.new_optional_interval_var(
                begin, size, end, literal, f"run {task} {place}"
            )
            self._intervals[place].append(interval)
            if place in fed:
                occupied = self.model.new_int_var(0, self._horizon, f"occupied {task} {place}")
                self._buffers[place].append(
                    self.model.new_optional_interval_var(
                        self._bring[task][1], occupied, end, literal, f"buffer {task} {place}"
                    )
                )

    def _add_transfer(self, task: int, fed: list[Any]) -> None:
        known = self._known
        bring = self._time(f"bring {task}", int(known.transfer_begin[task]))
        brought = self._time(f"brought {task}", int(known.transfer_end[task]))
        by: dict[int, Any] = {}
        for place, kind in enumerate(self._place_kind):
            if not self._costs.transfer_ns[kind].any():
                continue
            hinted = int(known.transfer_engine[task]) == place
            by[place] = literal = self._literal(f"by {task} {place}", hinted)
            ns = int(self._costs.transfer_ns[kind][task])
            self._intervals[place].append(
                self.model.new_optional_interval_var(
                    bring, ns, brought, literal, f"transfer {task} {place}"
                )
            )
        self.model.add(sum(by.values()) == sum(fed))
        self._bring[task] = by, bring, brought

    def _stream(self, task: int, ns: int, literal: Any) -> Any:
        """How long a task takes whose load streams."""
        by, bring, _ = self._bring[task]
        size = self.model.new_int_var(ns, self._horizon, f"size {task}")
        for place, dma in by.items():
            transfer = int(self._costs.transfer_ns[self._place_kind[place]][task])
            self.model.add(size == max(ns, transfer)).only_enforce_if(literal, dma)
        self.model.add(bring == self._begin[task]).only_enforce_if(literal)
        return size

    def _add_sources(self, task: int) -> None:
        handover, tasks = self._engines.handover_ns, self._tasks
        writes, label = self._costs.writes_cache, tasks.label
        for source in sorted(
            set(tasks.sources[tasks.first[task] : tasks.first[task + 1]].tolist())
        ):
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
        """`begin`, on one of these places, is later unless the source ran there, too."""
        later = begin >= self._end[source] + self._engines.handover_ns
        for place, literal in on.items():
            there = self._on[source].get(place)
            if there is None:
                self.model.add(later).only_enforce_if(literal)
            else:
                self.model.add(later).only_enforce_if(literal, there.negated())

    def _add_capacities(self) -> None:
        for place, intervals in enumerate(self._intervals):
            room = self._room[self._place_kind[place]]
            if room == 1:
                self.model.add_no_overlap(intervals)
            else:
                self.model.add_cumulative(intervals, [1] * len(intervals), room)
            if self._buffers[place]:
                buffers = self._buffers[place]
                self.model.add_cumulative(buffers, [1] * len(buffers), 2)

    def read(self, solver: cp_model.CpSolver) -> Schedule:
        """The solution that was found."""
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
