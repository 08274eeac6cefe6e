"""The trend of several sides, in order: where the steps changed, and how much in all.

Every side is compared with the first and with the one before it. The intervals of a table hold
simultaneously, by Bonferroni's correction (`converters/analyses/noise.py`): the error of 5 % is
divided by the number of ratios in the table.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain, count, islice, pairwise, product
from string import ascii_uppercase

from llamacpp_instr.converters.analyses.diff.rows import (
    EXCLUDED,
    TOO_FEW,
    Diff,
    clauses,
    columns,
    row,
)
from llamacpp_instr.converters.analyses.diff.sides import (
    Side,
    Sides,
    part_medians,
    prepare,
    step_median,
)
from llamacpp_instr.converters.analyses.noise import Median, Ratio, compare, describe
from llamacpp_instr.converters.analyses.settings import ALIKE, facts, log_names
from llamacpp_instr.converters.analyses.step_times import verb
from llamacpp_instr.log.session import Session
from llamacpp_instr.report.page import Figure
from llamacpp_instr.report.plain_charts import Group, bars
from llamacpp_instr.report.report import Cell, Column, Figures, Report, columns_of

STEPS = [
    *columns_of("text", "Phase", "side"),
    Column("median step", "ns"),
    *columns_of("ratio", "/ first", "first from", "first to"),
    Column("than first"),
    *columns_of("ratio", "/ previous", "previous from", "previous to"),
    Column("than previous"),
]


@dataclass(frozen=True)
class Trend:
    """The medians of one thing, by side, and their ratios."""

    medians: list[Median]
    to_first: list[Ratio]
    """of every side but the first"""
    to_previous: list[Ratio]

    @property
    def whole(self) -> Ratio:
        """The last side's ratio to the first."""
        return self.to_first[-1]


def compute_trend(
    groups: Sequence[Sequence[Session]], by: str | None = None, phase: str | None = None
) -> Diff:
    """The changes along three or more groups of sessions: either one session in each, or two or
    more, each of a process of its own. Its `steps` are the ratios of the last group to the first.

    Raises UsageError as `prepare` does.
    """
    found = prepare(groups, by, phase)
    names = letters(len(groups))
    # a side's ratio to the first is that to the previous one for the second side
    n_ratios = len(found.phases) * (2 * len(groups) - 3)
    trends = {
        p: _trend([step_median(side, p) for side in found.sides], n_ratios) for p in found.phases
    }
    shown_phases = [p for p in found.phases if phase or trends[p].whole.low is not None]
    parts = [_part_report(found, names, view, p) for p in shown_phases for view in found.views]
    reports = [
        _first_report(found, names, trends),
        _step_report(found, names, trends),
        *(part for part in parts if part.rows),
    ]
    chart = _chart(found, names, trends)
    return Diff(reports, {p: trend.whole for p, trend in trends.items()}, [chart])


def letters(n: int) -> list[str]:
    """The names of n sides: A to Z, then AA, AB and so on."""
    words = chain.from_iterable(product(ascii_uppercase, repeat=length) for length in count(1))
    return ["".join(word) for word in islice(words, n)]


def _trend(medians: list[Median], n_ratios: int) -> Trend:
    return Trend(
        medians,
        [compare(medians[0], median, n_ratios) for median in medians[1:]],
        [compare(a, b, n_ratios) for a, b in pairwise(medians)],
    )


# --- reports ---


def _first_report(found: Sides, names: Sequence[str], trends: dict[str, Trend]) -> Report:
    """The answer, and the logs with the settings that differ."""
    of_side = [dict(facts(side[0].session, found.phases)) for side in found.sides]
    differing = [what for what in of_side[0] if len({of[what] for of in of_side}) > 1]
    rows: list[list[Cell]] = [
        [name, _logs(side), *(of[what] for what in differing)]
        for name, side, of in zip(names, found.sides, of_side, strict=True)
    ]
    notes, unlike = found.record_notes(names)
    if not differing and not unlike:
        notes.append(ALIKE)
    notes += unlike
    notes += found.notes
    headings = [Column("side"), Column("log"), *map(Column, differing)]
    return Report(_answer(found, names, trends), headings, rows, notes, key="answer")


