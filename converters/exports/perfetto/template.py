"""The packets of a whole compute on one thread, built once for each plan.

A plan's kernels never change, so computes differ only in when the kernels began and ended, and in
what follows from that. The template has these values at known offsets and in a fixed width, and
numpy writes them for several computes at once. To find the offsets, the packets are serialized
with marks in place of the values. All bytes of a mark are at least 0x7F, so it is not part of any
text or small number.
"""

from __future__ import annotations

import struct
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray
from perfetto.protos.perfetto.trace import perfetto_trace_pb2 as pb

from llamacpp_instr.converters.exports.perfetto.packets import BEGIN, Packets, closing, event_packet
from llamacpp_instr.log.graph.timeline import (
    OpSlice,
    PlanTimeline,
    Run,
    Selection,
    layer_name,
    thread_spans,
)

Int64 = NDArray[np.int64]

_NUMBER, _NUMBER_BYTES = 2**63 - 1, b"\xff" * 8 + b"\x7f"
"""the mark of a number below 2**63: the longest varint of such a number"""
_RATE_BYTES = b"\xff" * 6 + b"\xef\xff"
(_RATE,) = struct.unpack("<d", _RATE_BYTES)
_FLOW, _FLOW_BYTES = 2**64 - 1, b"\xff" * 8


@dataclass(frozen=True)
class Times:
    """Kernels of `n` computes of one plan on one thread: arrays of (n, kernels), absolute ns."""

    begin: Int64
    end: Int64
    wait: Int64 | None
    """inside barriers, of each kernel's time"""
    done: Int64
    """(n,): when all threads were done"""
    flops: Int64
    """of each kernel; (1, kernels) if all computes have the same work"""
    bytes: Int64


