"""Checks a log strictly: every line on its own, then the lines against each other.

Invariant: the check streams, each error gives a finding with its line, and memory is bounded: what
is compared with later events is kept only while its context, graph, plan, step or compute can be
named. Only an event that is whole by the rules of all readers (`log.resolve`) is checked further.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice, pairwise, repeat
from pathlib import Path
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary, WeakSet

from llamacpp_instr.base.terminal import counted
from llamacpp_instr.log import schema
from llamacpp_instr.log.calls import call_columns
from llamacpp_instr.log.columns import Int64, kernel_times
from llamacpp_instr.log.devices import n_executed
from llamacpp_instr.log.graph.kernels import runs
from llamacpp_instr.log.known import KnownCompute, KnownContext, KnownGraph, KnownPlan, KnownStep
from llamacpp_instr.log.reader import LogEnd, LogReader
from llamacpp_instr.log.resolve import Resolver
from llamacpp_instr.log.runs import find_runs
from llamacpp_instr.log.schema import event_name

MAX_FINDINGS = 10_000
"""in one log; a file with more errors is not a log"""
COUNTER_SLACK = 1_000
"""ns by which a span of the cycle counter may exceed a span of the clock"""


class Finding(NamedTuple):
    """One error of a log."""

    path: str
    line: int
    message: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.message}"


def check_log(path: str | Path) -> Iterator[Finding]:
    """The findings of the log at `path` (`-` is standard input) in the order of its lines; none
    if it is clean. After MAX_FINDINGS one more says that the rest was not checked. Raises LogError
    for a file that is not a log."""
    found = _findings(path)
    for finding in islice(found, MAX_FINDINGS):
        latest = finding
        yield finding
    if next(found, None):
        message = f"more than {MAX_FINDINGS:,} findings: the rest of the log was not checked"
        yield latest._replace(message=message)


def missing_parts(paths: Sequence[str | Path]) -> Iterator[Finding]:
    """A finding for each part that is missing between two parts of one rotated log (`log.runs`)."""
    for run in find_runs(paths, repeated=True):
        for number in run.missing:
            after = next(p for n, p in zip(run.numbers, run.paths, strict=True) if n > number)
            yield Finding(after, 1, f"session_start: part {number} of this session is missing")


def _findings(path: str | Path) -> Iterator[Finding]:
    reader = LogReader(path, "give")
    if reader.dialect:
        name = reader.dialect.name
        message = f"in the {name} dialect of an earlier fork: it can be converted, but not checked"
        yield Finding(reader.path, 1, message)
        return
    checker = _Checker()
    for line, event in reader.items():
        if isinstance(event, str):
            yield Finding(reader.path, line, event)
            continue
        for message in checker.findings(line, event):
            yield Finding(reader.path, line, f"{event_name(event)}: {message}")
    assert reader.end is not None
    for line, message in checker.end_findings(reader.end):
        yield Finding(reader.path, line, message)


@dataclass
class _OfContext:
    """What is compared with later events of a context; times in ns."""

    step: int = -1
    """that began last"""
    step_end: int = 0
    """of the latest step"""
    compute_end: int = 0
    """of the latest compute"""
    n_tokens: int = 0
    """sampled"""
    token_t: int = 0


class _OfPlan(NamedTuple):
    """What `layers` and `ops` are compared with."""

    runs: list[tuple[int, int, int]]
    """(layer, first kernel, one past the last) of each run of kernels of one layer"""
    missing: str
    """what a complete compute would also have computed"""
    splits: frozenset[int]
    """those it has nodes of"""


@dataclass
class _OfStep:
    end: int
    """of its latest compute"""
    n_computes: int = 0
    n_reused: int = 0


@dataclass
class _OfCompute:
    layers: schema.Layers | None = None
    experts: bool = False
    threads: set[int] = field(default_factory=set)
    own: frozenset[int] = frozenset()
    """splits whose kernels thread 0 ran"""
    given: set[int] = field(default_factory=set)
    """splits whose kernels a device gave"""
    begins: dict[int, int] = field(default_factory=dict)
    """when each split was submitted or computed"""
    ends: dict[int, int] = field(default_factory=dict)
    """when the kernels of each split ended on a device, less the device's uncertainty"""
    waited: int | None = None
    """when the wait for all devices ended"""


