"""The slices of a plan's kernels as JSON text with places for the numbers of a compute."""

from __future__ import annotations

from typing import Any

import numpy as np
import orjson
from numpy.typing import NDArray

from llamacpp_instr.graph.kernels import KernelWork
from llamacpp_instr.graph.timeline import PlanTimeline, Selection

Int64 = NDArray[np.int64]

PER_CONTEXT = 10_000
"""a track's number is its context's, from 1, times this, plus its own within the context"""
SEPARATOR = b",\n"


class Template:
    """The events of a plan's kernels on one track, built once and filled in for each compute."""

    def __init__(self, timeline: PlanTimeline, chosen: Selection, tid: int, runs: bool) -> None:
        spans: list[tuple[int, int, int, bytes]] = []
        used: dict[int, tuple[bool, ...]] = {}
        """by op: whether bytes per second, FLOP/s, bytes and FLOPs are shown"""
        for level, cat, of in ((0, "layer", timeline.layers), (1, "block", timeline.blocks)):
            for run in of if runs and chosen.ops is None else ():
                if chosen.has_layer(run.layer):
                    body = _body(run.name, cat, {"layer": run.layer}, b"")
                    spans.append((run.first, level, run.last, body))
        for i, op in enumerate(timeline.ops):
            if chosen.has_op(op):
                rates = b',"GB/s":%d.%03d' if op.bytes else b""
                rates += b',"GFLOP/s":%d.%03d' if op.flops else b""
                rates += b',"bytes":%d,"flops":%d' if op.varies else b""
                body = _body(op.title, op.block, op.args, rates)
                spans.append((i, 2, i, body))
                used[i] = op.bytes > 0, op.flops > 0, op.varies, op.varies
        self.matched = bool(spans)
        # parents come before children that begin at the same time
        spans.sort(key=lambda span: span[:2])
        track = b'"pid":%d,"tid":%d' % (process_of(tid), tid)
        prefix = SEPARATOR + b'{"ph":"X",' + track + b',"ts":%d.%03d,"dur":%d.%03d,'
        self._text = b"".join(prefix + span[3] for span in spans)
        self._first = np.array([span[0] for span in spans], np.intp)
        self._last = np.array([span[2] for span in spans], np.intp)
        shown = [used[span[0]] if span[1] == 2 else (False,) * 4 for span in spans]
        of_rates, of_work = np.hsplit(np.array(shown, np.bool_).reshape(-1, 4), 2)
        always = np.ones((len(spans), 4), np.bool_)
        self._used = np.hstack((always, np.repeat(of_rates, 2, axis=1), of_work))

    def fill(self, start: Int64, end: Int64, work: KernelWork) -> bytes:
        """The events of a compute; `start` and `end` have the times of each kernel, in ns."""
        if not self.matched:
            return b""
        begin = start[self._first]
        dur = end[self._last] - begin
        amounts = np.column_stack((work.bytes, work.flops))[self._first]
        # in thousandths; one per nanosecond is 10^9 per second
        rates = amounts * 1000 // np.maximum(dur, 1)[:, None]
        values = np.column_stack((begin, dur, rates))
        halves = np.stack(np.divmod(values, 1000), axis=2).reshape(-1, 8)
        numbers = np.column_stack((halves, amounts))
        return self._text % tuple(numbers[self._used].tolist())


def _body(name: str, cat: str, args: dict[str, Any], rates: bytes) -> bytes:
    """The end of an event, from its name on. `rates` come after the args."""
    text = orjson.dumps({"name": name, "cat": cat, "args": args}).replace(b"%", b"%%")
    return text[1:-2] + rates + b"}}"


def process_of(tid: int) -> int:
    """The number of a track's context."""
    return tid // PER_CONTEXT
