"""The steps of a session that figures count (successful ones outside warm-up runs), and where their
time went: every nanosecond of every step, once.

Invariant: the notes name everything that is excluded, in complete sentences. The parts of a step
add up to the time that its caller saw, from its start until its result was ready. Kernels count for
as long as thread 0, which takes part in each, was in them. What a device runs behind the caller
overlaps what the caller does meanwhile, so it has an account of its own: the caller's has the
submission and the wait, never the execution.

Also what other processes took from steps. A thread that is ready to run and gets no CPU has been
displaced by another process, or by another thread of its own process, for example when two of them
begin on one CPU. `machine` events have that time (`delay`) and the CPU time of the process and of
the whole machine for intervals of about 100 ms. The time taken is the smaller of two: the delay,
and the CPU time that others had. The share taken is taken / (taken + CPU time of the process): 0 on
an idle machine, one half if an equal neighbour shares every CPU. Time that a hypervisor gave to
others (`steal`) is also taken; the CPUs share it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cached_property
from typing import Any, Generic, Literal, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from llamacpp_instr.base.terminal import counted
from llamacpp_instr.log.devices import n_executed
from llamacpp_instr.log.machines import Machines
from llamacpp_instr.log.schema import CONTEXTS_KEPT, Machine, Sync
from llamacpp_instr.log.session import (
    WAITED,
    WARM_UP,
    Int64,
    Session,
    Table,
    Timings,
    without_copy,
)
from llamacpp_instr.model.file import role_of

PHASES = ("prefill", "decode", "draft", "encode")
"""of steps, in the order in which they are shown"""


def counted_steps(session: Session, warm_up: bool = False) -> tuple[Table, list[str]]:
    """The steps that count, and notes on the excluded ones. `warm_up` includes warm-up runs."""
    steps = session.steps
    counts = steps["status"] == 0
    notes = []
    if failed := len(steps) - int(counts.sum()):
        notes.append(f"Left out: {counted(failed, 'failed step')}.")
    if not warm_up:
        marks, order = session.marks, np.argsort(steps["begin"], kind="stable")
        first, end = steps_inside(marks.rows(marks["name"] == WARM_UP), steps["begin"][order])
        # +1 where the steps of a mark begin, -1 after them: the sum counts the marks of a step
        marked = np.zeros(len(steps) + 1, np.int64)
        np.add.at(marked, first, 1)
        np.add.at(marked, end, -1)
        warm = np.zeros(len(steps), np.bool_)
        warm[order] = np.cumsum(marked)[:-1] > 0
        if n := int((warm & counts).sum()):
            notes.append(f"Left out: {counted(n, 'step')} of warm-up runs.")
        counts &= ~warm
    if session.open_steps:
        notes.append(f"Left out: {counted(len(session.open_steps), 'step')} without an end.")
    return steps.rows(counts), notes


def step_rows(session: Session, steps: Table) -> dict[int, int]:
    """The row in `steps` of every compute in one of them."""
    row = {step: i for i, step in enumerate(steps["step"].tolist())}
    computes = session.computes.tuples("compute", "step")
    return {compute: row[step] for compute, step in computes if step in row}


def steps_inside(marks: Table, begins: Int64) -> tuple[list[int], list[int]]:
    """The steps that begin in each mark: the first, and the one after the last, as indices into
    `begins`, which is sorted."""
    first = np.searchsorted(begins, marks["begin"])
    end = np.searchsorted(begins, marks["end"])
    end[marks["end"] < 0] = len(begins)  # an open one
    return first.tolist(), np.maximum(first, end).tolist()


DISTURBED = 0.05
"""share of an interval's time; if more is taken, its steps are disturbed"""

TICK = 10_000_000
"""ns; how imprecise the machine's CPU time may be"""

Float64 = NDArray[np.float64]


