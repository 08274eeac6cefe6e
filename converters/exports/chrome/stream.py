"""A log as a trace in Chrome's JSON format, for the many tools that read it.

Invariant: events of one track nest or are disjoint; times are microseconds since the start of the
earliest session with all three decimals, so no nanosecond is lost in a double. What the kernels of
a plan have in common is encoded once; per compute only numbers are put into it.
"""

from __future__ import annotations

import gzip
from collections.abc import Callable, Sequence
from typing import Any, BinaryIO

import orjson

from converters.exports.chrome.begun import Begun
from converters.exports.chrome.kernels import (
    PER_CONTEXT,
    SEPARATOR,
    Int64,
    Template,
    process_of,
)
from llamacpp_instr.errors import UsageError
from llamacpp_instr.graph.kernels import KernelWork
from llamacpp_instr.graph.timeline import (
    Lanes,
    Selection,
    layer_name,
    plan_timeline,
    remember,
)
from llamacpp_instr.log.columns import kernel_times
from llamacpp_instr.log.ids import KnownPlan, KnownStep
from llamacpp_instr.log.reader import EventReader
from llamacpp_instr.log.resolve import Resolver
from llamacpp_instr.log.waits import LatestSteps
from llamacpp_instr.schema import (
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
from llamacpp_instr.terminal import printable

TRACKS = ("steps", "phases", "layers", "sampler", "messages")
FIRST_THREAD, FIRST_MARK = 100, 5_000
"""numbers within a context of the tracks of threads and of marks; none is 0, which Perfetto takes
for the process itself"""
KEPT = 1024
"""ended steps on which a token may still be drawn"""


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
    readers = [Begun(each) for each in (reader, *others)]
    if compress:
        with gzip.GzipFile("", "wb", 5, output, mtime=0) as file:
            return _write_all(readers, file.write, chosen, threads, lenient)
    return _write_all(readers, output.write, chosen, threads, lenient)


def _write_all(
    readers: Sequence[Begun],
    write: Callable[[bytes], object],
    selection: Selection,
    threads: bool,
    lenient: bool,
) -> int:
    starts = [reader.start for reader in readers if reader.start is not None]
    earliest = min((start.wall for start in starts), default=0)
    left_out = processes = 0
    for reader in readers:
        writer = _Writer(reader, write, selection, threads)
        if len(readers) > 1 and reader.start is not None:
            writer.place(f", {printable(reader.path)}", reader.start.wall - earliest, processes)
        left_out += writer.run(lenient)
        processes = writer.processes
    write(b"\n]}\n")
    return left_out


class _Writer:
    def __init__(
        self,
        reader: EventReader,
        write: Callable[[bytes], object],
        selection: Selection,
        threads: bool,
    ) -> None:
        self._reader, self._write, self._selection = reader, write, selection
        self._threads = threads
        self._name, self._at = "", 0
        self._before = self.processes = 0
        """numbers of processes that the sessions before took, and afterwards this one too"""
        self._start = 0
        self._tracks: set[int] = set()
        self._refs = Resolver()
        """a plan keeps the templates of its tracks"""
        self._latest: LatestSteps[tuple[KnownStep, StepEnd]] = LatestSteps(
            lambda ended, t: self._step(*ended, t)
        )
        self._ended: dict[int, tuple[int, int]] = {}
        self._layers: dict[int, tuple[Layers, Compute]] = {}
        """by context: layers whose ops may still follow"""
        self._lanes = Lanes()
        self._matched = False
        self._takers: dict[type[Event], Callable[[Any], None]] = {
            SessionStart: self._begin,
            Model: self._model,
            Memory: self._memory,
            StepBegin: self._step_begin,
            StepEnd: self._step_end,
            Sync: self._latest.wait,
            Compute: self._compute,
            Layers: self._take_layers,
            Ops: self._ops,
            Kv: self._kv,
            Token: self._token,
            Mark: self._mark,
            Message: self._message,
        }

    def place(self, name: str, at: int, before: int) -> None:
        """This session is one of several: what follows the names of its processes, when it began,
        in ns after the earliest, and how many processes the sessions before it have."""
        self._name, self._at = name, at
        self._before = self.processes = before

    def run(self, lenient: bool) -> int:
        left_out = self._refs.feed(self._reader, self._takers, lenient)
        self._finish()
        return left_out

    def _begin(self, start: SessionStart) -> None:
        self._start = start.t - self._at
        if not self._before:
            about = {"recorded": start.time, "level": start.level, "t0_monotonic_ns": self._start}
            head = orjson.dumps({"displayTimeUnit": "ns", "otherData": about})
            self._write(head[:-1] + b',"traceEvents":[\n')
        # the first event: all others put a separator before themselves
        name = _metadata("process_name", self._process(0), "name", f"session{self._name}")
        self._write(SEPARATOR * (self._before > 0) + orjson.dumps(name))

    def _finish(self) -> None:
        for ctx in list(self._layers):
            self._flush_layers(ctx)
        self._latest.settle_all()
        for step in self._refs.open_steps.values():
            if self._selection.has_step(step.event.step):
                self._step(step, None, self._refs.latest)
        for _, mark in self._refs.open_marks.values() if self._whole else ():
            self._end_mark(mark, self._refs.latest)
        chosen = self._selection
        if not self._matched and (chosen.steps, chosen.layers, chosen.ops) != (None,) * 3:
            raise UsageError(f"{self._reader.path}: nothing of the log was selected")

    # --- writing ---

    def _event(self, event: dict[str, Any]) -> None:
        try:
            self._write(SEPARATOR + orjson.dumps(event, option=orjson.OPT_NON_STR_KEYS))
        except orjson.JSONEncodeError:
            raise OverflowError("impossible tensor sizes") from None

    def _us(self, t: int) -> float:
        return (t - self._start) / 1000

    def _slice(self, tid: int, name: str, begin: int, end: int, cat: str, args: Any) -> None:
        dur = max(0, end - begin) / 1000
        self._event(
            {"ph": "X", "pid": process_of(tid), "tid": tid, "ts": self._us(begin), "dur": dur,
             "name": name, "cat": cat, "args": args}
        )  # fmt: skip

    def _counter(self, ctx: int, name: str, t: int, value: float) -> None:
        self._event({"ph": "C", "pid": self._process(ctx), "ts": self._us(t), "name": name,
                     "args": {"value": value}})  # fmt: skip

    def _span(self, ctx: int, name: str, begin: int, end: int, value: float) -> None:
        """A counter that is zero when nothing runs."""
        self._counter(ctx, name, begin, value)
        self._counter(ctx, name, end, 0)

    def _process(self, ctx: int) -> int:
        """The number of a context's process."""
        self.processes = max(self.processes, self._before + ctx + 1)
        return self._before + ctx + 1

    def _track(self, ctx: int, name: str, number: int) -> int:
        """The number of a track, which is described when it is first used."""
        pid = self._process(ctx)
        tid = pid * PER_CONTEXT + number
        if tid not in self._tracks:
            if number == 1 and ctx:
                named = f"context {ctx}{self._name}"
                self._event(_metadata("process_name", pid, "name", named))
            self._tracks.add(tid)
            self._event(_metadata("thread_name", pid, "name", name, tid))
            self._event(_metadata("thread_sort_index", pid, "sort_index", number, tid))
        return tid

    def _on(self, ctx: int, name: str) -> int:
        return self._track(ctx, name, TRACKS.index(name) + 1)

    # --- facts ---

    @property
    def _whole(self) -> bool:
        return self._selection.steps is None

    def _model(self, model: Model) -> None:
        if self._whole:
            args = {"model": model.name or model.path.rsplit("/", 1)[-1], "arch": model.arch,
                    "ftype": model.ftype, "params": model.params, "bytes": model.bytes}  # fmt: skip
            begin, end = max(model.t, self._start), max(model.t + model.dur, self._start)
            if begin > model.t:
                # no time of the trace is negative: some tools leave such events out
                args["ns_before_session"] = begin - model.t
            self._slice(self._on(0, "steps"), "load", begin, end, "model", args)

    def _memory(self, memory: Memory) -> None:
        for use in memory.buffers if self._whole else ():
            for kind in ("model", "context", "compute"):
                name = f"memory {use.buffer} {kind}"
                self._counter(memory.ctx, name, memory.t, getattr(use, kind))

    def _kv(self, kv: Kv) -> None:
        if self._selection.has_step(kv.step) and (self._whole or kv.step >= 0):
            of = f" of cache {kv.cache}" if kv.cache else ""
            self._counter(kv.ctx, f"KV cells{of}", kv.t, kv.used)
            self._counter(kv.ctx, f"KV bytes{of}", kv.t, kv.bytes)

    def _message(self, message: Message) -> None:
        if self._whole:
            tid = self._on(0, "messages")
            self._event(
                {"ph": "i", "s": "t", "pid": process_of(tid), "tid": tid, "ts": self._us(message.t),
                 "name": message.level, "args": {"text": message.text}}
            )  # fmt: skip

    def _mark(self, mark: Mark) -> None:
        if not self._whole:
            return
        if mark.phase == "begin":
            # those that overlap each have a track, so that none has to nest in another
            self._lanes.begin(mark.mark, mark.t)
        elif mark.phase == "end":
            self._end_mark(self._refs.mark, mark.t)
        else:
            tid = self._track(0, "marks", FIRST_MARK)
            self._event({"ph": "i", "s": "t", "pid": process_of(tid), "tid": tid,
                         "ts": self._us(mark.t), "name": mark.name})  # fmt: skip

    def _end_mark(self, mark: Mark, t: int) -> None:
        lane, _ = self._lanes.end(mark.mark, t)
        tid = self._track(0, "marks", FIRST_MARK + lane)
        self._slice(tid, mark.name, mark.t, t, "mark", {"thread": mark.thread})

    # --- steps ---

    def _step_begin(self, step: StepBegin) -> None:
        self._latest.settle(step.ctx)
        if self._selection.has_step(step.step):
            self._matched |= self._selection.layers is None and self._selection.ops is None

    def _step_end(self, end: StepEnd) -> None:
        if self._refs.step and self._selection.has_step(end.step):
            step = self._refs.step.event
            self._flush_layers(step.ctx)
            self._latest.add(step.ctx, (self._refs.step, end), max(end.t, step.t))

    def _step(self, known: KnownStep, end: StepEnd | None, t: int) -> None:
        step = known.event
        args = {"step": step.step, "tokens": step.n_tokens, "outputs": step.n_outputs,
                "status": "the log ended" if end is None else end.status}  # fmt: skip
        self._slice(self._on(step.ctx, "steps"), known.phase, step.t, t, "step", args)
        remember(self._ended, step.step, (step.t, t), KEPT)
        if end is not None:
            self._span(step.ctx, "page faults", step.t, t, end.minflt + end.majflt)
            if t > step.t:
                rate = step.n_tokens * 1e9 / (t - step.t)
                self._span(step.ctx, "tokens/s", step.t, t, rate)

    def _compute(self, compute: Compute) -> None:
        self._flush_layers(compute.ctx)
        if not self._selection.has_step(compute.step):
            return
        tid = self._on(compute.ctx, "phases")
        now, start = compute.t, compute.t + compute.start
        for what in ("apply", "build", "alloc", "inputs"):
            if dur := getattr(compute, what):
                self._slice(tid, what, now, min(now + dur, start), "phase", {"ns": dur})
                now = min(now + dur, start)
        args = {"graph": compute.graph, "reused": compute.reused, "threads": compute.n_threads}
        self._slice(tid, "compute", start, start + compute.dur, "phase", args)

    def _token(self, token: Token) -> None:
        self._latest.settle(token.ctx)
        if not self._selection.has_step(token.step):
            return
        args = {"text": token.text, "id": token.id, "step": token.step}
        sampler = self._on(token.ctx, "sampler")
        self._slice(sampler, "sample", token.t, token.t + token.dur, "sampler", args)
        if token.step in self._ended:
            begin, end = self._ended.pop(token.step)
            text = orjson.dumps(token.text).decode()
            self._slice(self._on(token.ctx, "steps"), text, begin, end, "token", args)

    # --- layers and ops ---

    def _take_layers(self, layers: Layers) -> None:
        compute = self._refs.compute.event
        self._layers[compute.ctx] = layers, compute

    def _flush_layers(self, ctx: int) -> None:
        """Layers of which no ops came are drawn as they are."""
        layers, compute = self._layers.pop(ctx, (None, None))
        if layers is None or compute is None or self._selection.ops is not None:
            return
        if self._selection.has_step(compute.step):
            start, end = kernel_times(layers)
            tid = self._on(ctx, "layers")
            for layer, first, last in zip(layers.layer, start.tolist(), end.tolist(), strict=True):
                if self._selection.has_layer(layer):
                    self._matched = True
                    self._slice(tid, layer_name(layer), first, last, "layer", {"layer": layer})

    def _ops(self, ops: Ops) -> None:
        compute, plan = self._refs.compute.event, self._refs.plan
        waiting, _ = self._layers.get(compute.ctx, (None, None))
        main = ops.thread == 0
        if main and waiting is not None and waiting.compute == ops.compute:
            del self._layers[compute.ctx]
        if not self._selection.has_step(compute.step):
            return
        start, end = kernel_times(ops)
        if plan.kept is None:
            plan.kept = plan_timeline(plan.graph.event, plan.event), {}
        work = plan.kept[0].kernels.work(self._refs.compute.ubatch)
        if main:
            layers = self._on(compute.ctx, "layers")
            self._draw(plan, layers, True, start, end, work)
            if compute.dur:
                t = compute.t + compute.start
                for unit, amounts in (("GB/s", work.bytes), ("GFLOP/s", work.flops)):
                    rate = int(amounts.sum()) / compute.dur
                    self._span(compute.ctx, f"achieved {unit}", t, t + compute.dur, rate)
        if self._threads and ops.wait is not None:
            tid = self._track(compute.ctx, f"thread {ops.thread}", FIRST_THREAD + ops.thread)
            self._draw(plan, tid, False, start, end, work)

    def _draw(
        self, plan: KnownPlan, tid: int, runs: bool, start: Int64, end: Int64, work: KernelWork
    ) -> None:
        """Draws the kernels of a compute on a track."""
        timeline, templates = plan.kept
        template: Template | None = templates.get(tid)
        if template is None:
            template = templates[tid] = Template(timeline, self._selection, tid, runs)
        self._matched |= template.matched
        self._write(template.fill(start - self._start, end - self._start, work))


def _metadata(name: str, pid: int, key: str, value: str | int, tid: int = 0) -> dict[str, Any]:
    track = {"tid": tid} if tid else {}
    return {"ph": "M", "name": name, "pid": pid, **track, "args": {key: value}}
