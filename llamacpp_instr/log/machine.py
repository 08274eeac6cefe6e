"""What other processes took from a session's steps.

A thread that is ready to run and gets no CPU has been displaced: by another process, or by a thread
of its own process if there are more threads than CPUs. `machine` events have that time (`delay`)
and the process's CPU time for intervals of about 100 ms. The share of the time that was taken is
delay / (delay + CPU time): 0 on an idle machine, one half if an equal neighbour shares every CPU.
Time that a hypervisor gave to others (`steal`) is taken, too; the machine's CPUs share it.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from llamacpp_instr.log.session import Session, Table

DISTURBED = 0.05
"""share of the time of an interval that makes its steps disturbed ones"""

Float64 = NDArray[np.float64]


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
    capacity = np.maximum(machine["dur"], 1) * max(session.start.host.cores, 1)
    used = np.minimum((machine["cpu"] + delay) / capacity, 1.0)
    taken: Float64 = delay + steal * used
    return taken
