"""Which steps of a session count in figures: successful ones outside of warm-up runs.

Invariant: what is left out is said, in whole sentences, and nothing else is left out.
"""

from __future__ import annotations

import numpy as np

from llamacpp_instr.session import Session, Table

PHASES = ("prefill", "decode", "encode")
"""the labels of steps, in the order in which they are shown"""

WARM_UP = "warm-up"
"""the mark around a run that only warms up"""


def counted_steps(session: Session, warm_up: bool = False) -> tuple[Table, list[str]]:
    """The steps that count, with a column `label` (prefill, decode, encode), and notes on what
    was left out; `warm_up` counts warm-up runs as well."""
    steps = session.steps
    counted = steps["status"] == 0
    notes = []
    if failed := len(steps) - int(counted.sum()):
        notes.append(f"{failed} failed steps are left out.")
    if not warm_up:
        warm = _in_warm_up(session)
        if n := int((warm & counted).sum()):
            notes.append(f"{n} steps of warm-up runs are left out.")
        counted &= ~warm
    if session.n_open_steps:
        notes.append(f"{session.n_open_steps} steps had not ended and are left out.")
    steps = steps.rows(counted)
    encode = steps["kind"] == "encode"
    steps.columns["label"] = np.where(encode, "encode", steps["phase"])
    return steps, notes


def phase_of_compute(session: Session, steps: Table) -> dict[int, str]:
    """The label of every compute that lies in one of `steps`."""
    label = dict(zip(steps["step"].tolist(), steps["label"].tolist(), strict=True))
    pairs = zip(
        session.computes["compute"].tolist(), session.computes["step"].tolist(), strict=True
    )
    return {compute: label[step] for compute, step in pairs if step in label}


def _in_warm_up(session: Session) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
    steps, marks = session.steps, session.marks
    inside = np.zeros(len(steps), np.bool_)
    for i in np.flatnonzero(marks["name"] == WARM_UP):
        end = marks["end"][i] if marks["end"][i] >= 0 else np.iinfo(np.int64).max
        inside |= (steps["begin"] >= marks["begin"][i]) & (steps["begin"] < end)
    return inside
