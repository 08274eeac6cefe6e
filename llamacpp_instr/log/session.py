"""A log as a whole: its facts as events, its measurements as columns.

Invariant: every event is whole (`resolve`). A Session contains every context, graph and plan that
it refers to, and a row of `ops` is as long as its plan. Times are absolute, in ns.

The times of kernels, layers and parts of graphs are a matrix for all computes of one plan, with a
row for each compute, in the order of the log, and a column for each kernel, layer or part. Its
numbers have 4 bytes each if all of them fit.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from operator import attrgetter, setitem
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from llamacpp_instr.base.errors import LogError
from llamacpp_instr.base.terminal import OnProgress
from llamacpp_instr.log import schema
from llamacpp_instr.log.calls import CallsCollector
from llamacpp_instr.log.experts import ExpertsCollector, ExpertUses
from llamacpp_instr.log.graph.attention import Ubatch
from llamacpp_instr.log.graph.kernels import Kernels, Work, plan_kernels
from llamacpp_instr.log.known import KnownStep
from llamacpp_instr.log.reader import LogEnd
from llamacpp_instr.log.resolve import Resolver
from llamacpp_instr.log.runs import Run, read_run
from llamacpp_instr.log.schema import Event, Layers, Ops, Splits
from llamacpp_instr.log.threads import ThreadTimes, thread_times

Int64 = NDArray[np.int64]


class Table:
    """Columns of equal length by name: int64, bool or float64 if possible, else objects (text, and
    numbers that may be absent)."""

    def __init__(self, columns: dict[str, NDArray[Any]]) -> None:
        self.columns = columns

    def __getitem__(self, name: str) -> NDArray[Any]:
        return self.columns[name]

    def __len__(self) -> int:
        return len(next(iter(self.columns.values()), ()))

    def rows(self, selected: NDArray[Any]) -> Table:
        """The rows that a mask or an array of indices selects."""
        return Table({name: column[selected] for name, column in self.columns.items()})

    def tuples(self, *names: str) -> Iterator[Any]:
        """The values of these columns, row by row, as Python's own numbers."""
        return zip(*(self[name].tolist() for name in names), strict=True)


class Columns:
    """Collects rows with 8 bytes per number: integers, and columns of the kinds `q` integers, `b`
    booleans, `O` the rest. The schema limits numbers to 64 bits."""

    _WAITING = 1000
    """rows that are turned into columns at once, which is faster"""

    def __init__(self, *integers: str, **kinds: str) -> None:
        self._kinds = dict.fromkeys(integers, "q") | kinds
        self._columns: dict[str, Any] = {
            name: [] if kind == "O" else array(kind) for name, kind in self._kinds.items()
        }
        self._values = attrgetter(*self._kinds)
        self._waiting: list[Sequence[Any]] = []

    @classmethod
    def of(cls, event: type[Event]) -> Columns:
        """A column for each key of an event."""
        types = {f.name: f.type for f in msgspec.structs.fields(event)}
        plain = {name: getattr(of, "__origin__", of) for name, of in types.items()}
        return cls(**{name: {int: "q", bool: "b"}.get(of, "O") for name, of in plain.items()})

    def add(self, values: Sequence[Any]) -> None:
        self._waiting.append(values)
        if len(self._waiting) == self._WAITING:
            self._extend()

    def add_event(self, event: Event) -> None:
        self.add(self._values(event))

    def _extend(self) -> None:
        if self._waiting:
            columns = zip(*self._waiting, strict=True)
            for column, values in zip(self._columns.values(), columns, strict=True):
                column.extend(values)
            self._waiting.clear()

    def table(self) -> Table:
        """The rows so far, which share their memory with these columns: add none afterwards."""
        self._extend()
        types = {"q": np.int64, "b": np.bool_}
        return Table({
            name: np.array(self._columns[name], object) if kind == "O"
            else np.frombuffer(self._columns[name], types[kind])
            for name, kind in self._kinds.items()
        })  # fmt: skip


Matrix = NDArray[np.int32] | NDArray[np.int64]