def disturbed_steps(session: Session, steps: Table) -> NDArray[np.bool_]:
    """Whether a part of each step is in an interval that lost more than DISTURBED of its time."""
    machine = session.machine
    machine = machine.rows(np.array([d is not None for d in machine["delay"]], np.bool_))
    bad = machine.rows(taken_shares(session, machine) > DISTURBED)
    order = np.argsort(bad["t"], kind="stable")
    end, begin = bad["t"][order], (bad["t"] - bad["dur"])[order]
    at = np.searchsorted(end, steps["begin"], side="right")
    inside: NDArray[np.bool_] = at < len(end)
    inside[inside] = begin[at[inside]] < steps["end"][inside]
    return inside


def taken_shares(session: Session, machine: Table) -> Float64:
    """The share of the process's time that was taken in each interval, (intervals,)."""
    taken = taken_times(machine.columns, session.start.host.cores)
    share: Float64 = taken / np.maximum(taken + machine["cpu"], 1)
    return share


def taken_in_all(session: Session, machine: Table) -> int:
    """The ns that the threads lost in all intervals; the sums are more precise than each value."""
    columns = {name: machine[name].tolist() for name in _OF_MACHINE}
    sums = {name: [None if None in of else sum(of)] for name, of in columns.items()}
    return int(taken_times(sums, session.start.host.cores)[0])


def taken_share(event: Machine, cpus: int) -> float | None:
    """The share of the time that was taken in one interval, None if the log does not record it."""
    if event.delay is None:
        return None
    taken = float(taken_times({name: [getattr(event, name)] for name in _OF_MACHINE}, cpus)[0])
    return taken / max(taken + event.cpu, 1)


_OF_MACHINE = ("dur", "cpu", "delay", "busy", "steal")


def taken_times(columns: Mapping[str, Any], cpus: int) -> Float64:
    """The ns that the process's threads lost in each interval."""
    dur, cpu, delay = (np.array(columns[name], np.float64) for name in ("dur", "cpu", "delay"))
    steal = np.array([s or 0 for s in columns["steal"]], np.float64)
    busy = np.array([np.inf if b is None else b for b in columns["busy"]], np.float64)
    delay = np.minimum(delay, np.maximum(busy - cpu - TICK, 0))
    # of the stolen time, the process lost the part that belongs to the CPUs that it used
    used = np.minimum((cpu + delay) / (np.maximum(dur, 1) * max(cpus, 1)), 1.0)
    taken: Float64 = delay + steal * used
    return taken


Step = TypeVar("Step")


class LatestSteps(Generic[Step]):
    """For readers that stream: keeps the latest step of each context, because a wait for its result
    may follow. `settled` gets each step with the time when its result was ready."""

    def __init__(self, settled: Callable[[Step, int], object]) -> None:
        self._settled = settled
        self._latest: dict[int, tuple[Step, int]] = {}

    def add(self, ctx: int, step: Step, t: int) -> None:
        """A step has ended."""
        self.settle(ctx)
        self._latest[ctx] = step, t
        if len(self._latest) > CONTEXTS_KEPT:
            self.settle(next(iter(self._latest)))

    def wait(self, sync: Sync) -> None:
        """A wait has ended."""
        if sync.ctx in self._latest and sync.dur >= WAITED:
            step, t = self._latest[sync.ctx]
            self._latest[sync.ctx] = step, max(t, sync.t + sync.dur)

    def settle(self, ctx: int) -> None:
        """No wait for the latest step follows: another begins, or its token has come."""
        if ctx in self._latest:
            self._settled(*self._latest.pop(ctx))

    def settle_all(self) -> None:
        """No wait follows."""
        for ctx in list(self._latest):
            self.settle(ctx)


Measure = Literal["time", "bytes", "flops"]
KERNELS, LAYERS = "kernels", "layers"
BESIDE = (
    "compute", "between ops", "between layers", "KV slots", "graph build", "submission",
    "device waits", "the device", "the recorder", "the rest",
)  # fmt: skip
"""what a step does besides its kernels; besides its layers, if the log has no kernels"""
ON_DEVICES = ("submission", "device waits", "the device")
"""of BESIDE: giving parts to devices; copying their inputs and waiting for them; and parts that end
with their computation and whose kernels thread 0 did not run"""


