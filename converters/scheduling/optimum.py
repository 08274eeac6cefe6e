"""The shortest schedule, or the best that was found and how far it may be from the shortest.

Invariant: what is returned is valid, and no worse than the schedules by rule; its `proven` is a
lower bound of every schedule. The solver is OR-Tools' CP-SAT (extra `schedule`).
"""

from __future__ import annotations

import contextlib
import math
import os
import threading
import time
from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from llamacpp_instr.base.errors import UsageError
from llamacpp_instr.base.system import need
from llamacpp_instr.base.terminal import OnProgress
from llamacpp_instr.converters.scheduling.bounds import compute_bounds
from llamacpp_instr.converters.scheduling.engines import Engines
from llamacpp_instr.converters.scheduling.policies import schedule_list, schedule_program
from llamacpp_instr.converters.scheduling.schedule import Schedule, costs_of
from llamacpp_instr.converters.scheduling.tasks import Tasks

MOST_TASKS = 5000
MOST_CHOICES = 200_000
"""of an engine for a task, where engines of a kind must be told apart"""


def schedule_optimal(
    tasks: Tasks, engines: Engines, seconds: float, on_progress: OnProgress | None = None
) -> Schedule:
    """The best schedule that CP-SAT finds within `seconds`, with the lower bound that it proves.

    It is the shortest if `proven` is its makespan. `on_progress` gets the milliseconds so far and
    in all. A search that proves the optimum gives the same makespan each time; one that ends by
    time may not. Raises UsageError if OR-Tools is missing or there are too many tasks.
    """
    need("schedule")
    if len(tasks) > MOST_TASKS:
        raise UsageError(
            f"{len(tasks)} tasks are too many for the optimum, which takes up to {MOST_TASKS};"
            " choose one layer, or list scheduling"
        )
    choices = len(tasks) * engines.count()
    if (engines.handover_ns or engines.transfers) and choices > MOST_CHOICES:
        raise UsageError(
            f"{len(tasks)} tasks on {engines.count()} engines are too many for the optimum with"
            f" hand-over or transfers: at most {MOST_CHOICES} choices, not {choices};"
            " choose one layer, or list scheduling"
        )
    started = time.monotonic()
    known = min(
        (schedule_list(tasks, engines), schedule_program(tasks, engines)),
        key=lambda made: made.makespan,
    )
    known = replace(known, policy="optimal", proven=compute_bounds(tasks, engines).makespan)
    if known.makespan == known.proven:
        return known
    with _ticking(started, seconds, on_progress):
        return _solve(known, started + seconds)


def _solve(known: Schedule, until: float) -> Schedule:
    from ortools.sat.python import cp_model

    from llamacpp_instr.converters.scheduling.constraints import Constraints

    rules = Constraints(known, costs_of(known.tasks, known.engines))
    solver = cp_model.CpSolver()
    solver.parameters.max_time_in_seconds = max(until - time.monotonic(), 0.01)
    solver.parameters.random_seed = 0
    # OR-Tools 9.15 finds models infeasible that are not, if it probes them (or-tools issue 5274)
    solver.parameters.cp_model_probing_level = 0
    if hasattr(os, "sched_getaffinity"):  # else as many as the machine has
        solver.parameters.num_workers = len(os.sched_getaffinity(0))
    status = solver.solve(rules.model)
    assert status != cp_model.MODEL_INVALID, rules.model.validate()
    if status == cp_model.INFEASIBLE:
        return known  # it contradicts the known solution, so nothing of it is believed
    proven = max(known.proven or 0, math.ceil(solver.best_objective_bound - 1e-6))
    if status == cp_model.UNKNOWN:
        return replace(known, proven=proven)
    found = shifted_left(rules.read(solver))
    best = found if found.makespan < known.makespan else known
    return replace(best, proven=min(proven, best.makespan))


@contextlib.contextmanager
def _ticking(started: float, seconds: float, on_progress: OnProgress | None) -> Iterator[None]:
    """Reports the time that has passed, twice a second: the solver itself says nothing of it."""
    if on_progress is None:
        yield
        return
    done = threading.Event()

    def tick() -> None:
        while not done.wait(0.5):
            on_progress(int(1000 * (time.monotonic() - started)), int(1000 * seconds))

    thread = threading.Thread(target=tick, daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


_OCCUPIED = 1 << 62


def shifted_left(made: Schedule) -> Schedule:
    """The schedule with the same engines and orders, and everything as early as possible: each
    begin is the end of something that it waited for, or zero."""
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
        dma, slots = by[task], buffers[engine[task]]
        slot[task] = slots.index(min(slots))
        at = max(at, free[dma], min(slots), after_sources(task, dma, True))
        slots[slot[task]] = _OCCUPIED
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
