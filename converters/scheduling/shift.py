"""Begins everything as early as the order on each engine allows.

Invariant: nothing begins later than before, and nothing changes its engine or overtakes there; so
each begin is the end of something that it waited for, or zero.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from converters.scheduling.schedule import Schedule

_HELD = 1 << 62


def shifted_left(made: Schedule) -> Schedule:
    """The schedule with the same engines and orders, and everything as early as possible."""
    tasks, handover = made.tasks, made.engines.handover_ns
    n = len(tasks)
    engine, by = made.engine.tolist(), made.transfer_engine.tolist()
    takes = (made.end - made.begin).tolist()
    brings = (made.transfer_end - made.transfer_begin).tolist()
    together = ((made.transfer_begin == made.begin) & (made.transfer_engine >= 0)).tolist()
    first, sources = tasks.first.tolist(), tasks.sources.tolist()
    writes = [label.block == "kv" for label in tasks.labels]
    label = tasks.label.tolist()
    begin, end, bring, brought = [0] * n, [0] * n, [0] * n, [0] * n
    free = [0] * made.engines.count()
    buffers = [[0, 0] for _ in free]
    slot = [0] * n

    def after_sources(task: int, on: int, written: bool) -> int:
        return max(
            (
                end[source] + (handover if engine[source] != on else 0)
                for source in sources[first[task] : first[task + 1]]
                if not written or writes[label[source]]
            ),
            default=0,
        )

    def start_transfer(task: int, at: int) -> None:
        dma, held = by[task], buffers[engine[task]]
        slot[task] = held.index(min(held))
        at = max(at, free[dma], min(held), after_sources(task, dma, True))
        held[slot[task]] = _HELD
        bring[task], brought[task] = at, at + brings[task]
        free[dma] = brought[task]

    fed = np.flatnonzero((made.transfer_engine >= 0) & ~np.array(together, bool)).tolist()
    work = [(int(made.transfer_begin[i]), 0, i) for i in fed]
    work += [(at, 1, i) for i, at in enumerate(made.begin.tolist())]
    for _, is_task, task in sorted(work):
        if not is_task:
            start_transfer(task, 0)
            continue
        own = engine[task]
        at = max(free[own], after_sources(task, own, False))
        if together[task]:
            start_transfer(task, at)
            at = bring[task]
        elif by[task] >= 0:
            at = max(at, brought[task])
        begin[task], end[task] = at, at + takes[task]
        free[own] = end[task]
        if by[task] >= 0:
            buffers[own][slot[task]] = end[task]
    return replace(
        made,
        begin=np.array(begin, np.int64),
        end=np.array(end, np.int64),
        transfer_begin=np.array(bring, np.int64),
        transfer_end=np.array(brought, np.int64),
    )
