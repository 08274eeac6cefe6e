"""Whether the machine was to blame: what other processes took from a session's steps.

A thread that is ready to run and gets no CPU has been displaced: by another process, or by a thread
of its own process if there are more threads than CPUs. `machine` events have that time (`delay`)
and the process's CPU time for intervals of about 100 ms. The share of the time that was taken is
delay / (delay + CPU time): 0 on an idle machine, one half if an equal neighbour shares every CPU.
Time that a hypervisor gave to others (`steal`) is taken, too; the machine's CPUs share it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from llamacpp_instr.log.session import Session, Table

DISTURBED = 0.05
"""share of the time of an interval that makes its steps disturbed ones"""

Float64 = NDArray[np.float64]


@dataclass(frozen=True)
class Machine:
    """What the machine did during the steps of a session."""

    cpus: int
    switches: int
    """involuntary context switches of the process"""
    taken: int
    """time that its threads waited for a CPU, and their part of the stolen time; ns"""
    cpu: int
    """its CPU time in ns"""
    load: float | None
    """the largest load average"""
    running: float | None
    """mean number of threads on the machine that run or are ready to run"""
    steal: int
    """ns of all CPUs"""
    disturbed: int
    """steps that lie in disturbed intervals"""

    @property
    def share(self) -> float:
        """The part of the process's time that was taken from it."""
        return self.taken / max(self.taken + self.cpu, 1)

    @property
    def is_disturbed(self) -> bool:
        return self.share > DISTURBED

    def sentence(self) -> str:
        """What happened, for a reader who believes that the model is slow."""
        load = "" if self.load is None else f"; load {self.load:.3g} on {self.cpus} CPUs"
        steal = ", some of it to the hypervisor" if self.steal > self.taken / 20 else ""
        return (
            f"the process was descheduled {self.switches:,} times and lost"
            f" {100 * self.share:.0f} % of its CPU time to other work{steal}{load}"
        )


def compute_machine(session: Session, steps: Table) -> Machine | None:
    """What happened during `steps`; None if the log does not tell (it is an older one, or the
    system has no such count)."""
    machine = session.machine
    told = np.array([delay is not None for delay in machine["delay"]], np.bool_)
    machine = machine.rows(told)
    if not len(machine) or not len(steps):
        return None
    touched = _overlaps(machine, steps)
    machine = machine.rows(touched)
    if not len(machine):
        return None
    loads = [load for load in machine["load"] if load is not None]
    running = [n for n in machine["running"] if n is not None]
    shares = taken_shares(session, machine)
    return (
        Machine(
            cpus=session.start.host.cores,
            switches=int(machine["nivcsw"].sum()),
            taken=int(_taken(session, machine).sum()),
            cpu=int(machine["cpu"].sum()),
            load=max(loads, default=None),
            running=float(np.mean(running)) if running else None,
            steal=sum(steal or 0 for steal in machine["steal"]),
            disturbed=int(disturbed_steps(session, steps).sum()),
        )
        if len(shares)
        else None
    )


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
    taken = _taken(session, machine)
    share: Float64 = taken / np.maximum(taken + machine["cpu"], 1)
    return share


def _taken(session: Session, machine: Table) -> Float64:
    """The ns that the process's threads lost in each interval. Of the stolen time, they lost the
    part that belongs to the CPUs that they used."""
    delay = machine["delay"].astype(np.float64)
    steal = np.array([s or 0 for s in machine["steal"]], np.float64)
    capacity = np.maximum(machine["dur"], 1) * max(session.start.host.cores, 1)
    used = np.minimum((machine["cpu"] + delay) / capacity, 1.0)
    taken: Float64 = delay + steal * used
    return taken


def _overlaps(machine: Table, steps: Table) -> NDArray[np.bool_]:
    """Which intervals have a part of a step."""
    begins, ends = np.sort(steps["begin"]), np.sort(steps["end"])
    before = np.searchsorted(begins, machine["t"])
    over = np.searchsorted(ends, machine["t"] - machine["dur"], side="right")
    found: NDArray[np.bool_] = before > over
    return found
