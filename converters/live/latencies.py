"""Histograms of waiting times.

The bounds are those that OpenTelemetry's semantic conventions for generative AI advise.
"""

from __future__ import annotations

from bisect import bisect_left
from itertools import accumulate

TO_FIRST = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0,
)  # fmt: skip
"""upper bounds in seconds"""
BETWEEN = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5)


class Histogram:
    """Counts of times by their upper bounds, in seconds."""

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.sum = 0.0
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)

    def add(self, ns: float) -> None:
        """Count a time in ns."""
        seconds = ns / 1e9
        self.sum += seconds
        self._counts[bisect_left(self._bounds, seconds)] += 1

    def cumulative(self) -> list[tuple[str, float]]:
        """Prometheus's buckets: the upper bound, and how many times are at most that."""
        bounds = [*map(str, self._bounds), "+Inf"]
        return list(zip(bounds, map(float, accumulate(self._counts)), strict=True))