class Place(NamedTuple):
    """Where a kernel belongs; without kernels in the log, a layer has no block and no op."""

    phase: str
    layer: int
    block: str
    op: str
    """as `stats` calls it, and the role of the weight that it reads: `MUL_MAT q4_K ffn_down`"""
    device: str = ""
    """that ran it behind the caller"""


class Account:
    """The time of `steps`, which are those that count, of one session."""

    def __init__(self, session: Session, steps: Table) -> None:
        self.session = session
        self.steps = steps
        self.row = step_rows(session, steps)
        """compute -> its row in `steps`, for the computes in `steps`"""
        self.phases = [phase for phase in PHASES if (steps["phase"] == phase).any()]
        self.ops = self._of_steps(of for of in session.ops if of.thread == 0)
        """the kernels of thread 0 in `steps`"""
        self.device_ops = self._of_steps(session.device_ops)
        """those of devices"""
        self.layers = self._of_steps(session.layers)

    def _of_steps(self, timings: Iterable[Timings]) -> list[Timings]:
        """The computes of `steps` among `timings`."""
        kept = ((of, np.flatnonzero(self.rows_of(of) >= 0)) for of in timings)
        return [of.rows(rows) for of, rows in kept if len(rows)]

    def rows_of(self, timings: Timings) -> Int64:
        """The row in `steps` of each compute; -1 for one that is in none."""
        return np.array([self.row.get(of, -1) for of in timings.compute.tolist()], np.int64)

    @property
    def kernels(self) -> list[Timings]:
        """The kernels in `steps`, wherever they ran. Those of a device overlap the caller's."""
        return [*self.ops, *self.device_ops]

    @cached_property
    def devices(self) -> dict[str, tuple[Int64, Int64]]:
        """By device, for each step: the ns of its kernels, and the ns in which it ran at least one
        of them. They differ where kernels overlap."""
        found: dict[str, tuple[Int64, Int64]] = {}
        for device in dict.fromkeys(of.device for of in self.device_ops):
            ops = [of for of in self.device_ops if of.device == device]
            rows = np.concatenate([np.repeat(self.rows_of(of), of.dur.shape[1]) for of in ops])
            begin, end = (
                np.concatenate([getattr(of, name).ravel() for of in ops])
                for name in ("begin", "end")
            )
            order = np.lexsort((begin, rows))
            rows, begin, end = rows[order], begin[order], end[order]
            ran, busy = np.zeros((2, len(self.steps)), np.int64)
            np.add.at(ran, rows, end - begin)
            # each step on a stretch of time of its own, so that one scan finds all overlaps
            begin, end = (t - self.steps["begin"][rows] for t in (begin, end))
            away = rows * (int(end.max()) - int(begin.min()) + 1)
            reach = np.maximum.accumulate(end + away)
            before = np.concatenate([[np.iinfo(np.int64).min], reach[:-1]])
            np.add.at(busy, rows, np.maximum(reach - np.maximum(begin + away, before), 0))
            found[device] = ran, busy
        return found

    @cached_property
    def machines(self) -> Machines:
        """What other machines did during the steps."""
        return Machines(self.session, self.steps)

    @cached_property
    def by_machine(self) -> dict[str, dict[str, Int64]]:
        """By machine: ns of each step in each of `machines.PARTS`. They add up to `total`."""
        return {name: self.machines.parts(name) for name in self.machines.names}

    @cached_property
    def of_machines(self) -> dict[str, Int64]:
        """The same for all machines together with the kernels of thread 0, each ns once; the last
        part is the client's other work."""
        if not self.machines.names:
            return {}
        own = [(of.begin.ravel(), of.end.ravel()) for of in self.ops]
        return self.machines.together(own)

    @cached_property
    def total(self) -> Int64:
        """The time of each step as its caller saw it, ns."""
        seen: Int64 = self.steps["end"] - self.steps["begin"]
        return seen

    @cached_property
    def parts(self) -> dict[str, Int64]:
        """ns of each step in its `kernels` (or `layers`), and in each part of BESIDE."""
        session, steps = self.session, self.steps
        layers_alone = bool(session.layers) and not session.has_ops
        timed = self.layers if layers_alone else self.ops
        computes = session.computes.rows(np.isin(session.computes["step"], steps["step"]))
        numbers = computes["compute"].tolist()
        at = {compute: i for i, compute in enumerate(numbers)}
        rows = np.array([self.row[of] for of in numbers], np.int64)
        inside, is_timed = np.zeros(len(at), np.int64), np.zeros(len(at), np.bool_)
        for of in timed:
            these = [at[compute] for compute in of.compute.tolist()]
            np.add.at(inside, these, of.totals)
            is_timed[these] = True
        # layers last from their first kernel to their last, with what a device did between
        elsewhere = {} if layers_alone else device_times(session)
        none = (0, 0, 0)
        away = np.array([elsewhere.get(of, none) for of in numbers], np.int64).reshape(-1, 3)
        beside = computes["dur"] - inside - away.sum(axis=1)

        def of_step(ns: Int64) -> Int64:
            total = np.zeros(len(steps), np.int64)
            np.add.at(total, rows, ns)
            return total

        amounts: dict[str, Int64] = {
            LAYERS if layers_alone else KERNELS: of_step(inside),
            "compute": of_step(np.where(is_timed, 0, beside)),
            "between layers" if layers_alone else "between ops": of_step(
                np.where(is_timed, beside, 0)
            ),
            "KV slots": of_step(computes["apply"]),
            "graph build": of_step(computes["build"] + computes["alloc"]),
            "submission": of_step(away[:, 0]),
            "device waits": of_step(away[:, 1]) + steps["end"] - steps["returned"],
            "the device": of_step(away[:, 2]),
            "the recorder": steps["recorder"],
        }
        return amounts | {"the rest": self.total - sum(amounts.values())}

    def of_phase(self, phase: str) -> dict[str, int]:
        """`parts` of all steps of a phase."""
        rows = self.steps["phase"] == phase
        return {name: int(ns[rows].sum()) for name, ns in self.parts.items()}

    def by_place(self, by: Measure = "time") -> tuple[dict[Place, int], bool]:
        """The amount of each place (or layer, if the log has no kernels), and if any is a bound."""
        if by == "time" and not self.session.has_ops:
            layers = self.by_layer.items()
            return {Place(phase, layer, "", ""): ns for (phase, layer), ns in layers}, False
        bounded = False
        amounts: dict[Place, int] = defaultdict(int)
        for ops in self.kernels:
            places = self._places(ops.plan)
            work = None if by == "time" else self.session.work(ops)
            for phase, rows in self.by_phase(ops):
                if work is None:
                    column = ops.dur[rows].sum(axis=0, dtype=np.int64)
                else:
                    total = work.total(rows)
                    column = total.bytes if by == "bytes" else total.flops
                    bounded |= bool(total.bound.any())
                for place, amount in zip(places, column.tolist(), strict=True):
                    amounts[Place(phase, *place, ops.device)] += amount
        return amounts, bounded

    @cached_property
    def by_layer(self) -> dict[tuple[str, int], int]:
        """ns by phase and layer, from first kernel to last; empty if the log has kernels alone."""
        amounts: dict[tuple[str, int], int] = defaultdict(int)
        for layers in self.layers:
            for phase, rows in self.by_phase(layers):
                column = layers.dur[rows].sum(axis=0, dtype=np.int64)
                for layer, ns in zip(layers.label.tolist(), column.tolist(), strict=True):
                    amounts[phase, layer] += ns
        return amounts

    def by_phase(self, timings: Timings) -> Iterator[tuple[str, Any]]:
        """Each phase of `timings`, which are in `steps`, and an index of its computes."""
        phases = self.steps["phase"][self.rows_of(timings)]
        rows = ((phase, np.flatnonzero(phases == phase)) for phase in self.phases)
        return ((phase, without_copy(of)) for phase, of in rows if len(of))

    def _places(self, plan: int) -> list[tuple[int, str, str]]:
        """Layer, block and op of each kernel of a plan."""
        kernels = self.session.kernels(plan)
        names = [
            label if weight is None else f"{label} {role_of(weight)}"
            for label, weight in zip(kernels.label, kernels.weight, strict=True)
        ]
        return list(zip(kernels.layer.tolist(), kernels.block, names, strict=True))


