"""One lane per request: its text so far and its times.

Invariant: at most KEPT lanes, each with the latest KEPT_TOKENS tokens.
"""

from __future__ import annotations

import codecs
from bisect import bisect_left
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

from llamacpp_instr.log.batches import Part
from llamacpp_instr.log.requests import Request, RequestFinder
from llamacpp_instr.log.schema import Mark, Token

TO_FIRST = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0,
)  # fmt: skip
"""upper bounds in seconds, as OpenTelemetry's semantic conventions for generative AI advise"""
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


KEPT = 320
"""lanes: the latest requests; llama.cpp serves at most 256 sequences of a context at once"""
KEPT_TOKENS = 1000
"""of each lane"""


@dataclass(frozen=True)
class Shown:
    """A token: its text, when it was there and its probability."""

    index: int
    """counts the tokens of the lane"""
    text: str
    t: int
    p: float | None


@dataclass(eq=False)
class Lane:
    """A request as it is shown."""

    number: int
    """counts the lanes"""
    request: Request
    tokens: deque[Shown] = field(default_factory=lambda: deque(maxlen=KEPT_TOKENS))
    n_tokens: int = 0
    n_times: int = 0
    """token times whose gaps were counted"""
    counted: bool = False
    """whether the times of the request were"""
    over: bool = False
    """the application said so, or its sequence serves another request"""
    decode: codecs.IncrementalDecoder = field(
        default_factory=lambda: codecs.getincrementaldecoder("utf-8")("replace"), repr=False
    )
    """a character may need the bytes of several tokens"""

    @property
    def between(self) -> float | None:
        """The mean time from a token to the next, in ns; None with less than two."""
        times = self.request.token_times
        return (times[-1] - times[0]) / (len(times) - 1) if len(times) > 1 else None

    def add(self, token: Token) -> None:
        text = self.decode.decode(bytes.fromhex(token.hex) if token.hex else token.text.encode())
        self.tokens.append(Shown(self.n_tokens, text, token.t + token.dur, token.p))
        self.n_tokens += 1


class LiveLanes:
    """The lanes of a session, from its steps, tokens and marks in the order in which they end."""

    def __init__(self) -> None:
        self.n_requests = 0
        """that were seen"""
        self.to_first = Histogram(TO_FIRST)
        self.per_token = Histogram(BETWEEN)
        """of requests that have ended, the mean time from a token to the next"""
        self.gaps = Histogram(BETWEEN)
        """from each token to the next"""
        self._finder = RequestFinder(self._found)
        self._lanes: dict[int, Lane] = {}
        """by the identity of the request, which the lane keeps alive"""
        self._of_sequence: dict[tuple[int, int], Lane] = {}

    def __iter__(self) -> Iterator[Lane]:
        """In the order in which they began."""
        return iter(list(self._lanes.values()))

    def step(self, number: int, ctx: int, begin: int, end: int, parts: Sequence[Part]) -> None:
        """A step that counts has ended."""
        for request in self._finder.step(number, ctx, begin, end, parts):
            self._count_gaps(self._lane_of(request))

    def token(self, token: Token) -> None:
        """A token was sampled."""
        of = self._finder.token(token.ctx, token.seq, token.step, token.t, token.dur)
        if of is not None:
            lane = self._lane_of(of)
            lane.add(token)
            self._count_gaps(lane)

    def mark(self, begin: Mark, end: Mark) -> None:
        """A mark has ended."""
        seq = end.seq if end.seq >= 0 else begin.seq
        if seq >= 0:
            self._finder.span(seq, begin.t, end.t, begin.name)
            for (_, of), lane in self._of_sequence.items():
                if of == seq and lane.request.marked_end == end.t:
                    self._end(lane)

    def count(self, lane: Lane) -> None:
        """Count the times of a request that has ended; only once, and only if it has tokens."""
        to_first, between = lane.request.to_first_token, lane.between
        if lane.counted or to_first is None:
            return
        lane.counted = True
        self.to_first.add(to_first)
        if between is not None:
            self.per_token.add(between)

    def finish(self) -> None:
        """Nothing follows: all requests have ended."""
        self._finder.finish()

    def _lane_of(self, request: Request) -> Lane:
        lane = self._lanes.get(id(request))
        if lane is None:
            key = request.ctx, request.seq
            if (before := self._of_sequence.get(key)) is not None:
                self._end(before)
            lane = Lane(self.n_requests, request)
            self.n_requests += 1
            self._lanes[id(request)] = self._of_sequence[key] = lane
            if len(self._lanes) > KEPT:
                self._forget()
        return lane

    def _count_gaps(self, lane: Lane) -> None:
        times = lane.request.token_times
        for i in range(max(lane.n_times, 1), len(times)):
            self.gaps.add(times[i] - times[i - 1])
        lane.n_times = len(times)

    def _found(self, request: Request) -> None:
        if (lane := self._lanes.get(id(request))) is not None:
            self._end(lane)

    def _end(self, lane: Lane) -> None:
        lane.over = True
        self.count(lane)

    def _forget(self) -> None:
        """The oldest lane, one that is over if there is one."""
        oldest = next((lane for lane in self._lanes.values() if lane.over), None)
        lane = oldest or next(iter(self._lanes.values()))
        self.count(lane)
        del self._lanes[id(lane.request)]
        key = lane.request.ctx, lane.request.seq
        if self._of_sequence.get(key) is lane:
            del self._of_sequence[key]
