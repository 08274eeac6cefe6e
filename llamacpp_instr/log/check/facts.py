"""Checks the session and its static facts: every id is defined once, and before its first use.

Invariant: of a graph, only the columns are kept that later events are compared with.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

from llamacpp_instr.schema import (
    Context,
    Event,
    Graph,
    Mark,
    Memory,
    Model,
    Plan,
    SessionStart,
    Tensor,
)


class Numbers:
    """The ids that were defined. They count up, so one range and a few others suffice."""

    def __init__(self) -> None:
        self._first = self._next = 0
        self._others: set[int] = set()

    def give(self, number: int) -> bool:
        """Add `number`; False if it was already defined."""
        if number in self:
            return False
        if self._first == self._next:
            self._first = self._next = number  # a part of a rotated log does not begin at zero
        self._others.add(number)
        while self._next in self._others:
            self._others.remove(self._next)
            self._next += 1
        return True

    def __contains__(self, number: int) -> bool:
        return self._first <= number < self._next or number in self._others


@dataclass
class GraphFacts:
    """What later events are compared with."""

    ctx: int
    n_nodes: int
    n_splits: int
    layer: list[int] | None
    """of each node; None at `minimal`"""
    exec: list[int] | None
    on_cpu: bool
    """one split, on the CPU: the plan has the kernels of all nodes"""
    computed: bool = False


@dataclass
class PlanFacts:
    """What `layers` and `ops` are compared with."""

    graph: int
    n_kernels: int
    runs: list[tuple[int, int, int]] | None
    """(layer, first kernel, one past the last) of each run of kernels of one layer"""
    missing: str = ""
    """what a complete compute would also have computed"""


@dataclass
class _Model:
    n_tensors: int
    n_seen: int = 0
    tensors: Numbers = field(default_factory=Numbers)


class Facts:
    """The static facts so far."""

    def __init__(self) -> None:
        self.level = ""
        self.clock = ""
        self.perturbed = False
        self.graphs: dict[int, GraphFacts] = {}
        self.plans: dict[int, PlanFacts] = {}
        self._contexts: dict[int, int] = {}
        self._models: dict[int, _Model] = {}
        self._marks = Numbers()
        self._open_marks: dict[int, tuple[int, Mark]] = {}
        self._rules: dict[type[Event], Callable[[int, Any], Iterator[str]]] = {
            SessionStart: self._session_start,
            Mark: self._mark,
            Model: self._model,
            Tensor: self._tensor,
            Context: self._context,
            Memory: self._memory,
            Graph: self._graph,
            Plan: self._plan,
        }

    def findings(self, line: int, event: Event) -> Iterator[str]:
        """The errors of a static event, given the events before it."""
        rule = self._rules.get(type(event))
        return rule(line, event) if rule else iter(())

    def unknown_context(self, ctx: int) -> Iterator[str]:
        """A finding if context `ctx` was never defined."""
        if ctx not in self._contexts:
            yield f"context {ctx} was never given"

    def open_findings(self) -> Iterator[tuple[int, str]]:
        """What is still open in a closed log, with the line where it began."""
        for line, mark in self._open_marks.values():
            yield line, f"mark: mark {mark.mark} (`{mark.name}`) is never ended"

    def _session_start(self, line: int, event: SessionStart) -> Iterator[str]:
        if line > 1:
            yield "occurs a second time"
        else:
            self.level = event.level
            self.clock = event.clock
            self.perturbed = event.perturbed

    def _mark(self, line: int, event: Mark) -> Iterator[str]:
        if event.phase == "end":
            begun = self._open_marks.pop(event.mark, None)
            if begun is None:
                yield f"mark {event.mark} ends and was not begun"
            elif begun[1].name != event.name:
                yield f"mark {event.mark} ends as `{event.name}`, it began as `{begun[1].name}`"
            elif event.t < begun[1].t:
                yield f"mark {event.mark} ends {begun[1].t - event.t} ns before it begins"
        elif not self._marks.give(event.mark):
            yield f"mark {event.mark} was given before"
        elif event.phase == "begin":
            self._open_marks[event.mark] = (line, event)

    def _model(self, _line: int, event: Model) -> Iterator[str]:
        if event.model in self._models:
            yield f"model {event.model} was given before"
        self._models[event.model] = _Model(event.n_tensors)

    def _tensor(self, _line: int, event: Tensor) -> Iterator[str]:
        model = self._models.get(event.model)
        if model is None:
            yield f"model {event.model} was never given"
        elif not model.tensors.give(event.tensor):
            yield f"tensor {event.tensor} of model {event.model} was given before"
        else:
            model.n_seen += 1
            if event.tensor >= model.n_tensors:
                yield f"tensor {event.tensor} of a model of {model.n_tensors} tensors"

    def _context(self, _line: int, event: Context) -> Iterator[str]:
        if event.ctx in self._contexts:
            yield f"context {event.ctx} was given before"
        model = self._models.get(event.model)
        if model is None:
            yield f"model {event.model} was never given"
        elif 0 < model.n_seen < model.n_tensors:
            yield f"model {event.model} has {model.n_tensors} tensors, {model.n_seen} were given"
        self._contexts[event.ctx] = event.model

    def _memory(self, _line: int, event: Memory) -> Iterator[str]:
        return self.unknown_context(event.ctx)

    def _graph(self, _line: int, event: Graph) -> Iterator[str]:
        yield from self.unknown_context(event.ctx)
        if event.graph in self.graphs:
            yield f"graph {event.graph} was given before"
        nodes = event.nodes
        if (nodes is None) != (self.level == "minimal"):
            yield f"{'without' if nodes is None else 'with'} nodes at level {self.level}"
        elif nodes is not None and nodes.nb is not None and self.level != "verbose":
            yield f"with strides (`nb`) at level {self.level}"
        model = self._models.get(self._contexts.get(event.ctx, -1))
        for leaf in event.leafs:
            if leaf.tensor != -1 and model and leaf.tensor not in model.tensors:
                yield f"leaf `{leaf.name}` is tensor {leaf.tensor}, which was never given"
        whole = nodes and len(nodes.layer) == len(nodes.exec) == event.n_nodes
        self.graphs[event.graph] = GraphFacts(
            event.ctx,
            event.n_nodes,
            len(event.splits),
            nodes.layer if nodes and whole else None,
            nodes.exec if nodes and whole else None,
            [split.backend for split in event.splits] == ["CPU"],
        )

    def _plan(self, _line: int, event: Plan) -> Iterator[str]:
        if event.plan in self.plans:
            yield f"plan {event.plan} was given before"
        graph = self.graphs.get(event.graph)
        runs, missing = None, ""
        if graph is None:
            yield f"graph {event.graph} was never given"
        else:
            counts = event.n or [1] * len(event.node)
            ends = [node + n for node, n in zip(event.node, counts, strict=False)]
            last = max([end - 1 for end in ends] + event.node, default=-1)
            if last >= graph.n_nodes:
                yield f"node {last} of graph {event.graph}, which has {graph.n_nodes}"
            elif graph.layer is not None and graph.exec is not None:
                for first in event.node:
                    if not graph.exec[first]:
                        yield f"node {first} has a kernel, by its graph none runs for it"
                if graph.on_cpu:
                    missing = _missing(event.node, ends, graph.exec)
                layers = [graph.layer[node] for node in event.node]
                runs = _runs(layers)
        self.plans[event.plan] = PlanFacts(event.graph, len(event.node), runs, missing)


def _missing(node: list[int], ends: list[int], exec_: list[int]) -> str:
    """A finding if the kernels do not compute all nodes."""
    n_planned = sum(sum(exec_[first:end]) for first, end in zip(node, ends, strict=False))
    n_exec = sum(exec_)
    return "" if n_planned == n_exec else f"{n_planned} nodes of {n_exec} to compute"


def _runs(layers: list[int]) -> list[tuple[int, int, int]]:
    runs, at = [], 0
    for layer, group in groupby(layers):
        n = len(list(group))
        runs.append((layer, at, at + n))
        at += n
    return runs
