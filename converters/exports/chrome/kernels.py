"""The slices of a plan's kernels as JSON text with places for the numbers of a compute."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import orjson
from numpy.typing import NDArray

from llamacpp_instr.converters.exports.chrome.tracks import Track
from llamacpp_instr.log.graph.timeline import PlanTimeline, Selection, thread_spans

Int64 = NDArray[np.int64]

SEPARATOR = b",\n"
_THOUSANDTHS = np.array([b"%03d" % i for i in range(1000)], object)
"""the digits behind the point: to look them up is twice as fast as to format them"""


class Span(NamedTuple):
    """A slice of every compute of a plan."""

    begin: int
    """number of the time (`graph.timeline.thread_spans`), as `end`"""
    end: int
    text: bytes
    """from its name on"""
    rates: Sequence[int] = ()
    """numbers of amounts that it shows divided by its time"""
    amounts: Sequence[int] = ()
    """of those that it shows as they are, after the rates"""


class Template:
    """The events of a plan's kernels on one track, built once and filled in for each compute."""

    def __init__(self, track: Track, spans: Sequence[Span]) -> None:
        prefix = b'{"ph":"X","pid":%d,"tid":%d,"ts":%%d.%%b,"dur":%%d.%%b,' % track
        self._text = b"".join(SEPARATOR + prefix + span.text for span in spans)
        self._times = np.array([span[:2] for span in spans], np.intp).reshape(-1, 2).T
        rates = [(i, amount) for i, span in enumerate(spans) for amount in span.rates]
        self._rates = np.array(rates, np.intp).reshape(-1, 2).T
        # places in the text, and which of begins, durations and rates, or of the amounts, is there
        exact: list[tuple[int, int]] = []
        amounts: list[tuple[int, int]] = []
        self.size = 0
        """of numbers, those before and behind a point counted apart; 0 if nothing was selected"""
        next_rate = 2 * len(spans)
        for i, span in enumerate(spans):
            for which in (i, len(spans) + i, *range(next_rate, next_rate + len(span.rates))):
                exact.append((self.size, which))
                self.size += 2
            next_rate += len(span.rates)
            amounts += enumerate(span.amounts, self.size)
            self.size += len(span.amounts)
        self._exact = np.array(exact, np.intp).reshape(-1, 2).T
        self._amounts = np.array(amounts, np.intp).reshape(-1, 2).T

    def fill(self, start: Int64, end: Int64, tail: int, amounts: Int64) -> bytes:
        """The events of a compute: begin and end of each kernel, the wait for all threads after the
        last, all in ns, and the amounts that the spans number."""
        if not self.size:
            return b""
        begin, until = np.concatenate((start, end, end[-1:] + tail))[self._times]
        dur = until - begin
        span, rated = self._rates
        # in thousandths; one per nanosecond is 10^9 per second
        rates = amounts[rated] * 1000 // np.maximum(dur[span], 1)
        at, which = self._exact
        before, behind = np.divmod(np.concatenate((begin, dur, rates))[which], 1000)
        numbers = np.empty(self.size, object)
        numbers[at], numbers[at + 1] = before, _THOUSANDTHS[behind]
        at, which = self._amounts
        numbers[at] = amounts[which]
        return self._text % tuple(numbers.tolist())


def layer_spans(
    timeline: PlanTimeline, selection: Selection, bound: NDArray[np.bool_]
) -> list[Span]:
    """Layers, blocks in them, ops in those; the amounts are the kernels' bytes, then their FLOPs.
    `bound` is true for each op whose amounts are upper bounds."""
    n = len(timeline.ops)
    spans: list[tuple[int, int, Span]] = []
    for level, cat, of in ((0, "layer", timeline.layers), (1, "block", timeline.blocks)):
        for run in of if selection.ops is None else ():
            if selection.has_layer(run.layer):
                text = _text(run.name, cat, {"layer": run.layer})
                spans.append((run.first, level, Span(run.first, n + run.last, text)))
    for i, op in enumerate(timeline.ops):
        if selection.has_op(op):
            rates = [i] * (op.bytes > 0) + [n + i] * (op.flops > 0)
            numbers = b',"GB/s":%d.%b' * (op.bytes > 0) + b',"GFLOP/s":%d.%b' * (op.flops > 0)
            numbers += b',"bytes":%d,"flops":%d' * op.varies
            args = {**op.args, "work": "at most"} if bound[i] else op.args
            text = _text(op.title, op.block, args, numbers)
            spans.append((i, 2, Span(i, n + i, text, rates, (i, n + i) if op.varies else ())))
    # parents come before children that begin at the same time
    spans.sort(key=lambda span: span[:2])
    return [span for _, _, span in spans]


def spans_of_thread(timeline: PlanTimeline, selection: Selection, gaps: bool) -> list[Span]:
    """What one of ggml's threads did; the amounts are the kernels' waits."""
    wait = _text("wait", "wait", {})
    spans = []
    for begin, end, kernel in thread_spans(timeline, selection, gaps):
        if kernel is None:
            spans.append(Span(begin, end, wait))
        else:
            op = timeline.ops[kernel]
            text = _text(op.title, op.block, op.args, b',"wait_ns":%d')
            spans.append(Span(begin, end, text, amounts=(kernel,)))
    return spans


def _text(name: str, cat: str, args: dict[str, Any], numbers: bytes = b"") -> bytes:
    """The end of an event, from its name on. `numbers` come after the args."""
    text = orjson.dumps({"name": name, "cat": cat, "args": args}).replace(b"%", b"%%")
    return text[1:-2] + numbers + b"}}"
