"""The sides of a comparison of groups of sessions: what is compared, and every side's medians.

A side of one session has the noise within it, and an assumed one between processes. In a side of
several sessions, each of a process of its own, the median of every part is taken in each session,
and the spread of their logarithms is the noise: it has what changes from process to process (memory
layout, other processes).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from converters.analyses.noise import Median, compute_medians, disturb, median_of_group
from converters.analyses.step_times import StepTimes
from llamacpp_instr.errors import UsageError
from llamacpp_instr.log.session import Session
from llamacpp_instr.log.steps import PHASES

KEYS = ("block", "op", "layer")
Side = list[StepTimes]
Key = str | int
Samples = dict[Key, tuple[NDArray[np.float64], int]]
"""key of a row -> ns of each step of a phase (NaN in steps that lack it), and the number of timed
intervals in a step"""


@dataclass(frozen=True)
class Sides:
    """What is compared."""

    sides: list[Side]
    phases: list[str]
    """those that every session has"""
    views: list[str]
    """the keys of the breakdowns, of KEYS"""

    @property
    def every(self) -> Side:
        return [times for side in self.sides for times in side]

    @property
    def notes(self) -> list[str]:
        """What the sessions' steps leave out, and how their logs ended; once if it is the same for
        every log."""
        logs_of: dict[str, list[str]] = {}
        for times in self.every:
            for note in times.notes:
                path = times.session.path
                logs_of.setdefault(note.removeprefix(f"{path}: "), []).append(path)
        return [
            f"{log}: {note}"
            for note, logs in logs_of.items()
            for log in (["Each log"] if len(logs) == len(self.every) else dict.fromkeys(logs))
        ]


def prepare(
    groups: Sequence[Sequence[Session]], by: str | None, phase: str | None, who: str
) -> Sides:
    """What can be compared of the groups. Raises UsageError for a perturbed session, for another
    key than one of KEYS and `phase`, and if nothing can be compared. `who` has only KEYS."""
    if by not in (None, "phase", *KEYS):
        raise UsageError(f"--by {by} compares two logs; {who} {', '.join(KEYS)}")
    for session in (session for group in groups for session in group):
        if session.start.perturbed:
            raise UsageError(
                f"{session.path}: tensor values were read (--stats), so its times must not be"
                " compared; record it without --stats"
            )
    sides = [[StepTimes(session) for session in group] for group in groups]
    every = [times for side in sides for times in side]
    phases = [p for p in PHASES if all(p in t.phases for t in every) and phase in (None, p)]
    if not phases:
        what = f"{phase} steps" if phase else "steps of one phase"
        raise UsageError(f"not all of the {len(every)} logs have {what} that count")
    has_ops = all(times.session.ops for times in every)
    if by in ("op", "block") and not has_ops:
        raise UsageError(f"--by {by} needs the level detailed in all logs")
    views = [by] if by else ["block", "op"] if has_ops else ["layer"]
    return Sides(sides, phases, [view for view in views if view != "phase"])


def step_median(side: Side, phase: str) -> Median:
    """The median of whole steps."""
    return _medians(side, phase, [{"": (times.whole_steps(phase), 1)} for times in side])[""]


def part_medians(side: Side, by: str, phase: str) -> dict[Key, Median]:
    """The medians of the parts of a step by one of KEYS, without those that no step has."""
    return _medians(side, phase, [_samples(times, by, phase) for times in side])


def _medians(side: Side, phase: str, samples: Sequence[Samples]) -> dict[Key, Median]:
    """`samples` has those of each session."""
    samples = [
        {key: of for key, of in table.items() if not np.isnan(of[0]).all()} for table in samples
    ]
    if len(side) > 1:
        keys = dict.fromkeys(key for table in samples for key in table)
        return {
            key: median_of_group(
                [float(np.nanmedian(of[key][0])) if key in of else np.nan for of in samples]
            )
            for key in keys
        }
    (times,), (table,) = side, samples
    if not table:
        return {}
    rows, counts = zip(*table.values(), strict=True)
    medians = compute_medians(np.array(rows), times.blocks(phase), counts)
    return {key: disturb(of, times.taken) for key, of in zip(table, medians, strict=True)}


def _samples(times: StepTimes, by: str, phase: str) -> Samples:
    selected = times.steps["phase"] == phase
    if by == "layer":
        return {int(str(key)): (ns[selected], 1) for key, ns in times.by_layer().items()}
    names: dict[Key, int] = {}
    of_kernel = {}
    for plan in times.plans:
        kernels = times.session.kernels(plan)
        keys = kernels.block if by == "block" else kernels.label
        of_kernel[plan] = np.array([names.setdefault(key, len(names)) for key in keys], np.int64)
    by_unit = times.by_unit(of_kernel, len(names))
    counts = [np.bincount(numbers, minlength=len(names)) for numbers in of_kernel.values()]
    most = np.max(counts, axis=0)
    return {key: (by_unit[n][selected], int(most[n])) for key, n in names.items()}
