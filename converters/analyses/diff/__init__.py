"""The differences of two sessions: first their settings, then what was faster or slower.

Invariant: differences in the settings come before all figures. A part is called faster or slower
only if the difference exceeds the noise in the logs. A session compared with itself has a ratio of
exactly 1 everywhere. Figures are medians of the steps that count, in ns.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Sequence
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from converters.analyses.diff.align import Alignment, align
from converters.analyses.diff.rows import (
    EXCLUDED,
    OF_ONE_LOG,
    TOO_FEW,
    Diff,
    answer,
    columns,
    row,
)
from converters.analyses.machine import machine_notes
from converters.analyses.noise import Ratio, compare, compute_medians, disturb
from converters.analyses.settings import compute_settings
from converters.analyses.step_times import StepTimes
from converters.report.report import Cell, Column, Figures, Report
from llamacpp_instr.errors import UsageError
from llamacpp_instr.graph.ops import BLOCKS
from llamacpp_instr.log.session import Session
from llamacpp_instr.log.steps import PHASES

By = Literal["phase", "block", "layer", "op", "tensor"]
VIEWS: tuple[By, ...] = ("phase", "block", "layer", "op", "tensor")
DEFAULT_VIEWS: tuple[By, ...] = ("block", "op")

Float64 = NDArray[np.float64]
Samples = dict[Hashable, tuple[Float64, int]]
"""key of a row -> its ns in each step (NaN in steps that lack it), and the number of timed
intervals in each"""


def compute_diff(a: Session, b: Session, by: By | None = None, phase: str | None = None) -> Diff:
    """The differences of B from A: steps by phase, and parts `by` one key (default: blocks and
    ops). Raises UsageError for a perturbed session, and if nothing can be compared."""
    for session in (a, b):
        if session.start.perturbed:
            raise UsageError(
                f"{session.path}: tensor values were read (--stats), so its times must not be"
                " compared; record it without --stats"
            )
    sides = StepTimes(a), StepTimes(b)
    phases = [p for p in PHASES if all(p in s.phases for s in sides) and phase in (None, p)]
    if not phases:
        what = f"{phase} steps" if phase else "steps of one phase"
        raise UsageError(f"{a.path} and {b.path} do not both have {what} that count")
    if by in ("op", "block", "tensor"):
        for session in (a, b):
            if not session.ops:
                raise UsageError(
                    f"{session.path}: no ops were recorded; --by {by} needs the level detailed"
                )
    has_ops = bool(a.ops and b.ops)
    alignment = align(a, b) if has_ops else None
    views: Sequence[By] = [by] if by else DEFAULT_VIEWS if has_ops else ["layer"]
    steps, whole = _phase_report(sides, phases)
    # a table of a phase with too few steps is shown only on request
    told = [p for p in phases if phase or steps[p].low is not None]
    parts = [
        _part_report(sides, alignment, view, p) for p in told for view in views if view != "phase"
    ]
    first = compute_settings(a, b, phases)
    first.title = answer(steps, parts)
    first.notes = [
        *machine_notes([("A", [sides[0].machine]), ("B", [sides[1].machine])]),
        *first.notes,
    ]
    first.notes += dict.fromkeys(note for side in sides for note in side.notes)
    first.notes += dict.fromkeys(
        f"{session.path} recorded {n} models; their steps and kernels are counted together."
        for session in (a, b)
        if (n := len(session.models)) > 1
    )
    reports = [first, whole, *(part for part in parts if part.rows or part.notes)]
    if alignment is not None:
        reports += _only_reports(alignment, sides)
    return Diff(reports, steps)


# --- reports ---


def _phase_report(
    sides: tuple[StepTimes, StepTimes], phases: Sequence[str]
) -> tuple[dict[str, Ratio], Report]:
    ratios: dict[str, Ratio] = {}
    notes = []
    figures: Figures = {}
    for phase in phases:
        a, b = (
            disturb(
                compute_medians(side.whole_steps(phase)[None], side.blocks(phase), [1])[0],
                side.taken,
            )
            for side in sides
        )
        ratios[phase] = compare(a, b, len(phases))
        counts = [int((side.steps["phase"] == phase).sum()) for side in sides]
        notes.append(
            f"{phase}: {counts[0]:,} steps in {a.n_blocks} blocks of A,"
            f" {counts[1]:,} in {b.n_blocks} of B."
        )
        for side, count, of in zip("AB", counts, (a, b), strict=True):
            figures[f"{phase} steps of {side}"] = (count, "count")
            figures[f"{phase} blocks of {side}"] = (of.n_blocks, "count")
    if any(ratio.low is None for ratio in ratios.values()):
        notes.append(TOO_FEW)
    notes.append(EXCLUDED)
    notes.append(
        f'"from" and "to" are the 95 % interval, for the whole table at once. {OF_ONE_LOG}'
    )
    rows = [row(phase, ratio) for phase, ratio in ratios.items()]
    report = Report("Steps, median time", columns("Phase"), rows, notes, figures=figures)
    return ratios, report


def _part_report(
    sides: tuple[StepTimes, StepTimes], alignment: Alignment | None, by: By, phase: str
) -> Report:
    """One table of the rows that both sides have, in this phase."""
    a, b = (_samples(side, i, alignment, by, phase) for i, side in enumerate(sides))
    keys = [key for key in a if key in b]
    table = f"{phase.capitalize()} by {by}, median of a step"
    headings = columns(by.capitalize(), "layer" if by == "layer" else "text")
    if not keys:
        return Report(table, headings, [])
    medians = [
        [
            disturb(median, side.taken)
            for median in compute_medians(
                np.array([of[key][0] for key in keys]),
                side.blocks(phase),
                [of[key][1] for key in keys],
            )
        ]
        for of, side in zip((a, b), sides, strict=True)
    ]
    ratios = {
        key: compare(of_a, of_b, len(keys)) for key, of_a, of_b in zip(keys, *medians, strict=True)
    }
    if by in ("op", "tensor"):
        keys.sort(key=lambda key: -max(ratios[key].a, ratios[key].b))
    elif by == "layer":
        keys.sort(key=lambda key: int(str(key)))
    else:
        keys.sort(key=lambda key: [*BLOCKS, key].index(key))
    rows = [row(_shown_key(key, by, alignment), ratios[key]) for key in keys]
    missing = []
    for name, of, other in (("A", a, b), ("B", b, a)):
        lone = [str(_shown_key(key, by, alignment)) for key in of if key not in other]
        if lone and by in ("block", "layer"):
            missing.append(f"Only in {name}: {', '.join(lone)}.")
    return Report(table, headings, rows, missing)


def _samples(side: StepTimes, i: int, alignment: Alignment | None, by: By, phase: str) -> Samples:
    """The rows of one side in a phase."""
    selected = side.steps["phase"] == phase
    if by == "layer":
        found = {key: (row, 1) for key, row in side.by_layer().items()}
    else:
        assert alignment is not None
        units = alignment.units
        by_unit = side.by_unit(alignment.of_kernel[i], len(units))
        members: dict[Hashable, list[int]] = defaultdict(list)
        for n, unit in enumerate(units):
            if by == "block":
                members[unit.block].append(n)
            elif unit.is_in_both:
                members[n if by == "tensor" else unit.label].append(n)
        found = {
            key: (_sum(by_unit[rows]), sum(len(units[n].labels[i]) for n in rows))
            for key, rows in members.items()
        }
    chosen = {key: (row[selected], n) for key, (row, n) in found.items()}
    return {key: (row, n) for key, (row, n) in chosen.items() if not np.isnan(row).all()}


def _sum(rows: Float64) -> Float64:
    return np.where(np.isnan(rows).all(axis=0), np.nan, np.nansum(rows, axis=0))


def _shown_key(key: Hashable, by: By, alignment: Alignment | None) -> Cell:
    if by == "layer":
        return int(str(key))
    if by == "tensor" and isinstance(key, int) and alignment is not None:
        unit = alignment.units[key]
        place = f"blk.{unit.layer}." if unit.layer >= 0 else ""
        return f"{place}{unit.name or unit.block} {unit.label}"
    return str(key)


def _only_reports(alignment: Alignment, sides: tuple[StepTimes, StepTimes]) -> list[Report]:
    """The kernels that only one side runs, with their number in a graph."""
    reports = []
    for i, (name, side) in enumerate(zip("AB", sides, strict=True)):
        found: dict[tuple[str, str, str], int] = defaultdict(int)
        for unit in alignment.units:
            if not unit.is_in_both and unit.labels[i]:
                found[unit.label, unit.block, unit.name] += 1
        rows: list[list[Cell]] = [[*key, count] for key, count in found.items()]
        if rows:
            columns = [Column("Op"), Column("block"), Column("tensor"), Column("times", "count")]
            reports.append(Report(f"Only in {name}, {side.session.path}", columns, rows))
    return reports
