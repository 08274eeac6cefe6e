"""What every comparison of times shows: rows, the answer in the first line, the machine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from llamacpp_instr.converters.analyses.noise import MIN_BLOCKS, Ratio, describe
from llamacpp_instr.converters.analyses.step_times import StepTimes, verb
from llamacpp_instr.report.page import Figure
from llamacpp_instr.report.report import Cell, Column, Report, columns_of

EXCLUDED = "The steps exclude the time that the recorder itself took."
TOO_FEW = f"Fewer than {MIN_BLOCKS} blocks do not show the noise: record with --repeat 11."


@dataclass(frozen=True)
class Diff:
    """The differences of sessions, the last from the first; the first report's title is the
    answer, the second has the times of whole steps."""

    reports: list[Report]
    steps: dict[str, Ratio]
    """ratio of whole steps as their caller saw them, by phase; compared with a threshold"""
    charts: list[Figure] = field(default_factory=list)

    def slower_by(self, threshold: float) -> list[str]:
        """The phases in which the last steps are slower than the first by more than `threshold`
        (0.05 is 5 %) beyond the noise: the lower end of the interval exceeds 1 + threshold."""
        return [
            phase
            for phase, ratio in self.steps.items()
            if ratio.low is not None and ratio.low > 1 + threshold
        ]


def columns(
    first: str, unit: Literal["text", "layer"] = "text", a: str = "A", b: str = "B"
) -> list[Column]:
    return [
        Column(first, unit),
        *columns_of("ns", a, b),
        Column(f"{b} / {a}", "ratio", "ratio"),
        *columns_of("ratio", "from", "to"),
        Column(f"{b} is", key="verdict"),
    ]


def row(label: Cell, ratio: Ratio) -> list[Cell]:
    return [label, ratio.a, ratio.b, ratio.value, ratio.low, ratio.high, ratio.verdict]


def answer(
    steps: dict[str, Ratio],
    parts: Sequence[Report],
    sessions: Sequence[StepTimes],
    more_logs: str | None,
) -> str:
    """The first line: which phases are faster or slower, with their ratios and intervals."""
    text = clauses(steps, sessions, more_logs)
    if not any(ratio.differs for ratio in steps.values()):
        seen = [row for part in parts for row in part.rows if row[-1] in ("slower", "faster")]
        if seen:
            text += f"; {len(seen)} of the parts below differ{'s' * (len(seen) == 1)}"
    return text[0].upper() + text[1:] + "."


def clauses(
    steps: dict[str, Ratio], sessions: Sequence[StepTimes], more_logs: str | None, who: str = "B"
) -> str:
    """What every phase of `who` is: faster or slower, within the noise, or unknown for lack of
    steps, or of as many logs as `more_logs` says."""
    parts = [
        text
        for phase, ratio in steps.items()
        if (text := describe(ratio, verb(phase, sessions), who))
    ]
    few = "steps to tell" if more_logs is None else f"logs to tell ({more_logs})"
    for verdict, what in (
        ("within noise", "no difference beyond the noise"),
        ("too noisy to tell", "too much noise to tell"),
        ("too few to tell", f"too few {few}"),
    ):
        if phases := [phase for phase, ratio in steps.items() if ratio.verdict == verdict]:
            parts.append(f"{what} in {' and '.join(phases)}")
    return "; ".join(parts)
