"""Joins the clock of another process with a log's, by the commands that one sent to the other.

Invariant: the truth lies within the stated uncertainty, however long a command takes in each
direction, if the clocks keep their rates: within a window their ratio may wander by WANDER. Nothing
arrives before it is sent. So the server's clock shows at most `arrived` when the client's shows
`sent`, and at least `done` when the client's shows `answered`. In each window the lines that pass
between all of these bounds are a polygon, which shows where the line may be at the window's ends.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from llamacpp_instr.log.session import Int64

WINDOW_NS, WINDOW_REPLIES = 2_000_000_000, 64
"""the minimum duration of a window, and its minimum number of replies"""
WINDOWS = 2000
"""about how many a long session has; they take a second to compute"""
IDLE_NS = 1_000_000_000
"""a longer time without a command ends a window: nothing is known of the clocks then"""
MAX_DRIFT = 2e-3
"""of two clocks; NTP changes the rate of each by at most 500 ppm, and a crystal has some 100 ppm"""
WANDER = 2e-7
"""by how much the ratio of the rates may change within a window"""
PIECES = 8
"""of a window: lines cross in its middle, so the clock is known better there than at its ends"""
ROUNDING = 1.0
"""ns that the difference of two times lacks at most, since clocks are read in whole ns"""
_FAR = float(1 << 50)
"""ns; farther than any line is from the bounds of its window"""

Float64 = NDArray[np.float64]


class Exchanges(NamedTuple):
    """Commands in the order in which they were sent, with the times of both sides in ns."""

    sent: Int64
    """client: the first byte is about to be sent"""
    arrived: Int64
    """server: the first byte has arrived"""
    done: Int64
    """server: the work is done, and the reply not yet begun"""
    answered: Int64
    """client: the last byte of the reply has arrived; negative for a command without a reply"""

    def part(self, rows: Any) -> Exchanges:
        """The exchanges that a mask, an index or a slice selects."""
        return Exchanges(*(column[rows] for column in self))


class Clock:
    """The clock of a server relative to that of its client, as pieces of lines. Times are in ns."""

    def __init__(self, ends: Int64, offsets: Int64, uncertainty: Int64) -> None:
        """`ends` and `offsets`, (windows, 2), are the client's times at the ends of each window,
        and the server's time minus them."""
        self._ends, self._offsets, self._uncertainty = ends, offsets, uncertainty

    @property
    def offset(self) -> int:
        """The server's time minus the client's, at the first exchange."""
        return int(self._offsets[0, 0])

    @property
    def drift(self) -> float:
        """How much faster the server's clock runs, from the first exchange to the last; 40e-6 is
        40 ppm."""
        return float(self._offsets[-1, 1] - self._offsets[0, 0]) / max(self.passed, 1)

    @property
    def passed(self) -> int:
        """From the first exchange to the last."""
        return int(self._ends[-1, 1] - self._ends[0, 0])

    @property
    def uncertainty(self) -> int:
        """The largest of all windows."""
        return int(self._uncertainty.max())

    @property
    def usual_uncertainty(self) -> int:
        """The median of all windows."""
        return int(np.median(self._uncertainty))

    def uncertainty_at(self, server: Int64) -> Int64:
        """By how much the client's time of each of the server's times may be wrong."""
        return self._uncertainty[self._windows(server)]

    def to_client(self, server: Int64) -> Int64:
        """The client's time at each of the server's times. Their order is kept, except that a
        negative one, which is no time, becomes -1."""
        at = self._windows(server)
        begin, first, last = self._ends[at, 0], self._offsets[at, 0], self._offsets[at, 1]
        rate = (last - first) / np.maximum(self._ends[at, 1] - begin, 1)
        passed = server - begin - first
        client: Int64 = begin + passed - np.rint(passed * (rate / (1 + rate))).astype(np.int64)
        return np.where(server < 0, -1, client)

    def _windows(self, server: Int64) -> Int64:
        begins = (self._ends + self._offsets)[1:, 0]
        found: Int64 = np.searchsorted(begins, server, side="right")
        return found


def join_clocks(exchanges: Exchanges) -> Clock | None:
    """The server's clock relative to the client's; None if by every such clock something arrives
    before it is sent, or if no command has a reply."""
    has_reply = exchanges.answered >= 0
    if not has_reply.any():
        return None
    found: list[_Window] = []
    for window in _windows(exchanges, has_reply):
        if (fitted := _fitted(window)) is None:
            return None
        found += fitted
    ends = np.array([[window.begin, window.end] for window in found])
    base = found[0].base
    low, high = (
        np.array([getattr(window, name) + (window.base - base) for window in found])
        for name in ("low", "high")
    )
    # where two windows meet, the truth is what both allow
    least = np.maximum(low[:-1, 1], low[1:, 0])
    most = np.minimum(high[:-1, 1], high[1:, 0])
    agree = (ends[:-1, 1] == ends[1:, 0]) & (least <= most)
    for of, shared in ((low, least), (high, most)):
        of[:-1, 1] = np.where(agree, shared, of[:-1, 1])
        of[1:, 0] = np.where(agree, shared, of[1:, 0])
    slack = np.array([window.slack for window in found])
    uncertainty = ((high - low) / 2).max(axis=1) + 2 * slack + ROUNDING
    # a slow clock takes longer to pass the same time
    uncertainty /= 1 - MAX_DRIFT
    offsets = base + np.rint((low + high) / 2).astype(np.int64)
    return Clock(ends, offsets, np.ceil(uncertainty).astype(np.int64))