@dataclass(frozen=True)
class Timings:
    """All computes of one plan on one thread or device, or all with the same layers or splits."""

    thread: int
    plan: int
    """-1 for layers and splits"""
    device: str
    """that ran the kernels behind the caller; empty for a thread, layers and splits"""
    submitted: tuple[int, ...]
    """by split: 1 if its time ends with the submission to a device; empty for others"""
    label: Int64
    """of each column: layer, split, or the kernel's place in the plan"""
    place: Int64
    """of each row in the log: rows of all timings, sorted by it, are in the order of the log"""
    compute: Int64
    t: Int64
    """when the first gap of each row begins"""
    dur: Matrix
    gap: Matrix | None
    """before each interval; None if each begins when the previous one ends"""
    wait: Matrix | None
    """of `dur`, inside barriers; kernels at `verbose` only"""

    def __len__(self) -> int:
        return len(self.compute)

    def rows(self, selected: NDArray[Any] | Sequence[int]) -> Timings:
        """The computes of these numbers, ascending."""
        chosen = without_copy(selected)
        columns = {name: getattr(self, name) for name in _OF_COMPUTES}
        kept: dict[str, Any] = {
            name: None if of is None else of[chosen] for name, of in columns.items()
        }
        return replace(self, **kept)

    @property
    def end(self) -> Int64:
        """When each interval ends, absolute."""
        passed = np.cumsum(self.dur, axis=1, dtype=np.int64)
        if self.gap is not None:
            passed += np.cumsum(self.gap, axis=1, dtype=np.int64)
        ends: Int64 = passed + self.t[:, None]
        return ends

    @property
    def begin(self) -> Int64:
        return self.end - self.dur

    @property
    def totals(self) -> Int64:
        """The time in all intervals of each compute."""
        total: Int64 = self.dur.sum(axis=1, dtype=np.int64)
        return total


_OF_COMPUTES = ("place", "compute", "t", "dur", "gap", "wait")
"""what `Timings` has of each compute"""


def without_copy(rows: NDArray[Any] | Sequence[int]) -> Any:
    """An index that selects these rows, ascending, without a copy if they follow each other."""
    if len(rows) and rows[-1] - rows[0] == len(rows) - 1:
        return slice(int(rows[0]), int(rows[-1]) + 1)
    return rows


def in_order(timings: Sequence[Timings]) -> Iterator[tuple[Timings, int]]:
    """Each row in the order of the log: its timings and its number in them."""
    places = (of.place.tolist() for of in timings)
    rows = sorted((place, i, row) for i, of in enumerate(places) for row, place in enumerate(of))
    return ((timings[i], row) for _, i, row in rows)


class TimingsCollector:
    """Collects events of one kind (ops, layers or splits) as `Timings`."""

    def __init__(self) -> None:
        self._n = 0
        self._collected: dict[Any, dict[str, array[int]]] = {}
        """durations have 4 bytes, or 8 as soon as one needs them"""

    def add(self, event: Ops | Layers | Splits) -> None:
        """A whole event (`resolve`)."""
        thread, plan, wait, label = 0, -1, None, None
        device = ""
        submitted: tuple[int, ...] = ()
        if isinstance(event, Ops):
            thread, plan, wait, device = event.thread, event.plan, event.wait, event.device
        elif isinstance(event, Layers):
            label = tuple(event.layer)
        else:
            label, submitted = tuple(event.split), tuple(event.asynchronous)
        key = thread, plan, device, submitted, label, event.gap is None, wait is None
        if (into := self._collected.get(key)) is None:
            kinds = zip(_OF_COMPUTES, "qqqiii", strict=True)
            into = self._collected[key] = {name: array(kind) for name, kind in kinds}
        into["place"].append(self._n)
        into["compute"].append(event.compute)
        into["t"].append(event.t)
        for name, values in (("dur", event.dur), ("gap", event.gap), ("wait", wait)):
            try:
                into[name].fromlist(values or [])
            except OverflowError:  # then it has none of them
                into[name] = array("q", into[name])
                into[name].fromlist(values or [])
        self._n += 1

    def timings(self) -> list[Timings]:
        """What was collected, by plan in the order of first computes. Add nothing afterwards."""
        found = []
        for (thread, plan, device, given, label, *absent), into in self._collected.items():
            columns: dict[str, Any] = {
                name: np.frombuffer(of, np.int32 if of.typecode == "i" else np.int64)
                for name, of in into.items()
            }
            for name, is_absent in zip(("dur", "gap", "wait"), (False, *absent), strict=True):
                matrix = columns[name].reshape(len(into["compute"]), -1)
                columns[name] = None if is_absent else matrix
            labels = (
                np.arange(columns["dur"].shape[1]) if label is None else np.array(label, np.int64)
            )
            found.append(Timings(thread, plan, device, given, labels, **columns))
        return found


