"""The slices of layers and ops: templates, and the computes that wait to be filled into them.

A plan's kernels never change, so computes differ only in when the kernels began and ended, and in
what follows from that. A template has the packets of a whole compute on one thread, with these
values at known offsets and in a fixed width, and numpy writes them for several computes at once. To
find the offsets, the packets are serialized with marks in place of the values. All bytes of a mark
are at least 0x7F, so it is not part of any text or small number.

Invariant: the number of waiting computes and of kept templates is bounded for every log.
"""

from __future__ import annotations

import struct
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import chain

import numpy as np
from numpy.typing import NDArray
from perfetto.protos.perfetto.trace import perfetto_trace_pb2 as pb

from llamacpp_instr.converters.exports.perfetto.packets import BEGIN, Packets, closing, event_packet
from llamacpp_instr.converters.exports.traced import TEMPLATES, Span, layer_spans, spans_of_thread
from llamacpp_instr.log.columns import interval_columns
from llamacpp_instr.log.graph.kernels import KernelWork
from llamacpp_instr.log.graph.timeline import PlanTimeline, Selection, layer_name
from llamacpp_instr.log.schema import Layers, Ops

Int64 = NDArray[np.int64]

_OF_THREAD = ("what", "tensor", "layer")
"""arguments of ops on a thread's own track"""
BATCH = 4096
"""kernels of one plan and thread that are filled in at once"""
_NUMBER, _NUMBER_BYTES = 2**63 - 1, b"\xff" * 8 + b"\x7f"
"""the mark of a number below 2**63: the longest varint of such a number"""
_RATE_BYTES = b"\xff" * 6 + b"\xef\xff"
(_RATE,) = struct.unpack("<d", _RATE_BYTES)
_FLOW, _FLOW_BYTES = 2**64 - 1, b"\xff" * 8


