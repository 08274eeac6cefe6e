"""The sides of a comparison: what is compared, and every side's medians.

A side of one session has the noise within it, and an assumed one between processes. In a side of
several sessions, each of a process of its own, the median of every part is taken in each session,
and `noise.median_of_group` estimates how much processes differ.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from llamacpp_instr.base.errors import UsageError
from llamacpp_instr.converters.analyses.machine import machine_notes
from llamacpp_instr.converters.analyses.noise import (
    MIN_BLOCKS,
    PROCESS,
    Median,
    compute_medians,
    disturb,
    median_of_group,
)
from llamacpp_instr.converters.analyses.settings import unlike_notes
from llamacpp_instr.converters.analyses.step_times import StepTimes, took_turns
from llamacpp_instr.log.session import Session
from llamacpp_instr.log.steps import PHASES

KEYS = ("block", "op", "layer")
ASSUMED = f"{100 * PROCESS:g} % for the difference between processes"
Side = list[StepTimes]
Samples = Mapping[Hashable, tuple[NDArray[np.float64], int]]
"""key of a row -> ns of each step of a phase (NaN in steps that lack it), and the number of timed
intervals in a step"""


@dataclass(frozen=True)
class Sides:
    """What is compared."""

    sides: list[Side]
    phases: list[str]
    """those that every session has"""
    views: list[str]
    """the keys of the breakdowns"""

    @property
    def every(self) -> Side:
        return [times for side in self.sides for times in side]

    @property
    def several(self) -> bool:
        """Whether a side has several sessions."""
        return len(self.every) > len(self.sides)

    @property
    def in_turns(self) -> bool:
        """Whether the sessions of both sides were recorded in turns, often enough for pairs."""
        a, *others = self.sides
        return len(others) == 1 and took_turns(a, others[0])

    @property
    def notes(self) -> list[str]:
        """What the sessions' steps leave out, and how their logs ended; a sentence that holds for
        several logs once."""
        logs_of: dict[str, list[str]] = {}
        for times in self.every:
            for note in times.notes:
                path = times.session.path
                logs_of.setdefault(note.removeprefix(f"{path}: "), []).append(path)
        n = len(self.every)
        return [
            f"{'Each log' if len(logs) == n else _some(list(dict.fromkeys(logs)), n)}: {note}"
            for note, logs in logs_of.items()
        ]

    def record_notes(self, names: Sequence[str]) -> tuple[list[str], list[str]]:
        """On disturbed machines, and on sides whose own logs differ in settings."""
        machines = [[times.machine for times in side] for side in self.sides]
        sessions = [[times.session for times in side] for side in self.sides]
        return (
            machine_notes(list(zip(names, machines, strict=True))),
            unlike_notes(list(zip(names, sessions, strict=True))),
        )

    def interval_note(self, names: Sequence[str]) -> str:
        """What the intervals have of the noise."""
        if not self.several:
            return f"It includes the noise within each log, and {ASSUMED}."
        if self.in_turns:
            return f"The logs took turns: it is that of the ratios of {len(self.sides[0])} pairs."
        if few := self.more_logs(names):
            return (
                "It is that of the difference between processes. Fewer than"
                f" {MIN_BLOCKS} logs do not show that, so it includes at least the noise within"
                f" them, and {ASSUMED}: record {few}."
            )
        return "It is that of the difference between processes."

    def more_logs(self, names: Sequence[str]) -> str:
        """How many logs are needed to show how much processes differ; empty if there are enough."""
        lacking = zip((MIN_BLOCKS - len(side) for side in self.sides), names, strict=True)
        return ", ".join(f"{n} more of {name}" for n, name in lacking if n > 0)


def _some(logs: Sequence[str], n: int) -> str:
    return logs[0] if len(logs) == 1 else f"{len(logs)} of {n} logs"


def prepare(
    groups: Sequence[Sequence[Session]],
    by: str | None,
    phase: str | None,
    keys: Sequence[str] = KEYS,
) -> Sides:
    """What can be compared of the groups, each in order of time. Raises UsageError for groups of
    one session beside larger ones, for a perturbed session, for another key than `keys` and
    `phase`, and if nothing can be compared."""
    if len({min(len(group), 2) for group in groups}) != 1 or not groups[0]:
        raise UsageError(
            "give sides of one log each, or all of at least two logs, to show how much processes"
            " differ"
        )
    if by not in (None, "phase", *keys):
        raise UsageError(f"--by {by} compares two sides; a trend has {', '.join(keys)}")
    for session in (session for group in groups for session in group):
        if session.start.perturbed:
            raise UsageError(
                f"{session.path}: tensor values were read during the session, so its times must not"
                " be compared; record it without --stats"
            )
        if by not in (None, "phase", "layer") and not session.ops:
            raise UsageError(
                f"{session.path}: no ops were recorded; --by {by} needs the level detailed"
            )
    by_time = [sorted(group, key=lambda session: session.start.wall) for group in groups]
    sides = [[StepTimes(session) for session in group] for group in by_time]
    every = [times for side in sides for times in side]
    phases = [p for p in PHASES if all(p in t.phases for t in every) and phase in (None, p)]
    if not phases:
        what = f"{phase} steps" if phase else "steps of one phase"
        raise UsageError(f"not all of the {len(every)} logs have {what} that count")
    has_ops = all(times.session.ops for times in every)
    views = [by] if by else ["block", "op"] if has_ops else ["layer"]
    return Sides(sides, phases, [view for view in views if view != "phase"])


def step_median(side: Side, phase: str) -> Median:
    """The median of whole steps."""
    return medians(side, phase, [{"": (times.whole_steps(phase), 1)} for times in side])[""]


def medians(side: Side, phase: str, samples: Sequence[Samples]) -> dict[Hashable, Median]:
    """The medians of the rows that a step has; `samples` has those of each session."""
    found = [
        _of_session(times, phase, {k: of for k, of in table.items() if not np.isnan(of[0]).all()},
                    has_error=len(side) < MIN_BLOCKS)
        for times, table in zip(side, samples, strict=True)
    ]  # fmt: skip
    if len(side) == 1:
        return found[0]
    keys = dict.fromkeys(key for table in found for key in table)
    none = Median(np.nan, None, 0, 0)
    return {key: median_of_group([table.get(key, none) for table in found]) for key in keys}


def _of_session(
    times: StepTimes, phase: str, samples: Samples, *, has_error: bool
) -> dict[Hashable, Median]:
    """The medians of one session; their errors take time, and many sessions need none."""
    if not samples:
        return {}
    if not has_error:
        return {k: Median(float(np.nanmedian(ns)), None, 1, 0) for k, (ns, _) in samples.items()}
    rows, counts = zip(*samples.values(), strict=True)
    found = compute_medians(np.array(rows), times.blocks(phase), counts)
    return {key: disturb(of, times.taken) for key, of in zip(samples, found, strict=True)}


def part_medians(side: Side, by: str, phase: str) -> dict[Hashable, Median]:
    """The medians of the parts of a step by one of KEYS, without those that no step has."""
    return medians(side, phase, [_samples(times, by, phase) for times in side])


def layer_samples(times: StepTimes, phase: str) -> Samples:
    selected = times.steps["phase"] == phase
    return {key: (ns[selected], 1) for key, ns in times.by_layer().items()}


def _samples(times: StepTimes, by: str, phase: str) -> Samples:
    if by == "layer":
        return layer_samples(times, phase)
    selected = times.steps["phase"] == phase
    names: dict[Hashable, int] = {}
    of_kernel = {}
    for plan in times.plans:
        kernels = times.session.kernels(plan)
        keys = kernels.block if by == "block" else kernels.label
        of_kernel[plan] = np.array([names.setdefault(key, len(names)) for key in keys], np.int64)
    by_unit = times.by_unit(of_kernel, len(names))
    counts = [np.bincount(numbers, minlength=len(names)) for numbers in of_kernel.values()]
    most = np.max(counts, axis=0)
    return {key: (by_unit[n][selected], int(most[n])) for key, n in names.items()}
