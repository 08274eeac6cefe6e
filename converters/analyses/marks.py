"""The marks of the application (`record().mark`): how often, how long, and the steps in them."""

from __future__ import annotations

from collections import defaultdict

import numpy as np
from numpy.typing import NDArray

from llamacpp_instr.base.terminal import counted
from llamacpp_instr.log.session import Session, Table
from llamacpp_instr.log.steps import steps_inside
from llamacpp_instr.report.report import Cell, Column, Report, columns_of

Int64 = NDArray[np.int64]


def compute_marks(session: Session) -> Report:
    """One row for each name of a mark, in the order in which they first began; no rows if the
    application made no marks.

    Columns: how often it began; of those that ended the total, mean, median and longest time (ns,
    of the clock); steps that began inside on the same thread, also if they failed, with their time
    (ns) and tokens. A step inside two marks counts in both. An instant has no times.
    """
    marks, steps = session.marks, session.steps
    inside = _inside(marks, steps)
    places: dict[str, list[int]] = defaultdict(list)
    for i in np.argsort(marks["begin"], kind="stable").tolist():
        places[marks["name"][i]].append(i)
    rows: list[list[Cell]] = []
    for name, numbers in places.items():
        of = marks.rows(np.array(numbers, np.int64))
        dur = (of["end"] - of["begin"])[of["end"] > of["begin"]]
        n_steps, in_steps, n_tokens = (int(n) for n in inside[numbers].sum(axis=0))
        rows.append([name, len(numbers), *_spread(dur), n_steps, in_steps, n_tokens])
    notes = []
    if n_open := int((marks["end"] < 0).sum()):
        notes.append(f"Left out: the time of {counted(n_open, 'mark')} without an end.")
    columns = [
        Column("mark"),
        Column("count", "count"),
        *columns_of("ns", "total", "mean", "p50", "longest"),
        Column("steps", "count"),
        Column("in steps", "ns"),
        Column("tokens", "count"),
    ]
    return Report("Marks", columns, rows, notes)


def _spread(dur: Int64) -> list[Cell]:
    if not len(dur):
        return [None] * 4
    return [int(dur.sum()), float(dur.mean()), float(np.median(dur)), int(dur.max())]


def _inside(marks: Table, steps: Table) -> Int64:
    """For each mark the number, the time and the tokens of the steps that began in it."""
    found = np.zeros((len(marks), 3), np.int64)
    for thread in np.unique(marks["thread"]):
        of_marks = np.flatnonzero(marks["thread"] == thread)
        of_steps = steps.rows(steps["thread"] == thread)
        of_steps = of_steps.rows(np.argsort(of_steps["begin"], kind="stable"))
        first, end = steps_inside(marks.rows(of_marks), of_steps["begin"])
        dur = of_steps["end"] - of_steps["begin"]
        columns = np.stack([np.ones(len(of_steps), np.int64), dur, of_steps["n_tokens"]], axis=1)
        sums = np.concatenate([np.zeros((1, 3), np.int64), np.cumsum(columns, axis=0)])
        found[of_marks] = sums[end] - sums[first]
    return found
