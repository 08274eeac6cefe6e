"""The trend of several sides, in order: where the steps changed, and how much in all.

Every side is compared with the first and with the previous one. The intervals of a table hold
simultaneously, by Bonferroni's correction (`converters/analyses/noise.py`): the error of 5 % is
divided by the number of ratios in the table.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from itertools import pairwise

import numpy as np

from llamacpp_instr.converters.analyses import diff
from llamacpp_instr.converters.analyses.noise import Median, Ratio, compare, describe
from llamacpp_instr.converters.analyses.step_times import ALIKE, StepTimes, facts, log_names, verb
from llamacpp_instr.converters.analyses.tables import header
from llamacpp_instr.log.session import Session
from llamacpp_instr.report.plain_charts import Group, bars
from llamacpp_instr.report.report import Cell, Column, Figures, Report


class Trend:
    """The medians of one thing, by side, and their ratios; a table has `n_ratios` ratios."""

    def __init__(self, medians: list[Median], n_ratios: int) -> None:
        self.medians = medians
        self.to_first = [compare(medians[0], median, n_ratios) for median in medians[1:]]
        """of every side but the first"""
        self.to_previous = [compare(a, b, n_ratios) for a, b in pairwise(medians)]
        self.whole = self.to_first[-1]
        """the last side's ratio to the first"""


def compute_trend(
    groups: Sequence[Sequence[Session]], by: str | None = None, phase: str | None = None
) -> diff.Diff:
    """The changes along three or more groups of sessions: either one session in each, or two or
    more, each of a process of its own. Its `steps` are the ratios of the last group to the first.

    Raises UsageError as `Sides` does.
    """
    found = diff.Sides(groups, by, phase)
    # a side's ratio to the first is that to the previous one for the second side
    n_ratios = len(found.phases) * (2 * len(groups) - 3)
    trends = {
        p: Trend([diff.step_median(side, p) for side in found.sides], n_ratios)
        for p in found.phases
    }
    shown_phases = [p for p in found.phases if phase or trends[p].whole.low is not None]
    parts = [_part_report(found, view, p) for p in shown_phases for view in found.views]
    logs = [log_names([times.session.path for times in side]) for side in found.sides]
    reports = [
        _first_report(found, logs, trends),
        _step_report(found, trends, n_ratios),
        *(part for part in parts if part.rows),
    ]
    names = [f"{name}: {of}" for name, of in zip(found.names, logs, strict=True)]
    steps = [Group(p, [of.value for of in trend.medians], "ns") for p, trend in trends.items()]
    whole = {p: trend.whole for p, trend in trends.items()}
    return diff.Diff(reports, whole, [bars("Median step", names, steps)])


# --- reports ---


def _first_report(found: diff.Sides, logs: Sequence[str], trends: dict[str, Trend]) -> Report:
    """The answer, and the logs with the settings that differ."""
    of_side = [dict(facts(side[0].session, found.phases)) for side in found.sides]
    differing = [what for what in of_side[0] if len({of[what] for of in of_side}) > 1]
    rows: list[list[Cell]] = [
        [name, log, *(of[what] for what in differing)]
        for name, log, of in zip(found.names, logs, of_side, strict=True)
    ]
    machines, unlike = found.record_notes
    alike = [] if differing or unlike else [ALIKE]
    notes = [*machines, *alike, *unlike, *found.notes]
    columns = header("side", "log", *differing)
    return Report(_answer(found, trends), columns, rows, notes, key="answer")


def _answer(found: diff.Sides, trends: dict[str, Trend]) -> str:
    """Where it changed, and how much in all."""
    changes = [
        text
        for phase, trend in trends.items()
        for ratio, (before, name) in zip(trend.to_previous, pairwise(found.names), strict=True)
        if (text := describe(ratio, verb(phase, found.every), name, before))
    ]
    steady = [
        phase
        for phase, trend in trends.items()
        if trend.whole.low is not None and not any(ratio.differs for ratio in trend.to_previous)
    ]
    if steady:
        changes.append(
            f"no change beyond the noise from one side to the next in {' and '.join(steady)}"
        )
    where = "; ".join(changes)
    where = f"{where[0].upper()}{where[1:]}. " if where else ""
    ratios = {phase: trend.whole for phase, trend in trends.items()}
    first, *_, last = found.names
    whole = diff.clauses(ratios, found.every, found.few, last)
    return f"{where}From {first} to {last}: {whole}."


