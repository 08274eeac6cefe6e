"""A log as every trace format shows it: one walk over its events, which calls a format to draw.

Invariant: the phases of a step come in the order of time, none overlaps the next, and none reaches
beyond the step. What waits for its end is bounded.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from gzip import GzipFile
from hashlib import sha256
from heapq import heappop, heappush
from types import MappingProxyType
from typing import Any, BinaryIO, NamedTuple, cast
from weakref import WeakKeyDictionary

import msgspec
import numpy as np

from llamacpp_instr.log import schema
from llamacpp_instr.log.devices import covered
from llamacpp_instr.log.graph.kernels import KernelWork
from llamacpp_instr.log.graph.timeline import (
    Lanes,
    OpSlice,
    PlanTimeline,
    Selection,
    plan_timeline,
    remember,
    thread_spans,
)
from llamacpp_instr.log.known import KnownPlan, KnownStep
from llamacpp_instr.log.memory import MemoryInUse
from llamacpp_instr.log.reader import EventReader
from llamacpp_instr.log.requests import Request, RequestFinder
from llamacpp_instr.log.resolve import Resolver
from llamacpp_instr.log.session import WARM_UP
from llamacpp_instr.log.steps import LatestSteps

Args = Mapping[str, str | int | float]
Phase = tuple[str, int, int]
"""a part of a step: name, begin and end in ns"""
KEPT = 4096
"""ended steps on which a token may still be drawn, and computes of a step that wait for its end"""
TEMPLATES = 64
"""plans and templates that are kept; once the graph has changed, older ones are no longer used"""
DECODES = 3
"""that a viewer shows first"""
_ABOUT_COMPUTE = ("compute", "graph", "source", "n_tokens", "n_threads", "status", "reused")


@dataclass(frozen=True)
class Options:
    """What is written."""

    selection: Selection = field(default_factory=Selection)
    threads: bool = True
    """a track for every thread of ggml, where the log has them"""
    flows: bool = False
    """arrows from ops to those that read their results, and from tokens to the steps that take
    them, in a format that has flows"""
    gzip: bool = False
    lenient: bool = False
    """leave out events that are not whole (`log.resolve`), and count them"""

    def compressed(self, output: BinaryIO) -> AbstractContextManager[BinaryIO]:
        """The file to write to, for `output`."""
        if not self.gzip:
            return nullcontext(output)
        return cast(AbstractContextManager[BinaryIO], GzipFile("", "wb", 5, output, mtime=0))


WHOLE = Options()


@dataclass
class OpenStep:
    """A step that has not ended."""

    known: KnownStep
    warm_up: bool
    flows: list[int] = field(default_factory=list)
    """of the tokens that it takes and of the requests that it serves, in a format that has flows"""
    computes: list[schema.Compute] = field(default_factory=list)
    """that wait, because `prepare` comes before them and is known at the end"""
    first: int | None = None
    """when its first ubatch began, apply included"""
    last: int = 0
    """when its last compute ended"""
    served: Sequence[Request] = ()
    """the requests that it served, once it has ended"""


class Span(NamedTuple):
    """A slice of every compute of a plan, with numbers in place of what differs: of its times as
    `thread_spans` has them, and of amounts."""

    begin: int
    end: int
    name: str
    category: str
    args: Args
    op: OpSlice | None = None
    amounts: Mapping[str, int] = MappingProxyType({})
    """shown as they are, after `args`"""
    rates: Mapping[str, int] = MappingProxyType({})
    """shown divided by the slice's time, after those"""


@dataclass(frozen=True)
class TracedPlan:
    """What plans that differ only in their ids have in common."""

    timeline: PlanTimeline
    is_whole: bool
    """whether it has all kernels of its graph; if not, part of the work ran elsewhere"""
    templates: dict[object, Any] = field(default_factory=dict)
    """a format's own"""


