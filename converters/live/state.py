"""The latest figures of a session, from its events in order.

Invariant: the figures count every event; only what is kept of the past is bounded: SECONDS seconds
of history, STEPS steps, MESSAGES messages and the lanes of the latest requests. All times are in
ns.
"""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass, field
from pathlib import Path
from weakref import WeakKeyDictionary

import numpy as np
from numpy.typing import NDArray

from llamacpp_instr.converters.live.lanes import CACHED, COMPUTED, OUTPUT, LiveLanes
from llamacpp_instr.converters.live.times import CANCELLED
from llamacpp_instr.log.graph.kernels import plan_kernels
from llamacpp_instr.log.graph.ops import BLOCKS
from llamacpp_instr.log.known import KnownPlan, KnownStep
from llamacpp_instr.log.memory import MemoryInUse
from llamacpp_instr.log.requests import Copied, Served, Taken, read_note, server_context
from llamacpp_instr.log.resolve import Resolver, Takers
from llamacpp_instr.log.schema import (
    Context,
    Kv,
    Layers,
    Machine,
    Mark,
    Memory,
    Message,
    Model,
    Note,
    Ops,
    SessionEnd,
    SessionStart,
    StepBegin,
    StepEnd,
    Token,
)
from llamacpp_instr.log.session import WARM_UP

SECOND = 1_000_000_000
SECONDS = 3600
STEPS = 2000
MESSAGES = 200
Float64 = NDArray[np.float64]
Int64 = NDArray[np.int64]

MOVES = ("shift", "seq_cp", "seq_add", "seq_div")
"""operations on a cache that move cells"""
REQUEST = "request"
"""the name of llama-server's marks"""
_COLUMN = {block: i for i, block in enumerate(BLOCKS)}


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


def _row(ops: Ops, cells: PlanCells) -> ComputeRow:
    gaps = np.array(ops.gap or [0] * len(ops.dur), np.int64)
    return ComputeRow(cells, gaps, np.array(ops.dur, np.int64), ops.device)


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
    """the latest step that ended in it or before it"""


@dataclass(frozen=True)
class ComputeRow:
    """The kernels of one compute on thread 0, or of a split on a device, as columns."""

    cells: PlanCells
    gap: Int64
    """before each kernel"""
    dur: Int64
    device: str
    """empty for thread 0"""


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
    computes: list[ComputeRow]
    """those of devices may come after the end"""


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
    """What the threads of the latest compute did, in ns of each thread, if the log has it."""

    working: list[int] = field(default_factory=list)
    waiting: list[int] = field(default_factory=list)


@dataclass
class _Kept:
    """What is kept with a step that has not ended."""

    heat: Float64
    counts: bool
    """whether a user caused it"""
    computes: list[ComputeRow] = field(default_factory=list)