class _Window(NamedTuple):
    """A piece of a window, in which the clock is one line."""

    begin: int
    end: int
    base: int
    """the offset from which `low` and `high` count"""
    low: Float64
    """(2,): the least offset at `begin` and at `end`"""
    high: Float64
    slack: float
    """by which the offset may leave its line"""


class _Part(NamedTuple):
    """The exchanges of a window, and its ends on the client's clock."""

    exchanges: Exchanges
    begin: int
    end: int


def _windows(exchanges: Exchanges, has_reply: NDArray[np.bool_]) -> Iterator[_Part]:
    """Successive exchanges, at least WINDOW_NS long and with WINDOW_REPLIES replies, unless nothing
    was sent before or after them for IDLE_NS; the last ones before such a pause belong to the
    previous window if they are fewer. Each window has a reply."""
    sent, n = exchanges.sent, len(exchanges.sent)
    least = max(WINDOW_NS, int(sent[-1] - sent[0]) // WINDOWS)
    replies = np.flatnonzero(has_reply)
    latest = np.maximum.accumulate(np.maximum(sent, exchanges.answered))
    idle = np.flatnonzero(sent[1:] - latest[:-1] > IDLE_NS) + 1
    first = 0
    while first < n:
        begin = int(sent[first])
        at = int(np.searchsorted(replies, first))
        # where nothing was sent for a time, and where no reply follows
        last = int(next(iter(idle[idle > replies[at]]), n))
        if last > replies[-1]:
            last = n
        enough = (
            int(replies[at + WINDOW_REPLIES - 1]) + 1 if at + WINDOW_REPLIES <= len(replies) else n
        )
        end = max(int(np.searchsorted(sent, begin + least)), enough)
        rest = int(np.searchsorted(replies, min(end, last))) + WINDOW_REPLIES
        of_last = int(np.searchsorted(replies, last))
        if end >= last or rest > of_last or sent[last - 1] - sent[end] < least:
            end = last
        part = exchanges.part(slice(first, end))
        yield _Part(part, begin, int(sent[end]) if end < last else _last(part, begin))
        first = end


def _last(of: Exchanges, begin: int) -> int:
    """A time on the client's clock after all that either side did since `begin`."""
    replies = of.answered >= 0
    ahead = (of.done - of.answered)[replies].max()
    last = int(max(of.sent.max(), of.answered.max(), of.done.max() - ahead))
    return last + int(MAX_DRIFT * (last - begin)) + 1


def _fitted(part: _Part) -> list[_Window] | None:
    """The pieces of the window; those of its halves, if no line fits all of it; None if no line
    fits even a single reply."""
    if (window := _pieces(part)) is not None:
        return window
    exchanges = part.exchanges
    replies = np.flatnonzero(exchanges.answered >= 0)
    if len(replies) < 2:
        return None
    half = int(replies[len(replies) // 2])
    middle = int(exchanges.sent[half])
    found: list[_Window] = []
    for of in (
        _Part(exchanges.part(slice(None, half)), part.begin, middle),
        _Part(exchanges.part(slice(half, None)), middle, part.end),
    ):
        if (fitted := _fitted(of)) is None:
            return None
        found += fitted
    return found


def _pieces(part: _Part) -> list[_Window] | None:
    """Where the lines are that pass between all bounds of a window; None if there are none."""
    exchanges, begin, end = part
    replies = exchanges.answered >= 0
    answered, done = exchanges.answered[replies], exchanges.done[replies]
    upper = exchanges.arrived - exchanges.sent
    lower = done - answered
    base = int(lower.max())
    span = max(end - begin, 1)
    slack = WANDER * span / 4
    # (offset at begin, offset at end) @ weights <= bounds
    shares = np.concatenate([exchanges.sent - begin, answered - begin]) / span
    signs = np.repeat([1.0, -1.0], [len(upper), len(lower)])
    weights = np.stack([signs * (1 - shares), signs * shares])
    bounds = np.concatenate([upper - base, base - lower]) + slack + ROUNDING
    drift = MAX_DRIFT * span
    polygon = np.array([
        [-_FAR - drift, -_FAR], [-_FAR, -_FAR - drift], [_FAR + drift, _FAR], [_FAR, _FAR + drift],
    ])  # fmt: skip
    while True:
        excess = polygon @ weights - bounds
        worst = int(np.argmax(excess.max(axis=0)))
        if excess[:, worst].max() <= 0.5:
            break
        polygon = _clipped(polygon, excess[:, worst])
        if not len(polygon):
            return None
    shares = np.linspace(0, 1, PIECES + 1 if span > WINDOW_NS >> 10 else 2)
    at = polygon @ np.stack([1 - shares, shares])
    low, high = at.min(axis=0) - slack, at.max(axis=0) + slack
    ends = (begin + np.rint(shares * span).astype(np.int64)).tolist()
    return [
        _Window(ends[i], ends[i + 1], base, low[i : i + 2], high[i : i + 2], slack)
        for i in range(len(ends) - 1)
    ]


def _clipped(polygon: Float64, excess: Float64) -> Float64:
    """The part of a convex polygon with an excess of at most 0; `excess` is that of each corner."""
    found: list[Float64] = []
    for i, corner in enumerate(polygon):
        before = excess[i - 1]
        if (before > 0) != (excess[i] > 0):
            found.append(
                polygon[i - 1] + (corner - polygon[i - 1]) * (before / (before - excess[i]))
            )
        if excess[i] <= 0:
            found.append(corner)
    return np.array(found).reshape(-1, 2)