class ComputeTemplate:
    """Built by adding events in order; then `fill` gives the packets of any computes."""

    def __init__(self, packets: Packets, track: int, n_kernels: int) -> None:
        self._packets = packets
        self._track = track
        self._n = n_kernels
        self._parts: list[bytes] = []
        self.size = 0
        """bytes of one compute"""
        self.n_flows = 0
        # offsets of values, each with what the value is
        self._times: list[tuple[int, int]] = []
        self._waits: list[tuple[int, int]] = []
        self._flows: list[tuple[int, int]] = []
        self._rates: list[tuple[int, int]] = []
        self._amounts: list[tuple[int, int]] = []

    # --- building: times are numbered begins, ends, done; work is numbered FLOPs, bytes ---

    def begin_of(self, kernel: int) -> int:
        """The number of the time when a kernel began."""
        return kernel

    def end_of(self, kernel: int) -> int:
        """The number of the time when a kernel ended."""
        return self._n + kernel

    def begin(self, time: int, name: str, category: str, layer: int | None = None) -> None:
        """Begins a slice at the time of that number."""
        args = {} if layer is None else {"layer": layer}
        self._add(time, self._packets.event(BEGIN, self._track, name, category, args))

    def begin_op(
        self,
        kernel: int,
        op: OpSlice,
        args: Sequence[str],
        waits: bool = False,
        rates: bool = False,
        out: Sequence[int] = (),
        into: Sequence[int] = (),
    ) -> None:
        """Begins the slice of a kernel with the op's `args`, and with its wait, or with its rates
        and that of its work that varies.

        `out` and `into` number the flows that begin and end there, from 0 in each compute.
        """
        event = self._packets.event(BEGIN, self._track, op.title, op.block, colour=op.block)
        self._packets.add_args(event, {name: op.args[name] for name in args}, keep=True)
        if waits:
            self._packets.add_args(event, {"wait_ns": _NUMBER})
        work = {"GB/s": op.bytes, "GFLOP/s": op.flops} if rates else {}
        work = {name: amount for name, amount in work.items() if amount}
        flops, moved = kernel, self._n + kernel
        varying = {"bytes": moved, "flops": flops} if rates and op.varies else {}
        self._packets.add_args(event, dict.fromkeys(varying, _NUMBER))
        self._packets.add_args(event, dict.fromkeys(work, _RATE))
        event.flow_ids.extend([_FLOW] * len(out))
        event.terminating_flow_ids.extend([_FLOW] * len(into))
        # of all args the marked ones are the last, so their bytes are the last of that kind
        self._add(self.begin_of(kernel), event)
        self._waits += [(at, kernel) for at in self._last(_NUMBER_BYTES, waits)]
        places = self._last(_RATE_BYTES, len(work))
        of = [moved if name == "GB/s" else flops for name in work]
        self._rates += zip(places, of, strict=True)
        places = self._last(_NUMBER_BYTES, len(varying))
        self._amounts += zip(places, varying.values(), strict=True)
        flows = [*out, *into]
        self._flows += zip(self._last(_FLOW_BYTES, len(flows)), flows, strict=True)
        self.n_flows = max(self.n_flows, *(flow + 1 for flow in flows), 0)

    def end(self, time: int) -> None:
        """Ends the slice that began last."""
        self._add(time, closing(self._track))

    def _add(self, time: int, event: pb.TrackEvent) -> None:
        packet = event_packet(_NUMBER, event)
        self._times.append((self.size + packet.index(_NUMBER_BYTES), time))
        self._parts.append(packet)
        self.size += len(packet)

    def _last(self, mark: bytes, n: int) -> list[int]:
        """Offsets of the last `n` marks in the packet that was added last, in their order."""
        packet = self._parts[-1]
        found = [len(packet)]
        for _ in range(n):
            found.append(packet.rindex(mark, 0, found[-1]))
        return [self.size - len(packet) + at for at in found[:0:-1]]

    def close(self) -> ComputeTemplate:
        """Nothing is added any more."""
        self._bytes = np.frombuffer(bytearray(b"".join(self._parts)), np.uint8)
        self._parts.clear()
        self._fields = [
            np.array(places, np.intp).reshape(-1, 2).T
            for places in (self._times, self._rates, self._waits, self._flows, self._amounts)
        ]
        for at, _ in self._times + self._waits + self._amounts:
            self._bytes[at + 8] = 0
        return self

    # --- filling ---

    def fill(self, times: Times, first_flow: int = 0) -> NDArray[np.uint8]:
        """The packets of the computes, one after the other. Flows are numbered from `first_flow`
        on, `n_flows` for each compute."""
        (time_at, time_of), (rate_at, rate_of), *others = self._fields
        (wait_at, wait_of), (flow_at, flow_of), (amount_at, amount_of) = others
        n = len(times.begin)
        # the last word may reach beyond the end
        out = np.empty(n * self.size + 8, np.uint8)
        rows = out[: n * self.size].reshape(n, self.size)
        rows[:] = self._bytes
        # the same bytes as words that begin at any byte: one store writes eight of them
        words = np.ndarray((n, self.size), "<u8", out, strides=(self.size, 1))
        doubles = np.ndarray((n, self.size), "<f8", out, strides=(self.size, 1))
        t = np.concatenate((times.begin, times.end, times.done[:, None]), axis=1)[:, time_of]
        _put(rows, words, time_at, t)
        if len(rate_at):
            work = np.concatenate((times.flops, times.bytes), axis=1)
            dur = (times.end - times.begin)[:, rate_of % self._n]
            # a duration below the resolution of the clock has no rate: 0
            doubles[:, rate_at] = np.where(dur > 0, work[:, rate_of] / np.maximum(dur, 1), 0.0)
            if len(amount_at):
                _put(rows, words, amount_at, work[:, amount_of])
        if times.wait is not None:
            _put(rows, words, wait_at, times.wait[:, wait_of])
        if len(flow_at):
            base = first_flow + self.n_flows * np.arange(n)
            words[:, flow_at] = base[:, None] + flow_of
        return out[: n * self.size]


def _put(
    rows: NDArray[np.uint8], words: NDArray[np.uint64], at: NDArray[np.intp], values: Int64
) -> None:
    words[:, at] = padded_words(values)
    if values.size and int(values.max()) >> 56:
        rows[:, at + 8] = values >> 56


