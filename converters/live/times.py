"""The times of requests as histograms, by model and operation.

Upper bounds in seconds are those that OpenTelemetry's semantic conventions for generative AI advise
(https://opentelemetry.io/docs/specs/semconv/gen-ai/gen-ai-metrics/).
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from itertools import accumulate

from llamacpp_instr.log.requests import OPEN, Request

DURATION = (
    0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.56, 5.12, 10.24, 20.48, 40.96, 81.92,
)  # fmt: skip
TO_FIRST = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0,
)  # fmt: skip
BETWEEN = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5)

CANCELLED = "cancelled"
"""the error of a request whose client left"""


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


class Times:
    """A histogram for each combination of labels."""

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self._bounds = bounds
        self._histograms: dict[tuple[str, ...], Histogram] = {}

    def __iter__(self) -> Iterator[tuple[tuple[str, ...], Histogram]]:
        return iter(self._histograms.items())

    def add(self, ns: float, *labels: str) -> None:
        """Count a time in ns."""
        if labels not in self._histograms:
            self._histograms[labels] = Histogram(self._bounds)
        self._histograms[labels].add(ns)


class RequestTimes:
    """The times of requests that have ended; labels are the model and the operation."""

    def __init__(self) -> None:
        self.duration = Times(DURATION)
        """from the arrival to the end; the third label is the error, empty for none"""
        self.queue = Times(DURATION)
        """from the arrival to the first step"""
        self.to_first = Times(TO_FIRST)
        """from the arrival, or the first step, to the first token"""
        self.per_token = Times(BETWEEN)
        """the mean time from a token to the next"""
        self.between = Times(BETWEEN)
        """from each token to the next, also of requests under way; without the operation"""

    def count(self, request: Request, model: str, between: float | None) -> bool:
        """Count a request that has ended, and return whether it counts; `between` is the mean time
        between its tokens, in ns. One without a token counts if a server noted its end. Times of
        tokens are those of requests that were not cancelled."""
        to_first, served = request.to_first_token, request.served
        if served is None and (to_first is None or request.marked_end == OPEN):
            return False
        error = CANCELLED if served and served.end == CANCELLED else ""
        labels = model, served.operation if served else "text_completion"
        self.duration.add(request.total, *labels, error)
        if request.queued is not None and request.first_step >= 0:
            self.queue.add(request.queued, *labels)
        if not error and to_first is not None:
            self.to_first.add(to_first, *labels)
            if between is not None:
                self.per_token.add(between, *labels)
        return True
