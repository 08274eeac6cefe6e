"""The latest figures of a session, from its events in order: also one lane per request, with its
text so far and its times.

Invariant: the figures count every event; only what is kept of the past is bounded: SECONDS seconds
of history, STEPS steps, MESSAGES messages and LANES lanes, each with the latest KEPT_TOKENS tokens.
All times are in ns.
"""

from __future__ import annotations

import codecs
from bisect import bisect_left
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from weakref import WeakKeyDictionary

import numpy as np
from numpy.typing import NDArray

from llamacpp_instr.log.batches import Part
from llamacpp_instr.log.graph.kernels import plan_kernels
from llamacpp_instr.log.graph.ops import BLOCKS
from llamacpp_instr.log.requests import Request, RequestFinder
from llamacpp_instr.log.resolve import KnownPlan, KnownStep, Resolver, Takers
from llamacpp_instr.log.schema import (
    Context,
    Kv,
    Layers,
    Machine,
    Mark,
    Memory,
    Message,
    Model,
    Ops,
    SessionEnd,
    SessionStart,
    StepBegin,
    StepEnd,
    Token,
)

SECOND = 1_000_000_000
SECONDS = 3600
STEPS = 2000
MESSAGES = 200
Float64 = NDArray[np.float64]
Int64 = NDArray[np.int64]

MOVES = ("shift", "seq_cp", "seq_add", "seq_div")
"""operations on a cache that move cells"""
_COLUMN = {block: i for i, block in enumerate(BLOCKS)}


# --- requests ---

TO_FIRST = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0,
)  # fmt: skip
"""upper bounds in seconds, as OpenTelemetry's semantic conventions for generative AI advise"""
BETWEEN = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5)


class Histogram:
    """Counts of times by their upper bounds, in seconds."""

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.sum = 0.0
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)

    def add(self, ns: float) -> None:
        """Count a time in ns."""
        seconds = ns / 1e9
        self.sum += seconds
        self._counts[bisect_left(self._bounds, seconds)] += 1

    def cumulative(self) -> list[tuple[str, float]]:
        """Prometheus's buckets: the upper bound, and how many times are at most that."""
        bounds = [*map(str, self._bounds), "+Inf"]
        return list(zip(bounds, map(float, accumulate(self._counts)), strict=True))


LANES = 320
"""lanes: the latest requests; llama.cpp serves at most 256 sequences of a context at once"""
KEPT_TOKENS = 1000
"""of each lane"""


@dataclass(frozen=True)
class Shown:
    """A token: its text, when it was there and its probability."""

    index: int
    """counts the tokens of the lane"""
    text: str
    t: int
    p: float | None


@dataclass(eq=False)
class Lane:
    """A request as it is shown."""

    number: int
    """counts the lanes"""
    request: Request
    tokens: deque[Shown] = field(default_factory=lambda: deque(maxlen=KEPT_TOKENS))
    n_tokens: int = 0
    n_times: int = 0
    """token times whose gaps were counted"""
    counted: bool = False
    """whether the times of the request were"""
    over: bool = False
    """the application said so, or its sequence serves another request"""
    decode: codecs.IncrementalDecoder = field(
        default_factory=lambda: codecs.getincrementaldecoder("utf-8")("replace"), repr=False
    )
    """a character may need the bytes of several tokens"""

    @property
    def between(self) -> float | None:
        """The mean time from a token to the next, in ns; None with less than two."""
        times = self.request.token_times
        return (times[-1] - times[0]) / (len(times) - 1) if len(times) > 1 else None

    def add(self, token: Token) -> None:
        text = self.decode.decode(bytes.fromhex(token.hex) if token.hex else token.text.encode())
        self.tokens.append(Shown(self.n_tokens, text, token.t + token.dur, token.p))
        self.n_tokens += 1


