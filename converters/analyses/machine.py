"""Whether the machine was to blame: what other processes took from a session's steps.

`llamacpp_instr.log.steps` defines the time that was taken.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from llamacpp_instr.base.terminal import counted
from llamacpp_instr.log.session import Session, Table
from llamacpp_instr.log.steps import DISTURBED, disturbed_steps, taken_in_all


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
            f"the process was descheduled {counted(self.switches, 'time')} and lost"
            f" {100 * self.share:.0f} % of its CPU time to other work{steal}{load}"
        )


def compute_machine(session: Session, steps: Table) -> Machine | None:
    """What happened during `steps`; None if the log does not record it (it is an older one, or
    the system has no such count)."""
    machine = session.machine
    has_delay = np.array([delay is not None for delay in machine["delay"]], np.bool_)
    machine = machine.rows(has_delay)
    machine = machine.rows(_overlaps(machine, steps))
    if not len(machine):
        return None
    loads = [load for load in machine["load"] if load is not None]
    running = [n for n in machine["running"] if n is not None]
    return Machine(
        cpus=session.start.host.cores,
        switches=int(machine["nivcsw"].sum()),
        taken=taken_in_all(session, machine),
        cpu=int(machine["cpu"].sum()),
        load=max(loads, default=None),
        running=float(np.mean(running)) if running else None,
        steal=sum(steal or 0 for steal in machine["steal"]),
        disturbed=int(disturbed_steps(session, steps).sum()),
    )


def machine_notes(sides: Sequence[tuple[str, Sequence[Machine | None]]]) -> list[str]:
    """A sentence for each side of a comparison that has sessions on a disturbed machine; a side is
    its name, and what is known of each of its sessions."""
    notes = []
    for name, machines in sides:
        disturbed = [machine for machine in machines if machine and machine.is_disturbed]
        if disturbed:
            of = f", {len(disturbed)} of {len(machines)} logs" if len(machines) > 1 else ""
            notes.append(
                f"{name}{of}: {_together(disturbed).sentence()}. Its noise includes that; record it"
                " again on an idle machine."
            )
    return notes


def _together(machines: Sequence[Machine]) -> Machine:
    loads = [of.load for of in machines if of.load is not None]
    running = [of.running for of in machines if of.running is not None]
    return Machine(
        cpus=max(of.cpus for of in machines),
        switches=sum(of.switches for of in machines),
        taken=sum(of.taken for of in machines),
        cpu=sum(of.cpu for of in machines),
        load=max(loads, default=None),
        running=float(np.mean(running)) if running else None,
        steal=sum(of.steal for of in machines),
        disturbed=sum(of.disturbed for of in machines),
    )


def _overlaps(machine: Table, steps: Table) -> NDArray[np.bool_]:
    """Which intervals have a part of a step."""
    begins, ends = np.sort(steps["begin"]), np.sort(steps["end"])
    before = np.searchsorted(begins, machine["t"])
    over = np.searchsorted(ends, machine["t"] - machine["dur"], side="right")
    found: NDArray[np.bool_] = before > over
    return found
