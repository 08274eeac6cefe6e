"""What each machine of llama.cpp's RPC backend did during the steps, and the link to it.

A machine is an endpoint, by the name that its user gave. Invariant: each nanosecond of a step is in
one of PARTS on each machine, so the parts add up to the time that the caller saw. Where several
apply, the first one counts: a command that waits behind a compute is not on the wire then.

The clock of a machine is known within a bound, but the time that a link takes in each direction is
not. Where the sum of both directions is given, the bound cancels. All times are in ns.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from llamacpp_instr.log import schema
from llamacpp_instr.log.session import Session, Table
from llamacpp_instr.log.spans import Covered, Int64, Spans

Bools = NDArray[np.bool_]

COMPUTE, SERIALIZATION, WIRE, AWAY, QUEUE, WAITING = PARTS = (
    "compute", "serialization", "wire", "wire or machine", "queue", "waiting",
)  # fmt: skip
"""computing a graph; reading commands, writing tensors and building graphs; a command or its reply
is in transit; one of the previous two, where only the client's log is known; a command waits for
earlier ones; and nothing was asked of the machine"""

GRAPH_COMPUTE, GRAPH_RECOMPUTE = map(
    schema.RPC_COMMANDS.index, ("GRAPH_COMPUTE", "GRAPH_RECOMPUTE")
)
"""their codes"""

SMALL, LARGE = 4096, 1 << 16
"""bytes: up to SMALL a message takes the time of the link alone, from LARGE on mostly its rate"""
FASTEST = 0.1
"""share of the messages that are as fast as the link: others waited for a thread or a CPU"""


@dataclass(frozen=True)
class Link:
    """The link between the client and a machine."""

    machine: str
    round_trip: float | None
    """ns of a small command and its reply, without the machine's own time, if that is known; None
    if no small message was found"""
    rate_out: float | None
    """bytes per second of large messages to the machine; None without any"""
    rate_in: float | None
    """from it"""
    uncertainty: int | None
    """ns by which the machine's times may be wrong; None if its log was not merged"""


class Machines:
    """The commands of a session to its machines, and `steps`, which are those that count."""

    def __init__(self, session: Session, steps: Table) -> None:
        self._session, self._steps = session, steps
        self._rows = {step: row for row, step in enumerate(steps["step"].tolist())}
        connections = session.connections.values()
        self._of: dict[str, list[int]] = {}
        for of in connections:
            if of.side == "client":
                self._of.setdefault(of.endpoint, []).append(of.connection)
        number = session.calls["connection"]
        self.calls = {
            name: session.calls.rows(np.isin(number, numbers)) for name, numbers in self._of.items()
        }
        """by machine"""
        self.calls = {name: calls for name, calls in self.calls.items() if len(calls)}
        self._spans = {name: _spans(calls) for name, calls in self.calls.items()}

    @property
    def names(self) -> list[str]:
        return list(self.calls)

    def is_known(self, machine: str) -> bool:
        """Whether the machine's own log was merged."""
        return bool((self.calls[machine]["started"] >= 0).any())

    def parts(self, machine: str) -> dict[str, Int64]:
        """ns of each step in each of PARTS on a machine."""
        return self._divided([self._spans[machine]])

    def together(self, kernels: list[Spans]) -> dict[str, Int64]:
        """ns of each step in each of PARTS on any machine; `kernels` are those of the client, which
        also compute. The last part is the client's other work."""
        return self._divided([{COMPUTE: kernels}, *self._spans.values()])

    def _divided(self, machines: Sequence[dict[str, list[Spans]]]) -> dict[str, Int64]:
        begin, end = self._steps["begin"], self._steps["end"]
        parts: dict[str, Int64] = {}
        spans: list[Spans] = []
        before = np.zeros(len(begin), np.int64)
        for part in PARTS[:-1]:
            spans += [span for of in machines for span in of.get(part, ())]
            reach = Covered(spans).within(begin, end)
            parts[part], before = reach - before, reach
        return parts | {WAITING: end - begin - before}

    def traffic(self, machine: str) -> tuple[Int64, Int64, Int64]:
        """For each step: its commands to a machine, their bytes, and those of the replies."""
        calls, steps = self.calls[machine], self._steps
        row = np.array([self._rows.get(step, -1) for step in calls["step"].tolist()], np.int64)
        inside = row >= 0
        found = np.zeros((3, len(steps)), np.int64)
        for of, amount in zip(found, (inside, calls["out"], calls["in"]), strict=True):
            np.add.at(of, row[inside], amount[inside])
        return found[0], found[1], found[2]

    def link(self, machine: str) -> Link:
        """What all commands to a machine, including those outside steps, show of the link."""
        calls = self.calls[machine]
        bounds = [self._session.connections[of].uncertainty for of in self._of[machine]]
        known = [of for of in bounds if of is not None]
        calls = calls.rows(np.lexsort((calls["number"], calls["connection"])))
        uncertainty = max(known, default=None)
        if not self.is_known(machine):
            return Link(machine, _answers(calls), None, None, uncertainty)
        known_calls = calls.rows(calls["started"] >= 0)
        out, back = _out(known_calls), _back(known_calls)
        both = None if out[0] is None or back[0] is None else out[0] + back[0]
        return Link(machine, both, out[1], back[1], uncertainty)


