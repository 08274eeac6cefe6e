"""Finds which connections of a client's log and of its servers' are the same, and joins the clocks.

Invariant: two ends are one connection only if the commands that both logs have are equal, and their
clocks can be joined. Their addresses say which it is, unless something between them translates
addresses: then the commands and the clocks must fit one connection alone.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from llamacpp_instr.base.errors import LogError
from llamacpp_instr.base.terminal import OnProgress, counted
from llamacpp_instr.log import schema
from llamacpp_instr.log.calls import SERVERS, CallsCollector, Int64
from llamacpp_instr.log.clocks import Clock, Exchanges, join_clocks
from llamacpp_instr.log.reader import LogEnd
from llamacpp_instr.log.resolve import Resolver
from llamacpp_instr.log.runs import Run, read_run

GRAPHS = [schema.RPC_COMMANDS.index(name) for name in ("GRAPH_COMPUTE", "GRAPH_RECOMPUTE")]
"""the commands that ask for a compute"""


_COLUMNS = ("connection", "number", "command", "out", "in", "compute")
_OF_SIDE = {
    "client": ("sent", "answered", "split"), "server": ("arrived", "received", "done", "replied"),
}  # fmt: skip


@dataclass
class Process:
    """What a log says about the connections of its process."""

    run: Run
    start: schema.SessionStart
    end: LogEnd
    connections: dict[int, schema.Connection]
    ended: dict[int, schema.ConnectionEnd]
    calls: dict[str, Int64]
    """the columns `calls.CALLS` that its side has, except what only the client's events need; for a
    server, also the times of its computes"""

    @cached_property
    def rows(self) -> dict[int, Int64]:
        """The rows of each connection that has commands, in their order."""
        of = self.calls["connection"]
        order = np.lexsort((self.calls["number"], of))
        cuts = np.flatnonzero(np.diff(of[order])) + 1
        return {int(of[rows[0]]): rows for rows in np.split(order, cuts) if len(rows)}

    @property
    def is_client(self) -> bool:
        return any(of.side == "client" for of in self.connections.values())


def read_process(run: Run, lenient: bool = False, on_progress: OnProgress | None = None) -> Process:
    """Raises LogError for a log that cannot be read or has no connections."""
    refs = Resolver(masks=False)
    connections: dict[int, schema.Connection] = {}
    ended: dict[int, schema.ConnectionEnd] = {}
    calls = {side: CallsCollector(_COLUMNS + of) for side, of in _OF_SIDE.items()}
    computes = [array("q"), array("q"), array("q")]

    def rpc(event: schema.Rpc) -> None:
        side = refs.connections[event.connection].side
        calls[side].add(event, side)

    def compute(event: schema.Compute) -> None:
        begin = event.t + event.start
        for column, value in zip(computes, (event.compute, begin, begin + event.dur), strict=True):
            column.append(value)

    takers: dict[type[schema.Event], Any] = {
        schema.Connection: lambda of: connections.__setitem__(of.connection, of),
        schema.ConnectionEnd: lambda of: ended.__setitem__(of.connection, of),
        schema.Rpc: rpc,
        schema.Compute: compute,
    }
    reader = read_run(run, lenient, on_progress)
    refs.feed(reader, takers, lenient)
    assert reader.end is not None
    if not connections:
        raise LogError(
            "it has no connection of llama.cpp's RPC backend: record the client with `instr run"
            " --rpc` and each server with `instr exec -- ggml-rpc-server`",
            run.name,
        )
    side = "client" if any(of.side == "client" for of in connections.values()) else "server"
    columns = calls[side].columns()
    if side == "server":
        _add_computes(columns, *(np.frombuffer(of, np.int64) for of in computes))
    return Process(run, refs.start, reader.end, connections, ended, columns)


def _add_computes(calls: dict[str, Int64], number: Int64, begin: Int64, end: Int64) -> None:
    """The times of the computes that a server's commands asked for."""
    order = np.argsort(number, kind="stable")
    at = np.searchsorted(number, calls["compute"], sorter=order)
    inside = at < len(number)
    rows = order[at[inside]]
    known = inside.copy()
    known[inside] = number[rows] == calls["compute"][inside]
    for name, times in (("ran", begin), ("ran_end", end)):
        column = np.full(len(at), -1)
        column[known] = times[rows[known[inside]]]
        calls[name] = column


class Pair(NamedTuple):
    """A connection that two logs have."""

    connection: int
    """its number in the client's log"""
    numbers: Int64
    """of the commands that both have, ascending"""
    rows: Int64
    """of the client's"""
    server: int
    """index of the server's log"""
    other: int
    """its number there"""
    others: Int64
    """the server's rows of these commands"""