@dataclass(frozen=True)
class RequestSlice:
    """A request that has ended, from its arrival to its end, in ns.

    If the arrival is unknown, it begins 1 ns before its first step: trace_processor takes events
    of the same time in the order of the file, and a flow has to leave before it arrives.
    """

    request: Request
    name: str
    """given by the application, and perhaps different for each request"""
    begin: int
    end: int
    lane: int
    """slices of one lane do not overlap"""
    args: dict[str, str | int]


class SplitSlice(NamedTuple):
    """A part of a compute as thread 0 saw it, in ns."""

    compute: int
    number: int
    split: schema.Split
    begin: int
    end: int
    submitted: bool
    """whether it ends with the submission to a device, not with the computation"""


@dataclass(frozen=True)
class DeviceRun:
    """What a device computed of a split, behind thread 0, in ns."""

    ops: schema.Ops
    begin: int
    end: int
    lane: int
    """runs of one lane do not overlap"""
    submitted: int | None
    """when its submission began"""
    args: dict[str, str | int]


class RequestLanes:
    """Makes the slices of requests that have ended. Requests of one sequence overlap while one
    waits for another to end. So each sequence has lanes."""

    def __init__(self) -> None:
        self._lanes: dict[tuple[int, int], list[tuple[int, int]]] = {}
        """by context and sequence, a heap: when the last request of a lane ended, and the lane"""
        self._n_lanes = 0

    def slice(self, request: Request) -> RequestSlice:
        """The slice of a request, in a lane that is free at that time."""
        args = {
            "context": request.ctx,
            "sequence": request.seq,
            "mark": request.name or None,
            "prompt_tokens": min(request.prompt, schema.MOST),
            "reused_tokens": request.reused,
            "output_tokens": len(request.token_times),
            "to_first_token_ns": request.to_first_token,
            "queued_ns": request.queued,
            "first_step": request.first_step,
            "last_step": request.last_step,
        }
        begin = max(min(request.first, request.begin - 1), 0)
        end = max(begin, request.end)
        lane = self._lane(request.ctx, request.seq, begin, end)
        shown = {name: value for name, value in args.items() if value is not None}
        return RequestSlice(request, request.name or "request", begin, end, lane, shown)

    def _lane(self, ctx: int, seq: int, begin: int, end: int) -> int:
        lanes = self._lanes.setdefault((ctx, seq), [])
        if len(self._lanes) > schema.CONTEXTS_KEPT:
            del self._lanes[next(iter(self._lanes))]
        if lanes and lanes[0][0] <= begin:
            _, lane = heappop(lanes)
        else:
            self._n_lanes += 1
            lane = self._n_lanes - 1
        heappush(lanes, (end, lane))
        return lane