WARM_UP = "warm-up"
"""the mark around a warm-up run"""

WAITED = 20_000
"""ns; a shorter wait found the result ready, so it does not show when that came"""


def with_result_times(steps: Table, syncs: Table) -> Table:
    """The steps with `end` (the result was ready) and `returned` (the call returned), both in ns.

    They differ only if llama.cpp waited for a device after the call: then the step ends with that
    wait (`sync`). A wait belongs to the step of its context that began last before it.
    """
    returned = steps.columns.get("returned", steps["end"])
    end: Int64 = returned.copy()
    waits = syncs.rows(syncs["dur"] >= WAITED) if len(syncs) else syncs
    for ctx in np.unique(waits["ctx"]) if len(waits) else ():
        mine = np.flatnonzero(steps["ctx"] == ctx)
        mine = mine[np.argsort(steps["begin"][mine], kind="stable")]
        of_ctx = waits.rows(waits["ctx"] == ctx)
        at = np.searchsorted(steps["begin"][mine], of_ctx["t"], side="right") - 1
        known = at >= 0
        np.maximum.at(end, mine[at[known]], (of_ctx["t"] + of_ctx["dur"])[known])
    return Table(steps.columns | {"end": end, "returned": returned})


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
    adapters: list[schema.Adapters]
    graphs: dict[int, schema.Graph]
    plans: dict[int, schema.Plan]
    machine: Table
    """the keys of `machine`"""
    steps: Table
    """ended steps: step, ctx, phase (prefill, decode, encode), n_tokens, n_outputs, n_seqs, pos,
    thread, begin, end (the result is ready), returned, and the measurements of `step_end`"""
    sequences: Table
    """step, seq, pos (the first), tokens, outputs, prompt: for each sequence in an ended step"""
    computes: Table
    """the keys of `compute`"""
    ops: list[Timings]
    """kernels of thread 0, which takes part in each of its own; of all threads if `every_thread`
    was set"""
    device_ops: list[Timings]
    """kernels of devices that compute behind the caller"""
    devices: dict[str, schema.Device]
    """those whose kernels are timed, by name"""
    threads: Table
    """compute, thread, kernels: how many each thread had; and its `ThreadTimes` (verbose)"""
    layers: list[Timings]
    splits: list[Timings]
    experts: ExpertUses
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
    """what is known of each compute"""
    calls: Table
    """the commands of connections, with the columns `calls.CALLS`; those of one in their order"""
    connections: dict[int, schema.Connection]
    connections_ended: dict[int, schema.ConnectionEnd]
    _kernels: dict[int, Kernels] = field(default_factory=dict)

    @property
    def has_ops(self) -> bool:
        """Whether any kernel is timed."""
        return bool(self.ops or self.device_ops)

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
    computes: bool = True,
) -> Session:
    """The session of the log at `path` (`-` is standard input) or of a run (`log.runs`), also if
    it was not closed.

    `on_progress` gets the number of bytes read and the size of the file. Raises LogError with the
    line number for a line that violates the schema or is not whole (`resolve`); `lenient` leaves
    such lines and events out, and `log_end` counts them. `every_thread` keeps the kernels of all
    threads, not of the first alone: twice the memory for two threads. Without `computes`,
    which saves a third of the time, it has steps only: its `computes`, `kv`, `ubatches`, `ops`,
    `experts`, `threads`, `layers` and `splits` are empty.
    """
    (session,) = load_parts(path, on_progress, sys.maxsize, lenient, every_thread, computes)
    return session


def load_parts(
    path: str | Path | Run,
    on_progress: OnProgress | None = None,
    part_rows: int = 1 << 17,
    lenient: bool = False,
    every_thread: bool = False,
    computes: bool = True,
) -> Iterator[Session]:
    """The session of a log in successive parts, for logs larger than memory.

    A part has the models so far, the contexts, graphs and plans that it can refer to, and of
    everything else only what came after the previous part. It ends once it has `part_rows` events,
    ops and layer runs, and neither a step nor a warm-up is open: a step, its computes, their ops
    and the mark that excludes it are in the same part, but a wait for its result may come in the
    next one (`parts.JoinedParts`). The kernels of devices may delay the end until the part has
    twice as many rows; those that come still later are of no step. All parts except the last look
    like logs that were not closed. Raises like `load_session`.
    """
    run = path if isinstance(path, Run) else Run((str(path),))
    reader = read_run(run, lenient, on_progress)
    refs = Resolver(masks=computes)
    loader = _Loader(refs, lenient, every_thread, computes)
    for line, event in refs.follow(reader, lenient):
        is_full = loader.n_rows >= part_rows
        # a step that begins is open already
        if (
            is_full
            and type(event) is schema.StepBegin
            and len(refs.open_steps) == 1
            and all(mark.name != WARM_UP for _, mark in refs.open_marks.values())
            and (loader.n_rows >= 2 * part_rows or not refs.awaits_devices)
        ):
            yield loader.session(reader.path, LogEnd("unclosed", line - 1, 0, 0), [])
            loader.begin_part()
        loader.take(event)
    assert reader.end is not None
    for _, mark in refs.open_marks.values():
        loader.tables["marks"].add((mark.mark, mark.name, mark.t, -1, mark.thread, mark.seq))
    yield loader.session(run.name, reader.end, list(refs.open_steps.values()))


