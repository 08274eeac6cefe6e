"""What other processes took from a session's steps.

A thread that is ready to run and gets no CPU has been displaced: by another process, or by a thread
of its own, for example when two of them begin on one CPU. `machine` events have that time (`delay`)
and the CPU time of the process and of the whole machine for intervals of about 100 ms. What others
took is the delay, but at most the CPU time that others had. The share that was taken is that time
divided by it and the process's CPU time: 0 on an idle machine, one half if an equal neighbour
shares every CPU. Time that a hypervisor gave to others (`steal`) is taken, too; the CPUs share it.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from llamacpp_instr.log.schema import Machine
from llamacpp_instr.log.session import Session, Table

DISTURBED = 0.05
"""share of the time of an interval that makes its steps disturbed ones"""

TICK = 10_000_000
"""ns; the machine's CPU time is that inexact"""

Float64 = NDArray[np.float64]
Int64 = NDArray[np.int64]


def disturbed_steps(session: Session, steps: Table) -> NDArray[np.bool_]:
    """Whether each of `steps` lies, with any part, in an interval in which more than DISTURBED of
    the process's time was taken."""
    machine = session.machine
    machine = machine.rows(np.array([d is not None for d in machine["delay"]], np.bool_))
    bad = machine.rows(taken_shares(session, machine) > DISTURBED)
    order = np.argsort(bad["t"], kind="stable")
    end, begin = bad["t"][order], (bad["t"] - bad["dur"])[order]
    at = np.searchsorted(end, steps["begin"], side="right")
    inside: NDArray[np.bool_] = at < len(end)
    inside[inside] = begin[at[inside]] < steps["end"][inside]
    return inside


def taken_shares(session: Session, machine: Table) -> Float64:
    """The share of the process's time that was taken in each interval, (intervals,)."""
    taken = taken_times(session, machine)
    share: Float64 = taken / np.maximum(taken + machine["cpu"], 1)
    return share


def taken_times(session: Session, machine: Table) -> Float64:
    """The ns that the process's threads lost in each interval. Of the stolen time, they lost the
    part that belongs to the CPUs that they used."""
    delay = machine["delay"].astype(np.float64)
    steal = np.array([s or 0 for s in machine["steal"]], np.float64)
    busy = np.array([np.inf if b is None else b for b in machine["busy"]], np.float64)
    cores = session.start.host.cores
    return _taken(delay, steal, machine["cpu"], machine["dur"], busy, cores)


def taken_in_all(session: Session, machine: Table) -> int:
    """The ns that the process's threads lost in all intervals. Their sums are more exact than each
    of them."""
    whole = {
        name: np.array([sum(machine[name].tolist())], object) for name in ("dur", "cpu", "delay")
    }
    for name in ("busy", "steal"):
        known = [n for n in machine[name].tolist() if n is not None]
        whole[name] = np.array([sum(known) if len(known) == len(machine) else None], object)
    return int(taken_times(session, Table(whole))[0])


def taken_share(event: Machine, cpus: int) -> float | None:
    """The share of the process's time that was taken in one interval, None if the log does not
    record it."""
    if event.delay is None:
        return None
    busy = np.inf if event.busy is None else event.busy
    columns = [event.delay], [event.steal or 0], [event.cpu], [event.dur], [busy]
    delay, steal, cpu, dur, machine = np.array(columns, np.float64)
    taken = float(_taken(delay, steal, cpu, dur, machine, cpus)[0])
    return taken / max(taken + event.cpu, 1)


def _taken(
    delay: Float64,
    steal: Float64,
    cpu: Float64 | Int64,
    dur: Float64 | Int64,
    busy: Float64,
    cpus: int,
) -> Float64:
    delay = np.minimum(delay, np.maximum(busy - cpu - TICK, 0))
    used = np.minimum((cpu + delay) / (np.maximum(dur, 1) * max(cpus, 1)), 1.0)
    taken: Float64 = delay + steal * used
    return taken
