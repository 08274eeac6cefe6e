"""From a log's events to a trace, in one pass and bounded memory."""

from __future__ import annotations

import gzip
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, BinaryIO

import msgspec

from llamacpp_instr.base.errors import UsageError
from llamacpp_instr.converters.exports.perfetto.kernels import KernelSlices
from llamacpp_instr.converters.exports.perfetto.packets import Packets, Value, first_packets
from llamacpp_instr.converters.exports.perfetto.steps import StepSlices
from llamacpp_instr.converters.exports.perfetto.tracks import Tracks
from llamacpp_instr.converters.exports.requests import RequestSlice
from llamacpp_instr.converters.exports.steps import OpenStep, TracedSteps, achieved
from llamacpp_instr.log.graph.timeline import Selection
from llamacpp_instr.log.reader import EventReader
from llamacpp_instr.log.requests import Request
from llamacpp_instr.log.resolve import Resolver
from llamacpp_instr.log.schema import (
    Compute,
    Context,
    Event,
    Kv,
    Layers,
    Machine,
    Mark,
    Memory,
    Message,
    Model,
    Note,
    Ops,
    SessionStart,
    Splits,
    StepBegin,
    StepEnd,
    Sync,
    TensorStats,
    Token,
)

REQUEST_FLOWS = 1 << 17
"""from one request: to the steps of a context of 131,072 tokens"""


@dataclass(frozen=True)
class Options:
    """What is written."""

    selection: Selection = field(default_factory=Selection)
    threads: bool = True
    """a track for every thread of ggml, where the log has them"""
    flows: bool = False
    """arrows from ops to those that read their results, from tokens to the steps that take them"""
    gzip: bool = False
    lenient: bool = False
    """leave out events that are not whole (`log.resolve`), and count them"""


@dataclass(frozen=True)
class Written:
    """What became of a log."""

    bytes: int
    """before compression"""
    left_out: int
    """events that are not whole (lenient)"""


def write_perfetto(
    reader: EventReader, output: BinaryIO, options: Options, others: Sequence[EventReader] = ()
) -> Written:
    """Writes the log's session to `output` as a Perfetto trace (protobuf), `others` below it.

    Raises LogError, with the line, for an event that is not whole, unless `options.lenient`; and
    UsageError when nothing of a log was selected.
    """
    if options.gzip:
        with gzip.GzipFile("", "wb", 5, output, mtime=0) as compressed:
            return _write_all([reader, *others], compressed.write, options)
    return _write_all([reader, *others], output.write, options)


def _write_all(
    readers: Sequence[EventReader], write: Callable[[Any], object], options: Options
) -> Written:
    n_bytes = left_out = n_tracks = n_flows = 0
    for reader in readers:
        name = reader.path if len(readers) > 1 else ""
        writer = _Writer(reader, write, options, name, n_tracks, n_flows)
        written = writer.run()
        n_tracks, n_flows = writer.n_tracks, writer.n_flows
        n_bytes, left_out = n_bytes + written.bytes, left_out + written.left_out
    return Written(n_bytes, left_out)


