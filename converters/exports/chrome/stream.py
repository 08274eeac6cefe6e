"""A log as a trace in Chrome's JSON format, for the many tools that read it.

Invariant: events of one track nest or are disjoint; times are microseconds since the start of the
earliest session with all three decimals, so no nanosecond is lost in a double. What the kernels of
a plan have in common is encoded once; per compute only numbers are put into it.
"""

from __future__ import annotations

import gzip
from collections.abc import Callable, Iterator, Sequence
from itertools import chain, islice
from typing import Any, BinaryIO

import numpy as np
import orjson

from llamacpp_instr.base.errors import UsageError
from llamacpp_instr.base.terminal import printable
from llamacpp_instr.converters.exports.chrome.kernels import (
    SEPARATOR,
    Int64,
    Span,
    Template,
    layer_spans,
    spans_of_thread,
)
from llamacpp_instr.converters.exports.chrome.tracks import Track, Tracks
from llamacpp_instr.converters.exports.requests import RequestSlice
from llamacpp_instr.converters.exports.steps import OpenStep, TracedSteps, achieved, compute_phases
from llamacpp_instr.log.graph.timeline import Lanes, Selection, layer_name, plan_timeline, remember
from llamacpp_instr.log.reader import EventReader, LogEnd
from llamacpp_instr.log.requests import Request
from llamacpp_instr.log.resolve import Resolver
from llamacpp_instr.log.schema import (
    Compute,
    Event,
    Kv,
    Layers,
    Mark,
    Memory,
    Message,
    Model,
    Ops,
    SessionStart,
    StepBegin,
    StepEnd,
    Sync,
    Token,
)
from llamacpp_instr.log.session import kernel_times

TEMPLATES = 64
"""of a plan that are kept: one for each of its tracks"""


def write_chrome(
    reader: EventReader,
    output: BinaryIO,
    selection: Selection | None = None,
    threads: bool = True,
    compress: bool = False,
    lenient: bool = False,
    others: Sequence[EventReader] = (),
) -> int:
    """Writes the log's session to `output`, `others` beside it as processes of their own; how many
    events were left out (`lenient`).

    `threads` gives every thread of ggml a track, where the log has them. Several sessions begin
    where their wall clocks say. Raises LogError, with the line, for an event that is not whole
    (`log.resolve`), unless `lenient`; and UsageError when nothing of a log was selected.
    """
    chosen = selection or Selection()
    readers = [_Started(each) for each in (reader, *others)]
    if compress:
        with gzip.GzipFile("", "wb", 5, output, mtime=0) as file:
            return _write_all(readers, file.write, chosen, threads, lenient)
    return _write_all(readers, output.write, chosen, threads, lenient)


def _write_all(
    readers: Sequence[_Started],
    write: Callable[[bytes], object],
    selection: Selection,
    threads: bool,
    lenient: bool,
) -> int:
    starts = [reader.start for reader in readers if reader.start is not None]
    earliest = min((start.wall for start in starts), default=0)
    left_out, before = 0, Track(0, 0)
    for reader in readers:
        name, at = "", 0
        if len(readers) > 1 and reader.start is not None:
            name, at = f", {printable(reader.path)}", reader.start.wall - earliest
        writer = _Writer(reader, write, selection, threads, name, at, before)
        left_out += writer.run(lenient)
        before = writer.tracks.latest
    write(b"\n]}\n")
    return left_out


