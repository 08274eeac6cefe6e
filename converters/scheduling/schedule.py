"""A schedule: when and where each task runs; and what tasks cost on each kind of engine.

Invariant: what makes a schedule valid is stated here, and only here:

- An engine does one thing at a time. A task takes its time on the kind of engine that runs it.
- A task begins when its sources have ended. If a source ran on another engine, it begins at least
  the hand-over later.
- With transfers, a task that has a load and runs on an engine with local memory is fed: a DMA
  engine brings the load into one of the engine's two buffers of half the local memory. The buffer
  is occupied from the start of the transfer to the end of the task. The task begins when the
  transfer has ended. So the next load is brought while a task runs (double buffering).
- A load that is larger than a buffer streams through it: the task and its transfer begin together,
  and the task takes at least as long as the transfer.
- Weights can be brought at any time. A transfer waits, however, for those sources of its task that
  write the cache (block `kv`), and for their hand-over.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from llamacpp_instr.base.errors import UsageError
from llamacpp_instr.converters.scheduling.engines import EngineKind, Engines
from llamacpp_instr.converters.scheduling.tasks import Int32, Int64, Tasks

MAX_NS = 1 << 50
"""of all tasks in sequence on their slowest engines: 13 days"""


@dataclass(frozen=True)
class Schedule:
    """Columns have a value for each task; times are ns from the start of the schedule."""

    tasks: Tasks
    engines: Engines
    policy: str
    """program, list or optimal"""
    engine: Int32
    begin: Int64
    end: Int64
    transfer_engine: Int32
    """-1 if nothing is brought for the task"""
    transfer_begin: Int64
    transfer_end: Int64
    proven: int | None = None
    """ns: no schedule is shorter; None if nothing was proven"""

    @property
    def makespan(self) -> int:
        """ns until everything has ended."""
        return int(self.end.max(initial=0))


@dataclass(frozen=True)
class Costs:
    """What tasks cost on each kind of engine, in the order of the kinds."""

    ns: list[Int64]
    """of a task; 0 where the kind cannot run it"""
    transfer_ns: list[Int64]
    """of a task's load; 0 if it has none, or if the kind brings no loads"""
    fed: list[bool]
    """whether loads are brought to engines of the kind"""
    streamed: list[NDArray[np.bool_]]
    """of fed kinds: whether the load is larger than a buffer"""
    writes_cache: list[bool]
    """by label: transfers wait for such sources"""

    def least_transfer_ns(self) -> Int64:
        """Of each task's load, by the fastest DMA engine; 0 if none."""
        brings = [ns for ns in self.transfer_ns if ns.any()]
        zero = np.zeros_like(self.ns[0])
        return np.minimum.reduce(brings) if brings else zero


def costs_of(tasks: Tasks, engines: Engines) -> Costs:
    """The duration of each task on each kind: the recording's by the kind's speed, and at least
    what its bandwidth allows for the task's bytes, rounded up, at least 1. The bytes of a load that
    a transfer brings are not moved again. Raises UsageError if all together take too long."""
    fed = [engines.transfers and kind.local_memory is not None for kind in engines.kinds]
    ns, transfer_ns, streamed = [], [], []
    for kind, is_fed in zip(engines.kinds, fed, strict=True):
        ns.append(_task_ns(tasks, kind, is_fed))
        brings = engines.transfers and kind.transfers and kind.bandwidth is not None
        transfer_ns.append(_moving_ns(tasks.load, kind.bandwidth if brings else None))
        streamed.append(tasks.load > (kind.local_memory or 0) // 2)
    total = sum(float(column.sum(dtype=float)) for column in (*ns, *transfer_ns))
    if total > MAX_NS:
        raise UsageError(
            f"the tasks take up to {total / 1e9:.0f} s in sequence on these engines;"
            f" at most {MAX_NS / 1e9:.0f} s can be scheduled"
        )
    writes_cache = [label.block == "kv" for label in tasks.labels]
    return Costs(ns, transfer_ns, fed, streamed, writes_cache)


def _task_ns(tasks: Tasks, kind: EngineKind, fed: bool) -> Int64:
    can_run = np.array([kind.can_run(label) for label in tasks.labels], bool)[tasks.label]
    speed = np.array([kind.speed_of(label) for label in tasks.labels])[tasks.label]
    ns = np.ceil(np.minimum(tasks.ns / speed, float(MAX_NS) * 2)).astype(np.int64)
    # a product by one is exact, also for the integers that a float cannot hold
    ns = np.where(speed == 1, tasks.ns, ns)
    moved = tasks.bytes - tasks.load if fed else tasks.bytes
    ns = np.maximum(np.maximum(ns, _moving_ns(moved, kind.bandwidth)), 1)
    return np.where(can_run, ns, 0)


def _moving_ns(amount: Int64, bandwidth: float | None) -> Int64:
    if bandwidth is None:
        return np.zeros(len(amount), np.int64)
    ns = np.ceil(np.minimum(amount * 1e9 / bandwidth, float(MAX_NS) * 2)).astype(np.int64)
    return np.where(amount > 0, np.maximum(ns, 1), 0)