class LiveLanes:
    """The lanes of a session, from its steps, tokens and marks in the order in which they end."""

    def __init__(self) -> None:
        self.n_requests = 0
        """that were seen"""
        self.to_first = Histogram(TO_FIRST)
        self.per_token = Histogram(BETWEEN)
        """of requests that have ended, the mean time from a token to the next"""
        self.gaps = Histogram(BETWEEN)
        """from each token to the next"""
        self._finder = RequestFinder(self._found)
        self._lanes: dict[int, Lane] = {}
        """by the identity of the request, which the lane keeps alive"""
        self._of_sequence: dict[tuple[int, int], Lane] = {}

    def __iter__(self) -> Iterator[Lane]:
        """In the order in which they began."""
        return iter(list(self._lanes.values()))

    def step(
        self, number: int, ctx: int, begin: int, end: int, parts: Sequence[Part], target: int = -1
    ) -> None:
        """A step that counts has ended."""
        for request in self._finder.step(number, ctx, begin, end, parts, target):
            self._count_gaps(self._lane_of(request))

    def token(self, token: Token) -> None:
        """A token was sampled."""
        of = self._finder.token(token.ctx, token.seq, token.step, token.t, token.dur)
        if of is not None:
            lane = self._lane_of(of)
            lane.add(token)
            self._count_gaps(lane)

    def mark(self, begin: Mark, end: Mark) -> None:
        """A mark has ended."""
        seq = end.seq if end.seq >= 0 else begin.seq
        if seq >= 0:
            self._finder.span(seq, begin.t, end.t, begin.name)
            for (_, of), lane in self._of_sequence.items():
                if of == seq and lane.request.marked_end == end.t:
                    self._end(lane)

    def count(self, lane: Lane) -> None:
        """Count the times of a request that has ended; only once, and only if it has tokens."""
        to_first, between = lane.request.to_first_token, lane.between
        if lane.counted or to_first is None:
            return
        lane.counted = True
        self.to_first.add(to_first)
        if between is not None:
            self.per_token.add(between)

    def finish(self) -> None:
        """Nothing follows: all requests have ended."""
        self._finder.finish()

    def _lane_of(self, request: Request) -> Lane:
        lane = self._lanes.get(id(request))
        if lane is None:
            key = request.ctx, request.seq
            if (before := self._of_sequence.get(key)) is not None:
                self._end(before)
            lane = Lane(self.n_requests, request)
            self.n_requests += 1
            self._lanes[id(request)] = self._of_sequence[key] = lane
            if len(self._lanes) > LANES:
                self._forget()
        return lane

    def _count_gaps(self, lane: Lane) -> None:
        times = lane.request.token_times
        for i in range(max(lane.n_times, 1), len(times)):
            self.gaps.add(times[i] - times[i - 1])
        lane.n_times = len(times)

    def _found(self, request: Request) -> None:
        if (lane := self._lanes.get(id(request))) is not None:
            self._end(lane)

    def _end(self, lane: Lane) -> None:
        lane.over = True
        self.count(lane)

    def _forget(self) -> None:
        """The oldest lane, one that is over if there is one."""
        oldest = next((lane for lane in self._lanes.values() if lane.over), None)
        lane = oldest or next(iter(self._lanes.values()))
        self.count(lane)
        del self._lanes[id(lane.request)]
        key = lane.request.ctx, lane.request.seq
        if self._of_sequence.get(key) is lane:
            del self._of_sequence[key]


# --- steps ---


@dataclass(frozen=True)
class PlanCells:
    """The cells of the kernels of one plan, with what names them."""

    layer: Int64
    block: Int64
    label: list[str]


_CELLS: WeakKeyDictionary[KnownPlan, PlanCells] = WeakKeyDictionary()


def cells_of(plan: KnownPlan) -> PlanCells | None:
    """The cells of a plan, kept with it; None at `minimal`, where graphs have no nodes."""
    if plan not in _CELLS and plan.graph.event.nodes is not None:
        kernels = plan_kernels(plan.graph.event, plan.event)
        block = np.array([_COLUMN[name] for name in kernels.block], np.int64)
        _CELLS[plan] = PlanCells(kernels.layer, block, kernels.label)
    return _CELLS.get(plan)


@dataclass
class Heat:
    """The times of steps of one phase, in ns; (layers + 1, blocks), row 0 is outside of layers."""

    n_layers: int
    steps: int = 0
    sum: Float64 = field(init=False)
    last: Float64 = field(init=False)

    def __post_init__(self) -> None:
        self.sum = np.zeros((self.n_layers + 1, len(BLOCKS)))
        self.last = np.zeros_like(self.sum)

    def add(self, step: Float64) -> None:
        """A step has ended."""
        self.sum += step
        self.last = step
        self.steps += 1

    @property
    def mean(self) -> Float64:
        """The average of all steps so far."""
        return self.sum / max(self.steps, 1)


def add_times(step: Float64, layer: Int64, block: Int64, dur: list[int]) -> None:
    """Add the times of kernels or layers to the cells of their step."""
    rows = np.minimum(layer + 1, len(step) - 1)
    np.add.at(step, (rows, block), np.array(dur, np.float64))


@dataclass
class Second:
    """What happened in one second of the session."""

    number: int
    """since the session began"""
    tokens: int = 0
    prompt: int = 0
    """tokens of prompts that were computed"""
    steps: int = 0
    busy: int = 0
    """time of the steps that ended in it"""
    cells: int = 0
    """used in all caches, at its end"""
    rss: int = 0
    delay: int = 0
    """time in which threads waited for a CPU"""
    cpu: int = 0
    step: int = -1
    """the latest that ended in it or before"""


