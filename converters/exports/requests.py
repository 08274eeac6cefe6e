"""The requests of a session as slices, for every trace format.

Requests of one sequence overlap while one waits for the end of another. So each sequence has lanes.
"""

from __future__ import annotations

from dataclasses import dataclass
from heapq import heappop, heappush

from llamacpp_instr.log.requests import Request
from llamacpp_instr.log.schema import CONTEXTS_KEPT, MOST


@dataclass(frozen=True)
class RequestSlice:
    """A request that has ended, from its arrival to its end, in ns.

    If the arrival is unknown, it begins 1 ns before its first step: of what begins together,
    trace_processor takes that first which comes first in the file, and a flow has to leave before
    it arrives.
    """

    request: Request
    name: str
    """an application's, and perhaps another one for each request"""
    begin: int
    end: int
    lane: int
    """slices of one lane do not overlap"""
    args: dict[str, str | int]


class RequestLanes:
    """Makes the slices of requests that have ended."""

    def __init__(self) -> None:
        self._lanes: dict[tuple[int, int], list[tuple[int, int]]] = {}
        """by context and sequence, a heap: when the last request of a lane ended, and the lane"""
        self._n_lanes = 0

    def slice(self, request: Request) -> RequestSlice:
        """The slice of a request, in a lane that is free then."""
        args = {
            "context": request.ctx,
            "sequence": request.seq,
            "mark": request.name or None,
            "prompt_tokens": min(request.prompt, MOST),
            "reused_tokens": request.reused,
            "output_tokens": len(request.token_times),
            "to_first_token_ns": request.to_first_token,
            "queued_ns": request.queued,
            "first_step": request.first_step,
            "last_step": request.last_step,
        }
        begin = max(min(request.first, request.begin - 1), 0)
        end = max(begin, request.end)
        lane = self._lane(request.ctx, request.seq, begin, end)
        shown = {name: value for name, value in args.items() if value is not None}
        return RequestSlice(request, request.name or "request", begin, end, lane, shown)

    def _lane(self, ctx: int, seq: int, begin: int, end: int) -> int:
        lanes = self._lanes.setdefault((ctx, seq), [])
        if len(self._lanes) > CONTEXTS_KEPT:
            del self._lanes[next(iter(self._lanes))]
        if lanes and lanes[0][0] <= begin:
            _, lane = heappop(lanes)
        else:
            self._n_lanes += 1
            lane = self._n_lanes - 1
        heappush(lanes, (end, lane))
        return lane
