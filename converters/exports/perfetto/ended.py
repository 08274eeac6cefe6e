"""Steps that have ended and are not drawn yet.

Each waits until its result is there, which for a device may be after its end (`log.waits`), and
until it is known which requests it served. Invariant: one step of a context waits for its result,
and as many for their requests as a RequestFinder keeps.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from converters.exports.perfetto.requests import RequestSlices
from converters.exports.perfetto.steps import OpenStep
from llamacpp_instr.log.requests import Request, RequestFinder, parts_of
from llamacpp_instr.log.waits import WAITED
from llamacpp_instr.schema import CONTEXTS_KEPT, StepEnd, Sync


@dataclass
class _Ended:
    step: OpenStep
    end: StepEnd
    serves: bool
    t: int
    """when its result was there"""


class EndedSteps:
    """Draws steps with the flows from their requests. `draw` gets a step, its end, and when its
    result was there."""

    def __init__(
        self, draw: Callable[[OpenStep, StepEnd, int], object], slices: RequestSlices
    ) -> None:
        self._draw = draw
        self._slices = slices
        self.requests = RequestFinder(slices.draw, self._served)
        self._latest: dict[int, _Ended] = {}
        """by context"""
        self._unserved: dict[int, _Ended] = {}
        """by number"""

    def add(self, step: OpenStep, end: StepEnd, serves: bool) -> None:
        """A step has ended; `serves` tells whether it counts for requests."""
        ctx = step.begin.ctx
        self.settle(ctx)
        self._latest[ctx] = _Ended(step, end, serves, max(end.t, step.begin.t))
        if len(self._latest) > CONTEXTS_KEPT:
            self.settle(next(iter(self._latest)))

    def waited(self, sync: Sync) -> None:
        """A wait for a device has ended."""
        ended = self._latest.get(sync.ctx)
        if ended is not None and sync.dur >= WAITED:
            ended.t = max(ended.t, sync.t + sync.dur)

    def settle(self, ctx: int) -> None:
        """The result of the latest step of a context is there."""
        ended = self._latest.pop(ctx, None)
        if ended is None:
            return
        if not ended.serves:
            self._draw(ended.step, ended.end, ended.t)
            return
        begin = ended.step.begin
        self._unserved[begin.step] = ended
        counts = begin.n_seqs, begin.pos, begin.n_tokens, begin.n_outputs
        parts = parts_of(begin.sequences, *counts)
        self.requests.step(begin.step, ctx, begin.t, ended.t, parts)

    def settle_all(self) -> None:
        """The results of all steps that have ended are there."""
        for ctx in list(self._latest):
            self.settle(ctx)

    def _served(self, number: int, requests: list[Request]) -> None:
        ended = self._unserved.pop(number)
        ended.step.flows += map(self._slices.flow, requests)
        self._draw(ended.step, ended.end, ended.t)