@dataclass(frozen=True)
class ComputeRow:
    """The kernels of one compute on thread 0, as columns."""

    cells: PlanCells
    gap: Int64
    """before each kernel"""
    dur: Int64


@dataclass(frozen=True)
class StepRow:
    """A step that has ended, and where its kernels' time went."""

    step: int
    ctx: int
    phase: str
    n_tokens: int
    n_seqs: int
    begin: int
    dur: int
    computes: tuple[ComputeRow, ...]


@dataclass
class Cache:
    """Cells of one cache of a context."""

    used: int = 0
    size: int = 0
    n_bytes: int = 0
    moves: int = 0
    """how often cells were shifted to make room, or copied to another sequence"""


@dataclass
class Threads:
    """What the threads of the latest compute did, in ns of each thread, where the log has it."""

    working: list[int] = field(default_factory=list)
    waiting: list[int] = field(default_factory=list)


@dataclass
class _Kept:
    """What is kept with a step that has not ended."""

    heat: Float64
    computes: list[ComputeRow] = field(default_factory=list)


class LiveState:
    """Takes the events of a log through `takers`; its attributes are the figures."""

    def __init__(self) -> None:
        self.refs = Resolver()
        self.start: SessionStart | None = None
        self.end: SessionEnd | None = None
        self.is_over = False
        """whether nothing follows any more"""
        self._open: WeakKeyDictionary[KnownStep, _Kept] = WeakKeyDictionary()
        self.latest = 0
        """the largest `t` so far"""
        self.idle = 0
        """how long ago the latest event came; 0 while the log is behind, and when it has ended"""
        self.models: dict[int, Model] = {}
        self.contexts: dict[int, Context] = {}
        self.lanes = LiveLanes()
        self.seconds: deque[Second] = deque(maxlen=SECONDS)
        self.steps: deque[StepRow] = deque(maxlen=STEPS)
        self.messages: deque[tuple[int, int, str, str]] = deque(maxlen=MESSAGES)
        """number, time, level and text"""
        self.heat: dict[str, Heat] = {}
        """by phase"""
        self.caches: dict[tuple[int, int], Cache] = {}
        """by context and cache"""
        self.memory: dict[int, Memory] = {}
        """of each context, the latest"""
        self.machine: Machine | None = None
        self.threads: dict[int, Threads] = {}
        """of each context"""
        self.n_events = self.n_steps = self.n_failed = self.n_tokens = self.n_prompt = 0
        self.n_messages = 0
        self.busy = 0
        self.rss = 0
        """of the process, in bytes, as last recorded"""
        self.takers: Takers = {
            SessionStart: self._session_start,
            SessionEnd: self._session_end,
            Model: self._model,
            Context: self._context,
            Memory: self._take_memory,
            Machine: self._take_machine,
            Mark: self._mark,
            Message: self._message,
            StepBegin: self._step_begin,
            StepEnd: self._step_end,
            Layers: self._layers,
            Ops: self._ops,
            Kv: self._kv,
            Token: self._token,
        }

    @property
    def now(self) -> int:
        """The time on the clock of the log."""
        return self.latest + self.idle

    @property
    def elapsed(self) -> int:
        """The time since the session began."""
        return self.now - self.start.t if self.start else 0

    @property
    def under_way(self) -> list[KnownStep]:
        """The steps that have not ended."""
        return [] if self.is_over else list(self.refs.open_steps.values())

    def finish(self) -> None:
        """Nothing follows: the session was closed, or its program has ended."""
        self.is_over = True
        self.lanes.finish()

    def steps_between(self, first: int, last: int) -> tuple[int, int] | None:
        """The first and last step that ended in these seconds of the session, both included; None
        if none did, or none that is kept."""
        before = [second.step for second in self.seconds if second.number < first]
        chosen = [of for of in self.seconds if first <= of.number <= last and of.steps]
        if not chosen:
            return None
        begin = before[-1] if before else chosen[0].step - chosen[0].steps
        return begin + 1, chosen[-1].step

    # --- the session ---

    def _session_start(self, start: SessionStart) -> None:
        self.start, self.latest = start, start.t

    def _session_end(self, end: SessionEnd) -> None:
        self.end = end
        self.finish()

    def _model(self, model: Model) -> None:
        self.models[model.model] = model

    def _context(self, context: Context) -> None:
        self.contexts[context.ctx] = context
        if len(self.contexts) > len(self.refs.contexts):  # the resolver forgets those of long ago
            for ctx in self.contexts.keys() - self.refs.contexts.keys():
                for kept in (self.contexts, self.memory, self.threads):
                    kept.pop(ctx, None)
            self.caches = {key: of for key, of in self.caches.items() if key[0] in self.contexts}

    def _take_memory(self, memory: Memory) -> None:
        self.memory[memory.ctx] = memory
        self.rss = memory.rss or self.rss

    def _take_machine(self, machine: Machine) -> None:
        self.machine = machine
        second = self._second(machine.t)
        second.cpu += machine.cpu
        second.delay += machine.delay or 0

    def _mark(self, mark: Mark) -> None:
        if mark.phase == "end":
            self.lanes.mark(self.refs.mark, mark)

    def _message(self, message: Message) -> None:
        self.messages.append((self.n_messages, message.t, message.level, message.text))
        self.n_messages += 1

    # --- steps ---

    def _step_begin(self, begin: StepBegin) -> None:
        self.latest = max(self.latest, begin.t)
        context = self.contexts.get(begin.ctx)
        model = self.models.get(context.model) if context else None
        layers = model.hparams.get("n_layer", 0) if model else 0
        n = layers if isinstance(layers, int) else 0
        assert self.refs.step is not None
        heat = self.heat.setdefault(self.refs.step.phase, Heat(n))
        self._open[self.refs.step] = _Kept(np.zeros_like(heat.sum))

    def _step_end(self, end: StepEnd) -> None:
        known = self.refs.step
        assert known is not None
        begin = known.event
        if end.status != 0:
            self.n_failed += 1
            return
        kept, dur = self._open[known], max(end.t - begin.t, 0)
        counts = begin.n_tokens, begin.n_seqs, begin.t, dur, tuple(kept.computes)
        self.steps.append(StepRow(begin.step, begin.ctx, known.phase, *counts))
        self.heat[known.phase].add(kept.heat)
        self.n_steps += 1
        self.busy += dur
        second = self._second(end.t)
        second.step = max(second.step, begin.step)
        second.steps += 1
        second.busy += dur
        second.prompt += known.n_prompt
        self.n_prompt += known.n_prompt
        self.lanes.step(begin.step, begin.ctx, begin.t, end.t, known.parts, known.target)

    def _layers(self, layers: Layers) -> None:
        known = self.refs.open_steps.get(self.refs.step_of(layers))
        if known is not None and self.refs.compute.graph.event.nodes is None:
            # the log does not have its kernels
            rows = np.array(layers.layer, np.int64)
            other = np.full_like(rows, _COLUMN["other"])
            add_times(self._open[known].heat, rows, other, layers.dur)

    def _ops(self, ops: Ops) -> None:
        compute = self.refs.compute.event
        known = self.refs.open_steps.get(compute.step)
        cells = cells_of(self.refs.plan)
        gaps = ops.gap or [0] * len(ops.dur)
        waits = sum(gaps) + sum(ops.wait or ()) + ops.tail
        threads = self.threads.setdefault(compute.ctx, Threads())
        if ops.thread == 0:
            threads.working.clear()
            threads.waiting.clear()
        threads.working.append(sum(ops.dur) - sum(ops.wait or ()))
        threads.waiting.append(waits)
        if known is None or cells is None or ops.thread != 0:
            return
        kept = self._open[known]
        add_times(kept.heat, cells.layer, cells.block, ops.dur)
        kept.computes.append(ComputeRow(cells, np.array(gaps, np.int64), np.array(ops.dur)))

    def _kv(self, kv: Kv) -> None:
        cache = self.caches.setdefault((kv.ctx, kv.cache), Cache())
        cache.used, cache.size, cache.n_bytes = kv.used, kv.size, kv.bytes
        cache.moves += kv.op in MOVES

    def _token(self, token: Token) -> None:
        context = self.refs.contexts.get(token.ctx)
        if context is not None and context.event.target >= 0:
            return  # a draft, which the target may reject
        self.n_tokens += 1
        self._second(token.t + token.dur).tokens += 1
        self.lanes.token(token)

    # --- time ---

    def _second(self, t: int) -> Second:
        """The second of `t`, or the latest: events of other threads come a little later."""
        assert self.start is not None
        self.latest = max(self.latest, t)
        number = max(t - self.start.t, 0) // SECOND
        if not self.seconds or self.seconds[-1].number < number:
            step = self.seconds[-1].step if self.seconds else -1
            self.seconds.append(Second(number, step=step))
        latest = self.seconds[-1]
        latest.cells = sum(cache.used for cache in self.caches.values())
        latest.rss = self.rss
        return latest
