"""Selects the steps of a session that figures count: successful ones outside warm-up runs.

Invariant: the notes name everything that is excluded, in complete sentences.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from llamacpp_instr.base.terminal import counted
from llamacpp_instr.log.session import Session, Table

Int64 = NDArray[np.int64]

PHASES = ("prefill", "decode", "encode")
"""of steps, in the order in which they are shown"""

WARM_UP = "warm-up"
"""the mark around a warm-up run"""


def counted_steps(session: Session, warm_up: bool = False) -> tuple[Table, list[str]]:
    """The steps that count, and notes on the excluded ones. `warm_up` includes warm-up runs."""
    steps = session.steps
    counts = steps["status"] == 0
    notes = []
    if failed := len(steps) - int(counts.sum()):
        notes.append(f"Left out: {counted(failed, 'failed step')}.")
    if not warm_up:
        warm = _in_warm_up(session)
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


def _in_warm_up(session: Session) -> NDArray[np.bool_]:
    steps, marks = session.steps, session.marks
    order = np.argsort(steps["begin"], kind="stable")
    first, end = steps_inside(marks.rows(marks["name"] == WARM_UP), steps["begin"][order])
    # +1 where the steps of a mark begin, -1 after them: the sum is the number of marks of a step
    marked = np.zeros(len(steps) + 1, np.int64)
    np.add.at(marked, first, 1)
    np.add.at(marked, end, -1)
    inside = np.zeros(len(steps), np.bool_)
    inside[order] = np.cumsum(marked)[:-1] > 0
    return inside


def steps_inside(marks: Table, begins: Int64) -> tuple[list[int], list[int]]:
    """The steps that begin in each mark: the first, and the one after the last, as indices into
    `begins`, which is sorted."""
    first = np.searchsorted(begins, marks["begin"])
    end = np.searchsorted(begins, marks["end"])
    end[marks["end"] < 0] = len(begins)  # an open one
    return first.tolist(), np.maximum(first, end).tolist()
