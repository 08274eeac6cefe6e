"""Checks steps, computes and measurements: spans nest, and columns agree.

Invariant: only the latest compute of each context is kept, because `layers`, `ops` and `splits`
follow the compute that they measure.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

from llamacpp_instr.log.check.facts import Facts, Numbers
from llamacpp_instr.schema import (
    Compute,
    Event,
    Kv,
    Layers,
    Ops,
    Splits,
    StepBegin,
    StepEnd,
    Sync,
    TensorStats,
    Token,
)

COUNTER_SLACK = 1_000
"""ns by which a span of the cycle counter may exceed a span of the clock"""


@dataclass
class _Step:
    line: int
    event: StepBegin
    end: int
    """of its latest compute"""
    n_computes: int = 0
    n_reused: int = 0


@dataclass
class _Compute:
    event: Compute
    layers: Layers | None = None
    threads: set[int] = field(default_factory=set)
    splits: bool = False


class Measures:
    """The measurements so far that later events are compared with."""

    def __init__(self, facts: Facts) -> None:
        self._facts = facts
        self._steps = Numbers()
        self._open: dict[int, _Step] = {}
        self._running: dict[int, int] = {}
        """by context: the step that began last"""
        self._computes = Numbers()
        self._latest: dict[int, _Compute] = {}
        """by context"""
        self._by_number: dict[int, _Compute] = {}
        """the same, by compute"""
        self._step_end: dict[int, int] = {}
        """by context: when its latest step ended"""
        self._n_tokens: dict[int, int] = {}
        """by context: tokens sampled"""
        self._token_t: dict[int, int] = {}
        self._rules: dict[type[Event], Callable[[int, Any], Iterator[str]]] = {
            StepBegin: self._step_begin,
            StepEnd: self._step_ended,
            Compute: self._compute,
            Layers: self._layers,
            Ops: self._ops,
            Splits: self._splits,
            Sync: self._sync,
            Kv: self._kv,
            Token: self._token,
            TensorStats: self._tensor_stats,
        }

    def findings(self, line: int, event: Event) -> Iterator[str]:
        """The errors of a measurement, given the events before it."""
        rule = self._rules.get(type(event))
        return rule(line, event) if rule else iter(())

    def open_findings(self) -> Iterator[tuple[int, str]]:
        """What is still open in a closed log, with the line where it began."""
        for step in self._open.values():
            yield step.line, f"step_begin: step {step.event.step} is never ended"

    # --- steps ---

    def _step_begin(self, line: int, event: StepBegin) -> Iterator[str]:
        yield from self._facts.unknown_context(event.ctx)
        if not self._steps.give(event.step):
            yield f"step {event.step} was given before"
        running = self._running.get(event.ctx)
        if running in self._open:
            yield f"begins while step {running} of context {event.ctx} is open"
        self._running[event.ctx] = event.step
        ended = self._step_end.get(event.ctx, event.t)
        if event.t < ended:
            yield f"begins {ended - event.t} ns before the context's previous step ended"
        self._open[event.step] = _Step(line, event, event.t)

    def _step_ended(self, _line: int, event: StepEnd) -> Iterator[str]:
        step = self._open.pop(event.step, None)
        if step is None:
            known = event.step in self._steps
            yield f"step {event.step} {'was ended before' if known else 'was never begun'}"
            return
        begin = step.event.t
        self._step_end[step.event.ctx] = event.t
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

    def _compute(self, _line: int, event: Compute) -> Iterator[str]:
        yield from self._facts.unknown_context(event.ctx)
        if not self._computes.give(event.compute):
            yield f"compute {event.compute} was given before"
        graph = self._facts.graphs.get(event.graph)
        if graph is None:
            yield f"graph {event.graph} was never given"
        else:
            if graph.ctx != event.ctx:
                yield f"of context {event.ctx}, its graph is of context {graph.ctx}"
            if graph.computed != event.reused:
                before = "was" if graph.computed else "was not"
                yield f"`reused` is {event.reused}, graph {event.graph} {before} computed before"
            graph.computed = True
        previous = self._latest.get(event.ctx)
        if previous and event.t < _end(previous.event):
            late = _end(previous.event) - event.t
            yield f"begins {late} ns before the context's previous compute ended"
        if previous and self._by_number.get(previous.event.compute) is previous:
            del self._by_number[previous.event.compute]
        self._latest[event.ctx] = self._by_number[event.compute] = _Compute(event)
        if event.step != -1:
            yield from self._compute_in_step(event)

    def _compute_in_step(self, event: Compute) -> Iterator[str]:
        step = self._open.get(event.step)
        if step is None:
            yield f"step {event.step} {'is over' if event.step in self._steps else 'never began'}"
            return
        if step.event.ctx != event.ctx:
            yield f"of context {event.ctx}, its step is of context {step.event.ctx}"
        if event.t < step.event.t:
            yield f"begins {step.event.t - event.t} ns before its step"
        step.end = max(step.end, _end(event))
        if event.source != "memory_update":
            step.n_computes += 1
            step.n_reused += event.reused

    def _measured(
        self, compute: int, t: int, gap: list[int] | None, dur: list[int]
    ) -> tuple[_Compute | None, list[str]]:
        """The latest compute that columns belong to, and whether they are inside it."""
        latest = self._by_number.get(compute)
        if latest is None:
            over = compute in self._computes
            return None, [f"compute {compute} {'is over' if over else 'was never given'}"]
        slack = 0 if self._facts.clock == "monotonic" else COUNTER_SLACK
        begin = latest.event.t + latest.event.start
        first = t + (gap[0] if gap else 0)
        end = t + sum(dur) + sum(gap or ())
        if first < begin - slack:
            return latest, [f"begins {begin - first} ns before its compute"]
        if end > _end(latest.event) + slack:
            return latest, [f"ends {end - _end(latest.event)} ns after its compute"]
        return latest, []

    def _layers(self, _line: int, event: Layers) -> Iterator[str]:
        compute, wrong = self._measured(event.compute, event.t, event.gap, event.dur)
        yield from wrong
        if compute is None:
            return
        if compute.layers:
            yield f"the layers of compute {event.compute} were given before"
        elif compute.threads:
            yield f"comes after the ops of compute {event.compute}"
        compute.layers = event

    def _ops(self, _line: int, event: Ops) -> Iterator[str]:
        if self._facts.level == "minimal":
            yield "ops at level minimal"
        elif self._facts.level == "detailed" and (event.thread or event.wait is not None):
            yield "another thread than 0, or waiting, at level detailed"
        compute, wrong = self._measured(event.compute, event.t, event.gap, event.dur)
        yield from wrong
        plan = self._facts.plans.get(event.plan)
        if plan is None:
            yield f"plan {event.plan} was never given"
            return
        if len(event.dur) != plan.n_kernels:
            yield f"{len(event.dur)} kernels, plan {event.plan} has {plan.n_kernels}"
            return
        if compute is None:
            return
        if plan.graph != compute.event.graph:
            graph = compute.event.graph
            yield f"plan {event.plan} is of graph {plan.graph}, the compute of graph {graph}"
            return
        # an aborted compute leaves kernels out; where values are read, so does a thread that has
        # no part in some of the pieces in which the graph is then computed
        if plan.missing and compute.event.status == 0 and not self._facts.perturbed:
            yield f"plan {event.plan} has {plan.missing}"
        if event.thread >= compute.event.n_threads:
            yield f"thread {event.thread}, the compute has {compute.event.n_threads}"
        if event.thread in compute.threads:
            yield f"thread {event.thread} of compute {event.compute} was given before"
        compute.threads.add(event.thread)
        if event.thread == 0 and compute.layers and plan.runs is not None:
            yield from _layers_against_ops(compute.layers, event, plan.runs)

    def _splits(self, _line: int, event: Splits) -> Iterator[str]:
        compute, wrong = self._measured(event.compute, event.t, event.gap, event.dur)
        yield from wrong
        graph = self._facts.graphs.get(compute.event.graph) if compute else None
        if compute is None or graph is None:
            return
        if compute.splits:
            yield f"the splits of compute {event.compute} were given before"
        compute.splits = True
        if max(event.split, default=-1) >= graph.n_splits:
            yield f"split {max(event.split)}, the graph has {graph.n_splits}"

    # --- the rest ---

    def _sync(self, _line: int, event: Sync) -> Iterator[str]:
        return self._facts.unknown_context(event.ctx)

    def _kv(self, _line: int, event: Kv) -> Iterator[str]:
        yield from self._facts.unknown_context(event.ctx)
        if event.step != -1 and event.step not in self._steps:
            yield f"step {event.step} never began"
        if event.cells is not None and self._facts.level != "verbose":
            yield f"with cells at level {self._facts.level}"

    def _token(self, _line: int, event: Token) -> Iterator[str]:
        yield from self._facts.unknown_context(event.ctx)
        if event.step != -1 and event.step not in self._steps:
            yield f"step {event.step} never began"
        expected = self._n_tokens.get(event.ctx, 0)
        if event.index != expected:
            yield f"`index` is {event.index}, the context's next token is {expected}"
        self._n_tokens[event.ctx] = event.index + 1
        before = self._token_t.get(event.ctx, event.t)
        if event.t < before:
            yield f"`t` is {before - event.t} ns before the context's previous token"
        self._token_t[event.ctx] = event.t

    def _tensor_stats(self, _line: int, event: TensorStats) -> Iterator[str]:
        if event.compute not in self._computes:
            yield f"compute {event.compute} was never given"
        graph = self._facts.graphs.get(event.graph)
        if graph is None:
            yield f"graph {event.graph} was never given"
        elif event.node >= graph.n_nodes:
            yield f"node {event.node} of graph {event.graph}, which has {graph.n_nodes}"
        elif graph.layer is not None and graph.layer[event.node] != event.layer:
            layer = graph.layer[event.node]
            yield f"node {event.node} has layer {event.layer}, in its graph {layer}"


def _end(compute: Compute) -> int:
    return compute.t + compute.start + compute.dur


def _layers_against_ops(
    layers: Layers, ops: Ops, runs: list[tuple[int, int, int]]
) -> Iterator[str]:
    """The layers' runs must be those of the plan, and span the same nanoseconds as its ops."""
    if len(layers.dur) != len(layers.layer):
        return  # said before
    if layers.layer != [layer for layer, _, _ in runs]:
        yield "the compute's `layers` are not the runs of layers in its plan"
        return
    begins, ends = _intervals(ops.t, ops.gap, ops.dur)
    layer_begins, layer_ends = _intervals(layers.t, layers.gap, layers.dur)
    for i, (layer, first, end) in enumerate(runs):
        said, seen = (layer_begins[i], layer_ends[i]), (begins[first], ends[end - 1])
        if said != seen:
            yield (
                f"run {i} (layer {layer}) of the compute's `layers` is"
                f" {said[0] - ops.t}..{said[1] - ops.t}, its ops are"
                f" {seen[0] - ops.t}..{seen[1] - ops.t}"
            )
            return


def _intervals(t: int, gap: list[int] | None, dur: list[int]) -> tuple[list[int], list[int]]:
    gaps = gap if gap and len(gap) == len(dur) else [0] * len(dur)
    lengths = [g + d for g, d in zip(gaps, dur, strict=True)]
    ends = [t + end for end in accumulate(lengths)]
    return [end - d for end, d in zip(ends, dur, strict=True)], ends
