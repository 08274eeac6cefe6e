"""The bytes of one whole compute on one thread, built once; per compute only numbers change.

A plan's kernels never change, so all that differs from one compute to the next is when they began
and ended, and what follows from that. Those numbers have a fixed width, their places are known,
and numpy writes them for several computes at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from converters.exports.perfetto.packets import Packets, closing, event_to_fill, flow_from, flow_to
from converters.exports.perfetto.wire import PADDED, padded_words
from llamacpp_instr.graph.timeline import OpSlice, PlanTimeline, Selection, layer_name

Int64 = NDArray[np.int64]


@dataclass(frozen=True)
class Times:
    """Kernels of `n` computes of one plan on one thread: arrays of (n, kernels), absolute ns."""

    begin: Int64
    end: Int64
    wait: Int64 | None
    """inside barriers, of each kernel's time"""
    done: Int64
    """(n,): when all threads were done"""


class Template:
    """Built by adding slices in order; then `fill` gives the bytes of any computes."""

    def __init__(self, n_kernels: int) -> None:
        self._n = n_kernels
        self._parts: list[bytes] = []
        self._size = 0
        self._time_at: list[int] = []
        self._time_of: list[int] = []
        self._rate_at: list[int] = []
        self._rate_of: list[int] = []
        self._rate_work: list[int] = []
        self._wait_at: list[int] = []
        self._wait_of: list[int] = []
        self._flow_at: list[int] = []
        self._flow_of: list[int] = []
        self.n_flows = 0
        self._bytes = np.zeros(0, np.uint8)

    # --- building: times are numbered begins, ends, done ---

    def begin_of(self, kernel: int) -> int:
        """The number of the time when a kernel began."""
        return kernel

    def end_of(self, kernel: int) -> int:
        """The number of the time when a kernel ended."""
        return self._n + kernel

    @property
    def done(self) -> int:
        """The number of the time when all threads were done."""
        return 2 * self._n

    def add(self, time: int, body: bytes) -> int:
        """Adds an event at a time of that number; where its body ends is returned."""
        packet, time_at, body_at = event_to_fill(body)
        self._time_at.append(self._size + time_at)
        self._time_of.append(time)
        end = self._size + body_at + len(body)
        self._parts.append(packet)
        self._size += len(packet)
        return end

    def add_rate(self, before: int, kernel: int, work: int) -> None:
        """The 8 bytes that end at `before` are `work` in a nanosecond of the kernel."""
        self._rate_at.append(before - 8)
        self._rate_of.append(kernel)
        self._rate_work.append(work)

    def add_wait(self, before: int, kernel: int) -> None:
        """The padded varint that ends at `before` is the kernel's wait."""
        self._wait_at.append(before - PADDED)
        self._wait_of.append(kernel)

    def add_flow(self, before: int, edge: int) -> None:
        """The 8 bytes that end at `before` are the number of a flow."""
        self._flow_at.append(before - 8)
        self._flow_of.append(edge)
        self.n_flows = max(self.n_flows, edge + 1)

    def close(self) -> Template:
        """Nothing is added any more."""
        self._bytes = np.frombuffer(b"".join(self._parts), np.uint8)
        self._parts.clear()
        self._fields = (
            np.array(self._time_at, np.intp), np.array(self._time_of, np.intp),
            np.array(self._rate_at, np.intp), np.array(self._rate_of, np.intp),
            np.array(self._wait_at, np.intp), np.array(self._wait_of, np.intp),
            np.array(self._flow_at, np.intp), np.array(self._flow_of, np.uint64),
        )  # fmt: skip
        self._work = np.array(self._rate_work, np.float64)
        return self

    @property
    def size(self) -> int:
        """Bytes of one compute."""
        return self._size

    # --- filling ---

    def fill(self, times: Times, first_flow: int = 0) -> NDArray[np.uint8]:
        """The packets of the computes, one after the other; flows are numbered onwards from
        `first_flow`, `n_flows` a compute."""
        time_at, time_of, rate_at, rate_of, wait_at, wait_of, flow_at, flow_of = self._fields
        n = len(times.begin)
        # the last word may reach beyond the end
        out = np.empty(n * self._size + 8, np.uint8)
        rows = out[: n * self._size].reshape(n, self._size)
        rows[:] = self._bytes
        # the same bytes as words that begin at any byte: one store writes eight of them
        words = np.ndarray((n, self._size), "<u8", out, strides=(self._size, 1))
        doubles = np.ndarray((n, self._size), "<f8", out, strides=(self._size, 1))
        t = np.concatenate((times.begin, times.end, times.done[:, None]), axis=1)[:, time_of]
        self._put(rows, words, time_at, t)
        if len(rate_at):
            dur = (times.end - times.begin)[:, rate_of]
            # what took no time that the clock could see has no rate: 0
            doubles[:, rate_at] = np.where(dur > 0, self._work / np.maximum(dur, 1), 0.0)
        if len(wait_at) and times.wait is not None:
            self._put(rows, words, wait_at, times.wait[:, wait_of])
        if len(flow_at):
            base = first_flow + self.n_flows * np.arange(n, dtype=np.uint64)
            words[:, flow_at] = base[:, None].astype(np.uint64) + flow_of
        return out[: n * self._size]

    @staticmethod
    def _put(
        rows: NDArray[np.uint8], words: NDArray[np.uint64], at: NDArray[np.intp], values: Int64
    ) -> None:
        words[:, at] = padded_words(values)
        if values.size and int(values.max()) >> 56:
            rows[:, at + 8] = values >> 56


