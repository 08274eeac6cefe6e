"""The kernels of a graph as one plan, wherever they ran: on thread 0, and on devices behind it.

Invariant: a compute is joined only if the log has the kernels of each of its parts. Kernels are in
the order of the parts, which is that of the graph.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator

import numpy as np
from msgspec.structs import replace as changed

from llamacpp_instr.log.devices import device_splits
from llamacpp_instr.log.graph.kernels import without_copies
from llamacpp_instr.log.schema import Graph, Plan
from llamacpp_instr.log.session import Session, Timings


def joined(session: Session, own: Timings) -> tuple[Graph, Plan, list[tuple[Timings, list[int]]]]:
    """The graph of the computes of thread 0, without the scheduler's copies; a plan of all kernels;
    and the parts, all with the same computes, with the place of each of their kernels in it."""
    plan = session.plans[own.plan]
    graph = session.graphs[plan.graph]
    parts = [own, *_on_devices(session, graph, plan.graph, own)]
    if len(parts) == 1:
        return graph, plan, [(own, list(range(len(plan.node))))]
    kept = set.intersection(*(set(of.compute.tolist()) for of in parts))
    parts = [of.rows([i for i, n in enumerate(of.compute.tolist()) if n in kept]) for of in parts]
    begins = [split.start for split in graph.splits]
    kernels = [
        (bisect_right(begins, first), i, first, n)
        for i, of in enumerate(parts)
        for first, n in zip(session.plans[of.plan].node, session.plans[of.plan].counts, strict=True)
    ]
    order = sorted(range(len(kernels)), key=lambda at: kernels[at][:2])
    place = {at: number for number, at in enumerate(order)}
    places: list[list[int]] = [[] for _ in parts]
    for at, (_, i, _, _) in enumerate(kernels):
        places[i].append(place[at])
    whole = changed(
        plan,
        node=[kernels[at][2] for at in order],
        n=[kernels[at][3] for at in order],
        like=None,
    )
    return without_copies(graph), whole, list(zip(parts, places, strict=True))


def _on_devices(session: Session, graph: Graph, number: int, own: Timings) -> Iterator[Timings]:
    """The kernels of each part that ran on a device; of several plans, the most frequent one."""
    wanted = own.compute.tolist()
    for split, device in device_splits(graph).items():
        nodes = range(graph.splits[split].start, graph.splits[split].end)
        found = [
            of
            for of in session.device_ops
            if of.device == device
            and (plan := session.plans[of.plan]).graph == number
            and plan.node
            and plan.node[0] in nodes
        ]
        if found:
            yield max(found, key=lambda of: int(np.isin(of.compute, wanted).sum()))