class _Checker:
    """The rules of whole events, and the order and the counts of all lines.

    A rule gives the errors of an event, one message each, first those of the event on its own.
    """

    def __init__(self) -> None:
        self._refs = Resolver(masks=False)
        self._level = self._clock = ""
        self._perturbed = False
        self._counts: Counter[str] = Counter()
        self._latest = 0
        self._end: tuple[int, schema.SessionEnd] | None = None
        self._of_context: WeakKeyDictionary[KnownContext, _OfContext] = WeakKeyDictionary()
        self._of_plan: WeakKeyDictionary[KnownPlan, _OfPlan] = WeakKeyDictionary()
        self._of_step: WeakKeyDictionary[KnownStep, _OfStep] = WeakKeyDictionary()
        self._of_compute: WeakKeyDictionary[KnownCompute, _OfCompute] = WeakKeyDictionary()
        self._computed: WeakSet[KnownGraph] = WeakSet()
        self._due: Counter[str] = Counter()
        """by device: splits that it ran"""
        self._given: Counter[str] = Counter()
        """by device: splits whose kernels it gave"""
        self._commands: dict[int, tuple[int, int]] = {}
        """by open connection: the next number, and when its latest command ended"""
        # the method with the name of an event is its rule
        rules = {of: getattr(self, f"_{event_name(of)}", None) for of in schema.EVENTS}
        self._rules: dict[type[schema.Event], Callable[[Any], Iterator[str]] | None] = rules

    def findings(self, line: int, event: schema.Event) -> Iterator[str]:
        """The errors of the event of `line`, on its own and given the events before it."""
        if self._end:
            yield f"comes after session_end (line {self._end[0]})"
        if self._refs.is_of_earlier_part(event):
            self._counts[event_name(event)] += 1
            return
        event = self._refs.whole(event)
        problems = list(self._refs.problems(event))
        self._refs.take(line, event)
        yield from problems
        if not problems and (rule := self._rules.get(type(event))):
            yield from rule(event)
        if isinstance(event, schema.SessionEnd):
            self._end = (line, event)
            yield from self._totals(event)
        self._counts[event_name(event)] += 1
        self._latest = max(self._latest, event.t)

    def end_findings(self, end: LogEnd) -> Iterator[tuple[int, str]]:
        """Findings that are known only at the end of the log, each with its line."""
        if end.state == "truncated":
            yield end.lines + 1, "was not closed and ends in the middle of this line"
        if end.state == "unclosed" and self._end is None:
            yield end.lines, "was not closed: no session_end"
        if end.state != "closed" or self._end is None:
            return
        stated, seen = self._end[1].bytes, end.bytes_before_last
        if stated != seen:
            yield end.lines, f"session_end: `bytes` is {stated}, {seen} come before this line"
        for line, mark in self._refs.open_marks.values():
            yield line, f"mark: mark {mark.mark} (`{mark.name}`) is never ended"
        if self._end[1].reason != "rotated" and not self._end[1].dropped_ops:
            for device in self._refs.devices:
                if (n := self._due[device] - self._given[device]) > 0:
                    ran = f"of {self._due[device]:,} that it ran"
                    yield end.lines, f"{counted(n, 'split')} of {device} came without ops, {ran}"
        for step in self._refs.open_steps.values():
            yield step.line, f"step_begin: step {step.event.step} is never ended"

    def _totals(self, event: schema.SessionEnd) -> Iterator[str]:
        for name in sorted({*event.events, *self._counts}):
            stated, seen = event.events.get(name, 0), self._counts[name]
            if stated != seen:
                yield f"`events` has {stated} {name}, the log has {seen}"
        if event.t < self._latest:
            yield f"`t` is {self._latest - event.t} ns before the latest event"

    # --- the session and its facts ---

    def _session_start(self, event: schema.SessionStart) -> Iterator[str]:
        self._level, self._clock, self._perturbed = event.level, event.clock, event.perturbed
        return iter(())

    def _session_end(self, event: schema.SessionEnd) -> Iterator[str]:
        if event.dropped:
            yield f"the log is not complete: {counted(event.dropped, 'event')} dropped"
        if event.dropped_ops:
            dropped = counted(event.dropped_ops, "op")
            yield f"{dropped} dropped: a buffer was full, or results of a device are missing"

    def _mark(self, event: schema.Mark) -> Iterator[str]:
        if event.phase == "end":
            begin = self._refs.mark
            if begin.name != event.name:
                yield f"mark {event.mark} ends as `{event.name}`, it began as `{begin.name}`"
            elif event.t < begin.t:
                yield f"mark {event.mark} ends {begin.t - event.t} ns before it begins"

    def _tensor(self, event: schema.Tensor) -> Iterator[str]:
        n_tensors = self._refs.model.event.n_tensors
        if event.tensor >= n_tensors:
            yield f"tensor {event.tensor} of a model of {counted(n_tensors, 'tensor')}"

    def _context(self, event: schema.Context) -> Iterator[str]:
        n, given = self._refs.model.event.n_tensors, len(self._refs.model.tensors)
        if 0 < given < n:
            yield f"model {event.model} has {counted(n, 'tensor')}, the log {given}"

    def _graph(self, event: schema.Graph) -> Iterator[str]:
        if event.n_exec > event.n_nodes:
            yield f"`n_exec` is {event.n_exec}, more than `n_nodes` ({event.n_nodes})"
        nodes = event.nodes
        if nodes is not None:
            for i, (buffer, ne) in enumerate(zip(nodes.buffer, nodes.ne, strict=True)):
                if not -1 <= buffer < len(event.buffers):
                    yield f"node {i} is in buffer {buffer}, the graph has {len(event.buffers)}"
                if not ne:
                    yield f"node {i} has shape []"
            if sum(nodes.exec) != event.n_exec:
                yield f"`n_exec` is {event.n_exec}, column `exec` has {sum(nodes.exec)}"
        if (nodes is None) != (self._level == "minimal"):
            yield f"{'without' if nodes is None else 'with'} nodes at level {self._level}"
        elif nodes is not None and nodes.nb is not None and self._level != "verbose":
            yield f"with strides (`nb`) at level {self._level}"
        tensors = self._refs.context.model.tensors
        for leaf in event.leafs:
            if leaf.tensor != -1 and leaf.tensor not in tensors:
                yield f"leaf `{leaf.name}` is tensor {leaf.tensor}, which was never given"

    def _plan(self, event: schema.Plan) -> Iterator[str]:
        if self._refs.graph.is_damaged:
            return
        graph = self._refs.graph.event
        nodes = graph.whole
        for first in event.node:
            if not nodes.exec[first]:
                yield f"node {first} has a kernel, but in its graph none runs for it"
        # the caller or a device runs all kernels of a split, or none
        missing = ""
        planned, needed = n_executed(graph, event), n_executed(graph)
        for i, (n, of) in enumerate(zip(planned, needed, strict=True)):
            if n != of and (n or (len(needed) == 1 and graph.splits[i].backend == "CPU")):
                where = f" of split {i}" if len(needed) > 1 else ""
                missing = missing or f"{n} nodes of {of} to compute{where}"
        layers = runs([nodes.layer[i] for i in event.node])
        splits = frozenset(i for i, n in enumerate(planned) if n)
        self._of_plan[self._refs.plan] = _OfPlan(layers, missing, splits)

    # --- steps ---

    def _named_context(self) -> _OfContext:
        return self._of_context.setdefault(self._refs.context, _OfContext())

    def _step_begin(self, event: schema.StepBegin) -> Iterator[str]:
        context = self._named_context()
        if context.step in self._refs.open_steps:
            yield f"begins while step {context.step} of context {event.ctx} is open"
        context.step = event.step
        if event.t < context.step_end:
            overlap = context.step_end - event.t
            yield f"begins {overlap} ns before the context's previous step ended"

    def _step_end(self, event: schema.StepEnd) -> Iterator[str]:
        if event.n_reused > event.n_ubatch:
            yield f"`n_reused` is {event.n_reused}, more than `n_ubatch` ({event.n_ubatch})"
        known = self._refs.step
        assert known is not None
        begin = known.event.t
        step = self._of_step.setdefault(known, _OfStep(begin))
        if context := self._refs.contexts.get(known.event.ctx):
            self._of_context.setdefault(context, _OfContext()).step_end = event.t
        if event.t < begin:
            yield f"step {event.step} ends {begin - event.t} ns before it begins"
            return
        if event.t < step.end:
            yield f"step {event.step} ends {step.end - event.t} ns before its compute"
        parts = event.prepare + event.readback + event.recorder
        if parts > event.t - begin:
            yield f"`prepare`, `readback` and `recorder` take {parts} ns of {event.t - begin}"
        if event.n_ubatch != step.n_computes:
            yield f"`n_ubatch` is {event.n_ubatch}, the step has {step.n_computes} computes"
        elif event.n_reused != step.n_reused:
            yield f"`n_reused` is {event.n_reused}, {step.n_reused} computes are `reused`"

    # --- computes ---

    def _compute(self, event: schema.Compute) -> Iterator[str]:
        stages = event.apply + event.build + event.alloc + event.inputs
        if stages > event.start:
            yield f"its stages take {stages} ns, the compute starts at {event.start}"
        context, graph = self._named_context(), self._refs.graph
        if event.reused and graph not in self._computed:
            yield f"`reused` is True, graph {event.graph} was not computed before"
        self._computed.add(graph)
        if event.t < context.compute_end:
            overlap = context.compute_end - event.t
            yield f"begins {overlap} ns before the context's previous compute ended"
        context.compute_end = _end(event)
        if event.status == 0 and not self._perturbed:
            self._due.update(graph.device_splits.values())
        known = self._refs.step
        if known is not None:
            if event.t < known.event.t:
                yield f"begins {known.event.t - event.t} ns before its step"
            step = self._of_step.setdefault(known, _OfStep(known.event.t))
            step.end = max(step.end, _end(event))
            if event.source != "memory_update":
                step.n_computes += 1
                step.n_reused += event.reused

    def _measured(self, event: schema.Layers | schema.Ops | schema.Splits) -> Iterator[str]:
        """Whether intervals are inside their compute."""
        compute = self._refs.compute.event
        slack = 0 if self._clock == "monotonic" else COUNTER_SLACK
        begin = compute.t + compute.start
        first = event.t + (event.gap[0] if event.gap else 0)
        end = event.t + sum(event.dur) + sum(event.gap or ())
        if first < begin - slack:
            yield f"begins {begin - first} ns before its compute"
        elif end > _end(compute) + slack:
            yield f"ends {end - _end(compute)} ns after its compute"

    def _measured_compute(self) -> _OfCompute:
        """What is known of the latest compute, whose event may not have been whole."""
        return self._of_compute.setdefault(self._refs.compute, _OfCompute())

    def _layers(self, event: schema.Layers) -> Iterator[str]:
        yield from _gap(event.gap)
        for i, (one, next_one) in enumerate(pairwise(event.layer)):
            if one == next_one:
                yield f"runs {i} and {i + 1} are of one layer ({one})"
        yield from self._measured(event)
        compute = self._measured_compute()
        if compute.layers:
            yield f"the layers of compute {event.compute} were given before"
        elif compute.threads:
            yield f"comes after the ops of compute {event.compute}"
        compute.layers = event

    def _experts(self, event: schema.Experts) -> Iterator[str]:
        if self._level == "minimal":
            yield "experts at level minimal"
        compute = self._measured_compute()
        if compute.experts:
            yield f"the experts of compute {event.compute} were given before"
        compute.experts = True
        for node, expert, uses in event.choices():
            ids = self._refs.compute.graph.choices[node].ids
            if sum(uses) != ids:
                yield f"experts of node {node} were used {sum(uses)} times, it has {ids} ids"
            if any(one >= other for one, other in pairwise(expert)):
                yield f"the experts of node {node} are not in order"

    def _ops(self, event: schema.Ops) -> Iterator[str]:
        yield from _gap(event.gap)
        for i, (wait, dur) in enumerate(zip(event.wait or (), event.dur, strict=False)):
            if wait > dur:
                yield f"`wait[{i}]` is {wait}, more than its `dur` ({dur})"
        if self._level == "minimal":
            yield "ops at level minimal"
        elif self._level == "detailed" and (event.thread or event.wait is not None):
            yield "a thread other than 0, or waiting, at level detailed"
        compute, of = self._measured_compute(), self._refs.compute.event
        plan = self._of_plan.get(self._refs.plan)
        if not event.device:
            yield from self._measured(event)
        # an aborted compute leaves kernels out; where values are read, so does a thread that takes
        # no part in some of the pieces in which the graph is then computed
        if plan and plan.missing and of.status == 0 and not self._perturbed:
            yield f"plan {event.plan} has {plan.missing}"
        if event.device:
            yield from self._of_device(event, compute)
            return
        if event.thread >= of.n_threads:
            yield f"thread {event.thread}, the compute has {of.n_threads}"
        if event.thread in compute.threads:
            yield f"thread {event.thread} of compute {event.compute} was given before"
        compute.threads.add(event.thread)
        if event.thread == 0 and plan:
            compute.own = plan.splits
        if event.thread == 0 and compute.layers and plan:
            yield from _layers_against_ops(compute.layers, event, plan.runs)

    def _of_device(self, event: schema.Ops, compute: _OfCompute) -> Iterator[str]:
        """Whether the kernels of a split lie between its submission and the end of the wait."""
        of = f"split {event.split} of compute {event.compute}"
        if event.split in compute.given and not self._perturbed:
            yield f"{of} was given before"
        else:
            self._given[event.device] += 1
        if event.split in compute.own:
            yield f"thread 0 also has kernels of {of}"
        compute.given.add(event.split)
        if event.thread or event.tail or event.wait is not None:
            yield "with `thread`, `wait` or `tail`, which belong to threads"
        if (device := self._refs.devices.get(event.device)) is None:
            yield f"device {event.device} was never described"
            return
        slack = device.uncertainty + COUNTER_SLACK
        known = self._refs.compute.event
        first = event.t + (event.gap[0] if event.gap else 0)
        begin = compute.begins.get(event.split, known.t + known.start)
        if first < begin - slack:
            yield f"begins {begin - first} ns before {of} was submitted"
        compute.ends[event.split] = event.t + sum(event.dur) + sum(event.gap or ()) - slack
        yield from _waited(compute, {event.split}, event.compute)

    def _splits(self, event: schema.Splits) -> Iterator[str]:
        yield from _gap(event.gap)
        yield from self._measured(event)
        compute = self._measured_compute()
        if compute.begins:
            yield f"the splits of compute {event.compute} were given before"
        now = event.t
        for split, gap, dur in zip(event.split, event.gap or repeat(0), event.dur, strict=False):
            compute.begins[split] = now + gap
            now += gap + dur

    def _sync(self, event: schema.Sync) -> Iterator[str]:
        """The first wait after a compute ends when devices have run all of it."""
        for known in self._refs.behind.values():
            compute = self._of_compute.setdefault(known, _OfCompute())
            is_for_it = known.event.ctx == event.ctx and _end(known.event) <= event.t
            if is_for_it and compute.waited is None:
                compute.waited = event.t + event.dur
                yield from _waited(compute, compute.ends, known.event.compute)

    # --- connections ---

    def _rpc(self, event: schema.Rpc) -> Iterator[str]:
        yield from _gap(event.gap)
        connection = self._refs.connections[event.connection]
        number, latest = self._commands.get(event.connection, (0, 0))
        if event.first < number:
            yield f"`first` is {event.first}, the connection's next command is {number}"
        if event.t < latest:
            yield f"begins {latest - event.t} ns before the connection's previous command ended"
        of_client = event.send, event.wait
        parts = (
            of_client if connection.side == "client" else (event.receive, event.work, event.answer)
        )
        end = event.t + sum(event.gap) + sum(map(sum, (of for of in parts if of)))
        self._commands[event.connection] = event.first + len(event.command), end
        if event.arrive is not None:
            slack = (connection.uncertainty or 0) + COUNTER_SLACK
            yield from _against_time(call_columns(event, "client"), slack)

    def _connection_end(self, event: schema.ConnectionEnd) -> Iterator[str]:
        number, _ = self._commands.pop(event.connection, (0, 0))
        if event.commands < number:
            yield f"`commands` is {event.commands}, the connection has {number}"

    # --- the rest ---

    def _kv(self, event: schema.Kv) -> Iterator[str]:
        if event.used > event.size:
            yield f"{event.used} cells are used of {event.size}"
        for cell in event.cells or ():
            if cell >= event.size:
                yield f"cell {cell} of {event.size}"
        if event.cells is not None and self._level != "verbose":
            yield f"with cells at level {self._level}"

    def _token(self, event: schema.Token) -> Iterator[str]:
        if event.p is not None and not 0 <= event.p <= 1:
            yield f"probability {event.p}"
        if event.hex is not None:
            try:
                text = bytes.fromhex(event.hex).decode(errors="replace")
            except ValueError:
                yield "`hex` is not a hexadecimal number"
            else:
                # decoders differ in how many replacement characters they write for invalid bytes
                if text.replace("\ufffd", "") != event.text.replace("\ufffd", ""):
                    yield "`hex` and `text` are not the same bytes"
        context = self._named_context()
        if event.index != context.n_tokens:
            yield f"`index` is {event.index}, the context's next token is {context.n_tokens}"
        context.n_tokens = event.index + 1
        if event.t < context.token_t:
            yield f"`t` is {context.token_t - event.t} ns before the context's previous token"
        context.token_t = event.t

    def _tensor_stats(self, event: schema.TensorStats) -> Iterator[str]:
        n = event.nan + event.inf + sum(event.hist)
        if n != event.n:
            yield f"`nan`, `inf` and `hist` count {n} elements, `n` is {event.n}"
        if event.zero > event.n:
            yield f"{counted(event.zero, 'zero')} in {counted(event.n, 'element')}"
        low, mean, high = event.min, event.mean, event.max
        if low is not None and high is not None and mean is not None:
            slack = 1e-6 * max(abs(low), abs(high))  # the mean is summed with rounding
            if not low - slack <= mean <= high + slack:
                yield f"the mean {mean} is not between {low} and {high}"
        if event.std is not None and (event.std < 0 or math.isnan(event.std)):
            yield f"the deviation is {event.std}"
        graph = self._refs.graph
        if not graph.is_damaged:
            layer = graph.event.whole.layer[event.node]
            if layer != event.layer:
                yield f"node {event.node} has layer {event.layer}, in its graph {layer}"


