"""What ran on other devices than the CPU, of which a log has no kernels."""

from __future__ import annotations

import numpy as np

from llamacpp_instr.graph.kernels import untimed_backends
from llamacpp_instr.log.session import Session


def untimed_note(session: Session) -> str:
    """A sentence for tables of kernels; empty if all kernels are timed."""
    found = {name for graph in session.graphs.values() for name in untimed_backends(graph)}
    if not found:
        return ""
    return f"Kernels on {', '.join(sorted(found))} are not timed, so no row has them."


def device_times(session: Session) -> dict[int, int]:
    """By compute with parts on a device: the ns in which thread 0 copied inputs for a part, waited
    for the part before it, or was in one that is not the CPU's. Then it ran no kernel."""
    graph_of = dict(session.computes.tuples("compute", "graph"))
    found: dict[int, int] = {}
    for splits in session.splits:
        graph = session.graphs[graph_of[splits.compute]]
        if splits.label is None or not untimed_backends(graph):
            continue
        backends = [graph.splits[i].backend for i in splits.label.tolist()]
        elsewhere = np.array([backend != "CPU" for backend in backends], np.bool_)
        gaps = 0 if splits.gap is None else int(splits.gap.sum())
        found[splits.compute] = gaps + int(splits.dur[elsewhere].sum())
    return found
