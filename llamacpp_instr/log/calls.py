"""The commands of connections in columns, with the times of both ends where they are known."""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from typing import Any

import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray

from llamacpp_instr.log.schema import Rpc

Int64 = NDArray[np.int64]

CALLS = (
    "connection", "number", "command", "out", "in", "queued", "sent", "written", "answered", "step",
    "compute", "split", "arrived", "received", "started", "done", "replied", "ran", "ran_end",
)  # fmt: skip
"""of a command: bytes of its request and its reply; the client's times, and the step, compute and
split that queued it; the server's times, from its first byte on, the last two of the graph compute
that it asked for. All times are on the log's clock. -1: none, or not known"""
SERVERS = CALLS[CALLS.index("arrived") :]
"""the times of the server"""


def call_columns(event: Rpc, side: str) -> dict[str, Int64]:
    """The commands of a whole event (`resolve`) of a connection, by the names of CALLS; `side` is
    this process's end of it."""
    n = len(event.command)

    def column(values: list[Any] | None) -> Int64:
        return np.full(n, -1) if values is None else np.array(values, np.int64)

    columns = dict.fromkeys(CALLS, np.full(n, -1))
    columns |= {
        "connection": np.full(n, event.connection),
        "number": event.first + np.arange(n),
        "command": column(event.command),
        "out": column(event.request),
        "in": column(event.reply),
        "compute": column(event.compute),
    }
    gap = column(event.gap)
    if side == "client":
        send, wait = column(event.send), column(event.wait)
        written = event.t + np.cumsum(gap + send + wait) - wait
        sent = written - send
        columns |= {
            "step": column(event.step),
            "split": column(event.split),
            "queued": sent - column(event.queue),
            "sent": sent,
            "written": written,
            "answered": np.where(columns["in"] > 0, written + wait, -1),
        }
        if event.arrive is None:
            return columns
        known = np.array([of is not None for of in event.arrive], np.bool_)
        arrived = sent + np.array([of or 0 for of in event.arrive], np.int64)
    else:
        known = np.ones(n, np.bool_)
        took = gap + column(event.receive) + column(event.work) + column(event.answer)
        arrived = event.t + np.cumsum(took) - took + gap
    received = arrived + column(event.receive)
    done = received + column(event.work)
    start, run = column(event.start), column(event.run)
    times = {
        "arrived": arrived, "received": received, "started": received, "done": done,
        "replied": done + column(event.answer),
    }  # fmt: skip
    columns |= {name: np.where(known, of, -1) for name, of in times.items()}
    columns["ran"] = np.where(known & (start >= 0), received + start, -1)
    columns["ran_end"] = np.where(columns["ran"] >= 0, columns["ran"] + run, -1)
    return columns


class CallsCollector:
    """Collects the commands of whole events, the `names` of CALLS, with 8 bytes a number."""

    def __init__(self, names: Iterable[str] = CALLS) -> None:
        self._columns = {name: array("q") for name in names}

    def add(self, event: Rpc, side: str) -> None:
        columns = call_columns(event, side)
        for name, into in self._columns.items():
            into.frombytes(columns[name].tobytes())

    def columns(self) -> dict[str, Int64]:
        """What was collected. Add nothing afterwards."""
        return {name: np.frombuffer(of, np.int64) for name, of in self._columns.items()}


def merged_call(event: Rpc, server: dict[str, Int64]) -> Rpc:
    """A client's event with the server's times of its commands, which `server` has by the names of
    CALLS, on the client's clock; -1 for what the server's log lacks."""
    known, ran = server["received"] >= 0, server["ran"] >= 0
    arrive = (server["arrived"] - call_columns(event, "client")["sent"]).tolist()

    def lengths(begin: str, end: str, where: NDArray[np.bool_], other: int) -> list[int]:
        ns = np.maximum(server[end] - server[begin], 0)
        found: list[int] = np.where(where, ns, other).tolist()
        return found

    return replace(
        event,
        arrive=[ns if there else None for ns, there in zip(arrive, known.tolist(), strict=True)],
        receive=lengths("arrived", "received", known, 0),
        work=lengths("received", "done", known, 0),
        answer=lengths("done", "replied", known, 0),
        start=lengths("received", "ran", ran, -1),
        run=lengths("ran", "ran_end", ran, -1),
    )
