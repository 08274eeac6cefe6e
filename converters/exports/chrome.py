"""A log as a trace in Chrome's JSON format, for the many tools that read it.

Each context is a process, the first also the session, and so is each machine of the RPC backend.

Invariant: events of one track nest or are disjoint; times are microseconds since the start of the
earliest session with all three decimals, so no nanosecond is lost in a double. What the kernels of
a plan have in common is encoded once; per compute only numbers are put into it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain, islice
from typing import Any, BinaryIO, NamedTuple

import numpy as np
import orjson
from numpy.typing import NDArray

from llamacpp_instr.base.errors import UsageError
from llamacpp_instr.base.terminal import printable
from llamacpp_instr.converters.exports import traced
from llamacpp_instr.converters.exports.calls import Machines
from llamacpp_instr.log import schema
from llamacpp_instr.log.columns import kernel_times
from llamacpp_instr.log.graph.kernels import KernelWork
from llamacpp_instr.log.graph.timeline import layer_name, remember
from llamacpp_instr.log.reader import EventReader, LogEnd

Int64 = NDArray[np.int64]

SEPARATOR = b",\n"
ORDER = (
    "steps", "marks", "requests", "phases", "layers", "thread", "submissions", "device",
    "device waits", "machines", "commands", "sampler", "messages",
)  # fmt: skip
_MOST_LANES = 100_000
"""tracks of one name that are shown in their order"""
_THOUSANDTHS = np.array([b"%03d" % i for i in range(1000)], object)
"""the digits behind the point: looking them up is twice as fast as formatting them"""


def write_chrome(
    reader: EventReader,
    output: BinaryIO,
    options: traced.Options = traced.WHOLE,
    others: Sequence[EventReader] = (),
) -> int:
    """Writes the log's session to `output`, `others` beside it as processes of their own; returns
    how many events were left out (lenient). Wall clocks place several sessions in time.

    Raises LogError, with the line, for an event that is not whole, unless `options.lenient`; and
    UsageError when nothing of a log was selected.
    """
    readers = [_Started(each) for each in (reader, *others)]
    earliest = min((each.start.wall for each in readers if each.start), default=0)
    left_out, before = 0, Track(0, 0)
    with options.compressed(output) as file:
        for each in readers:
            name, at = "", 0
            if others and each.start:
                name, at = f", {printable(each.path)}", each.start.wall - earliest
            writer = _Writer(each, file.write, options, name, at, before)
            left_out += writer.run()
            before = writer.tracks.latest
        file.write(b"\n]}\n")
    return left_out


class _Writer(traced.TracedLog):
    def __init__(
        self,
        reader: EventReader,
        write: Callable[[bytes], object],
        options: traced.Options,
        name: str,
        at: int,
        before: Track,
    ) -> None:
        """`name` follows the names of the session's processes; it began `at` ns after the earliest
        one; the sessions `before` have processes and tracks up to these numbers."""
        super().__init__(reader, options)
        self._write, self._at = write, at
        self._start = 0
        self._separator = SEPARATOR if before.pid else b""
        self.tracks = Tracks(self._event, name, before)
        self._matched = False
        self._machines = Machines()
        self._n_flows = before.tid << 32

    def run(self) -> int:
        left_out = self.walk()
        self.end_marks()
        chosen = self.selection
        if not self._matched and (chosen.steps, chosen.layers, chosen.ops) != (None,) * 3:
            raise UsageError(f"{self.reader.path}: nothing of the log was selected")
        return left_out

    def take_session_start(self, start: schema.SessionStart) -> None:
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

    def take_model(self, model: schema.Model) -> None:
        if not self.whole:
            return
        args = traced.model_args(model)
        if model.t < self._start:
            args["ns_before_session"] = self._start - model.t
        self._slice(self.tracks.on(0, "steps"), "load", model.t, model.t + model.dur, "model", args)

    def take_memory(self, memory: schema.Memory) -> None:
        for use in memory.buffers:
            for kind in ("model", "context", "compute"):
                name = f"memory {use.buffer} {kind}"
                self._counter(memory.ctx, name, memory.t, getattr(use, kind))
        for name, n in self.of_devices(memory).items():
            self._counter(0, f"memory of {name}", memory.t, n)

    def draw_kv(self, kv: schema.Kv) -> None:
        of = f" of cache {kv.cache}" if kv.cache else ""
        self._counter(kv.ctx, f"KV cells{of}", kv.t, kv.used)
        self._counter(kv.ctx, f"KV bytes{of}", kv.t, kv.bytes)

    def take_message(self, message: schema.Message) -> None:
        on = self.tracks.on(0, "messages")
        self._instant(on, message.level, message.t, {"text": message.text})

    def draw_mark(self, mark: schema.Mark, lane: int, t: int | None) -> None:
        if mark.phase == "instant":
            self._instant(self.tracks.on(0, "marks"), mark.name, mark.t, {})
        elif t is not None:
            on = self.tracks.on(0, "marks", lane)
            self._slice(on, mark.name, mark.t, t, "mark", {"thread": mark.thread})

    # --- steps ---

    def take_step_begin(self, step: schema.StepBegin) -> traced.OpenStep | None:
        opened = super().take_step_begin(step)
        if opened is not None:
            self._matched |= self.selection.layers is None and self.selection.ops is None
        return opened

    def draw_step(self, step: traced.OpenStep, end: schema.StepEnd | None, t: int) -> None:
        begin = step.known.event
        args = {"step": begin.step, "tokens": begin.n_tokens, "outputs": begin.n_outputs,
                "status": "the log ended" if end is None else end.status}  # fmt: skip
        on = self.tracks.on(begin.ctx, "steps")
        self._slice(on, step.known.phase, begin.t, t, "step", args)
        if end is not None:
            self._span(begin.ctx, "page faults", begin.t, t, end.minflt + end.majflt)
            if t > begin.t:
                rate = begin.n_tokens * 1e9 / (t - begin.t)
                self._span(begin.ctx, "tokens/s", begin.t, t, rate)

    def draw_phases(self, ctx: int, phases: Sequence[traced.Phase], args: traced.Args) -> None:
        on = self.tracks.on(ctx, "phases")
        for name, begin, end in phases[:-1]:
            self._slice(on, name, begin, end, "phase", {})
        self._slice(on, *phases[-1], "phase", args)

    def draw_sync(self, sync: schema.Sync) -> None:
        on = self.tracks.on(sync.ctx, "device waits")
        self._slice(on, "synchronize", sync.t, sync.t + sync.dur, "wait", {})

    def draw_token(self, token: schema.Token) -> None:
        args = {"text": token.text, "id": token.id, "step": token.step}
        sampler = self.tracks.on(token.ctx, "sampler")
        self._slice(sampler, "sample", token.t, token.t + token.dur, "sampler", args)
        if token.step in self.spans:
            begin, end = self.spans[token.step]
            text = orjson.dumps(token.text).decode()
            self._slice(self.tracks.on(token.ctx, "steps"), text, begin, end, "token", args)

    def draw_request(self, request: traced.RequestSlice) -> None:
        on = self.tracks.on(request.request.ctx, "requests", request.lane)
        self._slice(on, request.name, request.begin, request.end, "request", request.args)

    # --- layers and ops ---

    def draw_layers(self, ctx: int, layers: schema.Layers) -> None:
        if self.selection.ops is not None:
            return
        start, end = kernel_times(layers)
        on = self.tracks.on(ctx, "layers")
        for layer, first, last in zip(layers.layer, start.tolist(), end.tolist(), strict=True):
            if self.selection.has_layer(layer):
                self._matched = True
                self._slice(on, layer_name(layer), first, last, "layer", {"layer": layer})

    def draw_ops(
        self, ctx: int, ops: schema.Ops, plan: traced.TracedPlan, work: KernelWork | None
    ) -> None:
        name = "layers" if work else "thread"
        self._draw_kernels(self.tracks.on(ctx, name, ops.thread), ops, plan, work)

    def draw_split(self, ctx: int, of: traced.SplitSlice) -> None:
        if of.submitted:
            on, name = self.tracks.on(ctx, "submissions"), f"submit to {of.split.backend}"
            self._slice(on, name, of.begin, of.end, "split", {"split": of.number})

    def draw_run(
        self, ctx: int, run: traced.DeviceRun, plan: traced.TracedPlan, work: KernelWork
    ) -> None:
        machine = self._machines.of_device(run.ops.device)
        on = self.tracks.on(machine or ctx, "device", run.lane, run.ops.device)
        self._slice(on, f"split {run.ops.split}", run.begin, run.end, "run", run.args)
        self._draw_kernels(on, run.ops, plan, work)
        if run.submitted is not None:
            self._flow("run", self.tracks.on(ctx, "submissions"), run.submitted, on, run.begin)

    def _flow(self, name: str, of: Track, begin: int, on: Track, end: int) -> None:
        """An arrow from the slice of a track at one time to that of another."""
        self._n_flows += 1
        flow = {"id": self._n_flows, "name": name, "cat": name}
        self._event({"ph": "s", **of._asdict(), "ts": self._us(begin), **flow})
        self._event({"ph": "f", "bp": "e", **on._asdict(), "ts": self._us(end), **flow})

    def take_connection(self, connection: schema.Connection) -> None:
        self._machines.add(connection)

    def take_rpc(self, event: schema.Rpc) -> None:
        """Draws commands, with arrows to the machine and back."""
        for call in self._machines.slices(event, self.selection):
            if call.sent:
                at = self.tracks.on(0, "machines", call.connection, f"commands to {call.machine}")
                self._slice(at, call.name, *call.sent, "command", call.args)
            for name, (begin, end) in call.ways:
                self._slice(at, name, begin, end, "way", {})
            if call.served:
                on = self.tracks.on(call.machine or 0, "commands", call.connection)
                self._slice(on, call.name, *call.served, "command", call.args)
            if call.sent and call.served:
                self._flow("request", at, call.sent[0], on, call.served[0])
            if call.reply and call.served:
                self._flow("reply", on, call.served[0], at, call.reply[0])

    def _draw_kernels(
        self, on: Track, ops: schema.Ops, plan: traced.TracedPlan, work: KernelWork | None
    ) -> None:
        gaps = ops.gap is not None
        if work:
            amounts: Int64 = np.concatenate((work.bytes, work.flops))
        else:
            amounts = np.array(ops.wait, np.int64)
        key = (on, work.bound.tobytes() if work else gaps)
        template: Template | None = plan.templates.get(key)
        if template is None:
            if work:
                spans = traced.layer_spans(plan.timeline, self.selection, work.bound.tolist())
                if self.selection.ops is not None:
                    spans = [span for span in spans if span.op]
            else:
                spans = traced.spans_of_thread(plan.timeline, self.selection, gaps)
            template = Template(on, spans)
            remember(plan.templates, key, template, traced.TEMPLATES)
        self._matched |= bool(template.text)
        begin, end = (t - self._start for t in kernel_times(ops))
        self._write(template.fill(begin, end, ops.tail, amounts))

    def draw_rates(self, compute: schema.Compute, rates: Mapping[str, float]) -> None:
        t = compute.t + compute.start
        for unit, rate in rates.items():
            self._span(compute.ctx, f"achieved {unit}", t, t + compute.dur, rate)


class _Started:
    """Gives the events of `reader` once, from the first one."""

    def __init__(self, reader: EventReader) -> None:
        self._reader = reader
        events = iter(reader)
        first = list(islice(events, 1))
        self._events = chain(first, events)
        self.start = first[0][1] if first and isinstance(first[0][1], schema.SessionStart) else None
        """None if the first event is damaged; reading the rest reports that"""

    def __iter__(self) -> Iterator[tuple[int, schema.Event]]:
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


class Track(NamedTuple):
    """Numbers from 1: Perfetto takes track 0 for the process itself, and two tracks with the same
    number for one, whatever their processes."""

    pid: int
    tid: int


class Tracks:
    """Hands out the numbers of processes and tracks, and describes them to `write` when they are
    first used.

    In a trace of several logs each has its own, with the `log`'s name, after those `before`.
    """

    def __init__(self, write: Callable[[dict[str, Any]], object], log: str, before: Track) -> None:
        self._write, self._log, self._before = write, log, before
        self._processes: dict[int | str, int] = {}
        self._tracks: dict[tuple[int | str, str, int, str], Track] = {}

    @property
    def latest(self) -> Track:
        """The largest numbers so far."""
        pid, tid = self._before
        return Track(pid + len(self._processes), tid + len(self._tracks))

    def process(self, ctx: int | str) -> int:
        """The number of the process of a context, or of a machine, by its name."""
        if ctx not in self._processes:
            pid = self._processes[ctx] = self.latest.pid + 1
            name = f"machine {ctx}" if isinstance(ctx, str) else f"context {ctx}"
            name = {0: "session", -1: "clients"}.get(ctx, name)  # type: ignore[arg-type]
            self._describe("process_name", {"pid": pid}, {"name": name + self._log})
        return self._processes[ctx]

    def on(self, ctx: int | str, name: str, lane: int = 0, device: str = "") -> Track:
        """A track of ORDER, of a context or a machine. Slices that overlap are on different lanes,
        which are tracks of one name; each thread is a lane of its own name, and so is each
        `device`."""
        key = ctx, name, lane, device
        if key not in self._tracks:
            track = self._tracks[key] = Track(self.process(ctx), self.latest.tid + 1)
            shown = f"{name} {lane}" if name == "thread" else device or name
            rank = ORDER.index(name) * _MOST_LANES + lane
            self._describe("thread_name", track._asdict(), {"name": shown})
            self._describe("thread_sort_index", track._asdict(), {"sort_index": rank})
        return self._tracks[key]

    def _describe(self, what: str, of: dict[str, int], args: dict[str, Any]) -> None:
        self._write({"ph": "M", "name": what, **of, "args": args})


class Template:
    """The events of a plan's kernels on one track, built once and filled in for each compute."""

    def __init__(self, track: Track, spans: Sequence[traced.Span]) -> None:
        prefix = b'{"ph":"X","pid":%d,"tid":%d,"ts":%%d.%%b,"dur":%%d.%%b,' % track
        self.text = b"".join(SEPARATOR + prefix + _text(span)[1:] for span in spans)
        self._times = np.array([span[:2] for span in spans], np.intp).reshape(-1, 2).T
        rates = [(i, amount) for i, span in enumerate(spans) for amount in span.rates.values()]
        self._rates = np.array(rates, np.intp).reshape(-1, 2).T
        # the order of the numbers: of those before points, then behind them, then the amounts
        n, order, rate = 2 * len(spans) + len(rates), list[int](), 2 * len(spans)
        for i, span in enumerate(spans):
            for exact in (i, len(spans) + i, *range(rate, rate + len(span.rates))):
                order += exact, n + exact
            rate += len(span.rates)
            order += [2 * n + amount for amount in span.amounts.values()]
        self._order = np.array(order, np.intp)

    def fill(self, start: Int64, end: Int64, tail: int, amounts: Int64) -> bytes:
        """The events of a compute: begin and end of each kernel, the wait for all threads after the
        last, all in ns, and the amounts that the spans number."""
        begin, until = np.concatenate((start, end, end[-1:] + tail))[self._times]
        dur = until - begin
        span, rated = self._rates
        # in thousandths; one per nanosecond is 10^9 per second
        rates = amounts[rated] * 1000 // np.maximum(dur[span], 1)
        before, behind = np.divmod(np.concatenate((begin, dur, rates)), 1000)
        numbers = np.concatenate((before, _THOUSANDTHS[behind], amounts))[self._order]
        return self.text % tuple(numbers.tolist())


def _text(span: traced.Span) -> bytes:
    """The end of an event, from its name on."""
    content = {"name": span.name, "cat": span.category, "args": span.args}
    text = orjson.dumps(content).replace(b"%", b"%%")
    numbers = [b',"%s":%%d.%%b' % name.encode() for name in span.rates]
    numbers += [b',"%s":%%d' % name.encode() for name in span.amounts]
    return text[:-2] + b"".join(numbers) + b"}}"