class TracedLog:
    """Walks over a log. A format derives from it and overrides functions `draw_...`, which are
    called for what is selected and draw nothing on their own; `take_EVENT` takes every event of
    that name, also if only the format defines it."""

    of_no_step: tuple[type[schema.Event], ...] = (
        schema.Memory, schema.Machine, schema.Mark, schema.Note, schema.Message,
    )  # fmt: skip
    """events that are left out if steps are selected"""

    def __init__(self, reader: EventReader, options: Options) -> None:
        self.reader, self.options, self.selection = reader, options, options.selection
        self.refs = Resolver()
        self.memory = MemoryInUse()
        self.whole = self.selection.steps is None
        """whether what belongs to no step is wanted"""
        self.spans: dict[int, tuple[int, int]] = {}
        """begin and end of the most recent steps"""
        lanes = RequestLanes()
        self._requests = RequestFinder(lambda found: self.draw_request(lanes.slice(found)))
        self._latest: LatestSteps[tuple[OpenStep, schema.StepEnd]] = LatestSteps(self._settled)
        self._layers: dict[int, tuple[schema.Layers, schema.Compute]] = {}
        """by context: the layers whose ops may still come"""
        self._computed = 0
        """when the latest compute ended"""
        self._submitted: dict[tuple[int, int], int] = {}
        """by compute and split: when it was submitted"""
        self._lanes_of: dict[tuple[int, str], list[int]] = {}
        """by context and device: when the last run of each lane ended"""
        self._marks = Lanes()
        self._open: dict[int, OpenStep] = {}
        self._of_plan: WeakKeyDictionary[KnownPlan, TracedPlan] = WeakKeyDictionary()
        self._plans: dict[bytes, TracedPlan] = {}
        """by the digest of its contents: each run of a prompt builds the same graphs again"""

    def walk(self) -> int:
        """Takes all events; returns how many were left out. What has not ended then ends with the
        log, except marks (`end_marks`)."""
        unwanted = () if self.whole else self.of_no_step
        takers = {
            event: getattr(self, name)
            for event in schema.EVENTS
            if hasattr(self, name := f"take_{schema.event_name(event)}") and event not in unwanted
        }
        left_out = self.refs.feed(self.reader, takers, self.options.lenient)
        for ctx in list(self._layers):
            self._flush_layers(ctx)
        self._computed = max(self.refs.latest, self._computed)
        self._latest.settle_all()
        for step in self._open.values():
            self._draw(step, None, self._computed)
        self._requests.finish()
        return left_out

    # --- what a format draws ---

    def draw_step(self, step: OpenStep, end: schema.StepEnd | None, t: int) -> None:
        """A step until `t`; without `end` if the log ended first."""

    def draw_phases(self, ctx: int, phases: Sequence[Phase], args: Args) -> None:
        """One phase before or after the computes of a step, or all of a compute. The last has the
        arguments."""

    def draw_layers(self, ctx: int, layers: schema.Layers) -> None:
        """The layers of a compute without ops."""

    def draw_ops(
        self, ctx: int, ops: schema.Ops, plan: TracedPlan, work: KernelWork | None
    ) -> None:
        """The ops of a compute: with their work among layers, otherwise on a thread's own track."""

    def draw_split(self, ctx: int, of: SplitSlice) -> None:
        """A split that thread 0 computed or submitted."""

    def draw_run(self, ctx: int, run: DeviceRun, plan: TracedPlan, work: KernelWork) -> None:
        """A split on a device, and its ops."""

    def draw_rates(self, compute: schema.Compute, rates: Mapping[str, float]) -> None:
        """What a compute achieved, by unit."""

    def draw_request(self, request: RequestSlice) -> None:
        """A request that has ended."""

    def draw_mark(self, mark: schema.Mark, lane: int, t: int | None) -> None:
        """An instant, the start of a span, or, at `t`, its end; spans of one lane do not
        overlap."""

    def draw_sync(self, sync: schema.Sync) -> None:
        """A wait for a device."""

    def draw_kv(self, kv: schema.Kv) -> None:
        """A change of a context's memory."""

    def draw_token(self, token: schema.Token) -> None:
        """A sampled token."""

    # --- events ---

    def take_step_begin(self, step: schema.StepBegin) -> OpenStep | None:
        """None if the step is not selected."""
        self._latest.settle(step.ctx)
        known = self.refs.step
        if known is None or not self.selection.has_step(step.step):
            return None
        warm_up = any(mark.name == WARM_UP for _, mark in self.refs.open_marks.values())
        opened = self._open[step.step] = OpenStep(known, warm_up)
        return opened

    def take_step_end(self, end: schema.StepEnd) -> None:
        """A wait for the result of the step may follow."""
        known = self.refs.step
        step = self._open.pop(end.step, None)
        if known is not None and step is not None:
            self._flush_layers(known.event.ctx)
            self._latest.add(known.event.ctx, (step, end), max(end.t, known.event.t))

    def take_compute(self, compute: schema.Compute) -> None:
        """If the step of a compute is open, the compute is drawn with it."""
        start = compute.t + compute.start
        self._computed = max(self._computed, start + compute.dur)
        self._flush_layers(compute.ctx)
        if not self.selection.has_step(compute.step):
            return
        step = self._open.get(compute.step)
        if step is None:
            self._draw_compute(compute)
            return
        if step.first is None and compute.source != "memory_update":  # part of preparing
            step.first = compute.t
        step.last = start + compute.dur
        step.computes.append(compute)
        if len(step.computes) > KEPT:
            self._draw_computes(step)

    def of_devices(self, memory: schema.Memory) -> dict[str, int]:
        """What the contexts hold on each device now, and what it has free, by the name of a counter
        in bytes."""
        self.memory.take(memory, self.refs.context.event.model)
        held = {f"{device} in use": n for device, n in self.memory.on_devices.items()}
        return held | {f"{of.device} free": of.free for of in memory.devices}

    def take_layers(self, layers: schema.Layers) -> None:
        """The ops of the compute may follow, and replace its layers."""
        compute = self.refs.compute.event
        self._layers[compute.ctx] = layers, compute

    def take_ops(self, ops: schema.Ops) -> None:
        known = self.refs.compute
        compute = known.event
        if ops.device:
            self._take_run(ops)
            return
        waiting, _ = self._layers.get(compute.ctx, (None, None))
        if ops.thread == 0 and waiting is not None and waiting.compute == ops.compute:
            del self._layers[compute.ctx]
        if not self.selection.has_step(compute.step):
            return
        plan = self._plan(self.refs.plan)
        if ops.thread == 0:
            work = plan.timeline.kernels.work(known.ubatch)
            self.draw_ops(compute.ctx, ops, plan, work)
            if compute.dur and plan.is_whole:
                amounts = {"GB/s": work.bytes, "GFLOP/s": work.flops}
                # faster than `of.sum()`, which counts with so few kernels
                sums = {unit: int(np.add.reduce(of)) for unit, of in amounts.items()}
                rates = {unit: of / compute.dur for unit, of in sums.items()}
                self.draw_rates(compute, rates)
        if self.options.threads and ops.wait is not None:
            self.draw_ops(compute.ctx, ops, plan, None)

    def take_splits(self, event: schema.Splits) -> None:
        compute, splits = self.refs.compute.event, self.refs.compute.graph.event.splits
        if not self.selection.has_step(compute.step):
            return
        now = event.t
        for i, (number, dur) in enumerate(zip(event.split, event.dur, strict=True)):
            begin = now + (event.gap[i] if event.gap else 0)
            now, submitted = begin + dur, bool(event.asynchronous[i])
            of = SplitSlice(event.compute, number, splits[number], begin, now, submitted)
            if submitted:
                remember(self._submitted, (event.compute, number), begin, KEPT)
            self.draw_split(compute.ctx, of)

    def _take_run(self, ops: schema.Ops) -> None:
        """A run takes a lane whose last run has ended, or a new one: two queues overlap."""
        known, device = self.refs.compute, self.refs.devices.get(ops.device)
        ctx = known.event.ctx
        if not ops.dur or not self.selection.has_step(known.event.step):
            return
        begin, end = ops.t, ops.t + sum(ops.dur) + sum(ops.gap or ())
        lanes = self._lanes_of.pop((ctx, ops.device), [])
        remember(self._lanes_of, (ctx, ops.device), lanes, schema.CONTEXTS_KEPT)
        lane = next((i for i, until in enumerate(lanes) if until < begin), len(lanes))
        lanes[lane : lane + 1] = [end]
        args: dict[str, str | int] = {"compute": ops.compute, "split": ops.split}
        if device is not None:
            args |= {"clock": device.clock, "uncertainty_ns": device.uncertainty}
        submitted = self._submitted.pop((ops.compute, ops.split), None)
        plan = self._plan(self.refs.plan)
        work = plan.timeline.kernels.work(known.ubatch)
        self.draw_run(ctx, DeviceRun(ops, begin, end, lane, submitted, args), plan, work)

    def take_sync(self, sync: schema.Sync) -> None:
        self._latest.wait(sync)
        if self.whole:
            self.draw_sync(sync)

    def take_kv(self, kv: schema.Kv) -> None:
        if self.selection.has_step(kv.step) and (self.whole or kv.step >= 0):
            self.draw_kv(kv)

    def take_token(self, token: schema.Token) -> None:
        self._latest.settle(token.ctx)
        if self.whole:
            self._requests.token(token.ctx, token.seq, token.step, token.t, token.dur)
        if self.selection.has_step(token.step):
            self.draw_token(token)

    def take_mark(self, mark: schema.Mark) -> None:
        """A mark may be that of a request."""
        if mark.phase == "instant":
            self.draw_mark(mark, 0, None)
        elif mark.phase == "begin":
            self.draw_mark(mark, self._marks.begin(mark.mark, mark.t), None)
        else:
            begin = self.refs.mark
            self._end_mark(begin, mark.t)
            self._latest.settle_all()
            seq = mark.seq if mark.seq >= 0 else begin.seq
            if seq >= 0:
                self._requests.span(seq, begin.t, mark.t, begin.name)

    def end_marks(self) -> None:
        """Ends the marks that are still open at the end of the log."""
        for _, mark in self.refs.open_marks.values() if self.whole else ():
            self._end_mark(mark, self._computed)

    # --- drawing ---

    def _end_mark(self, mark: schema.Mark, t: int) -> None:
        lane, begin = self._marks.end(mark.mark, t)
        self.draw_mark(mark, lane, max(begin, t))

    def _settled(self, ended: tuple[OpenStep, schema.StepEnd], t: int) -> None:
        step, end = ended
        begin, parts = step.known.event, step.known.parts
        if self.whole and end.status == 0 and not step.warm_up:
            target = step.known.target
            step.served = self._requests.step(begin.step, begin.ctx, begin.t, t, parts, target)
        self._draw(step, end, t)

    def _draw(self, step: OpenStep, end: schema.StepEnd | None, t: int) -> None:
        begin, ctx = step.known.event.t, step.known.event.ctx
        remember(self.spans, step.known.event.step, (begin, t), KEPT)
        self.draw_step(step, end, t)
        if end is not None and end.prepare:
            until = min(begin + end.prepare, t if step.first is None else step.first)
            self.draw_phases(ctx, [("prepare", begin, max(begin, until))], {})
        self._draw_computes(step)
        if end is not None and end.readback:
            # the log has the sum over the ubatches, which is drawn after the last one
            since = max(step.last, begin)
            until = min(since + end.readback, max(t, since))
            several = {"sum_of_ubatches": end.n_ubatch} if end.n_ubatch > 1 else {}
            self.draw_phases(ctx, [("readback", since, until)], several)

    def _draw_computes(self, step: OpenStep) -> None:
        for compute in step.computes:
            self._draw_compute(compute)
        step.computes.clear()

    def _draw_compute(self, compute: schema.Compute) -> None:
        now, start = compute.t, compute.t + compute.start
        phases: list[Phase] = []
        for name in ("apply", "build", "alloc", "inputs"):
            if dur := getattr(compute, name):
                end = min(now + dur, start)
                phases.append((name, now, end))
                now = end
        args = {name: getattr(compute, name) for name in _ABOUT_COMPUTE}
        phases.append(("compute", start, start + compute.dur))
        self.draw_phases(compute.ctx, phases, args)

    def _flush_layers(self, ctx: int) -> None:
        """Draws layers without ops as they are."""
        layers, compute = self._layers.pop(ctx, (None, None))
        if layers and compute and self.selection.has_step(compute.step):
            self.draw_layers(ctx, layers)

    def _plan(self, plan: KnownPlan) -> TracedPlan:
        """Computed once for plans that differ only in their ids, and kept while one is in use."""
        kept = self._of_plan.get(plan)
        if kept is None:
            graph, event = plan.graph.event, plan.event
            made_of = graph.splits, graph.buffers, graph.leafs, graph.nodes, event.node, event.n
            content = sha256(msgspec.msgpack.encode(made_of)).digest()
            kept = self._plans.get(content)
            if kept is None:
                is_whole = len(covered(graph, event)) == len(graph.splits)
                kept = TracedPlan(plan_timeline(graph, event), is_whole)
                remember(self._plans, content, kept, TEMPLATES)
            self._of_plan[plan] = kept
        return kept


