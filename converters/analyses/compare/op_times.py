"""Times and rates of the ops that read a weight, in two sessions: medians, rates, noise.

Invariant: a use is a weight and an op that reads it. So a matrix that is both looked up and
multiplied (tied embeddings) has two uses, and each is compared only with the same use.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from llamacpp_instr.converters.analyses.noise import (
    Median,
    Ratio,
    compare,
    compute_medians,
    disturb,
    join_blocks,
    median_of_group,
)
from llamacpp_instr.converters.analyses.step_times import StepTimes
from llamacpp_instr.log.graph.kernels import kernel_nodes, weight_read

Float64 = NDArray[np.float64]


class Use(NamedTuple):
    """A weight and an op that reads it."""

    weight: str
    op: str


@dataclass(frozen=True)
class Rates:
    """The rates of one side: medians over its steps of work by time, in units per second."""

    bytes: float | None
    flops: float | None


@dataclass(frozen=True)
class UseTimes:
    """Median times of a step in ns, their ratio with its noise, and the rates of both sides."""

    ratio: Ratio
    rates: tuple[Rates, Rates]


def compute_use_times(
    a: PhaseUses, b: PhaseUses, groups: Sequence[Sequence[Use]], *, in_turns: bool = False
) -> list[UseTimes | None]:
    """For each group of uses: the sum of their times, or None if a side lacks the group. The
    intervals hold simultaneously, as a family; those of sessions in turns are those of pairs."""
    sides = (a, b)
    measured = [[side.group(group) for group in groups] for side in sides]
    present = [
        i for i in range(len(groups)) if all(of[i] is not None for of in measured) and groups[i]
    ]
    found: list[UseTimes | None] = [None] * len(groups)
    medians = []
    for side, of in zip(sides, measured, strict=True):
        rows = [sums for i in present if (sums := of[i]) is not None]
        if not rows:
            return found
        times = np.array([row.time for row in rows])
        medians.append(side.medians(times, [len(groups[i]) for i in present], in_turns=in_turns))
    for at, i in enumerate(present):
        rates = [sums.rates() for of in measured if (sums := of[i]) is not None]
        ratio = compare(medians[0][at], medians[1][at], len(present), in_turns=in_turns)
        found[i] = UseTimes(ratio, (rates[0], rates[1]))
    return found


@dataclass(frozen=True)
class _Sums:
    """ns and work of some uses, by step."""

    time: Float64
    bytes: Float64
    flops: Float64

    def rates(self) -> Rates:
        ran = self.time > 0  # NaN is not
        if not ran.any():
            return Rates(None, None)
        n_bytes, flops = (
            float(np.median(work[ran] / self.time[ran])) * 1e9 for work in (self.bytes, self.flops)
        )
        return Rates(n_bytes or None, flops or None)


class PhaseUses:
    """The steps of one phase in some sessions of one model, by use."""

    def __init__(self, sessions: Sequence[StepTimes], phase: str) -> None:
        every = (use for of in sessions for plan in of.plans for use in _plan_uses(of, plan))
        found = dict.fromkeys(use for use in every if use)
        self.row = {use: i for i, use in enumerate(found)}
        """in the order of execution"""
        self.blocks = join_blocks([times.runs(phase) for times in sessions])
        n_steps = [len(times.runs(phase)) for times in sessions]
        self.begins = np.cumsum(n_steps)[:-1]
        """the columns with which later sessions begin"""
        self.taken = float(np.average([times.taken for times in sessions], weights=n_steps))
        """share of the time that a disturbed machine took, over all sessions"""
        columns = [self._of_session(times, phase) for times in sessions]
        self.time, self.bytes, self.flops = (
            np.concatenate(parts, axis=1) for parts in zip(*columns, strict=True)
        )

    def _of_session(self, times: StepTimes, phase: str) -> tuple[Float64, Float64, Float64]:
        """ns, bytes and floating point operations, each (uses, steps)."""
        n = len(self.row) + 1  # the last row is for kernels that read no weight
        unit: dict[int, NDArray[np.int64]] = {}
        n_bytes: dict[int, Float64] = {}
        flops: dict[int, Float64] = {}
        for plan in times.plans:
            rows = [self.row[use] if use else n - 1 for use in _plan_uses(times, plan)]
            unit[plan] = np.array(rows, np.int64)
            kernels = times.session.kernels(plan)
            for work, of in ((n_bytes, kernels.bytes), (flops, kernels.flops)):
                work[plan] = np.bincount(unit[plan], of, n).astype(np.float64)
        chosen = times.steps["phase"] == phase
        return (
            times.by_unit(unit, n)[:, chosen],
            times.work_by_unit(n_bytes, n)[:, chosen],
            times.work_by_unit(flops, n)[:, chosen],
        )

    def medians(self, times: Float64, n_timed: Sequence[int], *, in_turns: bool) -> list[Median]:
        """Of the rows of `times`: over all steps, or over the sessions of a side in turns."""
        if not in_turns:
            found = compute_medians(times, self.blocks, n_timed)
            return [disturb(median, self.taken) for median in found]
        parts = np.split(times, self.begins, axis=1)
        return [
            median_of_sessions([_quantile(part[i], 0.5) for part in parts])
            for i in range(len(times))
        ]

    def kernels(self) -> Median:
        """The lower deciles of all uses and of the other kernels, added up, over the sessions:
        what interrupts a kernel, also in most steps, does not change them."""
        parts = np.split(self.time, self.begins, axis=1)
        return median_of_sessions(
            [float(np.nansum([_quantile(row, 0.1) for row in part])) for part in parts]
        )

    def group(self, uses: Sequence[Use]) -> _Sums | None:
        """The sums of all uses; None if one of them is missing or ran in no step."""
        if not all(use in self.row for use in uses):
            return None
        rows = [self.row[use] for use in uses]
        time = self.time[rows].sum(axis=0)
        if not rows or np.isnan(time).all():
            return None
        return _Sums(time, self.bytes[rows].sum(axis=0), self.flops[rows].sum(axis=0))


def median_of_sessions(values: Sequence[float]) -> Median:
    """That of a side in turns, whose sessions have these times in ns."""
    return median_of_group([Median(value, None, 1, 0) for value in values])


def _quantile(row: Float64, share: float) -> float:
    """NaN if nothing of it ran."""
    ran = row[~np.isnan(row)]
    return float(np.quantile(ran, share)) if len(ran) else np.nan


def _plan_uses(times: StepTimes, plan: int) -> list[Use | None]:
    """The use of every kernel of a plan; None for kernels that read no weight."""
    of = times.session.plans[plan]
    graph = times.session.graphs[of.graph]
    op = graph.whole.op
    return [
        next((Use(name, op[i]) for i in inside if (name := weight_read(graph, [i])[0])), None)
        for inside in kernel_nodes(graph, of)
    ]