def padded_words(values: Int64) -> NDArray[np.uint64]:
    """The first 8 bytes of varints of 9 bytes, each as a little-endian word; the last byte is
    `values >> 56`.

    A byte of a varint holds 7 bits and says with its highest bit whether another byte follows. So
    zero bytes of bits at the end give any number below 2**63 the same width. Every parser accepts
    them (https://protobuf.dev/programming-guides/encoding), but the protobuf classes write none.
    """
    x: NDArray[np.uint64] = values.astype(np.uint64)
    # each step moves the upper half of every group up, to make room: 28 bits, 14, 7
    for low, high, shift in _SPREAD:
        x = (x & low) | ((x & high) << shift)
    x |= _MORE
    return x


_SPREAD = tuple(
    (np.uint64(low), np.uint64(high), np.uint64(shift))
    for low, high, shift in (
        (0x0000_0000_0FFF_FFFF, 0x00FF_FFFF_F000_0000, 4),
        (0x0000_3FFF_0000_3FFF, 0x0FFF_C000_0FFF_C000, 2),
        (0x007F_007F_007F_007F, 0x3F80_3F80_3F80_3F80, 1),
    )
)
_MORE = np.uint64(0x8080_8080_8080_8080)


def layers_template(
    packets: Packets,
    timeline: PlanTimeline,
    selection: Selection,
    track: int,
    flows: bool,
    bound: Sequence[bool],
) -> ComputeTemplate:
    """Layers, blocks in them, ops in those: what thread 0 did. `bound` marks the ops whose work
    is an upper bound."""
    template = ComputeTemplate(packets, track, len(timeline.ops))
    chosen = [selection.has_op(op) for op in timeline.ops]
    edges = [e for e in timeline.edges if chosen[e[0]] and chosen[e[1]]] if flows else []
    out: dict[int, list[int]] = {}
    into: dict[int, list[int]] = {}
    for number, (producer, reader) in enumerate(edges):
        out.setdefault(producer, []).append(number)
        into.setdefault(reader, []).append(number)
    opens: dict[int, list[tuple[Run, str]]] = {}
    closes: Counter[int] = Counter()
    for runs, category in ((timeline.layers, "layer"), (timeline.blocks, "block")):
        for run in runs:
            if any(chosen[run.first : run.last + 1]):
                opens.setdefault(run.first, []).append((run, category))
                closes[run.last] += 1
    for i, op in enumerate(timeline.ops):
        for run, category in opens.get(i, ()):
            template.begin(template.begin_of(i), run.name, category, run.layer)
        if chosen[i]:
            if bound[i]:
                op = replace(op, args={**op.args, "work": "at most"})
            template.begin_op(i, op, [*op.args], False, True, out.get(i, ()), into.get(i, ()))
            template.end(template.end_of(i))
        for _ in range(closes[i]):
            template.end(template.end_of(i))
    return template.close()


def runs_template(
    packets: Packets, layers: Sequence[int], selection: Selection, track: int
) -> ComputeTemplate:
    """The layers alone, where no ops were recorded."""
    template = ComputeTemplate(packets, track, len(layers))
    for i, layer in enumerate(layers):
        if selection.has_layer(layer):
            template.begin(template.begin_of(i), layer_name(layer), "layer", layer)
            template.end(template.end_of(i))
    return template.close()


def thread_template(
    packets: Packets,
    timeline: PlanTimeline,
    selection: Selection,
    track: int,
    gaps: bool,
    waits: bool,
) -> ComputeTemplate:
    """What one of ggml's threads did: ops, each with its wait inside barriers, and the barriers
    between them where the log has them (`gaps`)."""
    template = ComputeTemplate(packets, track, len(timeline.ops))
    for begin, end, kernel in thread_spans(timeline, selection, gaps):
        if kernel is None:
            template.begin(begin, "wait", "wait")
        else:
            op = timeline.ops[kernel]
            template.begin_op(kernel, op, ("what", "tensor", "layer"), waits=waits)
        template.end(end)
    return template.close()
