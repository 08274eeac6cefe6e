"""A log as a whole: its facts as events, its measurements as columns.

Invariant: every event is whole (`resolve`). A Session contains every context, graph and plan that
it refers to, and a row of `ops` is as long as its plan. Times are absolute, in ns.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import astuple, dataclass, field
from functools import cached_property
from operator import setitem
from pathlib import Path
from typing import Any

from llamacpp_instr.base.errors import LogError
from llamacpp_instr.base.progress import OnProgress
from llamacpp_instr.log import schema
from llamacpp_instr.log.columns import Columns, kinds_of
from llamacpp_instr.log.columns import Table as Table
from llamacpp_instr.log.graph.attention import Ubatch
from llamacpp_instr.log.graph.kernels import Kernels, Work, plan_kernels
from llamacpp_instr.log.ids import KnownStep
from llamacpp_instr.log.parts import read_run
from llamacpp_instr.log.reader import LogEnd
from llamacpp_instr.log.resolve import Resolver
from llamacpp_instr.log.runs import Run
from llamacpp_instr.log.timings import Timings, TimingsCollector
from llamacpp_instr.log.waits import with_result_times


@dataclass
class Session:
    """One recorded run."""

    path: str
    start: schema.SessionStart
    end: schema.SessionEnd | None
    """None when the log was not closed"""
    log_end: LogEnd
    models: dict[int, schema.Model]
    tensors: list[schema.Tensor]
    contexts: dict[int, schema.Context]
    memory: list[schema.Memory]
    graphs: dict[int, schema.Graph]
    plans: dict[int, schema.Plan]
    machine: Table
    """the keys of `machine`"""
    steps: Table
    """ended steps: step, ctx, phase (prefill, decode, encode), n_tokens, n_outputs, n_seqs, pos,
    thread, begin, end (the result is there), returned, and the measurements of `step_end`"""
    sequences: Table
    """step, seq, pos, tokens, outputs, prompt: what the batch of each ended step has of each
    sequence; `pos` is its first position"""
    computes: Table
    """the keys of `compute`"""
    ops: list[Timings]
    """kernels of thread 0, which takes part in each; of all threads if `every_thread` was set"""
    threads: Table
    """compute, thread, kernels, busy, waiting: the kernels of each thread, ns in them without their
    barriers, and ns in barriers, inside kernels and between them (verbose)"""
    layers: list[Timings]
    splits: list[Timings]
    syncs: Table
    kv: Table
    tokens: Table
    stats: list[schema.TensorStats]
    marks: Table
    """mark, name, begin, end, thread, seq; an instant ends when it begins, an open span with -1"""
    notes: list[schema.Note]
    messages: list[schema.Message]
    open_steps: list[KnownStep]
    """begun and not ended"""
    ubatches: dict[int, Ubatch]
    """what is known of the masks of each compute"""
    _kernels: dict[int, Kernels] = field(default_factory=dict)

    @cached_property
    def tensors_of(self) -> dict[int, list[schema.Tensor]]:
        """The tensors of each model that has any."""
        found: dict[int, list[schema.Tensor]] = {}
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

    def work(self, ops: Timings) -> Work:
        """What the kernels of `ops` computed and moved."""
        kernels = self.kernels(ops.plan)
        try:
            return kernels.works([self.ubatches.get(n) for n in ops.compute.tolist()])
        except OverflowError:
            raise LogError(f"plan {ops.plan}: impossible tensor sizes", self.path) from None


def load_session(
    path: str | Path | Run,
    on_progress: OnProgress | None = None,
    lenient: bool = False,
    every_thread: bool = False,
) -> Session:
    """The session of the log at `path` (`-` is standard input) or of a run (`log.runs`), also if
    it was not closed.

    `on_progress` gets the number of bytes read and the size of the file. Raises LogError with the
    line number for a line that violates the schema or is not whole (`resolve`); `lenient` leaves
    such lines and events out, and `log_end` counts them. `every_thread` keeps the kernels of all
    threads, not of the first alone: twice the memory for two threads.
    """
    (session,) = load_parts(path, on_progress, sys.maxsize, lenient, every_thread)
    return session


def load_parts(
    path: str | Path | Run,
    on_progress: OnProgress | None = None,
    part_rows: int = 1 << 17,
    lenient: bool = False,
    every_thread: bool = False,
) -> Iterator[Session]:
    """The session of a log in successive parts, for logs larger than memory.

    A part has the models so far, the contexts, graphs and plans that it can refer to, and of
    everything else only what came after the previous part. A part ends once it has `part_rows` ops
    and layer runs and no step is open, so a step, its computes and their ops are in the same part.
    All parts except the last look like logs that were not closed. Raises like `load_session`.
    """
    run = path if isinstance(path, Run) else Run((str(path),))
    reader = read_run(run, lenient, on_progress)
    refs = Resolver()
    loader = _Loader(refs, lenient, every_thread)
    for line, event in refs.follow(reader, lenient):
        is_full = loader.n_rows >= part_rows
        # a step that begins is open already
        if is_full and type(event) is schema.StepBegin and len(refs.open_steps) == 1:
            yield loader.session(reader.path, LogEnd("unclosed", line - 1, 0, 0), [])
            loader.begin_part()
        loader.take(event)
    assert reader.end is not None
    loader.end_marks()
    yield loader.session(run.name, reader.end, list(refs.open_steps.values()))


_STEP_BEGIN = ("step", "ctx", "n_tokens", "n_outputs", "n_seqs", "pos", "thread")
_STEP_END = tuple(n for n in schema.StepEnd.__struct_fields__ if n not in ("t", "step"))
_TABLES: dict[str, type[schema.Event]] = {
    "machine": schema.Machine,
    "computes": schema.Compute,
    "syncs": schema.Sync,
    "kv": schema.Kv,
    "tokens": schema.Token,
}
"""tables of a session that have the keys of an event"""
_LISTS: dict[str, type[schema.Event]] = {
    "tensors": schema.Tensor,
    "memory": schema.Memory,
    "stats": schema.TensorStats,
    "notes": schema.Note,
    "messages": schema.Message,
}
"""lists of a session that keep an event as it is"""


class _Loader:
    """Collects what events say. Its attributes become those of a `Session`."""

    def __init__(self, refs: Resolver, lenient: bool, every_thread: bool) -> None:
        self.refs = refs
        self.lenient = lenient
        self.every_thread = every_thread
        self.impossible: set[int] = set()
        """plans whose kernels cannot be computed (lenient)"""
        self.end: schema.SessionEnd | None = None
        self.begin_part()

    def begin_part(self) -> None:
        """Begin with new columns and lists, and with what can still be named; the part before keeps
        its own."""
        refs = self.refs
        self.models = {number: known.event for number, known in refs.models.items()}
        self.contexts = {number: known.event for number, known in refs.contexts.items()}
        self.graphs = {number: known.event for number, known in refs.graphs.items()}
        plans = refs.plans.items()
        self.plans = {n: known.event for n, known in plans if n not in self.impossible}
        begin = kinds_of(schema.StepBegin)
        self.steps = Columns(
            {name: begin[name] for name in _STEP_BEGIN}
            | {"phase": "O", "begin": "q", "end": "q"}
            | dict.fromkeys(_STEP_END, "q")
        )
        of_part = dict.fromkeys(("step", "seq", "pos", "tokens", "outputs"), "q")
        self.sequences = Columns(of_part | {"prompt": "b"})
        of_thread = ("compute", "thread", "kernels", "busy", "waiting")
        self.threads = Columns(dict.fromkeys(of_thread, "q"))
        of_mark = dict.fromkeys(("mark", "name", "begin", "end", "thread", "seq"), "q")
        self.marks = Columns(of_mark | {"name": "O"})
        self.tables = {name: Columns.of(event) for name, event in _TABLES.items()}
        self.lists: dict[str, Any] = {name: [] for name in _LISTS}
        self.ops, self.layers, self.splits = (TimingsCollector() for _ in range(3))
        self.ubatches: dict[int, Ubatch] = {}
        self.n_rows = 0
        self._takers: dict[type[schema.Event], Callable[[Any], None]] = {
            **{event: self.tables[name].add_event for name, event in _TABLES.items()},
            **{event: self.lists[name].append for name, event in _LISTS.items()},
            schema.SessionEnd: self._session_end,
            schema.Model: lambda event: setitem(self.models, event.model, event),
            schema.Context: lambda event: setitem(self.contexts, event.ctx, event),
            schema.Graph: lambda event: setitem(self.graphs, event.graph, event),
            schema.Plan: self._plan,
            schema.StepEnd: self._step_end,
            schema.Compute: self._compute,
            schema.Ops: self._ops,
            schema.Layers: self._layers,
            schema.Splits: self.splits.add,
            schema.Mark: self._mark,
        }

    def take(self, event: schema.Event) -> None:
        taker = self._takers.get(type(event))
        if taker is not None:
            taker(event)

    def end_marks(self) -> None:
        for _, mark in self.refs.open_marks.values():
            self.marks.add((mark.mark, mark.name, mark.t, -1, mark.thread, mark.seq))

    def session(self, path: str, log_end: LogEnd, open_steps: list[KnownStep]) -> Session:
        others: dict[str, Any] = {name: of.table() for name, of in self.tables.items()}
        return Session(
            path=path,
            start=self.refs.start,
            end=self.end,
            log_end=log_end,
            models=self.models,
            contexts=self.contexts,
            graphs=self.graphs,
            plans=self.plans,
            steps=with_result_times(self.steps.table(), others["syncs"]),
            sequences=self.sequences.table(),
            ops=self.ops.timings(),
            layers=self.layers.timings(),
            splits=self.splits.timings(),
            threads=self.threads.table(),
            marks=self.marks.table(),
            open_steps=open_steps,
            ubatches=self.ubatches,
            **others,
            **self.lists,
        )

    def _session_end(self, event: schema.SessionEnd) -> None:
        self.end = event

    def _plan(self, event: schema.Plan) -> None:
        try:
            if self.lenient:
                plan_kernels(self.refs.graph.event, event)
            self.plans[event.plan] = event
        except OverflowError:
            self.impossible.add(event.plan)
            self.refs.left_out += 1

    def _step_end(self, event: schema.StepEnd) -> None:
        assert self.refs.step is not None
        begin = self.refs.step.event
        row = [getattr(begin, name) for name in _STEP_BEGIN]
        row += self.refs.step.phase, begin.t, event.t
        self.steps.add(row + [getattr(event, name) for name in _STEP_END])
        for part in self.refs.step.parts:
            self.sequences.add((begin.step, *astuple(part)))

    def _compute(self, event: schema.Compute) -> None:
        self.tables["computes"].add_event(event)
        self.ubatches[event.compute] = self.refs.compute.ubatch

    def _ops(self, event: schema.Ops) -> None:
        if event.plan in self.impossible:
            self.refs.left_out += 1
            return
        self.n_rows += len(event.dur)
        if event.wait is not None:
            wait = sum(event.wait)
            busy, between = sum(event.dur) - wait, sum(event.gap or ())
            of_thread = event.compute, event.thread, len(event.dur), busy, wait + between
            self.threads.add(of_thread)
        if event.thread == 0 or self.every_thread:
            self.ops.add(event)

    def _layers(self, event: schema.Layers) -> None:
        self.n_rows += len(event.dur)
        self.layers.add(event)

    def _mark(self, event: schema.Mark) -> None:
        if event.phase != "begin":
            begin = event if event.phase == "instant" else self.refs.mark
            seq = event.seq if event.seq >= 0 else begin.seq
            self.marks.add((event.mark, begin.name, begin.t, event.t, begin.thread, seq))