class ComputeTemplate:
    """The packets of any computes of `n_kernels` on one track, which have these spans; `edges` are
    flows from a kernel's span to another one's."""

    def __init__(
        self,
        packets: Packets,
        track: int,
        n_kernels: int,
        spans: Sequence[Span],
        edges: Sequence[tuple[int, int]] = (),
    ) -> None:
        self._packets, self._track, self._n = packets, track, n_kernels
        self.n_flows = len(edges)
        self._data = bytearray()
        # offsets of values, each with the number of the value; numbers are times, then amounts
        self._numbers: list[tuple[int, int]] = []
        self._rates: list[tuple[int, int]] = []
        self._flows: list[tuple[int, int]] = []
        out: defaultdict[int, list[int]] = defaultdict(list)
        into: defaultdict[int, list[int]] = defaultdict(list)
        for number, (producer, reader) in enumerate(edges):
            out[producer].append(number)
            into[reader].append(number)
        ends: list[int] = []
        for span in spans:
            while ends and self._moment(ends[-1]) <= self._moment(span.begin):
                self._add(ends.pop(), closing(track))
            flows = (out[span.begin], into[span.begin]) if span.op else ([], [])
            self._begin(span, *flows)
            ends.append(span.end)
        for end in reversed(ends):
            self._add(end, closing(track))
        for at, _ in self._numbers:
            self._data[at + 8] = 0
        self._fields = [
            np.array(places, np.intp).reshape(-1, 2).T
            for places in (self._numbers, self._rates, self._flows)
        ]

    @property
    def size(self) -> int:
        """Bytes of one compute."""
        return len(self._data)

    def _moment(self, time: int) -> int:
        """Orders the numbers of times: a kernel begins, ends, then the next one begins."""
        return 2 * time if time < self._n else 2 * (time - self._n) + 1

    def _begin(self, span: Span, out: Sequence[int], into: Sequence[int]) -> None:
        colour = span.category if span.op else ""
        event = self._packets.event(BEGIN, self._track, span.name, span.category, colour=colour)
        self._packets.add_args(event, span.args, keep=True)
        self._packets.add_args(event, dict.fromkeys(span.amounts, _NUMBER))
        self._packets.add_args(event, dict.fromkeys(span.rates, _RATE))
        event.flow_ids.extend([_FLOW] * len(out))
        event.terminating_flow_ids.extend([_FLOW] * len(into))
        first = 2 * self._n + 1
        amounts = [first + amount for amount in span.amounts.values()]
        self._add(span.begin, event, amounts, [*span.rates.values()], [*out, *into])

    def _add(
        self,
        time: int,
        event: pb.TrackEvent,
        amounts: Sequence[int] = (),
        rates: Sequence[int] = (),
        flows: Sequence[int] = (),
    ) -> None:
        packet, start = event_packet(_NUMBER, event), len(self._data)
        self._numbers.append((start + packet.index(_NUMBER_BYTES), time))
        # of all args the marked ones are the last, so their bytes are the last of that kind
        for places, mark, values in (
            (self._numbers, _NUMBER_BYTES, amounts),
            (self._rates, _RATE_BYTES, rates),
            (self._flows, _FLOW_BYTES, flows),
        ):
            at = len(packet)
            for value in reversed(values):
                at = packet.rindex(mark, 0, at)
                places.append((start + at, value))
        self._data += packet

    def fill(
        self, begin: Int64, end: Int64, done: Int64, amounts: Int64, first_flow: int = 0
    ) -> NDArray[np.uint8]:
        """The packets of n computes, one after the other. `begin` and `end` are (n, kernels) in
        absolute ns, `done` is (n,): when all threads were done; `amounts` are (n, any). Flows are
        numbered from `first_flow` on, `n_flows` for each compute."""
        (number_at, number_of), (rate_at, rate_of), (flow_at, flow_of) = self._fields
        n = len(begin)
        # the last word may reach beyond the end
        out = np.empty(n * self.size + 8, np.uint8)
        rows = out[: n * self.size].reshape(n, self.size)
        rows[:] = np.frombuffer(self._data, np.uint8)
        # the same bytes as words that begin at any byte: one store writes eight of them
        words = np.ndarray((n, self.size), "<u8", out, strides=(self.size, 1))
        doubles = np.ndarray((n, self.size), "<f8", out, strides=(self.size, 1))
        numbers = np.concatenate((begin, end, done[:, None], amounts), axis=1)[:, number_of]
        words[:, number_at] = padded_words(numbers)
        if int(numbers.max()) >> 56:
            rows[:, number_at + 8] = numbers >> 56
        dur = (end - begin)[:, rate_of % self._n]
        # a duration below the resolution of the clock has no rate: 0
        doubles[:, rate_at] = np.where(dur > 0, amounts[:, rate_of] / np.maximum(dur, 1), 0.0)
        words[:, flow_at] = first_flow + self.n_flows * np.arange(n)[:, None] + flow_of
        return out[: n * self.size]


def padded_words(values: Int64) -> NDArray[np.uint64]:
    """The first 8 bytes of varints of 9 bytes, each as a little-endian word; the last byte is
    `values >> 56`.

    A byte of a varint holds 7 bits and says with its highest bit whether another byte follows. So
    bytes of zero bits at the end give any number below 2**63 the same width. Every parser accepts
    them (https://protobuf.dev/programming-guides/encoding), but the protobuf classes write none.
    """
    x: NDArray[np.uint64] = values.astype(np.uint64)
    # each step moves the upper half of every group up, to make room: 28 bits, 14, 7
    for low, high, shift in _SPREAD:
        x = (x & low) | ((x & high) << shift)
    x |= _MORE
    return x


_SPREAD = np.array(
    [
        (0x0000_0000_0FFF_FFFF, 0x00FF_FFFF_F000_0000, 4),
        (0x0000_3FFF_0000_3FFF, 0x0FFF_C000_0FFF_C000, 2),
        (0x007F_007F_007F_007F, 0x3F80_3F80_3F80_3F80, 1),
    ],
    np.uint64,
)
_MORE = np.uint64(0x8080_8080_8080_8080)


@dataclass
class _Batch:
    template: ComputeTemplate
    timeline: PlanTimeline | None
    """its id is a part of the key: kept, so that no other object gets that id"""
    computes: list[tuple[int, int, Int64 | None, Int64, tuple[Int64, ...]]] = field(
        default_factory=list
    )
    """t, tail, gap, dur and amounts"""


