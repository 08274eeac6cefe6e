"""Intervals of time, and how much of them lies in others.

Invariant: no interval ends before it begins. All times are in ns.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Int64 = NDArray[np.int64]
Spans = tuple[Int64, Int64]
"""the starts and the ends of intervals"""


def merged(begin: Int64, end: Int64) -> Spans:
    """The union of intervals as disjoint ones, in order."""
    order = np.argsort(begin, kind="stable")
    begin, end = begin[order], end[order]
    reach = np.maximum.accumulate(end) if len(end) else end
    first = np.ones(len(begin), np.bool_)
    first[1:] = begin[1:] > reach[:-1]
    last = np.roll(first, -1)
    return begin[first], reach[last]


class Covered:
    """The time in at least one of some intervals."""

    def __init__(self, spans: Sequence[Spans]) -> None:
        none = np.zeros(0, np.int64)
        begin, end = merged(*(np.concatenate([none, *(of[i] for of in spans)]) for i in (0, 1)))
        self.ns = int((end - begin).sum())
        self._t = np.stack([begin, end], axis=1).ravel()
        before = np.concatenate([[0], np.cumsum(end - begin)])
        self._before = np.stack([before[:-1], before[1:]], axis=1).ravel()

    def within(self, begin: Int64, end: Int64) -> Int64:
        """ns of it in each of these intervals."""
        if not len(self._t):
            return np.zeros(len(begin), np.int64)
        first = self._t[0]
        reach = [np.interp(t - first, self._t - first, self._before) for t in (begin, end)]
        ns: Int64 = (reach[1] - reach[0]).astype(np.int64)
        return ns