class _Writer:
    def __init__(
        self,
        reader: EventReader,
        write: Callable[[Any], object],
        options: Options,
        name: str,
        n_tracks: int,
        n_flows: int,
    ) -> None:
        self.n_tracks, self.n_flows = n_tracks, n_flows
        """of the logs before, and afterwards of this one too"""
        self._reader = reader
        self._output = write
        self._bytes = 0
        self._options = options
        self._selection = options.selection
        self._packets = packets = Packets()
        self._tracks = tracks = Tracks(self._emit, name, n_tracks)
        self._draw = draw = StepSlices(packets, tracks, self._emit)
        self._request_flows: dict[int, array[int]] = {}
        """to the steps of each request that has not ended, by `id`"""
        flows = self._new_flows if options.flows else None
        self._kernels = KernelSlices(packets, self._emit, self._selection, flows)
        self._refs = Resolver()
        self._steps = steps = TracedSteps(
            self._refs, self._selection, self._step, draw.phase, draw.compute, self._layers,
            self._request,
        )  # fmt: skip
        self._unloaded: dict[int, Model] = {}
        """models without a context"""
        self._tokens: dict[int, list[Token]] = {}
        """by context: tokens that the next step may take"""
        self._steps_seen: tuple[int, int] | None = None
        self._step_matched = False
        self._takers: dict[type[Event], Callable[[Any], None]] = {
            SessionStart: self._start,
            Model: self._model,
            Context: self._context,
            StepBegin: self._step_begin,
            StepEnd: steps.end,
            Compute: steps.compute,
            Layers: steps.layers,
            Ops: self._ops,
            Splits: self._splits,
            Sync: self._sync,
            Kv: self._kv,
            Token: self._token,
            TensorStats: self._stats,
        }
        if steps.whole:
            self._takers |= {
                Memory: draw.memory,
                Machine: self._machine,
                Mark: self._mark,
                Note: self._note,
                Message: self._message,
            }

    def run(self) -> Written:
        left_out = self._refs.feed(self._reader, self._takers, self._options.lenient)
        self._finish(self._refs.start)
        return Written(self._bytes, left_out)

    def _emit(self, data: Any) -> None:
        if interned := self._packets.take_interned():
            self._output(interned)
            self._bytes += len(interned)
        self._output(data)
        self._bytes += len(data)

    def _new_flows(self, n: int) -> int:
        self.n_flows += n
        return self.n_flows - n + 1

    # --- the session ---

    def _start(self, start: SessionStart) -> None:
        self._emit(first_packets(start.t, start.wall))
        note = f"Recorded {start.time} at level {start.level} on {start.host.cpu or 'a machine'}."
        if start.perturbed:
            note += " Tensor values were read (--stats): do not compare times."
        if start.args.get("dialect"):
            note += " Converted from an earlier fork's log: it measured times differently."
        self._tracks.begin(note)

    def _finish(self, start: SessionStart) -> None:
        latest = self._steps.finish()
        for tokens in self._tokens.values():
            for token in tokens:
                self._draw_token(token, None)
        self._draw.end_marks(latest)
        for model in self._unloaded.values() if self._steps.whole else ():
            self._draw.model(model, self._tracks.child(self._tracks.home, "messages"))
        self._kernels.flush()
        self.n_tracks = self._tracks.latest
        self._check_matches(start)

    def _check_matches(self, start: SessionStart) -> None:
        """UsageError when a selection matched nothing."""
        path, kernels, chosen = self._reader.path, self._kernels, self._selection
        if chosen.steps is not None and not self._step_matched:
            seen = self._steps_seen
            has = f"steps {seen[0]} to {seen[1]}" if seen else "no steps"
            raise UsageError(f"{path}: no step was selected; the log has {has}")
        if (chosen.layers is None and chosen.ops is None) or kernels.matched:
            return
        if chosen.ops is not None and not kernels.ops_seen:
            raise UsageError(f"{path}: no ops to select: recorded at level {start.level}")
        layers = sorted(layer for layer in kernels.layers_seen if layer >= 0)
        has = f"layers {layers[0]} to {layers[-1]}" if layers else "no layers"
        if chosen.ops is not None:
            names = {name for fused in kernels.ops_seen for name in fused.split("+")}
            has += f" and the ops {', '.join(sorted(names))}"
        raise UsageError(f"{path}: nothing was selected; the log has {has}")

    def _model(self, model: Model) -> None:
        self._unloaded[model.model] = model

    def _context(self, context: Context) -> None:
        home = self._tracks.context(context.ctx)
        model = self._unloaded.pop(context.model, None)
        if model is not None and self._steps.whole:
            self._draw.model(model, home)

    def _machine(self, machine: Machine) -> None:
        self._draw.machine(machine, self._refs.start.host.cores)

    def _mark(self, mark: Mark) -> None:
        self._draw.mark(mark)
        self._steps.mark(mark)

    def _note(self, note: Note) -> None:
        data = msgspec.json.encode(note.data).decode("utf-8", "replace")
        self._draw_message(note.t, note.name, "note", {"data": data})

    def _message(self, message: Message) -> None:
        self._draw_message(message.t, message.level, "message", {"text": message.text})

    def _draw_message(self, t: int, name: str, category: str, args: dict[str, Value]) -> None:
        track = self._tracks.child(self._tracks.home, "messages")
        self._draw.instant(track, name, t, category, args)

    # --- steps ---

    def _step_begin(self, step: StepBegin) -> None:
        low, high = self._steps_seen or (step.step, step.step)
        self._steps_seen = min(low, step.step), max(high, step.step)
        opened = self._steps.begin(step)
        self._step_matched |= opened is not None
        flows = opened.flows if opened is not None else []
        # a prompt takes no token of before; nor does what begins anew
        takes = opened is not None and opened.known.phase == "decode" and step.pos != 0
        for token in self._tokens.pop(step.ctx, ()):
            taken = takes and len(flows) < step.n_tokens
            if taken:
                flows.append(self._new_flows(1))
            self._draw_token(token, flows[-1] if taken else None)

    def _step(self, step: OpenStep, end: StepEnd | None, t: int, served: Sequence[Request]) -> None:
        for request in served:
            flows = self._request_flows.setdefault(id(request), array("q"))
            if len(flows) < REQUEST_FLOWS:
                flows.append(self._new_flows(1))
                step.flows.append(flows[-1])
        self._draw.step(step, end, t)

    def _request(self, of: RequestSlice) -> None:
        track = self._tracks.child(self._tracks.context(of.request.ctx), "requests", lane=of.lane)
        flows = self._request_flows.pop(id(of.request), ())
        self._draw.slice(track, of.name, of.begin, of.end, "request", of.args, flows, seldom=True)

    def _layers(self, ctx: int, layers: Layers) -> None:
        track = self._tracks.child(self._tracks.context(ctx), "layers")
        self._kernels.add_layers(layers, track)

    def _ops(self, ops: Ops) -> None:
        if not self._steps.ops(ops):
            return
        known = self._refs.compute
        home = self._tracks.context(known.event.ctx)
        timeline = self._kernels.timeline(known.graph.event, self._refs.plan.event)
        if ops.thread == 0:
            track = self._tracks.child(home, "layers")
            work = timeline.kernels.work(known.ubatch)
            self._kernels.add_ops(ops, timeline, track, work)
            if rates := achieved(work, known):
                self._draw.rates(rates, known.event)
        if self._options.threads and ops.wait is not None:
            track = self._tracks.child(home, f"thread {ops.thread}", below="threads")
            self._kernels.add_ops(ops, timeline, track, None)

    def _splits(self, splits: Splits) -> None:
        compute, known = self._refs.compute.event, self._refs.compute.graph.event.splits
        if self._selection.has_step(compute.step):
            self._draw.splits(splits, known, self._tracks.context(compute.ctx))

    def _sync(self, sync: Sync) -> None:
        self._steps.sync(sync)
        if self._steps.whole:
            self._draw.sync(sync)

    def _kv(self, kv: Kv) -> None:
        if self._steps.has(kv.step):
            self._draw.kv(kv)

    def _token(self, token: Token) -> None:
        if not self._steps.token(token):
            return
        if self._options.flows:
            # until the next step begins it is not known whether one takes it
            self._tokens.setdefault(token.ctx, []).append(token)
        else:
            self._draw_token(token, None)

    def _draw_token(self, token: Token, flow: int | None) -> None:
        self._draw.token(token, self._steps.spans.get(token.step), flow)

    def _stats(self, stats: TensorStats) -> None:
        compute = self._refs.compute.event
        if not self._selection.has_step(compute.step):
            return
        home = self._tracks.context(compute.ctx)
        names = ("name", "layer", "n", "min", "max", "mean", "std", "nan", "inf", "zero")
        args = {name: v for name in names if (v := getattr(stats, name)) is not None}
        track = self._tracks.child(home, "tensor statistics")
        self._draw.instant(track, "statistics", stats.t, "stats", args)
        self._draw.values(stats, home)
