"""The times of kernels, layers and parts of graphs: a matrix for all computes of one plan.

Invariant: a matrix has a row for each compute, in the order of the log, and a column for each
kernel, layer or part. Numbers are ns, of 4 bytes each if all of a matrix fit into them.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llamacpp_instr.log.schema import Layers, Ops, Splits

Int64 = NDArray[np.int64]
Matrix = NDArray[np.int32] | NDArray[np.int64]


@dataclass(frozen=True)
class Timings:
    """All computes of one plan on one thread, or all that have the same layers or splits."""

    thread: int
    plan: int
    """-1 for layers and splits"""
    label: Int64
    """of each column: layer, split, or the kernel's place in the plan"""
    place: Int64
    """of each row in the log: rows of all timings, sorted by it, are in the order of the log"""
    compute: Int64
    t: Int64
    """when the first gap of each row begins"""
    dur: Matrix
    gap: Matrix | None
    """before each interval; None if each begins when the one before it ends"""
    wait: Matrix | None
    """of `dur`, inside barriers; kernels at `verbose` only"""

    def __len__(self) -> int:
        return len(self.compute)

    def rows(self, selected: NDArray[Any] | Sequence[int]) -> Timings:
        """The computes of these numbers, ascending."""
        chosen = without_copy(selected)
        return replace(
            self,
            place=self.place[chosen],
            compute=self.compute[chosen],
            t=self.t[chosen],
            dur=self.dur[chosen],
            gap=None if self.gap is None else self.gap[chosen],
            wait=None if self.wait is None else self.wait[chosen],
        )

    @property
    def end(self) -> Int64:
        """When each interval ends, absolute."""
        passed = np.cumsum(self.dur, axis=1, dtype=np.int64)
        if self.gap is not None:
            passed += np.cumsum(self.gap, axis=1, dtype=np.int64)
        ends: Int64 = passed + self.t[:, None]
        return ends

    @property
    def begin(self) -> Int64:
        return self.end - self.dur

    @property
    def totals(self) -> Int64:
        """The time in all intervals of each compute."""
        total: Int64 = self.dur.sum(axis=1, dtype=np.int64)
        return total


def without_copy(rows: NDArray[Any] | Sequence[int]) -> Any:
    """An index that selects these rows, ascending, without a copy if they follow each other."""
    if len(rows) and rows[-1] - rows[0] == len(rows) - 1:
        return slice(int(rows[0]), int(rows[-1]) + 1)
    return rows


def in_order(timings: Sequence[Timings]) -> Iterator[tuple[Timings, int]]:
    """Each row in the order of the log: its timings and its number in them."""
    places = (of.place.tolist() for of in timings)
    rows = sorted((place, i, row) for i, of in enumerate(places) for row, place in enumerate(of))
    return ((timings[i], row) for _, i, row in rows)


class TimingsCollector:
    """Collects events of one kind (ops, layers or splits) as `Timings`."""

    def __init__(self) -> None:
        self._n = 0
        self._collected: dict[Any, _Collected] = {}

    def add(self, event: Ops | Layers | Splits) -> None:
        """A whole event (`resolve`)."""
        thread, plan, wait, label = 0, -1, None, None
        if isinstance(event, Ops):
            thread, plan, wait = event.thread, event.plan, event.wait
        else:
            label = tuple(event.layer if isinstance(event, Layers) else event.split)
        key = thread, plan, label, event.gap is None, wait is None
        if (into := self._collected.get(key)) is None:
            into = self._collected[key] = _Collected(len(event.dur))
        into.place.append(self._n)
        into.compute.append(event.compute)
        into.t.append(event.t)
        for numbers, values in ((into.dur, event.dur), (into.gap, event.gap), (into.wait, wait)):
            if values is not None:
                numbers.add(values)
        self._n += 1

    def timings(self) -> list[Timings]:
        """What was collected, by plan in the order of the first computes. Add nothing after it."""
        return [
            Timings(
                thread=thread,
                plan=plan,
                label=np.arange(of.n) if label is None else np.array(label, np.int64),
                place=np.frombuffer(of.place, np.int64),
                compute=np.frombuffer(of.compute, np.int64),
                t=np.frombuffer(of.t, np.int64),
                dur=of.matrix(of.dur),
                gap=None if without_gap else of.matrix(of.gap),
                wait=None if without_wait else of.matrix(of.wait),
            )
            for (thread, plan, label, without_gap, without_wait), of in self._collected.items()
        ]


class _Collected:
    """The columns of one `Timings` that grow."""

    def __init__(self, n: int) -> None:
        self.n = n
        self.place, self.compute, self.t = array("q"), array("q"), array("q")
        self.dur, self.gap, self.wait = _Numbers(), _Numbers(), _Numbers()

    def matrix(self, numbers: _Numbers) -> Matrix:
        of = np.frombuffer(numbers.array, np.int32 if numbers.array.typecode == "i" else np.int64)
        return of.reshape(len(self.compute), self.n)


class _Numbers:
    """Numbers of 4 bytes, or of 8 as soon as one needs them."""

    def __init__(self) -> None:
        self.array = array("i")

    def add(self, values: list[int]) -> None:
        try:
            self.array.fromlist(values)
        except OverflowError:  # then it has none of them
            self.array = array("q", self.array)
            self.array.fromlist(values)