def device_times(session: Session) -> dict[int, tuple[int, int, int]]:
    """By compute with a part that thread 0 did not compute: its ns in each of ON_DEVICES, in which
    thread 0 ran no kernel."""
    graph_of, plan_of = _graphs_and_plans(session)
    found: dict[int, tuple[int, int, int]] = {}
    for splits in session.splits:
        no_gaps = np.zeros(len(splits), np.int64)
        gaps = no_gaps if splits.gap is None else splits.gap.sum(axis=1, dtype=np.int64)
        by_plan: dict[tuple[int, int], list[int]] = defaultdict(list)
        for row, compute in enumerate(splits.compute.tolist()):
            by_plan[graph_of[compute], plan_of.get(compute, -1)].append(row)
        for (number, plan), rows in by_plan.items():
            graph, nodes = session.graphs[number], session.plans.get(plan)
            own = n_executed(graph, nodes) if nodes else [0] * len(graph.splits)
            away = np.array(
                [graph.splits[i].backend != "CPU" and not own[i] for i in splits.label.tolist()]
            )
            if away.any():
                submitted = np.array(splits.submitted, np.bool_)
                given, computed = (
                    splits.dur[:, away & of].sum(axis=1, dtype=np.int64)
                    for of in (submitted, ~submitted)
                )
                ns = zip(*(of[rows].tolist() for of in (given, gaps, computed)), strict=True)
                found.update(zip(splits.compute[rows].tolist(), ns, strict=True))
    return found


