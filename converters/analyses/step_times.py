"""The times of a session's steps, whole and by the units of work of their kernels.

Invariant: columns are steps in order of time, in ns of thread 0. A step that lacks a unit has NaN
there, never 0. Failed steps and warm-up runs are left out.
"""

from __future__ import annotations

import re
from collections.abc import Hashable, Sequence
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from llamacpp_instr.base.errors import UsageError
from llamacpp_instr.converters.analyses.machine import compute_machine
from llamacpp_instr.converters.analyses.noise import MIN_BLOCKS, SampleBlocks, cut_blocks
from llamacpp_instr.log.session import Session, Table
from llamacpp_instr.log.steps import Account, counted_steps, steps_inside

Float64 = NDArray[np.float64]

FEW_CELLS = 10_000_000
MOST_EMPTY = 50
"""maximum ratio of cells to filled cells of a table; most steps run all units"""


class StepTimes:
    """One session's steps that count, and their runs."""

    def __init__(self, session: Session) -> None:
        self.session = session
        steps, notes = counted_steps(session)
        ended = session.log_end.sentence()
        self.notes = [f"{session.path}: {note}" for note in [*notes, *[f"{ended}."] * bool(ended)]]
        self.steps = steps.rows(np.argsort(steps["begin"], kind="stable"))
        self.run = _runs(session, self.steps)
        self.machine = machine = compute_machine(session, self.steps)
        """what the machine did during these steps; None if the log does not record it"""
        self.taken = machine.share if machine and machine.is_disturbed else 0.0
        """share of the process's time that a disturbed machine took"""
        self.phases = set(self.steps["phase"].tolist())
        self.account = Account(session, self.steps)
        self.plans = list(dict.fromkeys(of.plan for of in self.account.ops))
        """the plans that ran in these steps, in order"""

    @property
    def clock(self) -> tuple[int, int]:
        """When the session began, and when its last step ended, by the clock on the wall; ns."""
        start = self.session.start
        return start.wall, start.wall + int(self.steps["end"].max(initial=start.t)) - start.t

    def runs(self, phase: str) -> NDArray[np.int64]:
        """The run of every step of a phase."""
        of_phase: NDArray[np.int64] = self.run[self.steps["phase"] == phase]
        return of_phase

    def blocks(self, phase: str) -> SampleBlocks:
        return cut_blocks(self.runs(phase))

    def whole_steps(self, phase: str) -> Float64:
        steps = self.steps.rows(self.steps["phase"] == phase)
        seen: NDArray[np.int64] = steps["end"] - steps["begin"] - steps["recorder"]
        return seen.astype(np.float64)

    def last_intervals(self, phase: str) -> bool:
        """Whether the steps of a phase last at least as long as the intervals of the machine's
        counts, so that those give their CPU time."""
        whole, intervals = self.whole_steps(phase), self.session.machine["dur"]
        return len(intervals) > 0 and bool(np.median(whole) >= np.median(intervals))

    def cpu_times(self, phase: str) -> Float64:
        """ns of the process, all threads, in each step of a phase. An interval of the machine's
        counts is spread evenly."""
        machine, steps = self.session.machine, self.steps.rows(self.steps["phase"] == phase)
        t = np.append(machine["t"][:1] - machine["dur"][:1], machine["t"])
        cpu = np.append(0, np.cumsum(machine["cpu"]))
        begin, end = (np.interp(steps[name], t, cpu) for name in ("begin", "end"))
        spent: Float64 = end - begin
        return spent

    def tokens_per_second(self, phase: str) -> float | None:
        """The median over the steps of a phase; None if there are none."""
        steps = self.steps.rows(self.steps["phase"] == phase)
        if not len(steps):
            return None
        return (
            float(np.median(steps["n_tokens"] / np.maximum(steps["end"] - steps["begin"], 1))) * 1e9
        )

    def by_unit(self, of_kernel: dict[int, NDArray[np.int64]], n_units: int) -> Float64:
        """ns of thread 0, (units, steps)."""
        self._check_cells(n_units, sum(of.dur.size for of in self.account.ops))
        total: Float64 = np.zeros((len(self.steps), n_units))
        present = np.zeros((len(self.steps), n_units), np.bool_)
        for ops in self.account.ops:
            if not len(of_kernel[ops.plan]):
                continue
            order = np.argsort(of_kernel[ops.plan], kind="stable")
            units, first = np.unique(of_kernel[ops.plan][order], return_index=True)
            sums = np.add.reduceat(ops.dur[:, order].astype(np.float64), first, axis=1)
            places = self.account.rows_of(ops)[:, None], units
            np.add.at(total, places, sums)
            present[places] = True
        total[~present] = np.nan
        return np.transpose(total)

    def work_by_unit(self, work: dict[int, Float64], n_units: int) -> Float64:
        """The work of each step, (units, steps); `work` has one compute of each plan, by unit."""
        total: Float64 = np.zeros((n_units, len(self.steps)))
        for ops in self.account.ops:
            np.add.at(total.T, self.account.rows_of(ops), work[ops.plan])
        return total

    def by_layer(self) -> dict[Hashable, Float64]:
        layers = self.account.layers
        every = {label for of in layers for label in of.label.tolist()}
        self._check_cells(len(every), sum(of.dur.size for of in layers))
        found: dict[Hashable, Float64] = {}
        for of in layers:
            rows = self.account.rows_of(of)
            for layer, dur in zip(of.label.tolist(), of.dur.T, strict=True):
                row = found.setdefault(layer, np.full(len(self.steps), np.nan))
                row[rows[np.isnan(row[rows])]] = 0
                np.add.at(row, rows, dur)
        return found

    def _check_cells(self, n_rows: int, n_measured: int) -> None:
        """Raise UsageError if a table of all steps would be nearly empty: otherwise a log with few
        measurements could take any amount of memory."""
        if n_rows * len(self.steps) > FEW_CELLS + MOST_EMPTY * n_measured:
            raise UsageError(
                f"{self.session.path}: its {len(self.steps):,} steps share too few of"
                f" {n_rows:,} parts to be compared"
            )


