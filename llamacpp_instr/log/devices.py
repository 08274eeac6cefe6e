"""The splits of a graph and what ran in them: kernels of the caller, or of a device behind it.

Invariant: what is timed follows from coverage alone. A split is timed if kernels of thread 0 or of
its device compute all of its executed nodes, whatever its backend is called.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from itertools import accumulate

from llamacpp_instr.log.schema import Graph, Ops, Plan

RUNS_KEPT = 64
"""the latest computes that `ops` of a device may name"""


def n_executed(graph: Graph, plan: Plan | None = None) -> list[int]:
    """By split: how many of its executed nodes the kernels of `plan` compute; without a plan, how
    many there are. The graph must have its nodes. Devices skip nodes without elements, for which
    the CPU runs a kernel."""
    executed = list(graph.whole.exec)
    for split in graph.splits:
        if split.backend != "CPU":
            for node in range(split.start, split.end):
                executed[node] &= graph.whole.bytes[node] > 0
    if plan is not None:
        computed = [0] * graph.n_nodes
        for kernel in plan.kernels:
            computed[kernel.start : kernel.stop] = executed[kernel.start : kernel.stop]
        executed = computed
    before = [0, *accumulate(executed)]
    return [before[split.end] - before[split.start] for split in graph.splits]


def covered(graph: Graph, plan: Plan | None) -> frozenset[int]:
    """The splits whose executed nodes are all computed by kernels of `plan`, including splits
    without any; the graph must have its nodes."""
    needed = n_executed(graph)
    there = n_executed(graph, plan) if plan else [0] * len(needed)
    return frozenset(i for i, n in enumerate(needed) if there[i] == n)


def backends_of(graph: Graph, splits: Collection[int]) -> list[str]:
    """The backends of these splits, each once, in order."""
    return list(dict.fromkeys(graph.splits[i].backend for i in sorted(splits)))


def other_backends(graph: Graph) -> list[str]:
    """The backends of a graph besides the CPU, in order."""
    return [name for name in backends_of(graph, range(len(graph.splits))) if name != "CPU"]


def device_splits(graph: Graph) -> dict[int, str]:
    """The splits with kernels that a device may run behind the caller, with its name; the graph
    must have its nodes."""
    splits = zip(graph.splits, n_executed(graph), strict=True)
    return {i: split.backend for i, (split, n) in enumerate(splits) if n and split.backend != "CPU"}


def device_ops_problems(event: Ops, graph: Graph, plan: Plan, planned: Graph) -> Iterator[str]:
    """Why the `ops` of a device do not fit their compute, whose graph is `graph`; that of `plan` is
    `planned`, which a later part of the log repeats under another id. One message each."""
    if event.split not in range(len(graph.splits)):
        yield f"split {event.split}, the graph has {len(graph.splits)}"
        return
    split = graph.splits[event.split]
    if split.backend != event.device:
        yield f"of {event.device}, but split {event.split} is of {split.backend}"
    if (planned.n_nodes, planned.splits) != (graph.n_nodes, graph.splits):
        yield f"plan {event.plan} is of graph {plan.graph}, the compute of graph {graph.graph}"
    for first, n in zip(plan.node, plan.counts, strict=False):  # a plan may be damaged
        if not split.start <= first < first + n <= split.end:
            nodes = f"{split.start}..{split.end - 1}"
            yield f"node {first}, split {event.split} has the nodes {nodes}"
            return
