"""What the rules of the findings know of a session, computed once."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from llamacpp_instr.converters.analyses.clock import Clock, compute_clock
from llamacpp_instr.converters.analyses.machine import Machine, compute_machine
from llamacpp_instr.log.requests import Request, find_requests
from llamacpp_instr.log.session import Session, Table
from llamacpp_instr.log.steps import Account
from llamacpp_instr.prediction.probe.file import Probe

BUSY = 0.5
"""load for each CPU, from which on a probe is not used"""


@dataclass(frozen=True)
class Finding:
    """One cause, with its figure."""

    rule: str
    """a name that does not change"""
    what: str
    share: float
    of: str
    """what the share is of"""
    advice: str


@dataclass(frozen=True)
class Facts:
    """A session and what several rules ask for; times in ns."""

    account: Account
    """of the steps that count"""
    by_time: Table
    """the same in order of time, as `requests` names them"""
    step_time: int
    clock: Clock
    machine: Machine | None
    requests: list[Request]
    computes: Table
    """those of `steps`, with the column `phase`"""
    probe: Probe | None
    """of the machine that recorded the session, measured while it was idle"""

    @property
    def session(self) -> Session:
        return self.account.session

    @property
    def steps(self) -> Table:
        return self.account.steps

    @property
    def n_threads(self) -> int:
        """The most that a compute used."""
        return int(self.computes["n_threads"].max()) if len(self.computes) else 0

    @property
    def is_crowded(self) -> bool:
        """Whether threads share CPUs, so that what one does takes long because another runs."""
        return 0 < self.session.start.host.cores < self.n_threads

    @property
    def lacks_cpus(self) -> bool:
        """Whether threads share CPUs, with each other or with other work."""
        return self.is_crowded or (self.machine is not None and self.machine.is_disturbed)


def gather_facts(account: Account, probe: Probe | None = None) -> Facts:
    """The facts of the steps of an account, which are those that count."""
    session, steps = account.session, account.steps
    computes = session.computes.rows(np.isin(session.computes["step"], steps["step"]))
    phases = steps["phase"][list(account.row.values())]
    by_time, requests = find_requests(session)
    return Facts(
        account=account,
        by_time=by_time,
        step_time=max(int(account.total.sum()), 1),
        clock=compute_clock(session, steps),
        machine=compute_machine(session, steps),
        requests=requests,
        computes=Table(computes.columns | {"phase": phases}),
        probe=probe if probe and _fits(probe, session) else None,
    )


def _fits(probe: Probe, session: Session) -> bool:
    """Whether a probe shows what the session's machine can do; on a busy one, it is too low."""
    return probe.cpu == session.start.host.cpu and probe.load <= BUSY * probe.cores