def _logs(side: Side) -> str:
    return log_names([times.session.path for times in side])


def _answer(found: Sides, names: Sequence[str], trends: dict[str, Trend]) -> str:
    """Where it changed, and how much in all."""
    changes = [
        text
        for phase, trend in trends.items()
        for ratio, (before, name) in zip(trend.to_previous, pairwise(names), strict=True)
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
    few = found.more_logs(names) if found.several else None
    ratios = {phase: trend.whole for phase, trend in trends.items()}
    whole = clauses(ratios, found.every, few, names[-1])
    return f"{where}From {names[0]} to {names[-1]}: {whole}."


def _step_report(found: Sides, names: Sequence[str], trends: dict[str, Trend]) -> Report:
    """A row for each phase and side."""
    rows: list[list[Cell]] = []
    figures: Figures = {}
    for phase, trend in trends.items():
        ratios = zip([None, *trend.to_first], [None, *trend.to_previous], strict=True)
        for name, median, (first, previous) in zip(names, trend.medians, ratios, strict=True):
            rows.append([phase, name, median.value, *_cells(first), *_cells(previous)])
            figures[f"{phase} blocks of {name}"] = (median.n_blocks, "count")
    notes = ["The medians are geometric means of those of a side's logs."] * found.several
    if not found.several and any(trend.whole.low is None for trend in trends.values()):
        notes.append(TOO_FEW)
    notes.append(EXCLUDED)
    n_ratios = len(trends) * (2 * len(names) - 3)
    notes.append(
        '"from" and "to" are the 95 % interval, for the whole table at once: Bonferroni\'s'
        f" correction for {n_ratios} ratios. {found.interval_note(names)}"
    )
    title = "Steps, median time"
    return Report(title, STEPS, rows, notes, figures=figures, labels=2, key="steps")


def _cells(ratio: Ratio | None) -> list[Cell]:
    return [None] * 4 if ratio is None else [ratio.value, ratio.low, ratio.high, ratio.verdict]


def _part_report(found: Sides, names: Sequence[str], by: str, phase: str) -> Report:
    """A row for each part that all sides have: the last side against the first, and the sides that
    differ from the one before them."""
    medians = [part_medians(side, by, phase) for side in found.sides]
    keys = [key for key in medians[0] if all(key in of for of in medians)]
    # the ratios of the rows: one to each previous side, and the last to the first
    n_ratios = len(keys) * len(names)
    trends = {key: _trend([of[key] for of in medians], n_ratios) for key in keys}
    if by == "layer":
        keys.sort(key=lambda key: int(str(key)))
    else:
        keys.sort(key=lambda key: -max(median.value for median in trends[key].medians))
    rows = []
    for key in keys:
        changes = [
            f"{name} {ratio.verdict}"
            for name, ratio in zip(names[1:], trends[key].to_previous, strict=True)
            if ratio.differs
        ]
        label = int(str(key)) if by == "layer" else str(key)
        rows.append([*row(label, trends[key].whole), ", ".join(changes) or None])
    headings = columns(by.capitalize(), "layer" if by == "layer" else "text", names[0], names[-1])
    headings.append(Column("than previous"))
    title = f"{phase.capitalize()} by {by}, median of a step"
    return Report(title, headings, rows, key=f"{phase}_by_{by}")


def _chart(found: Sides, names: Sequence[str], trends: dict[str, Trend]) -> Figure:
    logs = [f"{name}: {_logs(side)}" for name, side in zip(names, found.sides, strict=True)]
    groups = [
        Group(phase, [median.value for median in trend.medians], "ns")
        for phase, trend in trends.items()
    ]
    return bars("Median step", logs, groups)