class KernelSlices:
    """Writes the slices of `layers` and `ops` events, which must fit their plans."""

    def __init__(
        self,
        packets: Packets,
        write: Callable[[bytes | NDArray[np.uint8]], object],
        selection: Selection,
        flows: Callable[[int], int] | None,
    ) -> None:
        """`flows(n)` reserves n numbers for flows and returns the first. None draws no flows."""
        self._packets = packets
        self._write = write
        self._selection = selection
        self._flows = flows
        self._batches: OrderedDict[object, _Batch] = OrderedDict()
        self.layers_seen: set[int] = set()
        self.ops_seen: set[str] = set()
        self.matched = False
        """whether the selection contained any op, or any layer of a log without ops"""

    def add_layers(self, event: Layers, track: int) -> None:
        """Adds the layers of a compute whose ops are not recorded."""
        self.layers_seen.update(event.layer)
        if self._selection.ops is not None:
            return
        self.matched |= any(map(self._selection.has_layer, event.layer))
        key = ("layers", track, tuple(event.layer))
        if (batch := self._batches.get(key)) is None:
            n = len(event.layer)
            spans = [
                Span(i, n + i, layer_name(layer), "layer", {"layer": layer})
                for i, layer in enumerate(event.layer)
                if self._selection.has_layer(layer)
            ]
            batch = self._begin(key, ComputeTemplate(self._packets, track, n, spans), None)
        self._add(batch, event, 0)

    def add_ops(
        self, event: Ops, timeline: PlanTimeline, track: int, work: KernelWork | None
    ) -> None:
        """Adds the ops of a compute: with their `work` on the layers' track, else on a thread's
        own."""
        gaps = event.gap is not None
        bounds = work.bound.tobytes() if work and timeline.kernels.attention else b""
        key = (id(timeline), track, work is not None, gaps, bounds)
        if (batch := self._batches.get(key)) is None:
            self.layers_seen.update(op.layer for op in timeline.ops)
            self.ops_seen.update(op.name for op in timeline.ops)
            self.matched |= any(map(self._selection.has_op, timeline.ops))
            edges: list[tuple[int, int]] = []
            if work:
                spans = layer_spans(timeline, self._selection, work.bound.tolist())
                drawn = {span.begin for span in spans if span.op}
                edges = [e for e in timeline.edges if drawn.issuperset(e)] if self._flows else []
            else:
                spans = [
                    span._replace(args={name: span.args[name] for name in _OF_THREAD})
                    if span.op else span
                    for span in spans_of_thread(timeline, self._selection, gaps)
                ]  # fmt: skip
            n = len(timeline.ops)
            template = ComputeTemplate(self._packets, track, n, spans, edges)
            batch = self._begin(key, template, timeline)
        amounts = (work.bytes, work.flops) if work else (np.array(event.wait, np.int64),)
        self._add(batch, event, event.tail, *amounts)

    def flush(self) -> None:
        """Writes all waiting computes."""
        for batch in self._batches.values():
            self._fill(batch)

    def _begin(
        self, key: object, template: ComputeTemplate, timeline: PlanTimeline | None
    ) -> _Batch:
        batch = self._batches[key] = _Batch(template, timeline)
        if len(self._batches) > TEMPLATES:
            self._fill(self._batches.popitem(last=False)[1])
        return batch

    def _add(self, batch: _Batch, event: Ops | Layers, tail: int, *amounts: Int64) -> None:
        gap, dur = interval_columns(event)
        if not batch.template.size:
            return
        batch.computes.append((event.t, tail, gap, dur, amounts))
        if len(batch.computes) * len(dur) >= BATCH:
            self._fill(batch)

    def _fill(self, batch: _Batch) -> None:
        if not batch.computes:
            return
        t, tail, gaps, durs, each = zip(*batch.computes, strict=True)
        parts = [np.zeros(0, np.int64), *chain.from_iterable(each)]
        amounts = np.concatenate(parts).reshape(len(t), -1)
        dur = np.array(durs)
        step = dur.copy()
        for i, gap in enumerate(gaps):
            if gap is not None:
                step[i] += gap
        end = np.cumsum(step, axis=1)
        end += np.array(t)[:, None]
        done = end[:, -1] + np.array(tail)
        first = self._flows(batch.template.n_flows * len(t)) if self._flows else 0
        self._write(batch.template.fill(end - dur, end, done, amounts, first))
        batch.computes = []