def _against_time(columns: dict[str, Int64], slack: int) -> Iterator[str]:
    """Whether no command arrives before it was sent, and no reply before it can have been."""
    known = columns["received"] >= 0
    replied = known & (columns["answered"] >= 0)
    for what, before, after, where in (
        ("request", "sent", "received", known), ("reply", "done", "answered", replied),
    ):  # fmt: skip
        early = (columns[before] - columns[after])[where]
        if len(early) and early.max() > slack:
            yield f"a {what} arrives {early.max()} ns before it was sent"


def _gap(gap: list[int] | None) -> Iterator[str]:
    if gap and gap[0] != 0:
        yield f"`gap[0]` is {gap[0]}: the first interval begins at `t`"


def _waited(compute: _OfCompute, splits: Iterable[int], number: int) -> Iterator[str]:
    for split in splits:
        if compute.waited is not None and (late := compute.ends[split] - compute.waited) > 0:
            yield f"the ops of split {split} of compute {number} end {late} ns after the wait"


def _end(compute: schema.Compute) -> int:
    return compute.t + compute.start + compute.dur


def _layers_against_ops(
    layers: schema.Layers, ops: schema.Ops, planned: list[tuple[int, int, int]]
) -> Iterator[str]:
    """The layers' runs must be those of the plan, and span the same nanoseconds as its ops."""
    if layers.layer != [layer for layer, _, _ in planned]:
        yield "the compute's `layers` are not the runs of layers in its plan"
        return
    begins, ends = (times.tolist() for times in kernel_times(ops))
    stated_runs = zip(*(times.tolist() for times in kernel_times(layers)), strict=True)
    for i, ((layer, first, end), stated) in enumerate(zip(planned, stated_runs, strict=True)):
        seen = begins[first], ends[end - 1]
        if stated != seen:
            yield (
                f"run {i} (layer {layer}) of the compute's `layers` is"
                f" {stated[0] - ops.t}..{stated[1] - ops.t}, its ops are"
                f" {seen[0] - ops.t}..{seen[1] - ops.t}"
            )
            return