def layer_spans(timeline: PlanTimeline, selection: Selection, bound: Sequence[bool]) -> list[Span]:
    """Layers, blocks in them, ops in those: what thread 0 did. Parents come first. The amounts are
    the kernels' bytes, then their FLOPs; `bound` is true for each op whose amounts are bounds."""
    n = len(timeline.ops)
    chosen = [selection.has_op(op) for op in timeline.ops]
    spans: list[Span] = []
    for runs, category in ((timeline.layers, "layer"), (timeline.blocks, "block")):
        for run in runs:
            if any(chosen[run.first : run.last + 1]):
                args: Args = {"layer": run.layer}
                spans.append(Span(run.first, n + run.last, run.name, category, args))
    for i, op in enumerate(timeline.ops):
        if chosen[i]:
            args = {**op.args, "work": "at most"} if bound[i] else op.args
            amounts = {"bytes": i, "flops": n + i} if op.varies else {}
            rates = {"GB/s": i} if op.bytes else {}
            rates |= {"GFLOP/s": n + i} if op.flops else {}
            spans.append(Span(i, n + i, op.title, op.block, args, op, amounts, rates))
    return sorted(spans, key=lambda span: span.begin)


def spans_of_thread(timeline: PlanTimeline, selection: Selection, gaps: bool) -> list[Span]:
    """What one of ggml's threads did: ops, and the barriers between them where the log has them
    (`gaps`). The amounts are the kernels' waits inside barriers."""
    spans = []
    for begin, end, kernel in thread_spans(timeline, selection, gaps):
        if kernel is None:
            spans.append(Span(begin, end, "wait", "wait", {}))
        else:
            op, waits = timeline.ops[kernel], {"wait_ns": kernel}
            spans.append(Span(begin, end, op.title, op.block, op.args, op, waits))
    return spans