def _spans(calls: Table) -> dict[str, list[Spans]]:
    """When each of PARTS was under way on a machine."""

    def between(begin: Int64, end: Int64, rows: Bools) -> Spans:
        return begin[rows], np.maximum(begin, end)[rows]

    known, ran = calls["started"] >= 0, calls["ran"] >= 0
    has_reply = calls["answered"] >= 0
    sent = calls["sent"] >= 0
    both = known & sent
    return {
        COMPUTE: [between(calls["ran"], calls["ran_end"], ran)],
        SERIALIZATION: [between(calls["started"], calls["done"], known)],
        WIRE: [
            between(calls["sent"], calls["received"], both),
            between(calls["done"], calls["answered"], both & has_reply),
        ],
        AWAY: [between(calls["sent"], _heard_of(calls), sent & ~known)],
        QUEUE: [
            between(calls["queued"], calls["sent"], sent),
            between(calls["received"], calls["started"], known),
        ],
    }


def _heard_of(calls: Table) -> Int64:
    """When the client knew that a command had been done: at its reply, or at the next one of the
    connection; if none follows, when it was sent."""
    found: Int64 = np.maximum(calls["answered"], calls["written"])
    for number in np.unique(calls["connection"]):
        rows = np.flatnonzero(calls["connection"] == number)
        replies = rows[calls["answered"][rows] >= 0]
        at = np.searchsorted(replies, rows)
        later = at < len(replies)
        found[rows[later]] = calls["answered"][replies[at[later]]]
    return found


def _before(calls: Table, column: str) -> Int64:
    """The time in `column` of the previous command on the same connection; -1 for none."""
    found = np.full(len(calls), -1, np.int64)
    same = calls["connection"][1:] == calls["connection"][:-1]
    found[1:][same] = calls[column][:-1][same]
    return found


def _out(calls: Table) -> tuple[float | None, float | None]:
    """ns of the transit to the machine, on its clock, and bytes per second."""
    idle = calls["sent"] >= _before(calls, "done")
    small = calls["out"] <= SMALL
    way = _fastest((calls["received"] - calls["sent"])[idle & small])
    read = _before(calls, "received")
    alone = read <= calls["sent"]
    # a command that directly follows another is on the wire only after that
    took = calls["received"] - np.maximum(calls["sent"], read)
    return way, _rate(calls["out"], took - alone * (way or 0.0))


def _back(calls: Table) -> tuple[float | None, float | None]:
    """ns of the transit from the machine, on its clock, and bytes per second."""
    calls = calls.rows(calls["answered"] >= 0)
    took = calls["answered"] - calls["done"]
    way = _fastest(took[calls["in"] <= SMALL])
    return way, _rate(calls["in"], took - (way or 0.0))


def _answers(calls: Table) -> float | None:
    """ns from a small command to its reply, with what the machine did for it: only of commands
    that follow a reply, so that nothing else was asked of the machine."""
    after_reply = np.ones(len(calls), np.bool_)
    after_reply[1:] = calls["answered"][:-1] >= 0
    after_reply &= np.maximum(calls["out"], calls["in"]) <= SMALL
    alone = calls.rows(after_reply & (calls["answered"] >= 0))
    return _fastest(alone["answered"] - alone["sent"])


def _fastest(ns: Int64) -> float | None:
    return float(np.quantile(ns, FASTEST)) if len(ns) else None


def _rate(n_bytes: Int64, ns: NDArray[np.float64]) -> float | None:
    """Bytes per second of large messages, all together."""
    large = (n_bytes >= LARGE) & (ns > 0)
    return float(n_bytes[large].sum() / ns[large].sum() * 1e9) if large.any() else None
