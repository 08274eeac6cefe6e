"""Steps that have ended and are not drawn yet.

Each waits until its result is there, which for a device may be after its end, and until it is known
which requests it served. Invariant: one step of a context waits for its result, and as many for
their requests as a RequestFinder keeps.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from converters.exports.perfetto.requests import RequestSlices
from converters.exports.perfetto.steps import OpenStep
from llamacpp_instr.log.requests import Request, RequestFinder, parts_of
from llamacpp_instr.log.waits import LatestSteps
from llamacpp_instr.schema import StepEnd


class _Ended(NamedTuple):
    step: OpenStep
    end: StepEnd
    serves: bool


class EndedSteps:
    """Draws steps with the flows from their requests. `draw` gets a step, its end, and when its
    result was there."""

    def __init__(
        self, draw: Callable[[OpenStep, StepEnd, int], object], slices: RequestSlices
    ) -> None:
        self._draw = draw
        self._slices = slices
        self.latest: LatestSteps[_Ended] = LatestSteps(self._settled)
        self.requests = RequestFinder(slices.draw, self._served)
        self._unserved: dict[int, tuple[_Ended, int]] = {}
        """by number, with the time of the result"""

    def add(self, step: OpenStep, end: StepEnd, serves: bool) -> None:
        """A step has ended; `serves` tells whether it counts for requests."""
        self.latest.add(step.begin.ctx, _Ended(step, end, serves), max(end.t, step.begin.t))

    def _settled(self, ended: _Ended, t: int) -> None:
        if not ended.serves:
            self._draw(ended.step, ended.end, t)
            return
        begin = ended.step.begin
        self._unserved[begin.step] = ended, t
        counts = begin.n_seqs, begin.pos, begin.n_tokens, begin.n_outputs
        parts = parts_of(begin.sequences, *counts)
        self.requests.step(begin.step, begin.ctx, begin.t, t, parts)

    def _served(self, number: int, requests: list[Request]) -> None:
        ended, t = self._unserved.pop(number)
        flows = map(self._slices.flow, requests)
        ended.step.flows += [flow for flow in flows if flow is not None]
        self._draw(ended.step, ended.end, t)