def verb(phase: str, sessions: Sequence[StepTimes]) -> str:
    """What the steps of a phase do, with the tokens of a step: `prefills 512 tokens`, `decodes`."""
    word = {"prefill": "prefills", "decode": "decodes", "encode": "encodes"}[phase]
    tokens = [of.steps["n_tokens"][of.steps["phase"] == phase] for of in sessions]
    low, high = min(of.min() for of in tokens), max(of.max() for of in tokens)
    if high == 1:
        return word
    return f"{word} {high:,} tokens" if low == high else f"{word} {low:,} to {high:,} tokens"


def took_turns(a: Sequence[StepTimes], b: Sequence[StepTimes]) -> bool:
    """Whether the sessions of two sides, each in order of time, were recorded in turns, often
    enough for pairs: both i-th ones ended before the next ones began."""
    rounds = [[of.clock for of in pair] for pair in zip(a, b, strict=False)]
    return len(a) == len(b) >= MIN_BLOCKS and all(
        max(end for _, end in before) < min(begin for begin, _ in after)
        for before, after in pairwise(rounds)
    )


def _runs(session: Session, steps: Table) -> NDArray[np.int64]:
    """The run of every step: runs are the marks `run 1`, `run 2`, ..."""
    run = np.zeros(len(steps), np.int64)
    order = np.argsort(steps["begin"], kind="stable")
    inside = steps_inside(session.marks, steps["begin"][order])
    for name, first, end in zip(session.marks["name"].tolist(), *inside, strict=True):
        if (found := re.fullmatch(r"run (\d{1,9})", name)) is not None:
            run[order[first:end]] = int(found[1])
    return run
