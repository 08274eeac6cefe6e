"""One model compared with another: bytes, time and error in one row, by weight and by group.

Invariant: a row compares the same weights on both sides; a figure that one side lacks is None.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from llamacpp_instr.base.errors import UsageError
from llamacpp_instr.converters.analyses.compare.candidate import Candidate, bits_per_weight
from llamacpp_instr.converters.analyses.compare.op_times import (
    PhaseUses,
    Use,
    UseTimes,
    compute_use_times,
    median_of_sessions,
)
from llamacpp_instr.converters.analyses.noise import Ratio, compare
from llamacpp_instr.converters.analyses.step_times import took_turns
from llamacpp_instr.converters.analyses.stored_weights import StoredTensor, types_of
from llamacpp_instr.log.steps import PHASES


@dataclass(frozen=True)
class Side:
    """The figures of one model for the weights of a row."""

    types: str
    n_bytes: int
    bits_per_weight: float
    sqnr_db: float | None
    """infinite if the weights equal the reference; None if it was not computed"""


@dataclass(frozen=True)
class Row:
    """Some weights, or one weight and one op that reads it, on both sides."""

    name: str
    layer: int
    a: Side
    b: Side
    times: Mapping[str, UseTimes]
    """by phase"""

    @property
    def change(self) -> float:
        """The difference of the bytes, B - A, as a share of A's."""
        return self.b.n_bytes / self.a.n_bytes - 1 if self.a.n_bytes else 0.0


class Pair:
    """Two candidates and the weights that both have."""

    def __init__(self, a: Candidate, b: Candidate) -> None:
        self.a, self.b = a, b
        self.names = [name for name in a.weights if name in b.weights]
        self.only = [
            (of.name, [name for name in of.weights if name not in other.weights])
            for of, other in ((a, b), (b, a))
        ]
        self.in_turns = took_turns(a.times, b.times)
        """whether the runs of both are pairs"""
        self.disturbed = self.in_turns and any(of.taken for of in (*a.times, *b.times))
        """whether the times of whole steps say nothing, because other processes took them"""
        self.phases: dict[str, tuple[PhaseUses, PhaseUses]] = {}
        for phase in PHASES:
            if phase in a.phases() & b.phases():
                self.phases[phase] = PhaseUses(a.times, phase), PhaseUses(b.times, phase)

    def check(self) -> None:
        """Raises UsageError unless both have weights in common, with equal shapes."""
        what = f"{self.a.name} and {self.b.name} are not versions of the same model"
        if not self.names:
            raise UsageError(f"{what}: they have no tensor in common")
        for name in self.names:
            a, b = ([n for n in of.weights[name].ne if n > 1] for of in (self.a, self.b))
            if a != b:
                raise UsageError(f"{what}: {name} has the shape {a} in one, {b} in the other")

    def tensors(self) -> list[Row]:
        """A row for each weight, or for each op if several ops read a weight."""
        groups: list[tuple[str, list[str], list[Use]]] = []
        for name in self.names:
            uses = self._uses({name})
            several = len({use.op for use in uses}) > 1
            if not several:
                groups.append((short(name), [name], uses))
            else:
                groups += [(f"{short(name)} {use.op}", [name], [use]) for use in uses]
        return self._rows(groups)

    def by(self, key: Callable[[StoredTensor], str | int]) -> list[Row]:
        """A row for all weights of each role, or of each layer, in the order of the file."""
        members: dict[str | int, list[str]] = {}
        for name in self.names:
            members.setdefault(key(self.a.weights[name]), []).append(name)
        return self._rows(
            [(str(of), names, self._uses(set(names))) for of, names in members.items()]
        )

    def whole(self) -> Row:
        """A row for all weights that both have."""
        (row,) = self._rows([("all weights", self.names, self._uses(set(self.names)))])
        return row

    def step_ratio(self, phase: str) -> Ratio:
        """The ratio of whole steps, as their caller saw them. If others took the time: of their CPU
        times if they last long enough for those, else of their kernels."""
        sides = self.a.times, self.b.times
        by_cpu = all(of.last_intervals(phase) for sessions in sides for of in sessions)
        medians = []
        for sessions, uses in zip(sides, self.phases[phase], strict=True):
            if not self.disturbed:
                whole = np.concatenate([of.whole_steps(phase) for of in sessions])
                medians += uses.medians(whole[None], [1], in_turns=self.in_turns)
            elif by_cpu:
                cpu = [float(np.median(of.cpu_times(phase))) for of in sessions]
                medians.append(median_of_sessions(cpu))
            else:
                medians.append(uses.kernels())
        return compare(medians[0], medians[1], len(self.phases), in_turns=self.in_turns)

    def _uses(self, names: set[str]) -> list[Use]:
        found: dict[Use, None] = {}
        for sides in self.phases.values():
            in_both = (use for use in sides[0].row if use in sides[1].row)
            found |= dict.fromkeys(use for use in in_both if use.weight in names)
        return list(found)

    def _rows(self, groups: Sequence[tuple[str, list[str], list[Use]]]) -> list[Row]:
        timed = {
            phase: compute_use_times(
                *sides,
                [self._ran(sides, uses) for _, _, uses in groups],
                in_turns=self.in_turns,
            )
            for phase, sides in self.phases.items()
        }
        return [
            Row(
                label,
                self.a.weights[names[0]].layer,
                _side(self.a, names),
                _side(self.b, names),
                {phase: times for phase, of in timed.items() if (times := of[i]) is not None},
            )
            for i, (label, names, _) in enumerate(groups)
        ]

    @staticmethod
    def _ran(sides: tuple[PhaseUses, PhaseUses], uses: Sequence[Use]) -> list[Use]:
        """The uses that ran in this phase: a prefill without outputs reads no output matrix."""
        return [use for use in uses if all(use in side.row for side in sides)]


def short(name: str) -> str:
    """A weight's name without `.weight`."""
    return name.removesuffix(".weight")


def _side(of: Candidate, names: Sequence[str]) -> Side:
    weights = [of.weights[name] for name in names]
    return Side(
        " ".join(types_of(weights)),
        sum(weight.n_bytes for weight in weights),
        bits_per_weight(weights),
        of.sqnr_db(names),
    )


def arrow(a: str, b: str) -> str:
    """`Q8_0 → Q4_K`, or one of them if both are equal."""
    return a if a == b else f"{a} → {b}"


def more_or_fewer(change: float) -> str:
    """`47 % fewer bytes`."""
    if change == 0:
        return "same bytes"
    percent = f"{abs(change) * 100:.0f} %" if abs(change) >= 0.01 else f"{abs(change) * 100:.2f} %"
    return f"{percent} {'fewer' if change < 0 else 'more'} bytes"


def faster_or_slower(ratio: Ratio) -> str:
    """`1.70× faster`, or that the difference is within the noise."""
    if ratio.value is None or not ratio.differs:
        return ratio.verdict
    return f"{1 / ratio.value:.2f}× faster" if ratio.value < 1 else f"{ratio.value:.2f}× slower"


def sqnr_words(row: Row) -> str | None:
    """`46.1 → 22.3` in dB. Only B's value if A equals the reference; `∞` if B equals it, too."""
    if row.a.sqnr_db is None or row.b.sqnr_db is None:
        return None
    a, b = (f"{side.sqnr_db:.1f}".replace("inf", "∞") for side in (row.a, row.b))
    return b if a == "∞" else arrow(a, b)
