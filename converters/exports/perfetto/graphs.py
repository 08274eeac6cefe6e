"""The graphs and plans that later events may name.

Invariant: only the graphs used last are kept, so that a log which builds one for every step needs
no more memory than another. A recorder keeps four a context, and gives an older one anew, under
another number, when it is computed again; so no log that was recorded names a forgotten one, as
long as no more than GRAPHS / 4 contexts compute in turns.
"""

from __future__ import annotations

from llamacpp_instr.graph.kernels import graph_problem, plan_problem
from llamacpp_instr.schema import Graph, Plan

GRAPHS = 64


class Unfollowable(Exception):
    """An event refers to what the log does not have, or had too long ago."""


class Graphs:
    """Graphs by number, the one used last at the end, and their plans."""

    def __init__(self) -> None:
        self._graphs: dict[int, Graph] = {}
        self._plans: dict[int, Plan] = {}
        self._plans_of: dict[int, list[int]] = {}
        self._full = False

    def add(self, graph: Graph) -> None:
        """Raises Unfollowable for a graph that is wrong in itself."""
        if problem := graph_problem(graph):
            raise Unfollowable(problem)
        if graph.graph in self._graphs:
            if self._graphs[graph.graph] != graph:
                raise Unfollowable(f"graph {graph.graph} was another one before")
            return
        self._graphs[graph.graph] = graph
        self._plans_of[graph.graph] = []
        if len(self._graphs) > GRAPHS:
            self._full = True
            self._forget(next(iter(self._graphs)))

    def add_plan(self, plan: Plan) -> None:
        """Raises Unfollowable for a plan that does not fit its graph."""
        if problem := plan_problem(plan, self.use(plan.graph)):
            raise Unfollowable(problem)
        if self._plans.get(plan.plan, plan) != plan:
            raise Unfollowable(f"plan {plan.plan} was another one before")
        self._plans[plan.plan] = plan
        self._plans_of[plan.graph].append(plan.plan)

    def use(self, number: int) -> Graph:
        """The graph of that number; Unfollowable when there is none, or it was forgotten."""
        graph = self._graphs.pop(number, None)
        if graph is None:
            raise Unfollowable(self._missing("graph", number))
        self._graphs[number] = graph
        return graph

    def plan(self, number: int) -> Plan:
        """The plan of that number; Unfollowable as `use`."""
        plan = self._plans.get(number)
        if plan is None:
            raise Unfollowable(self._missing("plan", number))
        return plan

    def _forget(self, number: int) -> None:
        self._graphs.pop(number, None)
        for plan in self._plans_of.pop(number, ()):
            self._plans.pop(plan, None)

    def _missing(self, what: str, number: int) -> str:
        never = f"{what} {number} was never given"
        return f"{never}, or not with the {GRAPHS} graphs used last" if self._full else never
