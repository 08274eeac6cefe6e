"""The differences of two groups of sessions, each of a process of its own.

The median of every part is taken in each session; its logarithms in the two groups are compared
with Welch's t. So the interval has what changes from process to process (memory layout, other
processes), which one log on each side cannot show. Rows are as in `compute_diff`.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from converters.analyses.diff.rows import Diff, answer, columns, machine_notes, row
from converters.analyses.noise import Ratio, compare_groups
from converters.analyses.settings import compute_settings
from converters.analyses.step_times import StepTimes
from converters.report.report import Cell, Figures, Report
from llamacpp_instr.errors import UsageError
from llamacpp_instr.log.session import Session
from llamacpp_instr.log.steps import PHASES

KEYS = ("block", "op", "layer")
Medians = dict[str | int, float]
"""key of a row -> median ns of the steps of one session"""


def compute_group_diff(
    before: Sequence[Session],
    after: Sequence[Session],
    by: str | None = None,
    phase: str | None = None,
) -> Diff:
    """The differences of the sessions `after` from those `before`; at least two of each.

    Raises UsageError for fewer, for a perturbed session, for another key than one of KEYS, and if
    nothing can be compared.
    """
    if by not in (None, "phase", *KEYS):
        raise UsageError(f"--by {by} compares two logs; groups of logs have {', '.join(KEYS)}")
    if min(len(before), len(after)) < 2:
        raise UsageError("give at least two logs on each side, to show how much processes differ")
    for session in (*before, *after):
        if session.start.perturbed:
            raise UsageError(
                f"{session.path}: tensor values were read (--stats), so its times must not be"
                " compared; record it without --stats"
            )
    groups = [[StepTimes(session) for session in group] for group in (before, after)]
    every = [times for group in groups for times in group]
    phases = [p for p in PHASES if all(p in t.phases for t in every) and phase in (None, p)]
    if not phases:
        what = f"{phase} steps" if phase else "steps of one phase"
        raise UsageError(f"not all of the {len(every)} logs have {what} that count")
    has_ops = all(times.session.ops for times in every)
    if by in ("op", "block") and not has_ops:
        raise UsageError(f"--by {by} needs the level detailed in all logs")
    views = [by] if by else ["block", "op"] if has_ops else ["layer"]
    whole = {
        p: _ratio([[_whole_step(t, p) for t in g] for g in groups], len(phases)) for p in phases
    }
    parts = [_part(groups, view, p) for p in phases for view in views if view != "phase"]
    first = compute_settings(before[0], after[0], phases)
    first.title = answer(whole, parts)
    notes = machine_notes([(t.session.path, t) for t in every])
    first.notes = [*notes, *first.notes, *dict.fromkeys(n for t in every for n in t.notes)]
    return Diff([first, _whole(whole, groups), *(part for part in parts if part.rows)], whole)


def _whole(ratios: dict[str, Ratio], groups: Sequence[Sequence[StepTimes]]) -> Report:
    counts = [len(group) for group in groups]
    figures: Figures = {"logs of A": (counts[0], "count"), "logs of B": (counts[1], "count")}
    notes = [
        f"A is {counts[0]} logs, B is {counts[1]}: geometric means of their medians. The interval"
        " is that of the difference between processes, for the whole table at once."
    ]
    rows = [row(p, ratio) for p, ratio in ratios.items()]
    return Report("Steps, median time", columns("Phase"), rows, notes, figures=figures)


def _whole_step(times: StepTimes, phase: str) -> float:
    return float(np.median(times.whole_steps(phase)))


def _ratio(sides: Sequence[Sequence[float]], n_family: int) -> Ratio:
    return compare_groups(sides[0], sides[1], n_family)


def _part(groups: Sequence[Sequence[StepTimes]], by: str, phase: str) -> Report:
    found = [[_medians(times, by, phase) for times in group] for group in groups]
    keys = [
        key
        for key in dict.fromkeys(key for group in found for of in group for key in of)
        if all(any(key in of for of in group) for group in found)
    ]
    ratios = {
        key: _ratio([[of.get(key, np.nan) for of in group] for group in found], len(keys))
        for key in keys
    }
    if by == "layer":
        keys.sort(key=lambda key: int(key))
    else:
        keys.sort(key=lambda key: -max(ratios[key].a, ratios[key].b))
    rows: list[list[Cell]] = [row(key, ratios[key]) for key in keys]
    unit = columns(by.capitalize(), "layer" if by == "layer" else "text")
    return Report(f"{phase.capitalize()} by {by}, median of a step", unit, rows)


def _medians(times: StepTimes, by: str, phase: str) -> Medians:
    selected = times.steps["phase"] == phase
    table: dict[str | int, NDArray[np.float64]]
    if by == "layer":
        table = {int(str(key)): values for key, values in times.by_layer().items()}
    else:
        names: dict[str | int, int] = {}
        of_kernel = {}
        for plan in times.plans:
            kernels = times.session.kernels(plan)
            keys = kernels.block if by == "block" else kernels.label
            numbers = [names.setdefault(key, len(names)) for key in keys]
            of_kernel[plan] = np.array(numbers, np.int64)
        by_unit = times.by_unit(of_kernel, len(names))
        table = {key: by_unit[n] for key, n in names.items()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # of rows without a step in this phase
        medians = {key: float(np.nanmedian(values[selected])) for key, values in table.items()}
    return {key: value for key, value in medians.items() if not np.isnan(value)}
