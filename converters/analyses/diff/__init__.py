"""The differences of two sides: first their settings, then what was faster or slower.

Invariant: differences in the settings come before all figures. A part is called faster or slower
only if the difference exceeds the noise in the logs. A side compared with itself has a ratio of
exactly 1 everywhere. Figures are medians of the steps that count, in ns.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llamacpp_instr.base.terminal import counted
from llamacpp_instr.converters.analyses.diff.align import Unit, align
from llamacpp_instr.converters.analyses.diff.rows import (
    EXCLUDED,
    TOO_FEW,
    Diff,
    answer,
    columns,
    row,
)
from llamacpp_instr.converters.analyses.diff.sides import (
    Samples,
    Sides,
    layer_samples,
    medians,
    prepare,
    step_median,
)
from llamacpp_instr.converters.analyses.noise import Ratio, compare
from llamacpp_instr.converters.analyses.settings import ALIKE, compute_settings
from llamacpp_instr.log.graph.ops import BLOCKS
from llamacpp_instr.log.session import Session
from llamacpp_instr.report.report import Cell, Column, Figures, Report

VIEWS = ("phase", "block", "layer", "op", "tensor")
Float64 = NDArray[np.float64]


def compute_diff(
    before: Sequence[Session],
    after: Sequence[Session],
    by: str | None = None,
    phase: str | None = None,
) -> Diff:
    """The differences of the sessions `after` from those `before`, one or several of each: steps by
    phase, and parts `by` one of VIEWS (default: blocks and ops). Raises UsageError as `prepare`
    does."""
    found = prepare((before, after), by, phase, VIEWS)
    work = _Work(found) if all(times.session.ops for times in found.every) else None
    a, b = found.sides
    whole = {
        p: compare(step_median(a, p), step_median(b, p), len(found.phases), in_turns=found.in_turns)
        for p in found.phases
    }
    # a table of a phase with too few steps is shown only on request
    shown_phases = [p for p in found.phases if phase or whole[p].low is not None]
    parts = [_part_report(found, work, view, p) for p in shown_phases for view in found.views]
    first = _first_report(found)
    few = found.more_logs("AB") if found.several else None
    first.title = answer(whole, parts, found.every, few)
    reports = [first, _step_report(found, whole), *(of for of in parts if of.rows or of.notes)]
    return Diff([*reports, *(_only_reports(found, work) if work else [])], whole)


class _Work:
    """The units of work of both sides, and their ns in each step, (units, steps), by session."""

    def __init__(self, found: Sides) -> None:
        sessions = [[times.session for times in side] for side in found.sides]
        alignment = align(*sessions)
        self.units = alignment.units
        self.ns = [
            [
                times.by_unit(of_kernel, len(self.units))
                for times, of_kernel in zip(side, kernels, strict=True)
            ]
            for side, kernels in zip(found.sides, alignment.of_kernel, strict=True)
        ]

    def rows(self, by: str) -> dict[Hashable, list[int]]:
        """The units of each row; by op and tensor only what both sides do."""
        members: dict[Hashable, list[int]] = defaultdict(list)
        for n, unit in enumerate(self.units):
            if by == "block":
                members[unit.block].append(n)
            elif unit.is_in_both:
                members[unit.label if by == "op" else n].append(n)
        return members

    def samples(
        self, found: Sides, side: int, phase: str, rows: Mapping[Any, Sequence[int]]
    ) -> list[Samples]:
        """Of each session of a side."""
        n_timed = {
            key: sum(len(self.units[n].labels[side]) for n in of) for key, of in rows.items()
        }
        return [
            {key: (_sum(ns[of][:, times.steps["phase"] == phase]), n_timed[key])
             for key, of in rows.items()}
            for times, ns in zip(found.sides[side], self.ns[side], strict=True)
        ]  # fmt: skip


def _sum(rows: Float64) -> Float64:
    return np.where(np.isnan(rows).all(axis=0), np.nan, np.nansum(rows, axis=0))


# --- reports ---


def _first_report(found: Sides) -> Report:
    """The settings, and what is to be known of the logs."""
    sessions = [[times.session for times in side] for side in found.sides]
    first = compute_settings(sessions[0], sessions[1], found.phases)
    machines, unlike = found.record_notes("AB")
    first.notes = [
        *machines,
        *unlike,
        *(note for note in first.notes if not (unlike and note == ALIKE)),
        *found.notes,
    ]
    first.notes += dict.fromkeys(
        f"{session.path} recorded {n} models; their steps and kernels are counted together."
        for of in sessions
        for session in of
        if (n := len(session.models)) > 1
    )
    return first


def _step_report(found: Sides, whole: dict[str, Ratio]) -> Report:
    notes: list[str] = []
    figures: Figures = {}
    if found.several:
        a, b = map(len, found.sides)
        figures = {"logs of A": (a, "count"), "logs of B": (b, "count")}
        notes.append(f"A is {a} logs, B is {b}: geometric means of their medians.")
    else:
        for phase in whole:
            counts = []
            for name, (times,) in zip("AB", found.sides, strict=True):
                n, blocks = len(times.whole_steps(phase)), times.blocks(phase).block
                n_blocks = len(np.unique(blocks))
                figures[f"{phase} steps of {name}"] = (n, "count")
                figures[f"{phase} blocks of {name}"] = (n_blocks, "count")
                counts.append(f"{counted(n, 'step')} in {counted(n_blocks, 'block')} of {name}")
            notes.append(f"{phase}: {', '.join(counts)}.")
        if any(ratio.low is None for ratio in whole.values()):
            notes.append(TOO_FEW)
    notes.append(EXCLUDED)
    interval = found.interval_note("AB")
    notes.append(f'"from" and "to" are the 95 % interval, for the whole table at once. {interval}')
    rows = [row(phase, ratio) for phase, ratio in whole.items()]
    title = "Steps, median time"
    return Report(title, columns("Phase"), rows, notes, figures=figures, key="steps")


def _part_report(found: Sides, work: _Work | None, by: str, phase: str) -> Report:
    """One table of the rows that both sides have, in this phase."""
    a, b = (
        medians(
            side,
            phase,
            [layer_samples(times, phase) for times in side]
            if work is None or by == "layer"
            else work.samples(found, i, phase, work.rows(by)),
        )
        for i, side in enumerate(found.sides)
    )
    keys = [key for key in a if key in b]
    ratios = {key: compare(a[key], b[key], len(keys), in_turns=found.in_turns) for key in keys}
    if by in ("op", "tensor"):
        keys.sort(key=lambda key: -max(ratios[key].a, ratios[key].b))
    elif by == "layer":
        keys.sort(key=lambda key: int(str(key)))
    else:
        keys.sort(key=lambda key: [*BLOCKS, key].index(key))

    def shown(key: Hashable) -> Cell:
        if by == "tensor" and work is not None and isinstance(key, int):
            return _tensor(work.units[key])
        return int(str(key)) if by == "layer" else str(key)

    rows = [row(shown(key), ratios[key]) for key in keys]
    missing = []
    for name, of, other in (("A", a, b), ("B", b, a)):
        lone = [str(shown(key)) for key in of if key not in other]
        if lone and by in ("block", "layer"):
            missing.append(f"Only in {name}: {', '.join(lone)}.")
    headings = columns(by.capitalize(), "layer" if by == "layer" else "text")
    title = f"{phase.capitalize()} by {by}, median of a step"
    return Report(title, headings, rows, missing, key=f"{phase}_by_{by}")


def _tensor(unit: Unit) -> str:
    place = f"blk.{unit.layer}." if unit.layer >= 0 else ""
    return f"{place}{unit.name or unit.block} {unit.label}"


def _only_reports(found: Sides, work: _Work) -> list[Report]:
    """The kernels that only one side runs, the slowest first: their number in a graph, and their
    time in a step of each phase."""
    reports = []
    for i, (name, side) in enumerate(zip("AB", found.sides, strict=True)):
        lone: dict[tuple[str, str, str], list[int]] = defaultdict(list)
        for n, unit in enumerate(work.units):
            if unit.labels[i] and not unit.is_in_both:
                lone[unit.label, unit.block, unit.name].append(n)
        of_phase = [medians(side, p, work.samples(found, i, p, lone)) for p in found.phases]
        rows: list[list[Cell]] = []
        for key, units in lone.items():
            times = [of[key].value if key in of else None for of in of_phase]
            rows.append([*key, len(units), *times])
        rows.sort(key=lambda of: -max((float(ns) for ns in of[4:] if ns is not None), default=0.0))
        if rows:
            headings = [Column("Op"), Column("block"), Column("tensor"), Column("times", "count")]
            headings += [Column(phase, "ns") for phase in found.phases]
            logs = f"{len(side)} logs" if found.several else side[0].session.path
            title = f"Only in {name}, {logs}"
            reports.append(Report(title, headings, rows, key=f"only_in_{name.lower()}"))
    return reports
