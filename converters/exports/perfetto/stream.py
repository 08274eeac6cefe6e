"""From a log's events to a trace, in one pass and bounded memory.

What comes in every step has a form; other packets are built one by one. Invariant: a slice is
written when both its ends are known, never reaches beyond the slice that it is in, and comes after
what lies before it on its track.
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any, BinaryIO

import msgspec

from llamacpp_instr.base.errors import UsageError
from llamacpp_instr.converters.exports import traced
from llamacpp_instr.converters.exports.calls import CallSlice, Machines
from llamacpp_instr.converters.exports.perfetto.kernels import KernelSlices
from llamacpp_instr.converters.exports.perfetto.packets import (
    BEGIN,
    INSTANT,
    Packets,
    Slice,
    Tracks,
    Value,
    closing,
    event_packet,
    first_packets,
    sample,
    valid,
)
from llamacpp_instr.converters.exports.traced import Options
from llamacpp_instr.log import schema
from llamacpp_instr.log.graph.kernels import KernelWork
from llamacpp_instr.log.graph.timeline import remember
from llamacpp_instr.log.reader import EventReader
from llamacpp_instr.log.steps import taken_share

Write = Callable[[Any], object]
Counter = tuple[str, str, str, float]
"""name, unit, the track that it is below, and value"""
REQUEST_FLOWS = 1 << 17
"""from one request: to the steps of a context of 131,072 tokens"""
VALUES = 1000
"""tensors whose values are drawn as counters; a pattern may match all of a model"""


def write_perfetto(
    reader: EventReader,
    output: BinaryIO,
    options: Options = traced.WHOLE,
    others: Sequence[EventReader] = (),
) -> int:
    """Writes the log's session to `output` as a Perfetto trace (protobuf), `others` below it;
    returns how many events were left out (lenient).

    Raises LogError, with the line, for an event that is not whole, unless `options.lenient`; and
    UsageError when nothing of a log was selected.
    """
    left_out = 0
    writer: _Writer | None = None
    with options.compressed(output) as file:
        for each in (reader, *others):
            name = each.path if others else ""
            writer = _Writer(each, file.write, options, name, writer)
            left_out += writer.run()
    return left_out


class _Writer(traced.TracedLog):
    def __init__(
        self, reader: EventReader, write: Write, options: Options, name: str, before: _Writer | None
    ) -> None:
        """`before` has written the previous log."""
        super().__init__(reader, options)
        self.n_flows: int = before.n_flows if before else 0
        """of all logs so far"""
        self._output = write
        self._packets = packets = Packets()
        self.tracks: Tracks = Tracks(self._emit, name, before.tracks.latest if before else 0)
        self._request_flows: dict[int, array[int]] = {}
        """to the steps of each request that has not ended, by `id`"""
        self._machines = Machines()
        self._run_flows: dict[tuple[int, int], int] = {}
        """by compute and split: from its submission"""
        flows = self._new_flows if options.flows else None
        self._kernels = KernelSlices(packets, self._emit, self.selection, flows)
        self._unloaded: dict[int, schema.Model] = {}
        """models without a context"""
        self._tokens: dict[int, list[schema.Token]] = {}
        """by context: tokens that the next step may take"""
        self._tensors: set[tuple[int, str]] = set()
        """that have counters"""
        self._steps_seen: tuple[int, int] | None = None
        self._step_matched = False

    def run(self) -> int:
        """Returns how many events were left out."""
        left_out = self.walk()
        for tokens in self._tokens.values():
            for token in tokens:
                self._draw_token(token, None)
        self.end_marks()
        for model in self._unloaded.values() if self.whole else ():
            self._draw_model(model, self.tracks.child(self.tracks.home, "messages"))
        self._kernels.flush()
        self._check_matches()
        return left_out

    def _check_matches(self) -> None:
        """Raises UsageError when a selection matched nothing."""
        path, kernels, chosen = self.reader.path, self._kernels, self.selection
        if chosen.steps is not None and not self._step_matched:
            seen = self._steps_seen
            has = f"steps {seen[0]} to {seen[1]}" if seen else "no steps"
            raise UsageError(f"{path}: no step was selected; the log has {has}")
        if (chosen.layers is None and chosen.ops is None) or kernels.matched:
            return
        if chosen.ops is not None and not kernels.ops_seen:
            level = self.refs.start.level
            raise UsageError(f"{path}: no ops to select: recorded at level {level}")
        layers = sorted(layer for layer in kernels.layers_seen if layer >= 0)
        has = f"layers {layers[0]} to {layers[-1]}" if layers else "no layers"
        if chosen.ops is not None:
            names = {name for fused in kernels.ops_seen for name in fused.split("+")}
            has += f" and the ops {', '.join(sorted(names))}"
        raise UsageError(f"{path}: nothing was selected; the log has {has}")

    # --- writing ---

    def _emit(self, data: Any) -> None:
        if self._packets.any_new:
            self._output(self._packets.take_interned())
        self._output(data)

    def _new_flows(self, n: int) -> int:
        self.n_flows += n
        return self.n_flows - n + 1

    def _slice(
        self,
        track: int,
        name: str,
        begin: int,
        end: int,
        category: str,
        args: Mapping[str, Value],
        flows: Iterable[int] = (),
        seldom: bool = False,
    ) -> None:
        """One slice, from which `flows` lead; `seldom` if few have the name."""
        event = self._packets.event(BEGIN, track, name, category, args, seldom=seldom)
        event.flow_ids.extend(flows)
        self._emit(event_packet(begin, event) + event_packet(max(begin, end), closing(track)))

    def _instant(
        self, track: int, name: str, t: int, category: str, args: Mapping[str, Value]
    ) -> None:
        event = self._packets.event(INSTANT, track, name, category, args, seldom=True)
        self._emit(event_packet(t, event))

    def _fill(self, shape: tuple[Slice | int, ...], values: Sequence[Any]) -> None:
        self._emit(self._packets.fill(shape, values))

    # --- facts ---

    def take_session_start(self, start: schema.SessionStart) -> None:
        self._emit(first_packets(start.t, start.wall))
        note = f"Recorded {start.time} at level {start.level} on {start.host.cpu or 'a machine'}."
        if start.perturbed:
            note += " Tensor values were read (--stats): do not compare times."
        if start.args.get("dialect"):
            note += " Converted from an earlier fork's log: it measured times differently."
        self.tracks.begin(note)

    def take_model(self, model: schema.Model) -> None:
        self._unloaded[model.model] = model

    def take_context(self, context: schema.Context) -> None:
        home = self.tracks.context(context.ctx)
        model = self._unloaded.pop(context.model, None)
        if model is not None and self.whole:
            self._draw_model(model, home)

    def _draw_model(self, model: schema.Model, track: int) -> None:
        args: dict[str, Value] = {**traced.model_args(model), "tensors": model.n_tensors}
        args |= {name: value for name, value in model.hparams.items() if name not in args}
        self._slice(track, "load", model.t, model.t + model.dur, "model", args)

    def take_memory(self, memory: schema.Memory) -> None:
        home = self.tracks.context(memory.ctx)
        held = [
            (f"{use.buffer} {kind}", getattr(use, kind))
            for use in memory.buffers
            for kind in ("model", "context", "compute")
        ]
        for name, n in held + [("resident memory", memory.rss)] * bool(memory.rss):
            counter = self.tracks.child(home, name, "bytes", below="memory")
            self._emit(sample(memory.t, counter, n))
        for name, n in self.of_devices(memory).items():
            counter = self.tracks.child(self.tracks.home, name, "bytes", below="memory of devices")
            self._emit(sample(memory.t, counter, n))

    def take_machine(self, machine: schema.Machine) -> None:
        """Draws what the machine did in the interval, and zero from its end on."""
        share = taken_share(machine, self.refs.start.host.cores)
        taken = None if share is None else 100 * share
        for name, unit, value in (("waiting for a CPU", "%", taken), ("load", "", machine.load)):
            if value is not None:
                track = self.tracks.child(self.tracks.home, name, unit, below="machine")
                begin = max(machine.t - machine.dur, 0)
                self._emit(sample(begin, track, value) + sample(machine.t, track, 0))

    def take_note(self, note: schema.Note) -> None:
        data = msgspec.json.encode(note.data).decode("utf-8", "replace")
        self._draw_message(note.t, note.name, "note", {"data": data})

    def take_message(self, message: schema.Message) -> None:
        self._draw_message(message.t, message.level, "message", {"text": message.text})

    def _draw_message(self, t: int, name: str, category: str, args: Mapping[str, Value]) -> None:
        self._instant(self.tracks.child(self.tracks.home, "messages"), name, t, category, args)

    def draw_mark(self, mark: schema.Mark, lane: int, t: int | None) -> None:
        track = self.tracks.child(self.tracks.home, "marks", lane=lane)
        args = {"mark": mark.mark, "thread": mark.thread}
        if t is not None:
            self._emit(event_packet(t, closing(track)))
        elif mark.phase == "instant":
            self._instant(track, mark.name, mark.t, "mark", args)
        else:
            event = self._packets.event(BEGIN, track, mark.name, "mark", args, seldom=True)
            self._emit(event_packet(mark.t, event))

    def draw_kv(self, kv: schema.Kv) -> None:
        """Draws the use of a cache, and its change."""
        home = self.tracks.context(kv.ctx)
        of = f" of cache {kv.cache}" if kv.cache else ""
        cells = self.tracks.child(home, f"KV cells{of}", "cells", below="KV")
        n_bytes = self.tracks.child(home, f"KV bytes{of}", "bytes", below="KV")
        self._fill((cells, n_bytes), (kv.t, kv.used, kv.t, kv.bytes))
        if kv.op != "apply":
            names = ("seq", "seq_dst", "p0", "p1", "arg")
            args = {name: v for name in names if (v := getattr(kv, name)) is not None}
            self._instant(home, f"KV {kv.op}", kv.t, "kv", args)

    def take_tensor_stats(self, stats: schema.TensorStats) -> None:
        """Draws the values of a tensor; for at most VALUES tensors also as counters."""
        compute = self.refs.compute.event
        if not self.selection.has_step(compute.step):
            return
        home = self.tracks.context(compute.ctx)
        names = ("name", "layer", "n", "min", "max", "mean", "std", "nan", "inf", "zero")
        args = {name: v for name in names if (v := getattr(stats, name)) is not None}
        track = self.tracks.child(home, "tensor statistics")
        self._instant(track, "statistics", stats.t, "stats", args)
        name = stats.name or f"node {stats.node}"
        if (home, name) not in self._tensors and len(self._tensors) >= VALUES:
            return
        self._tensors.add((home, name))
        for what in ("min", "max", "mean", "std"):
            if what in args:
                below = "tensor statistics"
                counter = self.tracks.child(home, f"{name} {what}", "value", below=below)
                self._emit(sample(stats.t, counter, args[what]))

    # --- steps ---

    def take_step_begin(self, step: schema.StepBegin) -> traced.OpenStep | None:
        low, high = self._steps_seen or (step.step, step.step)
        self._steps_seen = min(low, step.step), max(high, step.step)
        opened = super().take_step_begin(step)
        self._step_matched |= opened is not None
        flows = opened.flows if opened is not None else []
        # a prompt takes no earlier token; nor does a sequence that starts again
        takes = opened is not None and opened.known.phase == "decode" and step.pos != 0
        for token in self._tokens.pop(step.ctx, ()):
            taken = takes and len(flows) < step.n_tokens
            if taken:
                flows.append(self._new_flows(1))
            self._draw_token(token, flows[-1] if taken else None)
        return opened

    def draw_step(self, step: traced.OpenStep, end: schema.StepEnd | None, t: int) -> None:
        for request in step.served:
            flows = self._request_flows.setdefault(id(request), array("q"))
            if len(flows) < REQUEST_FLOWS:
                flows.append(self._new_flows(1))
                step.flows.append(flows[-1])
        begin = step.known.event
        args: dict[str, Value] = {
            "step": begin.step,
            "tokens": begin.n_tokens,
            "outputs": begin.n_outputs,
            "sequences": begin.n_seqs,
            "thread": begin.thread,
        }
        if begin.pos >= 0:
            last = begin.pos + begin.n_tokens - 1
            several = begin.n_seqs <= 1 and last > begin.pos
            args["positions"] = f"{begin.pos} to {last}" if several else str(begin.pos)
        counters: list[Counter] = []
        if end is None:
            args["ended"] = "not before the log did"
        else:
            args |= {
                "status": end.status,
                "ubatches": end.n_ubatch,
                "graphs_reused": end.n_reused,
                "recorder_ns": end.recorder,
            }
            counters.append(("minor page faults", "faults", "page faults", end.minflt))
            counters.append(("major page faults", "faults", "page faults", end.majflt))
            if begin.n_tokens and t != begin.t:
                rate = begin.n_tokens * 1e9 / (t - begin.t)
                counters.append(("tokens/s", "tokens/s", "", rate))
        home = self.tracks.context(begin.ctx)
        shown = home, step.known.phase, "step", tuple(args), "terminating_flow_ids"
        tracks, samples = self._counters(home, counters, begin.t, t)
        self._fill((shown, *tracks), (begin.t, t, step.flows, *args.values(), *samples))

    def _counters(
        self, home: int, counters: Iterable[Counter], begin: int, end: int
    ) -> tuple[list[int], list[float]]:
        """The tracks and values of two samples of each counter, which is zero from `end` on."""
        tracks: list[int] = []
        values: list[float] = []
        for name, unit, below, value in counters:
            track = self.tracks.child(home, name, unit, below=below)
            tracks += track, track
            values += begin, value, end, 0
        return tracks, values

    def draw_phases(self, ctx: int, phases: Sequence[traced.Phase], args: traced.Args) -> None:
        on = self.tracks.child(self.tracks.context(ctx), "phases")
        shape: list[Slice] = [(on, name, "phase", (), "") for name, _, _ in phases]
        shape[-1] = (on, phases[-1][0], "phase", tuple(args), "")
        times = [t for phase in phases for t in phase[1:]]
        self._fill(tuple(shape), (*times, *args.values()))

    def draw_sync(self, sync: schema.Sync) -> None:
        on = self.tracks.child(self.tracks.context(sync.ctx), "device waits")
        self._fill(((on, "synchronize", "wait", (), ""),), (sync.t, sync.t + sync.dur))

    def draw_request(self, request: traced.RequestSlice) -> None:
        home = self.tracks.context(request.request.ctx)
        track = self.tracks.child(home, "requests", lane=request.lane)
        flows = self._request_flows.pop(id(request.request), ())
        begin, end = request.begin, request.end
        self._slice(track, request.name, begin, end, "request", request.args, flows, seldom=True)

    def draw_layers(self, ctx: int, layers: schema.Layers) -> None:
        track = self.tracks.child(self.tracks.context(ctx), "layers")
        self._kernels.add_layers(layers, track)

    def draw_ops(
        self, ctx: int, ops: schema.Ops, plan: traced.TracedPlan, work: KernelWork | None
    ) -> None:
        home = self.tracks.context(ctx)
        if work:
            track = self.tracks.child(home, "layers")
        else:
            track = self.tracks.child(home, f"thread {ops.thread}", below="threads")
        self._kernels.add_ops(ops, plan.timeline, track, work)

    def draw_rates(self, compute: schema.Compute, rates: Mapping[str, float]) -> None:
        start = compute.t + compute.start
        counters = ((f"achieved {unit}", unit, "", rate) for unit, rate in rates.items())
        home = self.tracks.context(compute.ctx)
        tracks, samples = self._counters(home, counters, start, start + compute.dur)
        self._fill(tuple(tracks), samples)

    def draw_split(self, ctx: int, of: traced.SplitSlice) -> None:
        track = self.tracks.child(self.tracks.context(ctx), "splits")
        args: dict[str, Value] = {
            "split": of.number,
            "nodes": f"{of.split.start} to {of.split.end - 1}",
            "ends_with": "submission" if of.submitted else "computation",
        }
        name = f"submit to {of.split.backend}" if of.submitted else of.split.backend
        flows = []
        if of.submitted:
            flows.append(self._new_flows(1))
            remember(self._run_flows, (of.compute, of.number), flows[0], traced.KEPT)
        self._slice(track, name, of.begin, of.end, "split", args, flows)

    def draw_run(
        self, ctx: int, run: traced.DeviceRun, plan: traced.TracedPlan, work: KernelWork
    ) -> None:
        home, ops = self.tracks.context(ctx), run.ops
        if machine := self._machines.of_device(ops.device):
            home = self.tracks.machine(machine, self._machines.about(machine))
        track = self.tracks.child(home, ops.device, lane=run.lane, below="devices")
        flow = self._run_flows.pop((ops.compute, ops.split), None)
        shown = track, f"split {ops.split}", "run", tuple(run.args), "terminating_flow_ids"
        flows = [] if flow is None else [flow]
        self._fill((shown,), (run.begin, run.end, flows, *run.args.values()))
        self._kernels.add_ops(ops, plan.timeline, track, work)

    def take_connection(self, connection: schema.Connection) -> None:
        self._machines.add(connection)

    def take_rpc(self, event: schema.Rpc) -> None:
        for call in self._machines.slices(event, self.selection):
            self._draw_call(call)

    def _draw_call(self, call: CallSlice) -> None:
        """Draws a command on the client's track and on the machine's, with an arrow there and one
        to the reply."""
        there, back = self._new_flows(1), self._new_flows(1)
        if call.sent:
            link = f"commands to {call.machine}"
            on = self.tracks.child(self.tracks.home, link, lane=call.connection, below="machines")
            event = self._packets.event(BEGIN, on, call.name, "command", call.args)
            events = {"request": event}  # without a slice of its own, the command itself
            packets = []
            for name, (begin, end) in call.ways:
                events[name] = self._packets.event(BEGIN, on, name, "way")
                packets += [(begin, events[name]), (end, closing(on))]
            events["request"].flow_ids.extend([there] if call.served else [])
            if call.reply:
                events["reply"].terminating_flow_ids.append(back)
            for t, packet in ((call.sent[0], event), *packets, (call.sent[1], closing(on))):
                self._emit(event_packet(t, packet))
        if call.served:
            home = self.tracks.home
            if call.machine:
                home = self.tracks.machine(call.machine, self._machines.about(call.machine))
            on = self.tracks.child(home, "commands", lane=call.connection)
            event = self._packets.event(BEGIN, on, call.name, "command", call.args)
            event.terminating_flow_ids.extend([there] if call.sent else [])
            event.flow_ids.extend([back] if call.reply else [])
            begin, end = call.served
            self._emit(event_packet(begin, event) + event_packet(end, closing(on)))

    def draw_token(self, token: schema.Token) -> None:
        if self.options.flows:
            # until the next step begins it is not known whether one takes it
            self._tokens.setdefault(token.ctx, []).append(token)
        else:
            self._draw_token(token, None)

    def _draw_token(self, token: schema.Token, flow: int | None) -> None:
        """Draws a token on the sampler's track, and on the step that computed its logits."""
        text = valid(token.text)
        args: dict[str, Value] = {"text": text, "id": token.id, "index": token.index}
        if token.p is not None:
            args["p"] = token.p
        if token.hex is not None:
            args["hex"] = token.hex
        if token.step >= 0:
            args["step"] = token.step
        home, end = self.tracks.context(token.ctx), token.t + token.dur
        sampler, names = self.tracks.child(home, "sampler"), tuple(args)
        shape: list[Slice] = [(sampler, "sample", "sampler", names, "flow_ids")]
        values = [token.t, end, [] if flow is None else [flow], *args.values()]
        if (span := self.spans.get(token.step)) is not None:
            shape.append((home, None, "token", names, ""))
            values += *span, _quoted(text), *args.values()
        self._fill(tuple(shape), values)


@lru_cache(traced.KEPT)
def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