@dataclass
class Joined:
    """A client and its servers."""

    client: Process
    servers: list[Process]
    pairs: dict[int, Pair]
    """by the number of the connection in the client's log"""
    clocks: list[Clock]
    """of each server"""

    def missing(self) -> list[str]:
        """The endpoints that computed for the client and whose log was not given."""
        calls = self.client.calls
        asked = set(calls["connection"][np.isin(calls["command"], GRAPHS)].tolist())
        of = self.client.connections
        joined = {number for number, one in of.items() if one.id} | self.pairs.keys()
        return sorted({of[number].endpoint for number in asked - joined})

    def notes(self) -> list[str]:
        """What the user should know, a line each: how the clocks were joined, which logs are not
        whole, and which are missing."""
        notes = [self._clock_note(i) for i in range(len(self.servers))]
        for of in (self.client, *self.servers):
            if sentence := of.end.sentence():
                notes.append(f"{of.run.name}: {sentence}")
            if of.start.level == "minimal":
                which = "of servers" if of is self.client else "of this server"
                notes.append(f"{of.run.name}: level minimal, so kernels {which} have no times")
        notes += [
            f"{endpoint}: no log of this server; its kernels have no times"
            for endpoint in self.missing()
        ]
        return notes

    def _clock_note(self, server: int) -> str:
        clock, process = self.clocks[server], self.servers[server]
        pairs = [pair for pair in self.pairs.values() if pair.server == server]
        n = sum(len(pair.rows) for pair in pairs)
        of_client = sum(len(self.client.rows[pair.connection]) for pair in pairs)
        endpoints = sorted({self.client.connections[pair.connection].endpoint for pair in pairs})
        # more than the drift that an offset off by its bound at both ends would show
        known = abs(clock.drift) > 2 * clock.uncertainty / max(clock.passed, 1)
        return (
            f"{process.run.name}: {', '.join(endpoints)}, {n:,} of {of_client:,} commands; clock"
            f" {clock.offset / 1e9:+,.6f} s from the client's"
            f"{f' and {clock.drift * 1e6:+.1f} ppm' if known else ''}"
            f", within ±{clock.usual_uncertainty / 1e3:,.1f} µs (at most"
            f" {clock.uncertainty / 1e3:,.1f} µs)"
        )

    def server_times(self, event: schema.Rpc) -> dict[str, Int64]:
        """The server's times of the client's commands, by the names of `calls.SERVERS`, on the
        client's clock; -1 for what the server's log lacks."""
        pair = self.pairs[event.connection]
        calls, clock = self.servers[pair.server].calls, self.clocks[pair.server]
        numbers = event.first + np.arange(len(event.command))
        at = np.searchsorted(pair.numbers, numbers)
        known = at < len(pair.numbers)
        known[known] = pair.numbers[at[known]] == numbers[known]
        found = {name: np.full(len(numbers), -1) for name in SERVERS}
        for name, column in found.items():
            times = calls["received" if name == "started" else name]
            column[known] = clock.to_client(times[pair.others[at[known]]])
        return found

    def computes(self) -> dict[str, Int64]:
        """The computes that servers made for the client: `compute` and `split` of the client, in
        this order, the `server` and its `other` compute."""
        rows = {name: [np.zeros(0, np.int64)] for name in ("compute", "split", "server", "other")}
        for pair in self.pairs.values():
            client, server = self.client.calls, self.servers[pair.server].calls
            columns = {
                "compute": client["compute"][pair.rows],
                "split": client["split"][pair.rows],
                "server": np.full(len(pair.rows), pair.server),
                "other": server["compute"][pair.others],
            }
            is_graph = np.isin(client["command"][pair.rows], GRAPHS)
            is_graph &= (columns["compute"] >= 0) & (columns["other"] >= 0)
            for name, column in columns.items():
                rows[name].append(column[is_graph])
        joined = {name: np.concatenate(of) for name, of in rows.items()}
        order = np.lexsort((joined["split"], joined["compute"]))
        return {name: of[order] for name, of in joined.items()}


def join_processes(processes: Sequence[Process]) -> Joined:
    """Pairs the connections of a client with those of its servers, in any order. Raises LogError
    for logs that do not belong together."""
    clients = [of for of in processes if of.is_client]
    servers = [of for of in processes if not of.is_client]
    if not clients:
        raise LogError("it is a server's log; also name its client's log", processes[0].run.name)
    if len(clients) > 1:
        raise LogError(
            f"it is a client's log, and so is {clients[0].run.name}; name only one",
            clients[1].run.name,
        )
    if not servers:
        raise LogError("it is a client's log; also name its servers' logs", clients[0].run.name)
    client = clients[0]
    for server in servers:
        if server.start.id in {of.id for of in client.connections.values()}:
            raise LogError(f"was already merged into {client.run.name}", server.run.name)
    pairs = _by_address(client, servers)
    _by_commands(client, servers, pairs)
    clocks = []
    for i, server in enumerate(servers):
        of_server = [pair for pair in pairs.values() if pair.server == i]
        if not of_server:
            raise LogError(_stranger(client, server), server.run.name)
        if (clock := join_clocks(_exchanges(client, server, of_server))) is None:
            raise LogError(
                f"its clock does not fit {client.run.name}: data would arrive before it was sent",
                server.run.name,
            )
        clocks.append(clock)
    return Joined(client, servers, pairs, clocks)