class LiveState:
    """Takes the events of a log through `takers`; its attributes are the figures."""

    def __init__(self) -> None:
        self.refs = Resolver()
        self.start: SessionStart | None = None
        self.end: SessionEnd | None = None
        self.is_over = False
        """whether nothing more follows"""
        self._open: WeakKeyDictionary[KnownStep, _Kept] = WeakKeyDictionary()
        self.latest = 0
        """the largest `t` so far"""
        self.idle = 0
        """how long ago the latest event came; 0 while catching up, and when the log has ended"""
        self.models: dict[int, Model] = {}
        self.contexts: dict[int, Context] = {}
        self.lanes = LiveLanes(self._add_tokens, self.model_of)
        self.tokens: Counter[tuple[str, str]] = Counter()
        """by model and kind"""
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
        self.n_events = self.n_steps = self.n_failed = self.n_messages = 0
        self._n_left = 0
        """requests that left the queue before a slot took them"""
        self._left: dict[int, Served] = {}
        """by the mark, which ends next"""
        self.copies: Copied | None = None
        """of prompts in RAM, after the latest move"""
        self.copy_moves: Counter[str] = Counter()
        """by the operation"""
        self.held: dict[int, int] = {}
        """tokens that each slot has in the cache"""
        self._taken: set[int] = set()
        """open marks of requests that have a slot"""
        self.busy = 0
        self.devices: Counter[str] = Counter()
        """by device: the time of its kernels"""
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
            Note: self._note,
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

    @property
    def n_tokens(self) -> int:
        """Output tokens."""
        return self._n_of(OUTPUT)

    @property
    def n_prompt(self) -> int:
        """Tokens of prompts that were computed."""
        return self._n_of(COMPUTED)

    @property
    def n_cached(self) -> int:
        """Tokens of prompts that were found in the cache."""
        return self._n_of(CACHED)

    def _n_of(self, kind: str) -> int:
        return sum(n for (_, of), n in self.tokens.items() if of == kind)

    @property
    def queue(self) -> list[Mark]:
        """The requests that wait for a slot of llama-server, in the order of their arrival."""
        if self.is_over or not self.lanes.slots:
            return []
        marks = (mark for _, mark in self.refs.open_marks.values())
        waits = [mark for mark in marks if mark.name == REQUEST and mark.mark not in self._taken]
        copies = (lane.request.arrival < 0 and not lane.over for lane in self.lanes.slots.values())
        return waits[sum(copies) :]  # a copy of a prompt has a slot, but the log does not say so

    @property
    def n_requests(self) -> int:
        """The requests that arrived, or that began if their arrival is unknown."""
        return self.lanes.n_requests + self._n_left + len(self.queue)

    @property
    def server(self) -> Context | None:
        """The context whose sequences are the slots of requests."""
        return server_context(self.contexts.values())

    def is_server(self, ctx: int) -> bool:
        """Whether the sequences of a context are slots, as far as the log has said so."""
        server = self.server
        return bool(self.lanes.slots) and server is not None and server.ctx == ctx

    @property
    def in_use(self) -> MemoryInUse:
        """What the contexts hold now, and what devices have."""
        found = MemoryInUse()
        for ctx, memory in self.memory.items():
            found.take(memory, self.contexts[ctx].model)
        return found

    def model_of(self, ctx: int) -> str:
        """The name of the model of a context; if that is unknown, of `server`."""
        context = self.contexts.get(ctx) or self.server
        model = self.models.get(context.model) if context else None
        return (model.name or Path(model.path).name) if model else ""

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
        if not model.dry:
            self.models[model.model] = model

    def _context(self, context: Context) -> None:
        known = self.refs.models.get(context.model)
        if known is not None and known.event.dry:
            return
        self.contexts[context.ctx] = context
        if len(self.contexts) > len(self.refs.contexts):  # the resolver forgets old ones
            for ctx in self.contexts.keys() - self.refs.contexts.keys():
                for kept in (self.contexts, self.memory, self.threads, self.lanes.silent):
                    kept.pop(ctx, None)
            self.caches = {key: of for key, of in self.caches.items() if key[0] in self.contexts}

    def _take_memory(self, memory: Memory) -> None:
        self.rss = memory.rss or self.rss
        if memory.ctx in self.contexts:
            self.memory[memory.ctx] = memory

    def _take_machine(self, machine: Machine) -> None:
        self.machine = machine
        second = self._second(machine.t)
        second.cpu += machine.cpu
        second.delay += machine.delay or 0

    def _mark(self, mark: Mark) -> None:
        if mark.phase != "end":
            return
        begin = self.refs.mark
        self.lanes.mark(begin, mark)
        left = self._left.pop(mark.mark, None)
        waited = mark.mark not in self._taken
        self._taken.discard(mark.mark)
        if self.lanes.slots and waited and begin.name == REQUEST and max(begin.seq, mark.seq) < 0:
            self._n_left += 1
            labels = self.model_of(-1), left.operation if left else "unknown", CANCELLED
            self.lanes.times.duration.add(mark.t - begin.t, *labels)

    def _note(self, note: Note) -> None:
        of = read_note(note)
        if isinstance(of, Copied):
            self.copies = of
            self.copy_moves[of.op] += 1
            if of.op == "load":
                self.held[of.slot] = of.tokens
        elif isinstance(of, Served) and of.slot < 0:
            self._left[of.mark] = of
        elif isinstance(of, Served):
            self.lanes.serve(of)
        elif isinstance(of, Taken) and of.mark in self.refs.open_marks:
            self._taken.add(of.mark)
            self.lanes.take(of, self.refs.open_marks[of.mark][1])

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
        marks = (mark.name for _, mark in self.refs.open_marks.values())
        self._open[self.refs.step] = _Kept(np.zeros_like(heat.sum), WARM_UP not in marks)

    def _step_end(self, end: StepEnd) -> None:
        known = self.refs.step
        assert known is not None
        begin = known.event
        if end.status != 0:
            self.n_failed += 1
            return
        kept, dur = self._open[known], max(end.t - begin.t, 0)
        if not kept.counts:
            return
        counts = begin.n_tokens, begin.n_seqs, begin.t, dur, kept.computes
        self.steps.append(StepRow(begin.step, begin.ctx, known.phase, *counts))
        self.heat[known.phase].add(kept.heat)
        self.n_steps += 1
        self.busy += dur
        second = self._second(end.t)
        second.step = max(second.step, begin.step)
        second.steps += 1
        second.busy += dur
        self._add_tokens(end.t, begin.ctx, COMPUTED, known.n_prompt)
        self.lanes.step(begin.step, begin.ctx, begin.t, end.t, known.parts, known.target)
        if self.is_server(begin.ctx):
            self.held.update({of.seq: of.pos + of.tokens for of in known.parts})

    def _layers(self, layers: Layers) -> None:
        known = self.refs.open_steps.get(self.refs.step_of(layers))
        if known is not None and self.refs.compute.graph.event.nodes is None:
            # the log does not have its kernels
            rows = np.array(layers.layer, np.int64)
            other = np.full_like(rows, _COLUMN["other"])
            add_times(self._open[known].heat, rows, other, layers.dur)

    def _ops(self, ops: Ops) -> None:
        if ops.device:
            self._device_ops(ops)
            return
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
        kept.computes.append(_row(ops, cells))

    def _device_ops(self, ops: Ops) -> None:
        """Adds the kernels of a device to their step, which may have ended."""
        self.devices[ops.device] += sum(ops.dur)
        known, cells = self.refs.compute.step, cells_of(self.refs.plan)
        if known is None or cells is None:
            return
        if known in self._open and known.event.step in self.refs.open_steps:
            kept = self._open[known]
            add_times(kept.heat, cells.layer, cells.block, ops.dur)
            kept.computes.append(_row(ops, cells))
            return
        number = known.event.step
        row = next((of for of in reversed(self.steps) if of.step == number), None)
        if row is not None:  # else the step does not count
            heat = self.heat[known.phase]
            add_times(heat.sum, cells.layer, cells.block, ops.dur)
            if row is self.steps[-1]:
                add_times(heat.last, cells.layer, cells.block, ops.dur)
            row.computes.append(_row(ops, cells))

    def _kv(self, kv: Kv) -> None:
        if kv.ctx not in self.contexts:
            return
        cache = self.caches.setdefault((kv.ctx, kv.cache), Cache())
        cache.used, cache.size, cache.n_bytes = kv.used, kv.size, kv.bytes
        cache.moves += kv.op in MOVES
        if self.is_server(kv.ctx):
            if kv.op == "clear":
                self.held.clear()
            elif kv.op == "seq_rm" and kv.seq in self.held and (kv.p1 is None or kv.p1 < 0):
                self.held[kv.seq] = min(self.held[kv.seq], max(kv.p0 or 0, 0))

    def _token(self, token: Token) -> None:
        context = self.refs.contexts.get(token.ctx)
        if context is not None and context.event.target >= 0:
            return  # a draft, which the target may reject
        self._add_tokens(token.t + token.dur, token.ctx, OUTPUT, 1)
        self.lanes.token(token)

    def _add_tokens(self, t: int, ctx: int, kind: str, n: int) -> None:
        """Count tokens of a kind that were ready at `t`."""
        self.tokens[self.model_of(ctx), kind] += n
        second = self._second(t)
        second.tokens += n * (kind == OUTPUT)
        second.prompt += n * (kind == COMPUTED)

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