def untimed_splits(session: Session) -> dict[int, frozenset[int]]:
    """By compute with executed nodes that no kernel of the log computes: the splits of these.
    Nothing for a log without nodes, nor for the CPU, whose splits an interrupted compute lacks."""
    graph_of, plan_of = _graphs_and_plans(session)
    given: dict[int, Int64] = {}
    for ops in session.device_ops:
        plan = session.plans[ops.plan]
        n = np.array(n_executed(session.graphs[plan.graph], plan))
        # a compute whose values are read is given in pieces
        given.update((of, given[of] + n if of in given else n) for of in ops.compute.tolist())
    by_plan: dict[tuple[int, int], tuple[list[int], list[int]]] = {}
    found = {}
    for compute, number in graph_of.items():
        key = number, plan_of.get(compute, -1)
        if key not in by_plan:
            graph, own = session.graphs[number], session.plans.get(key[1])
            needed = n_executed(graph) if graph.nodes else []
            done = n_executed(graph, own) if own else [0] * len(needed)
            others = (i for i, n in enumerate(needed) if graph.splits[i].backend != "CPU")
            by_plan[key] = [i for i in others if done[i] < needed[i]], needed
        lacking, needed = by_plan[key]
        if lacking and compute in given:
            lacking = [i for i in lacking if given[compute][i] < needed[i]]
        if lacking:
            found[compute] = frozenset(lacking)
    return found


def _graphs_and_plans(session: Session) -> tuple[dict[int, int], dict[int, int]]:
    """By compute: its graph, and the plan of thread 0."""
    plans = {n: of.plan for of in session.ops if of.thread == 0 for n in of.compute.tolist()}
    return dict(session.computes.tuples("compute", "graph")), plans
