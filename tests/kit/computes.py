"""Timings compute by compute, as the events of a log have them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from numpy.typing import NDArray

from llamacpp_instr.log.session import Timings, in_order


@dataclass(frozen=True)
class OneCompute:
    """The columns of one event."""

    all: Timings
    """of this compute alone"""
    compute: int
    thread: int
    plan: int
    label: NDArray[Any]
    dur: NDArray[Any]
    gap: NDArray[Any] | None
    begin: NDArray[Any]
    end: NDArray[Any]


def one_by_one(timings: Sequence[Timings]) -> list[OneCompute]:
    """In the order of the log."""
    found = []
    for of, row in in_order(timings):
        alone = of.rows([row])
        gap = None if alone.gap is None else alone.gap[0]
        found.append(
            OneCompute(
                alone, int(alone.compute[0]), of.thread, of.plan, of.label, alone.dur[0], gap,
                alone.begin[0], alone.end[0],
            )
        )  # fmt: skip
    return found