def _by_address(client: Process, servers: Sequence[Process]) -> dict[int, Pair]:
    ends: dict[tuple[str, str], list[tuple[int, int]]] = {}
    for i, server in enumerate(servers):
        for number, of in server.connections.items():
            ends.setdefault((of.peer, of.local), []).append((i, number))
    found = {}
    for number, of in client.connections.items():
        same = [
            pair
            for i, other in ends.get((of.local, of.peer), ())
            if (pair := _pair(client, number, servers, i, other)) is not None
        ]
        if same:  # a port may be used again
            found[number] = max(same, key=lambda pair: len(pair.rows))
    return found


def _by_commands(client: Process, servers: Sequence[Process], pairs: dict[int, Pair]) -> None:
    """Adds the pairs whose addresses differ. Those that computed come first: the few commands of
    others fit any server, and only its clock, once it is known, says whose they are."""
    calls = client.calls
    computed = set(calls["connection"][np.isin(calls["command"], GRAPHS)].tolist())
    left = [number for number in client.rows if number not in pairs]
    for number in sorted(left, key=lambda of: (of not in computed, -len(client.rows[of]))):
        known = {i for i in range(len(servers)) if any(of.server == i for of in pairs.values())}
        found = [
            pair
            for i in (range(len(servers)) if number in computed else sorted(known))
            for pair in _candidates(client, number, servers, i, pairs)
        ]
        if len(found) == 1:
            pairs[number] = found[0]
        elif len(found) > 1 and number in computed:
            one, other = (
                f"connection {pair.other} of {servers[pair.server].run.name}" for pair in found[:2]
            )
            raise LogError(
                f"connection {number} may be {one} or {other}: it has the addresses of"
                " neither, and the commands and clocks fit both",
                client.run.name,
            )


def _candidates(
    client: Process, number: int, servers: Sequence[Process], i: int, pairs: dict[int, Pair]
) -> Iterator[Pair]:
    """The connections of a server that a client's connection may be."""
    known = [pair for pair in pairs.values() if pair.server == i]
    for other in sorted(servers[i].rows.keys() - {pair.other for pair in known}):
        pair = _pair(client, number, servers, i, other)
        if pair is not None and join_clocks(_exchanges(client, servers[i], [*known, pair])):
            yield pair


def _pair(
    client: Process, number: int, servers: Sequence[Process], server: int, other: int
) -> Pair | None:
    """The two ends as one connection, None if their commands differ or they have none in common."""
    ends = client, servers[server]
    rows = client.rows.get(number), servers[server].rows.get(other)
    if rows[0] is None or rows[1] is None:
        return None
    numbers = [of.calls["number"][at] for of, at in zip(ends, rows, strict=True)]
    ended = client.ended.get(number), servers[server].ended.get(other)
    for end, of_other in zip(ended, reversed(numbers), strict=True):
        # the last command may have failed at one end
        if end is not None and of_other.max() > end.commands:
            return None
    common, first, second = np.intersect1d(
        numbers[0], numbers[1], assume_unique=True, return_indices=True
    )
    mine, others = rows[0][first], rows[1][second]
    for name in ("command", "out", "in"):
        if not len(mine) or (client.calls[name][mine] != ends[1].calls[name][others]).any():
            return None
    return Pair(number, common, mine, server, other, others)


def _exchanges(client: Process, server: Process, pairs: Sequence[Pair]) -> Exchanges:
    mine = np.concatenate([pair.rows for pair in pairs])
    others = np.concatenate([pair.others for pair in pairs])
    order = np.argsort(client.calls["sent"][mine], kind="stable")
    mine, others = mine[order], others[order]
    return Exchanges(
        client.calls["sent"][mine],
        server.calls["arrived"][others],
        server.calls["done"][others],
        client.calls["answered"][mine],
    )


def _stranger(client: Process, server: Process) -> str:
    """Why a log is not that of a server of the client."""
    n = counted(len(server.connections), "connection")
    servers = sorted({of.peer for of in client.connections.values()})
    local = sorted({of.local for of in server.connections.values()})
    return (
        f"does not belong to {client.run.name}: none of its {n} has the same commands at a possible"
        f" time. It served at {', '.join(local[:3])}; the client was connected to"
        f" {', '.join(servers[:3])}"
    )
