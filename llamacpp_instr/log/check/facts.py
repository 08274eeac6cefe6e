"""Checks the session and its static facts: what a level contains, counts, what a plan computes."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby
from typing import NamedTuple

from llamacpp_instr.base.terminal import counted
from llamacpp_instr.log import schema
from llamacpp_instr.log.check.event import Rules
from llamacpp_instr.log.resolve import Resolver


class PlanFacts(NamedTuple):
    """What `layers` and `ops` are compared with; a known plan keeps it."""

    runs: list[tuple[int, int, int]]
    """(layer, first kernel, one past the last) of each run of kernels of one layer"""
    missing: str
    """what a complete compute would also have computed"""


class Facts:
    """The rules of static facts, for whole events that `refs` has taken."""

    def __init__(self, refs: Resolver) -> None:
        self.level = ""
        self.clock = ""
        self.perturbed = False
        self._refs = refs
        self.rules: Rules = {
            schema.SessionStart: self._session_start,
            schema.Mark: self._mark,
            schema.Tensor: self._tensor,
            schema.Context: self._context,
            schema.Graph: self._graph,
            schema.Plan: self._plan,
        }

    def _session_start(self, event: schema.SessionStart) -> Iterator[str]:
        self.level, self.clock, self.perturbed = event.level, event.clock, event.perturbed
        return iter(())

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
        model = self._refs.model
        if 0 < len(model.tensors) < model.event.n_tensors:
            n, given = model.event.n_tensors, len(model.tensors)
            yield f"model {event.model} has {counted(n, 'tensor')}, the log {given}"

    def _graph(self, event: schema.Graph) -> Iterator[str]:
        nodes = event.nodes
        if (nodes is None) != (self.level == "minimal"):
            yield f"{'without' if nodes is None else 'with'} nodes at level {self.level}"
        elif nodes is not None and nodes.nb is not None and self.level != "verbose":
            yield f"with strides (`nb`) at level {self.level}"
        tensors = self._refs.context.model.tensors
        for leaf in event.leafs:
            if leaf.tensor != -1 and leaf.tensor not in tensors:
                yield f"leaf `{leaf.name}` is tensor {leaf.tensor}, which was never given"

    def _plan(self, event: schema.Plan) -> Iterator[str]:
        graph = self._refs.graph.event
        nodes = graph.whole
        for first in event.node:
            if not nodes.exec[first]:
                yield f"node {first} has a kernel, by its graph none runs for it"
        missing = ""
        # one split, on the CPU: the plan has the kernels of all nodes
        if [split.backend for split in graph.splits] == ["CPU"]:
            n_planned = sum(nodes.exec[node] for computed in event.kernels for node in computed)
            n_exec = sum(nodes.exec)
            missing = "" if n_planned == n_exec else f"{n_planned} nodes of {n_exec} to compute"
        self._refs.plan.kept = PlanFacts(_runs([nodes.layer[i] for i in event.node]), missing)


def _runs(layers: list[int]) -> list[tuple[int, int, int]]:
    runs, at = [], 0
    for layer, group in groupby(layers):
        n = len(list(group))
        runs.append((layer, at, at + n))
        at += n
    return runs
