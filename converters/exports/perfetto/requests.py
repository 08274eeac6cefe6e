"""The slices of requests, with a flow to each of their first FLOWS steps; written when a request
has ended.

Requests of one sequence overlap while one waits for the end of another. So each sequence has lanes.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable
from heapq import heappop, heappush

from converters.exports.perfetto.packets import BEGIN, Packets, Value, closing, event_packet
from converters.exports.perfetto.tracks import Tracks
from llamacpp_instr.log.requests import Request
from llamacpp_instr.schema import CONTEXTS_KEPT, MOST

FLOWS = 1 << 17
"""of one request: the steps of a context of 131,072 tokens"""


class RequestSlices:
    """Draws requests on a track below their context's."""

    def __init__(
        self,
        packets: Packets,
        tracks: Tracks,
        write: Callable[[bytes], object],
        new_flows: Callable[[int], int],
    ) -> None:
        self._packets = packets
        self._tracks = tracks
        self._write = write
        self._new_flows = new_flows
        self._flows: dict[int, array[int]] = {}
        """to the steps of each request that has not ended, by `id`"""
        self._lanes: dict[tuple[int, int], list[tuple[int, int]]] = {}
        """by context and sequence, a heap: when the last request of a lane ended, and the lane"""
        self._n_lanes = 0

    def flow(self, request: Request) -> int | None:
        """The number of a new flow from the request, for a step that served it; None if the request
        has FLOWS already."""
        flows = self._flows.setdefault(id(request), array("q"))
        if len(flows) == FLOWS:
            return None
        flows.append(self._new_flows(1))
        return flows[-1]

    def draw(self, request: Request) -> None:
        """Draws a request from its arrival to its end. If the arrival is unknown, it begins 1 ns
        before its first step: of what begins together, trace_processor takes that first which comes
        first in the file, and a flow has to leave before it arrives."""
        args: dict[str, Value | None] = {
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
        shown = {name: value for name, value in args.items() if value is not None}
        home = self._tracks.context(request.ctx)
        begin = max(min(request.first, request.begin - 1), 0)
        end = max(begin, request.end)
        lane = self._lane(request.ctx, request.seq, begin, end)
        track = self._tracks.child(home, "requests", lane=lane)
        # the name is an application's, and may be another one for each request
        name = request.name or "request"
        event = self._packets.event(BEGIN, track, name, "request", shown, seldom=True)
        event.flow_ids.extend(self._flows.pop(id(request), ()))
        self._write(event_packet(begin, event) + event_packet(end, closing(track)))

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