_STEP_BEGIN = ("step", "ctx", "n_tokens", "n_outputs", "n_seqs", "pos", "thread")
_STEP_END = tuple(n for n in schema.StepEnd.__struct_fields__ if n not in ("t", "step"))
_of_step_begin, _of_step_end = attrgetter(*_STEP_BEGIN, "t"), attrgetter("t", *_STEP_END)
_TABLES: dict[str, type[schema.Event]] = {
    "machine": schema.Machine, "computes": schema.Compute, "syncs": schema.Sync,
    "kv": schema.Kv, "tokens": schema.Token,
}  # fmt: skip
"""tables of a session that have the keys of an event"""
_LISTS: dict[str, type[schema.Event]] = {
    "tensors": schema.Tensor, "memory": schema.Memory, "adapters": schema.Adapters,
    "stats": schema.TensorStats, "notes": schema.Note, "messages": schema.Message,
}  # fmt: skip
"""lists of a session that keep events unchanged"""


class _Loader:
    """Collects what events say. Its dictionaries become attributes of a `Session`."""

    def __init__(self, refs: Resolver, lenient: bool, every_thread: bool, computes: bool) -> None:
        self.refs = refs
        self.lenient = lenient
        self.every_thread = every_thread
        self.computes = computes
        self.impossible: set[int] = set()
        """plans whose kernels cannot be computed (lenient)"""
        self.end: schema.SessionEnd | None = None
        self._has_dry = False
        self.begin_part()

    def begin_part(self) -> None:
        """Begin with new columns and what can still be named; the previous part keeps its own."""
        self.facts: dict[str, Any] = {
            name: {
                number: known.event
                for number, known in getattr(self.refs, name).items()
                if not self._is_dry(known.event)
            }
            for name in ("models", "contexts", "graphs", "plans")
        }
        for plan in self.impossible:
            self.facts["plans"].pop(plan, None)
        self.facts |= {
            "ubatches": {}, "connections": dict(self.refs.connections), "connections_ended": {},
        }  # fmt: skip
        self._ubatches: dict[Ubatch | None, Ubatch | None] = {}
        """each once, as many of a long session are equal"""
        self.tables = {
            "steps": Columns(*_STEP_BEGIN, "begin", "phase", "end", *_STEP_END, phase="O"),
            "sequences": Columns("step", "seq", "pos", "tokens", "outputs", prompt="b"),
            "threads": Columns("compute", "thread", "kernels", *ThreadTimes._fields),
            "marks": Columns("mark", "name", "begin", "end", "thread", "seq", name="O"),
            **{name: Columns.of(event) for name, event in _TABLES.items()},
        }
        self.lists: dict[str, Any] = {name: [] for name in _LISTS}
        self.timings = {name: TimingsCollector() for name in ("ops", "layers", "splits")}
        self.experts = ExpertsCollector()
        self.calls = CallsCollector()
        self.n_rows = 0
        self._takers: dict[type[schema.Event], Callable[[Any], None]] = {
            **{event: self.tables[name].add_event for name, event in _TABLES.items()},
            **{event: self.lists[name].append for name, event in _LISTS.items()},
            schema.SessionEnd: lambda event: setattr(self, "end", event),
            schema.Model: self._model,
            schema.Context: lambda event: setitem(self.facts["contexts"], event.ctx, event),
            schema.Graph: lambda event: setitem(self.facts["graphs"], event.graph, event),
            schema.Plan: self._plan,
            schema.StepEnd: self._step_end,
            schema.Compute: self._compute,
            schema.Experts: self._experts,
            schema.Ops: self._ops,
            schema.Layers: self._layers,
            schema.Splits: self.timings["splits"].add,
            schema.Mark: self._mark,
            schema.Connection: lambda of: setitem(self.facts["connections"], of.connection, of),
            schema.ConnectionEnd: lambda of: setitem(
                self.facts["connections_ended"], of.connection, of
            ),
            schema.Rpc: self._rpc,
        }
        if not self.computes:
            for of in (schema.Compute, schema.Experts, schema.Kv, schema.Layers, schema.Splits):
                del self._takers[of]

    def _is_dry(self, event: schema.Event) -> bool:
        """Whether it is about a model without weights, which llama.cpp's programs load before the
        one that their users see."""
        if isinstance(event, schema.Model | schema.Tensor):
            return self.refs.models[event.model].event.dry
        if isinstance(event, schema.Plan):
            event = self.refs.graphs[event.graph].event
        if isinstance(event, schema.Graph) and event.ctx < 0:
            return False
        if isinstance(event, schema.Context | schema.Graph | schema.Memory | schema.Adapters):
            return self.refs.contexts[event.ctx].model.event.dry
        return False

    def take(self, event: schema.Event) -> None:
        self.n_rows += 1
        taker = self._takers.get(type(event))
        if taker is not None and not (self._has_dry and self._is_dry(event)):
            taker(event)

    def session(self, path: str, log_end: LogEnd, open_steps: list[KnownStep]) -> Session:
        columns: dict[str, Any] = {name: of.table() for name, of in self.tables.items()}
        columns |= {name: of.timings() for name, of in self.timings.items()}
        every = columns["ops"]
        columns["ops"] = [of for of in every if not of.device]
        columns["device_ops"] = [of for of in every if of.device]
        columns["experts"] = self.experts.uses()
        columns["calls"] = Table(self.calls.columns())
        columns["steps"] = with_result_times(columns["steps"], columns["syncs"])
        return Session(
            path=path,
            start=self.refs.start,
            end=self.end,
            devices=dict(self.refs.devices),
            log_end=log_end,
            open_steps=open_steps,
            **self.facts,
            **self.lists,
            **columns,
        )

    def _model(self, event: schema.Model) -> None:
        if event.dry:
            self._has_dry = True
        else:
            self.facts["models"][event.model] = event

    def _plan(self, event: schema.Plan) -> None:
        try:
            if self.lenient:
                plan_kernels(self.refs.graph.event, event)
            self.facts["plans"][event.plan] = event
        except OverflowError:
            self.impossible.add(event.plan)
            self.refs.left_out += 1

    def _step_end(self, event: schema.StepEnd) -> None:
        assert self.refs.step is not None
        step = self.refs.step
        self.tables["steps"].add((*_of_step_begin(step.event), step.phase, *_of_step_end(event)))
        for part in step.parts:
            self.tables["sequences"].add((event.step, *part))

    def _compute(self, event: schema.Compute) -> None:
        self.tables["computes"].add_event(event)
        ubatch = self.refs.compute.ubatch
        self.facts["ubatches"][event.compute] = self._ubatches.setdefault(ubatch, ubatch)

    def _experts(self, event: schema.Experts) -> None:
        self.facts["ubatches"][event.compute] = self.refs.compute.ubatch
        self.n_rows += sum(map(len, event.expert))
        self.experts.add(event)

    def _ops(self, event: schema.Ops) -> None:
        if event.plan in self.impossible:
            self.refs.left_out += 1
            return
        if not self.computes:
            return
        self.n_rows += len(event.dur)
        if event.wait is not None:
            times = thread_times(event, self.refs.plan)
            self.tables["threads"].add((event.compute, event.thread, len(event.dur), *times))
        if event.device or event.thread == 0 or self.every_thread:
            self.timings["ops"].add(event)

    def _rpc(self, event: schema.Rpc) -> None:
        self.n_rows += len(event.command)
        self.calls.add(event, self.refs.connections[event.connection].side)

    def _layers(self, event: schema.Layers) -> None:
        self.n_rows += len(event.dur)
        self.timings["layers"].add(event)

    def _mark(self, event: schema.Mark) -> None:
        if event.phase != "begin":
            begin = event if event.phase == "instant" else self.refs.mark
            seq = event.seq if event.seq >= 0 else begin.seq
            self.tables["marks"].add((event.mark, begin.name, begin.t, event.t, begin.thread, seq))
