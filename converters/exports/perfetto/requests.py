"""The slices of requests, with a flow to each of their first FLOWS steps; written when a request
has ended."""

from __future__ import annotations

from array import array
from collections.abc import Callable

from converters.exports.perfetto.packets import BEGIN, Packets, closing, event_packet
from converters.exports.perfetto.tracks import Tracks
from converters.exports.requests import RequestSlice
from llamacpp_instr.log.requests import Request

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

    def flow(self, request: Request) -> int | None:
        """The number of a new flow from the request, for a step that served it; None if the request
        has FLOWS already."""
        flows = self._flows.setdefault(id(request), array("q"))
        if len(flows) == FLOWS:
            return None
        flows.append(self._new_flows(1))
        return flows[-1]

    def draw(self, of: RequestSlice) -> None:
        """Draws a request that has ended."""
        home = self._tracks.context(of.request.ctx)
        track = self._tracks.child(home, "requests", lane=of.lane)
        event = self._packets.event(BEGIN, track, of.name, "request", of.args, seldom=True)
        event.flow_ids.extend(self._flows.pop(id(of.request), ()))
        self._write(event_packet(of.begin, event) + event_packet(of.end, closing(track)))