def layers_template(
    packets: Packets, timeline: PlanTimeline, selection: Selection, track: int, flows: bool
) -> Template:
    """Layers, blocks in them, ops in those: what thread 0 did."""
    template = Template(len(timeline.ops))
    chosen = [selection.has_op(op) for op in timeline.ops]
    edges = [e for e in timeline.edges if chosen[e[0]] and chosen[e[1]]] if flows else []
    edges_at: dict[int, list[tuple[int, bool]]] = {}
    for number, (producer, reader) in enumerate(edges):
        edges_at.setdefault(producer, []).append((number, True))
        edges_at.setdefault(reader, []).append((number, False))
    opens: dict[int, list[bytes]] = {}
    closes: dict[int, int] = {}
    for runs, category in ((timeline.layers, "layer"), (timeline.blocks, "block")):
        for run in runs:
            if any(chosen[run.first : run.last + 1]):
                body = packets.opening(track, run.name, category)
                opens.setdefault(run.first, []).append(body + packets.arg("layer", run.layer))
                closes[run.last] = closes.get(run.last, 0) + 1
    for i, op in enumerate(timeline.ops):
        for body in opens.get(i, ()):
            template.add(template.begin_of(i), body)
        if chosen[i]:
            _add_op(template, packets, i, op, track, edges_at.get(i, []))
            template.add(template.end_of(i), closing(track))
        for _ in range(closes.get(i, 0)):
            template.add(template.end_of(i), closing(track))
    return template.close()


def runs_template(
    packets: Packets, layers: Sequence[int], selection: Selection, track: int
) -> Template:
    """The layers alone, where no ops were recorded."""
    template = Template(len(layers))
    for i, layer in enumerate(layers):
        if not selection.has_layer(layer):
            continue
        body = packets.opening(track, layer_name(layer), "layer") + packets.arg("layer", layer)
        template.add(template.begin_of(i), body)
        template.add(template.end_of(i), closing(track))
    return template.close()


def _add_op(
    template: Template,
    packets: Packets,
    i: int,
    op: OpSlice,
    track: int,
    edges: list[tuple[int, bool]],
) -> None:
    """`edges` are those that begin (True) or end at the op, by their numbers."""
    body = packets.opening(track, op.name, op.block, colour=op.block)
    body += packets.args(op.args, keep=True)
    # the fields to fill are at the end; each value is the last bytes of its field
    flows, rates = list[tuple[int, int]](), list[tuple[int, int]]()
    for edge, begins in edges:
        body += flow_from(0) if begins else flow_to(0)
        flows.append((len(body), edge))
    for name, work in (("GB/s", op.bytes), ("GFLOP/s", op.flops)):
        if work:
            body += packets.arg(name, 0.0)
            rates.append((len(body), work))
    start = template.add(template.begin_of(i), body) - len(body)
    for at, edge in flows:
        template.add_flow(start + at, edge)
    for at, work in rates:
        template.add_rate(start + at, i, work)


def thread_template(
    packets: Packets,
    timeline: PlanTimeline,
    selection: Selection,
    track: int,
    gaps: bool,
    waits: bool,
) -> Template:
    """What one of ggml's threads did: ops, each with its wait inside barriers, and the barriers
    between them where the log has them (`gaps`)."""
    template = Template(len(timeline.ops))
    wait = packets.opening(track, "wait", "wait")
    last = len(timeline.ops) - 1
    for i, op in enumerate(timeline.ops):
        if not selection.has_op(op):
            continue
        if gaps and i:
            template.add(template.end_of(i - 1), wait)
            template.add(template.begin_of(i), closing(track))
        body = packets.opening(track, op.name, op.block, colour=op.block)
        kept = {name: op.args[name] for name in ("what", "tensor", "layer")}
        body += packets.args(kept, keep=True)
        if waits:
            body += packets.arg_of_number("wait_ns")
        end = template.add(template.begin_of(i), body)
        if waits:
            template.add_wait(end, i)
        template.add(template.end_of(i), closing(track))
        if gaps and i == last:
            template.add(template.end_of(i), wait)
            template.add(template.done, closing(track))
    return template.close()