class _Writer:
    def __init__(
        self,
        reader: EventReader,
        write: Callable[[bytes], object],
        selection: Selection,
        threads: bool,
        name: str,
        at: int,
        before: Track,
    ) -> None:
        """`name` follows the names of the session's processes; it began `at` ns after the earliest
        one; the sessions `before` have processes and tracks up to these numbers."""
        self._reader, self._write, self._selection = reader, write, selection
        self._threads, self._at = threads, at
        self._start = 0
        self._separator = SEPARATOR if before.pid else b""
        self.tracks = Tracks(self._event, name, before)
        self._refs = Resolver()
        """a plan keeps its timeline and the templates of its tracks"""
        self._steps = steps = TracedSteps(
            self._refs, selection, self._step, self._phase, self._compute, self._layers,
            self._request,
        )  # fmt: skip
        self._lanes = Lanes()
        self._matched = False
        self._takers: dict[type[Event], Callable[[Any], None]] = {
            SessionStart: self._begin,
            StepBegin: self._step_begin,
            StepEnd: steps.end,
            Sync: self._sync,
            Compute: steps.compute,
            Layers: steps.layers,
            Ops: self._ops,
            Kv: self._kv,
            Token: self._token,
        }
        if steps.whole:
            self._takers |= {
                Model: self._model,
                Memory: self._memory,
                Mark: self._mark,
                Message: self._message,
            }

    def run(self, lenient: bool) -> int:
        left_out = self._refs.feed(self._reader, self._takers, lenient)
        latest = self._steps.finish()
        for _, mark in self._refs.open_marks.values() if self._steps.whole else ():
            self._end_mark(mark, latest)
        chosen = self._selection
        if not self._matched and (chosen.steps, chosen.layers, chosen.ops) != (None,) * 3:
            raise UsageError(f"{self._reader.path}: nothing of the log was selected")
        return left_out

    def _begin(self, start: SessionStart) -> None:
        self._start = start.t - self._at
        if not self._separator:
            about = {"recorded": start.time, "level": start.level, "t0_monotonic_ns": self._start}
            head = orjson.dumps({"displayTimeUnit": "ns", "otherData": about})
            self._write(head[:-1] + b',"traceEvents":[\n')
        self.tracks.process(0)

    # --- writing ---

    def _event(self, event: dict[str, Any]) -> None:
        try:
            text = orjson.dumps(event, option=orjson.OPT_NON_STR_KEYS)
        except orjson.JSONEncodeError:
            raise OverflowError("impossible tensor sizes") from None
        self._write(self._separator + text)
        self._separator = SEPARATOR

    def _us(self, t: int) -> float:
        # no time of the trace is negative: some tools leave such events out
        return max(t - self._start, 0) / 1000

    def _slice(self, on: Track, name: str, begin: int, end: int, cat: str, args: Any) -> None:
        dur = max(0, end - max(begin, self._start)) / 1000
        self._event(
            {"ph": "X", "pid": on.pid, "tid": on.tid, "ts": self._us(begin), "dur": dur,
             "name": name, "cat": cat, "args": args}
        )  # fmt: skip

    def _instant(self, on: Track, name: str, t: int, args: dict[str, Any]) -> None:
        self._event({"ph": "i", "s": "t", **on._asdict(), "ts": self._us(t), "name": name,
                     "args": args})  # fmt: skip

    def _counter(self, ctx: int, name: str, t: int, value: float) -> None:
        self._event({"ph": "C", "pid": self.tracks.process(ctx), "ts": self._us(t), "name": name,
                     "args": {"value": value}})  # fmt: skip

    def _span(self, ctx: int, name: str, begin: int, end: int, value: float) -> None:
        """A counter that is zero when nothing runs."""
        self._counter(ctx, name, begin, value)
        self._counter(ctx, name, end, 0)

    # --- facts ---

    def _model(self, model: Model) -> None:
        args = {"model": model.name or model.path.rsplit("/", 1)[-1], "arch": model.arch,
                "ftype": model.ftype, "params": model.params, "bytes": model.bytes}  # fmt: skip
        if model.t < self._start:
            args["ns_before_session"] = self._start - model.t
        self._slice(self.tracks.on(0, "steps"), "load", model.t, model.t + model.dur, "model", args)

    def _memory(self, memory: Memory) -> None:
        for use in memory.buffers:
            for kind in ("model", "context", "compute"):
                name = f"memory {use.buffer} {kind}"
                self._counter(memory.ctx, name, memory.t, getattr(use, kind))

    def _kv(self, kv: Kv) -> None:
        if self._steps.has(kv.step):
            of = f" of cache {kv.cache}" if kv.cache else ""
            self._counter(kv.ctx, f"KV cells{of}", kv.t, kv.used)
            self._counter(kv.ctx, f"KV bytes{of}", kv.t, kv.bytes)

    def _message(self, message: Message) -> None:
        on = self.tracks.on(0, "messages")
        self._instant(on, message.level, message.t, {"text": message.text})

    def _mark(self, mark: Mark) -> None:
        if mark.phase == "begin":
            # those that overlap each have a track, so that none has to nest in another
            self._lanes.begin(mark.mark, mark.t)
        elif mark.phase == "end":
            self._end_mark(self._refs.mark, mark.t)
        else:
            self._instant(self.tracks.on(0, "marks"), mark.name, mark.t, {})
        self._steps.mark(mark)

    def _end_mark(self, mark: Mark, t: int) -> None:
        lane, _ = self._lanes.end(mark.mark, t)
        on = self.tracks.on(0, "marks", lane)
        self._slice(on, mark.name, mark.t, t, "mark", {"thread": mark.thread})

    # --- steps ---

    def _step_begin(self, step: StepBegin) -> None:
        if self._steps.begin(step) is not None:
            self._matched |= self._selection.layers is None and self._selection.ops is None

    def _step(
        self, opened: OpenStep, end: StepEnd | None, t: int, _served: Sequence[Request]
    ) -> None:
        step = opened.known.event
        args = {"step": step.step, "tokens": step.n_tokens, "outputs": step.n_outputs,
                "status": "the log ended" if end is None else end.status}  # fmt: skip
        on = self.tracks.on(step.ctx, "steps")
        self._slice(on, opened.known.phase, step.t, t, "step", args)
        if end is not None:
            self._span(step.ctx, "page faults", step.t, t, end.minflt + end.majflt)
            if t > step.t:
                rate = step.n_tokens * 1e9 / (t - step.t)
                self._span(step.ctx, "tokens/s", step.t, t, rate)

    def _phase(self, ctx: int, name: str, begin: int, end: int, args: dict[str, Any]) -> None:
        self._slice(self.tracks.on(ctx, "phases"), name, begin, end, "phase", args)

    def _compute(self, compute: Compute) -> None:
        about = ("compute", "graph", "source", "n_tokens", "n_threads", "status", "reused")
        args = {name: getattr(compute, name) for name in about}
        for name, begin, end in compute_phases(compute):
            self._phase(compute.ctx, name, begin, end, args if name == "compute" else {})

    def _sync(self, sync: Sync) -> None:
        self._steps.sync(sync)
        if self._steps.whole:
            on = self.tracks.on(sync.ctx, "device waits")
            self._slice(on, "synchronize", sync.t, sync.t + sync.dur, "wait", {})

    def _token(self, token: Token) -> None:
        if not self._steps.token(token):
            return
        args = {"text": token.text, "id": token.id, "step": token.step}
        sampler = self.tracks.on(token.ctx, "sampler")
        self._slice(sampler, "sample", token.t, token.t + token.dur, "sampler", args)
        if token.step in self._steps.spans:
            begin, end = self._steps.spans[token.step]
            text = orjson.dumps(token.text).decode()
            self._slice(self.tracks.on(token.ctx, "steps"), text, begin, end, "token", args)

    def _request(self, of: RequestSlice) -> None:
        on = self.tracks.on(of.request.ctx, "requests", of.lane)
        self._slice(on, of.name, of.begin, of.end, "request", of.args)

    # --- layers and ops ---

    def _layers(self, ctx: int, layers: Layers) -> None:
        if self._selection.ops is not None:
            return
        start, end = kernel_times(layers)
        on = self.tracks.on(ctx, "layers")
        for layer, first, last in zip(layers.layer, start.tolist(), end.tolist(), strict=True):
            if self._selection.has_layer(layer):
                self._matched = True
                self._slice(on, layer_name(layer), first, last, "layer", {"layer": layer})

    def _ops(self, ops: Ops) -> None:
        if not self._steps.ops(ops):
            return
        known, plan, chosen = self._refs.compute, self._refs.plan, self._selection
        compute, gaps = known.event, ops.gap is not None
        if plan.kept is None:
            plan.kept = plan_timeline(plan.graph.event, plan.event), {}
        timeline, templates = plan.kept
        begin, end = (t - self._start for t in kernel_times(ops))

        def draw(on: Track, shape: object, spans: Callable[[], list[Span]], amounts: Int64) -> None:
            """Draws the kernels on a track; computes of one shape have the same slices there."""
            template: Template | None = templates.get((on, shape))
            if template is None:
                template = Template(on, spans())
                remember(templates, (on, shape), template, TEMPLATES)
            self._matched |= template.size > 0
            self._write(template.fill(begin, end, ops.tail, amounts))

        if ops.thread == 0:
            work = timeline.kernels.work(known.ubatch)
            on, amounts = self.tracks.on(compute.ctx, "layers"), (work.bytes, work.flops)
            draw(
                on,
                work.bound.tobytes(),
                lambda: layer_spans(timeline, chosen, work.bound),
                np.concatenate(amounts),
            )
            t = compute.t + compute.start
            for unit, rate in achieved(work, known):
                self._span(compute.ctx, f"achieved {unit}", t, t + compute.dur, rate)
        if self._threads and ops.wait is not None:
            on = self.tracks.on(compute.ctx, "thread", ops.thread)
            wait = np.array(ops.wait, np.int64)
            draw(on, gaps, lambda: spans_of_thread(timeline, chosen, gaps), wait)


class _Started:
    """Gives the events of `reader`, once, from the first on."""

    def __init__(self, reader: EventReader) -> None:
        self._reader = reader
        events = iter(reader)
        first = list(islice(events, 1))
        self._events = chain(first, events)
        self.start = first[0][1] if first and isinstance(first[0][1], SessionStart) else None
        """None if the first event is damaged; reading the rest reports that"""

    def __iter__(self) -> Iterator[tuple[int, Event]]:
        return self._events

    @property
    def path(self) -> str:
        return self._reader.path

    @property
    def end(self) -> LogEnd | None:
        return self._reader.end

    @end.setter
    def end(self, end: LogEnd | None) -> None:
        self._reader.end = end