def _step_report(found: diff.Sides, trends: dict[str, Trend], n_ratios: int) -> Report:
    rows: list[list[Cell]] = []
    figures: Figures = {}
    for phase, trend in trends.items():
        ratios = zip([None, *trend.to_first], [None, *trend.to_previous], strict=True)
        for name, median, (first, previous) in zip(found.names, trend.medians, ratios, strict=True):
            rows.append([phase, name, median.value, *_cells(first), *_cells(previous)])
            figures[f"{phase} blocks of {name}"] = (median.n_blocks, "count")
    notes = ["The medians are geometric means of those of a side's logs."] * found.several
    if not found.several and any(trend.whole.low is None for trend in trends.values()):
        notes.append(diff.TOO_FEW)
    notes += [
        diff.EXCLUDED,
        '"from" and "to" are the 95 % interval, for the whole table at once: Bonferroni\'s'
        f" correction for {n_ratios} ratios. {found.interval_note}",
    ]
    columns = header(
        "Phase", "side", ("ns", "median step"), ("ratio", "/ first", "first from", "first to"),
        "than first", ("ratio", "/ previous", "previous from", "previous to"), "than previous",
    )  # fmt: skip
    title = "Steps, median time"
    return Report(title, columns, rows, notes, figures=figures, labels=2, key="steps")


def _cells(ratio: Ratio | None) -> list[Cell]:
    return [None] * 4 if ratio is None else [ratio.value, ratio.low, ratio.high, ratio.verdict]


def _part_report(found: diff.Sides, by: str, phase: str) -> Report:
    """A row for each part that all sides have: the last side against the first, and the sides that
    differ from the previous one."""
    of_sides = [
        diff.medians(side, phase, [_samples(times, by, phase) for times in side])
        for side in found.sides
    ]
    keys = [key for key in of_sides[0] if all(key in of for of in of_sides)]
    # the ratios of the rows: one to each previous side, and the last to the first
    n_ratios = len(keys) * len(found.sides)
    trends = {key: Trend([of[key] for of in of_sides], n_ratios) for key in keys}
    if by == "layer":
        keys.sort(key=lambda key: int(str(key)))
    else:
        keys.sort(key=lambda key: -max(median.value for median in trends[key].medians))
    rows = []
    for key in keys:
        changes = [
            f"{name} {ratio.verdict}"
            for name, ratio in zip(found.names[1:], trends[key].to_previous, strict=True)
            if ratio.differs
        ]
        label = int(str(key)) if by == "layer" else str(key)
        rows.append([*diff.ratio_row(label, trends[key].whole), ", ".join(changes) or None])
    columns = diff.ratio_columns(by.capitalize(), by == "layer", found.names[0], found.names[-1])
    title = f"{phase.capitalize()} by {by}, median of a step"
    return Report(title, [*columns, Column("than previous")], rows, key=f"{phase}_by_{by}")


def _samples(times: StepTimes, by: str, phase: str) -> diff.Samples:
    """The parts of a step by one of KEYS."""
    if by == "layer":
        return diff.layer_samples(times, phase)
    names: dict[Hashable, int] = {}
    of_kernel = {}
    for plan in times.plans:
        kernels = times.session.kernels(plan)
        keys = kernels.block if by == "block" else kernels.label
        of_kernel[plan] = np.array([names.setdefault(key, len(names)) for key in keys], np.int64)
    by_unit = times.by_unit(of_kernel, len(names))
    counts = [np.bincount(numbers, minlength=len(names)) for numbers in of_kernel.values()]
    most = np.max(counts, axis=0)
    selected = times.of(phase)
    return {key: (by_unit[n][selected], int(most[n])) for key, n in names.items()}