def model_args(model: schema.Model) -> dict[str, str | int]:
    """What the slice of a model's load shows first."""
    return {
        "model": model.name or model.path.rsplit("/", 1)[-1],
        "arch": model.arch,
        "ftype": model.ftype,
        "params": model.params,
        "bytes": model.bytes,
    }


def first_look(events: Iterable[tuple[int, schema.Event]]) -> tuple[int, int] | None:
    """Begin and end of the part to show first, in ns; None if the log has no step that ended.

    The part has the first three decodes and the last prefill before them. Of a long prefill it has
    only the end, which takes at most as long as the decodes together. Steps inside a mark named
    `warm-up` are skipped. Reads no further than necessary.
    """
    refs = Resolver()
    warm_up: int | None = None
    prefills: list[tuple[int, int]] = []
    decodes: list[tuple[int, int]] = []

    def settled(step: schema.StepBegin, end: int) -> None:
        if step.phase == "decode" or not decodes:
            (decodes if step.phase == "decode" else prefills).append((step.t, end))

    latest = LatestSteps(settled)
    for line, event in events:
        refs.take(line, event)  # what is not whole is shown as far as possible
        if isinstance(event, schema.Mark) and event.name == WARM_UP and event.phase == "begin":
            warm_up = event.mark
        elif isinstance(event, schema.Mark) and event.mark == warm_up and event.phase == "end":
            latest.settle_all()
            warm_up, prefills[:], decodes[:] = None, [], []
        elif isinstance(event, schema.StepBegin):
            latest.settle(event.ctx)
        elif isinstance(event, schema.StepEnd) and (step := refs.step):
            latest.add(step.event.ctx, step.event, max(event.t, step.event.t))
        elif isinstance(event, schema.Sync):
            latest.wait(event)
        if len(decodes) == DECODES and warm_up is None:
            break
    else:
        latest.settle_all()
    if not decodes:
        return prefills[-1] if prefills else None
    begin, end = decodes[0][0], decodes[-1][1]
    if prefills:
        begin = max(prefills[-1][0], min(begin, prefills[-1][1]) - (end - begin))
    # without margins: the UI ignores a range that extends beyond the trace
    return begin, end
