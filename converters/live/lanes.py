"""One lane for each request of a live session, with its text so far and its times.

Invariant: what is kept is bounded: LANES lanes, each with the latest KEPT_TOKENS tokens. All times
are in ns.
"""

from __future__ import annotations

import codecs
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from llamacpp_instr.converters.live.times import RequestTimes
from llamacpp_instr.log.batches import Part
from llamacpp_instr.log.requests import Request, RequestFinder, Served, Taken
from llamacpp_instr.log.schema import Mark, Token

LANES = 320
"""lanes: the latest requests; llama.cpp serves at most 256 sequences of a context at once"""
KEPT_TOKENS = 1000
"""of each lane"""


@dataclass(frozen=True)
class Shown:
    """A token: its text, when it was ready, and its probability."""

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
    """whether the times of the request were counted"""
    over: bool = False
    """the application said so, or its sequence serves another request"""
    decode: codecs.IncrementalDecoder = field(
        default_factory=lambda: codecs.getincrementaldecoder("utf-8")("replace"), repr=False
    )
    """a character may need the bytes of several tokens"""

    @property
    def between(self) -> float | None:
        """The mean time from a token to the next, in ns; None with fewer than two."""
        times = self.request.token_times
        return (times[-1] - times[0]) / (len(times) - 1) if len(times) > 1 else None

    def add(self, token: Token) -> None:
        text = self.decode.decode(bytes.fromhex(token.hex) if token.hex else token.text.encode())
        self.tokens.append(Shown(self.n_tokens, text, token.t + token.dur, token.p))
        self.n_tokens += 1


Add = Callable[[int, int, str, int], None]
"""counts tokens: a time, a context, a kind and how many"""
COMPUTED, CACHED, OUTPUT = "input_computed", "input_cached", "output"
"""kinds of tokens: those of prompts, computed or found in the cache, and sampled ones"""


class LiveLanes:
    """The lanes of a session, from its steps, tokens and marks in the order in which they end.

    `add` gets what only a request shows: tokens of its prompt from the cache, and output tokens of
    an application that does its own sampling. `model_of` names the model of a context.
    """

    def __init__(
        self, add: Add = lambda *_of: None, model_of: Callable[[int], str] = lambda _ctx: ""
    ) -> None:
        self.n_requests = 0
        """that began"""
        self.slots: dict[int, Lane] = {}
        """the latest request of each, if the application notes which slot takes a request"""
        self.times = RequestTimes()
        self.silent: dict[int, int] = {}
        """by context, outputs of prompts that may stand for tokens that the log does not have: they
        do if a decode follows"""
        self._add, self._model_of = add, model_of
        self._finder = RequestFinder(self._found)
        self._lanes: dict[int, Lane] = {}
        """by the identity of the request, which the lane keeps alive"""
        self._of_sequence: dict[tuple[int, int], Lane] = {}

    def __iter__(self) -> Iterator[Lane]:
        """In the order in which they began."""
        return iter(list(self._lanes.values()))

    def step(
        self, number: int, ctx: int, begin: int, end: int, parts: Sequence[Part], target: int = -1
    ) -> None:
        """A step that counts has ended."""
        new = 0
        for request in self._finder.step(number, ctx, begin, end, parts, target):
            new += self._count_gaps(self._lane_of(request))
            if request.first_step == number:
                self._add(end, ctx, CACHED, request.reused)
        if target < 0 and not self._finder.samples(ctx):
            new += self.silent.get(ctx, 0)
            decodes = not all(part.prompt for part in parts)
            self.silent[ctx] = 0 if decodes else new
            self._add(end, ctx, OUTPUT, new * decodes)

    def token(self, token: Token) -> None:
        """A token was sampled."""
        of = self._finder.token(token.ctx, token.seq, token.step, token.t, token.dur)
        self.silent.pop(token.ctx, None)
        if of is not None:
            if id(of) not in self._lanes:  # its whole prompt was in the cache
                self._add(token.t, token.ctx, CACHED, of.reused)
            lane = self._lane_of(of)
            lane.add(token)
            self._count_gaps(lane)

    def take(self, taken: Taken, mark: Mark) -> None:
        """A slot took the request of a mark."""
        self.slots[taken.slot] = self._lane_of(self._finder.take(taken, mark.t, mark.name))

    def serve(self, served: Served) -> None:
        """The request of a slot ends; the end of its mark follows."""
        request = self.slots[served.slot].request if served.slot in self.slots else None
        if request is not None and (request.taken is None or request.taken.mark == served.mark):
            request.served = served

    def mark(self, begin: Mark, end: Mark) -> None:
        """A mark has ended."""
        seq = end.seq if end.seq >= 0 else begin.seq
        if seq >= 0:
            self._finder.span(seq, begin.t, end.t, begin.name)
            for (_, of), lane in self._of_sequence.items():
                if of == seq and lane.request.marked_end == end.t:
                    self._end(lane)

    def count(self, lane: Lane) -> None:
        """Count the times of a request that has ended, only once."""
        if not lane.counted:
            model = self._model_of(lane.request.ctx)
            lane.counted = self.times.count(lane.request, model, lane.between)

    def finish(self) -> None:
        """Nothing follows: all requests have ended."""
        for lane in self:
            self._end(lane)

    def _lane_of(self, request: Request) -> Lane:
        lane = self._lanes.get(id(request))
        if lane is None:
            key = request.ctx, request.seq
            if (before := self._of_sequence.get(key)) is not None:
                self._end(before)
            lane = Lane(self.n_requests, request)
            self.n_requests += 1
            self._lanes[id(request)] = self._of_sequence[key] = lane
            if self.slots:
                self.slots[request.seq] = lane  # a copy takes no slot
            if len(self._lanes) > LANES:
                self._forget()
        return lane

    def _count_gaps(self, lane: Lane) -> int:
        """Count the times between new tokens; returns the number of new tokens."""
        times, new = lane.request.token_times, len(lane.request.token_times) - lane.n_times
        model = self._model_of(lane.request.ctx)
        for i in range(max(lane.n_times, 1), len(times)):
            self.times.between.add(times[i] - times[i - 1], model)
        lane.n_times = len(times)
        return max(new, 0)

    def _found(self, request: Request) -> None:
        if (lane := self._lanes.get(id(request))) is not None:
            self._end(lane)

    def _end(self, lane: Lane) -> None:
        lane.over = True
        self.count(lane)

    def _forget(self) -> None:
        """Forget the oldest lane, one that is over if there is one."""
        oldest = next((lane for lane in self._lanes.values() if lane.over), None)
        lane = oldest or next(iter(self._lanes.values()))
        self.count(lane)
        del self._lanes[id(lane.request)]
        key = lane.request.ctx, lane.request.seq
        if self._of_sequence.get(key) is lane:
            del self._of_sequence[key]
