"""What every comparison of times shows: rows, the answer in the first line, the machine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from converters.analyses.machine import compute_machine
from converters.analyses.noise import Ratio, describe
from converters.analyses.step_times import StepTimes
from converters.report.report import Cell, Column, Report

_OTHERWISE = (
    ("within noise", "no difference beyond the noise"),
    ("too few to tell", "too few steps to tell"),
)


@dataclass(frozen=True)
class Diff:
    """The differences of two sessions; the first report's title is the answer."""

    reports: list[Report]
    steps: dict[str, Ratio]
    """ratio of whole steps as their caller saw them, by phase; compared with a threshold"""

    def slower_by(self, threshold: float) -> list[str]:
        """The phases in which B's steps are slower than A's by more than `threshold` (0.05 is 5 %)
        beyond the noise: the lower end of the interval exceeds 1 + threshold."""
        return [
            phase
            for phase, ratio in self.steps.items()
            if ratio.low is not None and ratio.low > 1 + threshold
        ]


def columns(first: str, unit: Literal["text", "layer"] = "text") -> list[Column]:
    return [
        Column(first, unit),
        Column("A", "ns"),
        Column("B", "ns"),
        Column("B / A", "ratio"),
        Column("from", "ratio"),
        Column("to", "ratio"),
        Column("B is"),
    ]


def row(label: Cell, ratio: Ratio) -> list[Cell]:
    return [label, ratio.a, ratio.b, ratio.value, ratio.low, ratio.high, word(ratio)]


def word(ratio: Ratio) -> str:
    if ratio.low is None:
        return "too few to tell"
    if not ratio.differs:
        return "within noise"
    return "slower" if ratio.low > 1 else "faster"


def machine_notes(sides: Sequence[tuple[str, StepTimes]]) -> list[str]:
    """A sentence for each named side that was recorded on a disturbed machine."""
    found = ((name, compute_machine(times.session, times.steps)) for name, times in sides)
    return [
        f"{name}: {machine.sentence()}. Its noise includes that; better record it again."
        for name, machine in found
        if machine is not None and machine.is_disturbed
    ]


def answer(steps: dict[str, Ratio], parts: Sequence[Report]) -> str:
    """The first line: which phases are faster or slower, with their ratios and intervals."""
    clauses = [text for phase, ratio in steps.items() if (text := describe(ratio, phase))]
    differ = bool(clauses)
    for told, what in _OTHERWISE:
        if phases := [phase for phase, ratio in steps.items() if word(ratio) == told]:
            clauses.append(f"{what} in {' and '.join(phases)}")
    text = "; ".join(clauses)
    if not differ:
        seen = [row for part in parts for row in part.rows if row[-1] in ("slower", "faster")]
        if seen:
            text += f"; {len(seen)} of the parts below differ{'s' * (len(seen) == 1)}"
    return text[0].upper() + text[1:] + "."
