"""The differences of two groups of sessions, each of a process of its own.

The medians of a group are compared with Welch's t, see `converters.analyses.diff.sides`. Rows are
as in `compute_diff`.
"""

from __future__ import annotations

from collections.abc import Sequence

from converters.analyses.diff.rows import Diff, answer, columns, row
from converters.analyses.diff.sides import Side, part_medians, prepare, step_median
from converters.analyses.machine import machine_notes
from converters.analyses.noise import Ratio, compare
from converters.analyses.settings import ALIKE, compute_settings, unlike_notes
from converters.report.report import Cell, Figures, Report
from llamacpp_instr.errors import UsageError
from llamacpp_instr.log.session import Session


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
    if min(len(before), len(after)) < 2:
        raise UsageError("give at least two logs on each side, to show how much processes differ")
    found = prepare((before, after), by, phase, "groups of logs have")
    a, b = found.sides
    whole = {
        p: compare(step_median(a, p), step_median(b, p), len(found.phases)) for p in found.phases
    }
    parts = [_part(a, b, view, p) for p in found.phases for view in found.views]
    first = compute_settings(before[0], after[0], found.phases)
    first.title = answer(whole, parts)
    notes = machine_notes([(t.session.path, [t.machine]) for t in found.every])
    unlike = unlike_notes([("A", before), ("B", after)])
    alike = [note for note in first.notes if not (unlike and note == ALIKE)]
    first.notes = [*notes, *unlike, *alike, *found.notes]
    steps = _whole(whole, (len(a), len(b)))
    return Diff([first, steps, *(part for part in parts if part.rows)], whole)


def _whole(ratios: dict[str, Ratio], counts: tuple[int, int]) -> Report:
    figures: Figures = {"logs of A": (counts[0], "count"), "logs of B": (counts[1], "count")}
    notes = [
        f"A is {counts[0]} logs, B is {counts[1]}: geometric means of their medians. The interval"
        " is that of the difference between processes, for the whole table at once."
    ]
    rows = [row(p, ratio) for p, ratio in ratios.items()]
    return Report("Steps, median time", columns("Phase"), rows, notes, figures=figures)


def _part(a: Side, b: Side, by: str, phase: str) -> Report:
    of_a, of_b = part_medians(a, by, phase), part_medians(b, by, phase)
    keys = [key for key in of_a if key in of_b]
    ratios = {key: compare(of_a[key], of_b[key], len(keys)) for key in keys}
    if by == "layer":
        keys.sort(key=lambda key: int(key))
    else:
        keys.sort(key=lambda key: -max(ratios[key].a, ratios[key].b))
    rows: list[list[Cell]] = [row(key, ratios[key]) for key in keys]
    unit = columns(by.capitalize(), "layer" if by == "layer" else "text")
    return Report(f"{phase.capitalize()} by {by}, median of a step", unit, rows)
