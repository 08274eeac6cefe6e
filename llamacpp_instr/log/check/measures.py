"""Checks steps, computes and measurements: spans nest, and columns agree.

Invariant: what is compared with later events is kept with the context, graph, step or compute that
it is about, and forgotten with it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import accumulate

from llamacpp_instr.log import schema
from llamacpp_instr.log.check.event import Rules
from llamacpp_instr.log.check.facts import Facts, PlanFacts
from llamacpp_instr.log.ids import KnownStep
from llamacpp_instr.log.resolve import Resolver

COUNTER_SLACK = 1_000
"""ns by which a span of the cycle counter may exceed a span of the clock"""


@dataclass
class _Context:
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


@dataclass
class _Step:
    end: int
    """of its latest compute"""
    n_computes: int = 0
    n_reused: int = 0


@dataclass
class _Compute:
    layers: schema.Layers | None = None
    threads: set[int] = field(default_factory=set)
    splits: bool = False


class Measures:
    """The rules of measurements, for whole events that `refs` has taken."""

    def __init__(self, refs: Resolver, facts: Facts) -> None:
        self._refs = refs
        self._facts = facts
        self.rules: Rules = {
            schema.StepBegin: self._step_begin,
            schema.StepEnd: self._step_ended,
            schema.Compute: self._compute,
            schema.Layers: self._layers,
            schema.Ops: self._ops,
            schema.Splits: self._splits,
            schema.Kv: self._kv,
            schema.Token: self._token,
            schema.TensorStats: self._tensor_stats,
        }

    def _of_context(self) -> _Context:
        """What is kept with the context that the event names."""
        context = self._refs.context
        if context.kept is None:
            context.kept = _Context()
        kept: _Context = context.kept
        return kept

    # --- steps ---

    def _step_begin(self, event: schema.StepBegin) -> Iterator[str]:
        context = self._of_context()
        if context.step in self._refs.open_steps:
            yield f"begins while step {context.step} of context {event.ctx} is open"
        context.step = event.step
        if event.t < context.step_end:
            overlap = context.step_end - event.t
            yield f"begins {overlap} ns before the context's previous step ended"

    def _step_ended(self, event: schema.StepEnd) -> Iterator[str]:
        known = self._refs.step
        assert known is not None
        step, begin = _of_step(known), known.event.t
        if context := self._refs.contexts.get(known.event.ctx):
            context.kept = context.kept or _Context()
            context.kept.step_end = event.t
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
        context, graph = self._of_context(), self._refs.graph
        computed = graph.kept is not None
        if computed != event.reused:
            before = "was" if computed else "was not"
            yield f"`reused` is {event.reused}, graph {event.graph} {before} computed before"
        graph.kept = True
        if event.t < context.compute_end:
            overlap = context.compute_end - event.t
            yield f"begins {overlap} ns before the context's previous compute ended"
        context.compute_end = _end(event)
        self._refs.compute.kept = _Compute()
        if self._refs.step is not None:
            yield from _compute_in_step(event, self._refs.step)

    def _measured(self, event: schema.Layers | schema.Ops | schema.Splits) -> Iterator[str]:
        """Whether intervals are inside their compute."""
        compute = self._refs.compute.event
        slack = 0 if self._facts.clock == "monotonic" else COUNTER_SLACK
        begin = compute.t + compute.start
        first = event.t + (event.gap[0] if event.gap else 0)
        end = event.t + sum(event.dur) + sum(event.gap or ())
        if first < begin - slack:
            yield f"begins {begin - first} ns before its compute"
        elif end > _end(compute) + slack:
            yield f"ends {end - _end(compute)} ns after its compute"

    def _layers(self, event: schema.Layers) -> Iterator[str]:
        yield from self._measured(event)
        compute = self._of_compute()
        if compute.layers:
            yield f"the layers of compute {event.compute} were given before"
        elif compute.threads:
            yield f"comes after the ops of compute {event.compute}"
        compute.layers = event

    def _ops(self, event: schema.Ops) -> Iterator[str]:
        if self._facts.level == "minimal":
            yield "ops at level minimal"
        elif self._facts.level == "detailed" and (event.thread or event.wait is not None):
            yield "another thread than 0, or waiting, at level detailed"
        yield from self._measured(event)
        compute, of = self._of_compute(), self._refs.compute.event
        plan: PlanFacts | None = self._refs.plan.kept
        # an aborted compute leaves kernels out; where values are read, so does a thread that has
        # no part in some of the pieces in which the graph is then computed
        if plan and plan.missing and of.status == 0 and not self._facts.perturbed:
            yield f"plan {event.plan} has {plan.missing}"
        if event.thread >= of.n_threads:
            yield f"thread {event.thread}, the compute has {of.n_threads}"
        if event.thread in compute.threads:
            yield f"thread {event.thread} of compute {event.compute} was given before"
        compute.threads.add(event.thread)
        if event.thread == 0 and compute.layers and plan:
            yield from _layers_against_ops(compute.layers, event, plan.runs)

    def _splits(self, event: schema.Splits) -> Iterator[str]:
        yield from self._measured(event)
        compute = self._of_compute()
        if compute.splits:
            yield f"the splits of compute {event.compute} were given before"
        compute.splits = True

    def _of_compute(self) -> _Compute:
        """What is kept with the compute that the event names; it may not have been whole."""
        known = self._refs.compute
        known.kept = known.kept or _Compute()
        kept: _Compute = known.kept
        return kept

    # --- the rest ---

    def _kv(self, event: schema.Kv) -> Iterator[str]:
        if event.cells is not None and self._facts.level != "verbose":
            yield f"with cells at level {self._facts.level}"

    def _token(self, event: schema.Token) -> Iterator[str]:
        context = self._of_context()
        if event.index != context.n_tokens:
            yield f"`index` is {event.index}, the context's next token is {context.n_tokens}"
        context.n_tokens = event.index + 1
        if event.t < context.token_t:
            yield f"`t` is {context.token_t - event.t} ns before the context's previous token"
        context.token_t = event.t

    def _tensor_stats(self, event: schema.TensorStats) -> Iterator[str]:
        nodes = self._refs.graph.event.nodes
        if nodes and nodes.layer[event.node] != event.layer:
            layer = nodes.layer[event.node]
            yield f"node {event.node} has layer {event.layer}, in its graph {layer}"


def _of_step(known: KnownStep) -> _Step:
    """What is kept with a step."""
    known.kept = known.kept or _Step(known.event.t)
    kept: _Step = known.kept
    return kept


def _compute_in_step(event: schema.Compute, known: KnownStep) -> Iterator[str]:
    if event.t < known.event.t:
        yield f"begins {known.event.t - event.t} ns before its step"
    step = _of_step(known)
    step.end = max(step.end, _end(event))
    if event.source != "memory_update":
        step.n_computes += 1
        step.n_reused += event.reused


def _end(compute: schema.Compute) -> int:
    return compute.t + compute.start + compute.dur


def _layers_against_ops(
    layers: schema.Layers, ops: schema.Ops, runs: list[tuple[int, int, int]]
) -> Iterator[str]:
    """The layers' runs must be those of the plan, and span the same nanoseconds as its ops."""
    if layers.layer != [layer for layer, _, _ in runs]:
        yield "the compute's `layers` are not the runs of layers in its plan"
        return
    begins, ends = _intervals(ops.t, ops.gap, ops.dur)
    layer_begins, layer_ends = _intervals(layers.t, layers.gap, layers.dur)
    for i, (layer, first, end) in enumerate(runs):
        stated, seen = (layer_begins[i], layer_ends[i]), (begins[first], ends[end - 1])
        if stated != seen:
            yield (
                f"run {i} (layer {layer}) of the compute's `layers` is"
                f" {stated[0] - ops.t}..{stated[1] - ops.t}, its ops are"
                f" {seen[0] - ops.t}..{seen[1] - ops.t}"
            )
            return


def _intervals(t: int, gap: list[int] | None, dur: list[int]) -> tuple[list[int], list[int]]:
    lengths = [g + d for g, d in zip(gap or [0] * len(dur), dur, strict=True)]
    ends = [t + end for end in accumulate(lengths)]
    return [end - d for end, d in zip(ends, dur, strict=True)], ends
