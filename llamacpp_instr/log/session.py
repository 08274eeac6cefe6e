"""A log as a whole: its facts as events, its measurements as columns.

Invariant: every reference is valid. A Session contains every graph, plan, compute and context that
it refers to, and the columns of `ops` are as long as their plan. `check` finds all other errors of
a log. Times are absolute, in ns.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from llamacpp_instr.errors import LogError
from llamacpp_instr.graph.kernels import Kernels, graph_problem, plan_kernels, plan_problem
from llamacpp_instr.log.columns import Columns, WrongTimes, interval_columns, kind
from llamacpp_instr.log.columns import Table as Table
from llamacpp_instr.log.reader import LogEnd, read_events
from llamacpp_instr.progress import OnProgress
from llamacpp_instr.schema import (
    MOST,
    Compute,
    Context,
    Event,
    Graph,
    Kv,
    Layers,
    Mark,
    Memory,
    Message,
    Model,
    Note,
    Ops,
    Plan,
    SessionEnd,
    SessionStart,
    Splits,
    StepBegin,
    StepEnd,
    Sync,
    Tensor,
    TensorStats,
    Token,
    event_name,
)

Int64 = NDArray[np.int64]


@dataclass(frozen=True)
class Timed:
    """The kernels, layers or splits of one compute on one thread, one after the other.

    The columns have equal lengths; `begin` and `end` are absolute.
    """

    compute: int
    thread: int
    plan: int
    """-1 for layers and splits"""
    t: int
    gap: Int64 | None
    dur: Int64
    wait: Int64 | None = None
    """of `dur`, inside barriers; kernels at `verbose` only"""
    label: Int64 | None = None
    """layer or split; None for kernels, whose labels are in the plan"""

    @property
    def end(self) -> Int64:
        return self.t + np.cumsum(self.dur if self.gap is None else self.dur + self.gap)

    @property
    def begin(self) -> Int64:
        return self.end - self.dur


@dataclass
class Session:
    """One recorded run."""

    path: str
    start: SessionStart
    end: SessionEnd | None
    """None when the log was not closed"""
    log_end: LogEnd
    models: dict[int, Model]
    tensors: list[Tensor]
    contexts: dict[int, Context]
    memory: list[Memory]
    graphs: dict[int, Graph]
    plans: dict[int, Plan]
    steps: Table
    """ended steps: step, ctx, kind, phase, n_tokens, n_outputs, n_seqs, pos, thread, begin, end,
    and the measurements of `step_end`"""
    computes: Table
    """the keys of `compute`"""
    ops: list[Timed]
    layers: list[Timed]
    splits: list[Timed]
    syncs: Table
    kv: Table
    tokens: Table
    stats: list[TensorStats]
    marks: Table
    """mark, name, begin, end, thread; an instant ends when it begins, an open span with -1"""
    notes: list[Note]
    messages: list[Message]
    open_steps: list[StepBegin]
    """begun and not ended"""
    _kernels: dict[int, Kernels] = field(default_factory=dict)

    @cached_property
    def tensors_of(self) -> dict[int, list[Tensor]]:
        """The tensors of each model that has any."""
        found: dict[int, list[Tensor]] = {}
        for tensor in self.tensors:
            found.setdefault(tensor.model, []).append(tensor)
        return found

    def kernels(self, plan: int) -> Kernels:
        """The kernels of `plan`, computed on first use."""
        if plan not in self._kernels:
            of = self.plans[plan]
            try:
                self._kernels[plan] = plan_kernels(self.graphs[of.graph], of)
            except OverflowError:
                raise LogError(f"plan {plan}: impossible tensor sizes", self.path) from None
        return self._kernels[plan]


def load_session(path: str | Path, on_progress: OnProgress | None = None) -> Session:
    """The session of the log at `path` (`-` is standard input), also if it was not closed.

    `on_progress` gets the number of bytes read and the size of the file. Raises LogError with the
    line number for a line that violates the schema or refers to something unknown.
    """
    (session,) = load_parts(path, on_progress, part_rows=sys.maxsize)
    return session


def load_parts(
    path: str | Path, on_progress: OnProgress | None = None, part_rows: int = 1 << 17
) -> Iterator[Session]:
    """The session of a log in successive parts, for logs larger than memory.

    Each part has all numbered facts so far (models, contexts, graphs, plans), and of everything
    else only what came after the previous part. A part ends once it has `part_rows` ops and layer
    runs and no step is open, so a step, its computes and their ops are in the same part. All parts
    except the last look like logs that were not closed. Raises like `load_session`.
    """
    reader = read_events(path, on_progress=on_progress)
    loader = _Loader()
    for line, event in reader:
        if loader.n_rows >= part_rows and not loader.open_steps and type(event) is StepBegin:
            yield loader.session(reader.path, LogEnd("unclosed", line - 1, 0, 0))
            loader.forget()
        try:
            loader.take(event)
        except (_Unfollowable, WrongTimes) as error:
            raise LogError(f"{event_name(event)}: {error}", reader.path, line) from None
    assert reader.end is not None
    loader.end_marks()
    yield loader.session(reader.path, reader.end)


class _Unfollowable(Exception):
    """An event refers to something that the log does not contain."""


_STEP_BEGIN = tuple(name for name in StepBegin.__struct_fields__ if name != "t")
_STEP_END = tuple(name for name in StepEnd.__struct_fields__ if name not in ("t", "step"))


class _Loader:
    def __init__(self) -> None:
        begin = {info.name: kind(info.type) for info in msgspec.structs.fields(StepBegin)}
        self.steps = Columns(
            {name: begin[name] for name in _STEP_BEGIN}
            | {"begin": "q", "end": "q"}
            | dict.fromkeys(_STEP_END, "q")
        )
        self.marks = Columns({"mark": "q", "name": "O", "begin": "q", "end": "q", "thread": "q"})
        self.computes = Columns.of(Compute)
        self.syncs = Columns.of(Sync)
        self.kv = Columns.of(Kv)
        self.tokens = Columns.of(Token)
        self.start: SessionStart | None = None
        self.end: SessionEnd | None = None
        self.models: dict[int, Model] = {}
        self.tensors: list[Tensor] = []
        self.contexts: dict[int, Context] = {}
        self.memory: list[Memory] = []
        self.graphs: dict[int, Graph] = {}
        self.plans: dict[int, Plan] = {}
        self.ops: list[Timed] = []
        self.layers: list[Timed] = []
        self.splits: list[Timed] = []
        self.stats: list[TensorStats] = []
        self.notes: list[Note] = []
        self.messages: list[Message] = []
        self.open_steps: dict[int, StepBegin] = {}
        self.open_marks: dict[int, Mark] = {}
        self.graph_of: dict[int, int] = {}
        self.kernels: dict[int, Kernels] = {}
        self.n_rows = 0
        self._takers: dict[type[Event], Callable[[Any], None]] = {
            SessionStart: self._session_start,
            SessionEnd: self._session_end,
            Model: self._model,
            Tensor: self._tensor,
            Context: self._context,
            Memory: self._memory,
            Graph: self._graph,
            Plan: self._plan,
            StepBegin: self._step_begin,
            StepEnd: self._step_end,
            Compute: self._compute,
            Ops: self._ops,
            Layers: self._layers,
            Splits: self._splits,
            Sync: self.syncs.add_event,
            Kv: self.kv.add_event,
            Token: self.tokens.add_event,
            TensorStats: lambda event: self.stats.append(event),
            Mark: self._mark,
            Note: lambda event: self.notes.append(event),
            Message: lambda event: self.messages.append(event),
        }

    def take(self, event: Event) -> None:
        self._takers[type(event)](event)

    def forget(self) -> None:
        """Begin a new part with new lists; the previous part keeps its own."""
        for columns in (self.steps, self.marks, self.computes, self.syncs, self.kv, self.tokens):
            columns.clear()
        for name in ("tensors", "memory", "ops", "layers", "splits", "stats", "notes", "messages"):
            setattr(self, name, [])
        self.n_rows = 0

    def end_marks(self) -> None:
        for mark in self.open_marks.values():
            self.marks.add((mark.mark, mark.name, mark.t, -1, mark.thread))

    def session(self, path: str, log_end: LogEnd) -> Session:
        if self.start is None:
            raise LogError("its session_start is damaged", path, 1)
        return Session(
            path=path,
            start=self.start,
            end=self.end,
            log_end=log_end,
            models=self.models,
            tensors=self.tensors,
            contexts=self.contexts,
            memory=self.memory,
            graphs=self.graphs,
            plans=self.plans,
            steps=self.steps.table(),
            computes=self.computes.table(),
            ops=self.ops,
            layers=self.layers,
            splits=self.splits,
            syncs=self.syncs.table(),
            kv=self.kv.table(),
            tokens=self.tokens.table(),
            stats=self.stats,
            marks=self.marks.table(),
            notes=self.notes,
            messages=self.messages,
            open_steps=list(self.open_steps.values()),
            _kernels=self.kernels,
        )

    def _session_start(self, event: SessionStart) -> None:
        self.start = event

    def _session_end(self, event: SessionEnd) -> None:
        self.end = event

    def _model(self, event: Model) -> None:
        self.models[event.model] = event

    def _context(self, event: Context) -> None:
        _follow("model", event.model, self.models)
        self.contexts[event.ctx] = event

    def _graph(self, event: Graph) -> None:
        _follow("context", event.ctx, self.contexts)
        if problem := graph_problem(event):
            raise _Unfollowable(problem)
        _keep("graph", event.graph, event, self.graphs)

    def _plan(self, event: Plan) -> None:
        _follow("graph", event.graph, self.graphs)
        if problem := plan_problem(event, self.graphs[event.graph]):
            raise _Unfollowable(problem)
        _keep("plan", event.plan, event, self.plans)

    def _step_begin(self, event: StepBegin) -> None:
        _follow("context", event.ctx, self.contexts)
        self.open_steps[event.step] = event

    def _step_end(self, event: StepEnd) -> None:
        begin = self.open_steps.pop(event.step, None)
        if begin is None:
            raise _Unfollowable(f"step {event.step} was never begun")
        self.steps.add(
            (
                *(getattr(begin, name) for name in _STEP_BEGIN),
                begin.t,
                event.t,
                *(getattr(event, name) for name in _STEP_END),
            )
        )

    def _compute(self, event: Compute) -> None:
        _follow("graph", event.graph, self.graphs)
        self.graph_of[event.compute] = event.graph
        self.computes.add_event(event)

    def _ops(self, event: Ops) -> None:
        _follow("plan", event.plan, self.plans)
        _follow("compute", event.compute, self.graph_of)
        plan = self.plans[event.plan]
        if plan.graph != self.graph_of[event.compute]:
            raise _Unfollowable(f"plan {event.plan} is of another graph than the compute")
        if len(plan.node) != len(event.dur):
            n = len(event.dur)
            raise _Unfollowable(f"{n} kernels, plan {event.plan} has {len(plan.node)}")
        wait = None if event.wait is None else _column(event.wait, event.dur)
        self.n_rows += len(event.dur)
        self.ops.append(_timed(event, thread=event.thread, plan=event.plan, wait=wait))

    def _layers(self, event: Layers) -> None:
        _follow("compute", event.compute, self.graph_of)
        self.n_rows += len(event.dur)
        self.layers.append(_timed(event, label=_column(event.layer, event.dur)))

    def _splits(self, event: Splits) -> None:
        _follow("compute", event.compute, self.graph_of)
        self.splits.append(_timed(event, label=_column(event.split, event.dur)))

    def _tensor(self, event: Tensor) -> None:
        _follow("model", event.model, self.models)
        if math.prod(event.ne) > MOST:
            raise _Unfollowable("an impossible tensor shape")
        self.tensors.append(event)

    def _memory(self, event: Memory) -> None:
        _follow("context", event.ctx, self.contexts)
        self.memory.append(event)

    def _mark(self, event: Mark) -> None:
        if event.phase == "begin":
            self.open_marks[event.mark] = event
            return
        begin = event if event.phase == "instant" else self.open_marks.pop(event.mark, None)
        if begin is None:
            raise _Unfollowable(f"mark {event.mark} ends and was not begun")
        self.marks.add((event.mark, begin.name, begin.t, event.t, begin.thread))


def _keep(what: str, number: int, event: Event, known: dict[int, Any]) -> None:
    if known.setdefault(number, event) != event:
        raise _Unfollowable(f"{what} {number} was another one before")


def _follow(what: str, number: int, known: dict[int, Any]) -> None:
    if number not in known:
        raise _Unfollowable(f"{what} {number} was never given")


def _column(values: list[int], beside: list[int]) -> Int64:
    if len(values) != len(beside):
        raise _Unfollowable("its columns differ in length")
    return np.array(values, np.int64)


def _timed(
    event: Ops | Layers | Splits,
    thread: int = 0,
    plan: int = -1,
    wait: Int64 | None = None,
    label: Int64 | None = None,
) -> Timed:
    gap, dur = interval_columns(event)
    return Timed(event.compute, thread, plan, event.t, gap, dur, wait, label)
