"""Makes one log from a client's log and its servers': every machine on the client's clock.

Invariant: the client's events and their ids are unchanged, except for the numbers of plans. Each
compute is followed by the kernels that servers ran for it, as those of a device; node k of a
server's graph is node `start + k` of the client's, where `start` is that of the split. A server's
kernel appears once or, if its log lacks it, not at all. The logs are read side by side: only what
servers computed between two computes of the client is held back.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from hashlib import blake2b
from typing import Any, BinaryIO, NamedTuple

import msgspec
import numpy as np
from msgspec.structs import replace

from llamacpp_instr.base.errors import LogError
from llamacpp_instr.base.terminal import OnProgress
from llamacpp_instr.log import schema
from llamacpp_instr.log.calls import Int64, merged_call
from llamacpp_instr.log.clocks import Clock
from llamacpp_instr.log.connections import Joined, Process
from llamacpp_instr.log.devices import RUNS_KEPT
from llamacpp_instr.log.known import KnownCompute
from llamacpp_instr.log.reader import EventReader
from llamacpp_instr.log.resolve import Resolver
from llamacpp_instr.log.runs import read_run
from llamacpp_instr.log.schema import Event

_MEASURED = (
    schema.Plan, schema.Experts, schema.Layers, schema.Ops, schema.Splits, schema.TensorStats,
    schema.Device,
)  # fmt: skip
"""what may follow a compute and belongs to it"""
WAITING = 1024
"""computes of a server that wait for the client's, at most"""


def write_merged(
    joined: Joined, file: BinaryIO, lenient: bool = False, on_progress: OnProgress | None = None
) -> None:
    """Writes the log. Raises LogError for logs that do not fit each other."""
    counts: Counter[str] = Counter()
    n_bytes = 0
    encode = msgspec.json.Encoder().encode
    for event in _Merger(joined, lenient).events(on_progress):
        if isinstance(event, schema.SessionEnd):
            event = replace(event, events=dict(counts), bytes=n_bytes)
        counts[schema.event_name(event)] += 1
        line = encode(event) + b"\n"
        n_bytes += len(line)
        file.write(line)


class _Kernels(NamedTuple):
    """What a server ran for one compute of the client."""

    ops: schema.Ops
    plan: schema.Plan
    graph: schema.Graph
    slack: int
    """ns by which the times may be wrong on the server's clock"""
    experts: schema.Experts | None


class _OfSplit(NamedTuple):
    """What a server ran for one split of a compute."""

    split: int
    server: int
    kernels: _Kernels


class _Server:
    """The kernels of a server's log, in its order."""

    def __init__(self, of: Process, computes: Int64, lenient: bool) -> None:
        """`computes` are those that the client asked for, ascending."""
        self.name = of.run.name
        self._asked = computes
        self._refs = Resolver(masks=False)
        self._events = self._refs.follow(read_run(of.run, lenient), lenient)
        self._found: dict[int, list[_Kernels]] = {}
        self._latest = -1
        self._experts: schema.Experts | None = None

    def take(self, compute: int) -> list[_Kernels]:
        """The kernels of a compute, which are given once."""
        # those of a device may be late
        while self._latest < compute + (0 if compute in self._found else RUNS_KEPT):
            if not self._read():
                break
        while compute in self._found and self._latest == compute and self._read():
            pass
        return self._found.pop(compute, [])

    def _read(self) -> bool:
        """Whether there was another event."""
        _, event = next(self._events, (0, None))
        if isinstance(event, schema.Compute):
            self._latest = max(self._latest, event.compute)
        elif isinstance(event, schema.Experts):
            self._experts = event
        elif isinstance(event, schema.Ops) and event.thread == 0:
            at = np.searchsorted(self._asked, event.compute)
            if at < len(self._asked) and self._asked[at] == event.compute:
                device, experts = self._refs.devices.get(event.device), self._experts
                kernels = _Kernels(
                    event,
                    self._refs.plan.event,
                    self._refs.plan.graph.event,
                    device.uncertainty if device else 0,
                    experts if experts and experts.compute == event.compute else None,
                )
                self._found.setdefault(event.compute, []).append(kernels)
                if len(self._found) > WAITING:
                    del self._found[next(iter(self._found))]
        return event is not None


class _Merger:
    def __init__(self, joined: Joined, lenient: bool) -> None:
        self._joined, self._lenient = joined, lenient
        self._computes = joined.computes()
        of_server = self._computes["server"]
        self._servers = [
            _Server(of, np.unique(self._computes["other"][of_server == i]), lenient)
            for i, of in enumerate(joined.servers)
        ]
        self._refs = Resolver(masks=False)
        self._waiting: list[tuple[KnownCompute, list[_OfSplit]]] = []
        """computes whose own measurements may still come, and what servers ran for them"""
        self._plans: dict[int, dict[Any, int]] = {}
        """the new number of each plan of each graph of the client: by its old number, and by split,
        server and the server's plan"""
        self._n_plans = 0
        self._devices: dict[str, int] = {}
        """the stated uncertainty of each"""
        self._lacking: Counter[str] = Counter()
        """splits without kernels, by device"""

    def events(self, on_progress: OnProgress | None) -> Iterator[Event]:
        """The events of the merged log, whose `session_end` counts those of the client."""
        reader = _Raw(read_run(self._joined.client.run, self._lenient, on_progress))
        experts: schema.Experts | None = None
        for _, event in self._refs.follow(reader, self._lenient):
            if experts is not None:  # they come before the kernels
                if isinstance(event, schema.Experts) and event.compute == experts.compute:
                    reader.latest = _together(event, experts)
                else:
                    yield experts
                experts = None
            if not isinstance(event, _MEASURED):
                yield from self._of_servers()
            yield self._own(event, reader.latest)
            if isinstance(event, schema.Compute):
                found = self._found(event, self._refs.graph.event)
                self._waiting.append((self._refs.compute, found))
                experts = _experts_of(self._refs.compute, found)
        yield from self._of_servers()

    def _own(self, event: Event, raw: Event) -> Event:
        """An event of the client as the merged log has it; `raw` is as it was written."""
        if isinstance(event, schema.SessionStart):
            ids = [event.id, *(of.start.id for of in self._joined.servers)]
            digest = blake2b("\0".join(ids).encode(), digest_size=8).hexdigest()
            perturbed = event.perturbed or any(of.start.perturbed for of in self._joined.servers)
            return replace(event, id=digest, part=1, perturbed=perturbed)
        if isinstance(event, schema.Connection) and event.connection in self._joined.pairs:
            pair = self._joined.pairs[event.connection]
            server, clock = self._joined.servers[pair.server], self._joined.clocks[pair.server]
            return replace(
                event,
                id=server.start.id,
                host=server.start.host,
                offset=clock.offset,
                drift=clock.drift,
                uncertainty=clock.uncertainty,
            )
        if isinstance(event, schema.Rpc) and event.connection in self._joined.pairs:
            return merged_call(event, self._joined.server_times(event))
        if isinstance(event, schema.Plan):
            return self._plan(raw)
        if isinstance(event, schema.Ops):
            plans = self._plans[self._refs.plan.graph.event.graph]
            return replace(event, plan=plans[event.plan])
        if isinstance(event, schema.SessionEnd):
            known = (self._lacking[device] for device in self._devices)
            return replace(event, dropped_ops=event.dropped_ops + sum(known))
        return raw

    def _plan(self, raw: Event) -> schema.Plan:
        assert isinstance(raw, schema.Plan)
        plans = self._plans_of(raw.graph)
        plans[raw.plan] = self._new_plan()
        like = raw.like
        if like is not None:
            like = next(of[like] for of in self._plans.values() if like in of)
        return replace(raw, plan=plans[raw.plan], like=like)

    def _plans_of(self, graph: int) -> dict[Any, int]:
        if graph not in self._plans:
            for forgotten in self._plans.keys() - self._refs.graphs.keys():
                del self._plans[forgotten]
        return self._plans.setdefault(graph, {})

    def _new_plan(self) -> int:
        self._n_plans += 1
        return self._n_plans - 1

    def _found(self, compute: schema.Compute, graph: schema.Graph) -> list[_OfSplit]:
        """What servers ran for a compute."""
        numbers = self._computes["compute"]
        first, end = np.searchsorted(numbers, [compute.compute, compute.compute + 1]).tolist()
        names = ("split", "server", "other")
        found: list[_OfSplit] = []
        for row in range(first, end) if graph.nodes is not None else ():
            split, server, other = (int(self._computes[name][row]) for name in names)
            of = self._servers[server].take(other)
            if not of:
                known = 0 <= split < len(graph.splits)
                self._lacking[graph.splits[split].backend if known else ""] += 1
            for kernels in of:
                if (split, server, kernels.plan.plan) not in self._plans_of(graph.graph):
                    self._check(compute, graph, split, server, kernels.graph)
                found.append(_OfSplit(split, server, kernels))
        return found

    def _of_servers(self) -> Iterator[Event]:
        """The lines of all servers for the computes whose own lines were written."""
        for compute, found in self._waiting:
            for of in found:
                yield from self._of_server(compute.event, compute.graph.event, *of)
        self._waiting.clear()

    def _of_server(
        self, compute: schema.Compute, graph: schema.Graph, split: int, server: int, of: _Kernels
    ) -> Iterator[Event]:
        clock = self._joined.clocks[server]
        plans = self._plans_of(graph.graph)
        key = split, server, of.plan.plan
        if key not in plans:
            plans[key] = self._new_plan()
            start = graph.splits[split].start
            node = [start + first for first in of.plan.node]
            yield schema.Plan(
                t=compute.t, plan=plans[key], graph=graph.graph, node=node, n=of.plan.n
            )
        name = graph.splits[split].backend
        uncertainty = of.slack + _uncertainty(clock, of.ops)
        if uncertainty > self._devices.get(name, -1):
            self._devices[name] = uncertainty
            host = self._joined.servers[server].start.host
            device = f" {of.ops.device}" if of.ops.device else ""
            yield schema.Device(
                t=compute.t,
                name=name,
                description=f"{host.cpu}{device}",
                clock="joined",
                tick=1.0,
                uncertainty=uncertainty,
            )
        (t,) = clock.to_client(np.array([of.ops.t])).tolist()
        yield schema.Ops(
            t=t,
            compute=compute.compute,
            plan=plans[key],
            device=name,
            split=split,
            gap=of.ops.gap,
            dur=of.ops.dur,
        )

    def _check(
        self, compute: schema.Compute, graph: schema.Graph, split: int, server: int,
        other: schema.Graph,
    ) -> None:  # fmt: skip
        """Raises LogError if a server's graph is not the split of the client's."""
        theirs, mine = other.nodes, graph.whole
        if 0 <= split < len(graph.splits) and theirs is not None:
            nodes = slice(graph.splits[split].start, graph.splits[split].end)
            if mine.name[nodes] == theirs.name and mine.op[nodes] == theirs.op:
                return
        raise LogError(
            f"graph {other.graph} is not split {split} of compute {compute.compute} of"
            f" {self._joined.client.run.name}, which asked for it",
            self._servers[server].name,
        )


def _experts_of(compute: KnownCompute, found: Sequence[_OfSplit]) -> schema.Experts | None:
    """The experts that servers used for a compute, by the nodes of the client; those that read
    their ids in another split of the client are left out."""
    columns: list[tuple[int, list[int], list[int]]] = []
    for of in found:
        start = compute.graph.event.splits[of.split].start
        for node, expert, uses in of.kernels.experts.choices() if of.kernels.experts else ():
            choice = compute.graph.choices.get(start + node)
            if choice is not None and choice.node == start + node:
                columns.append((start + node, expert, uses))
    if not columns:
        return None
    event = compute.event
    return _experts(schema.Experts(t=event.t, compute=event.compute, node=[], expert=[]), columns)


def _together(one: schema.Experts, other: schema.Experts) -> schema.Experts:
    """The experts of both events of a compute."""
    return _experts(one, [*one.choices(), *other.choices()])


def _experts(
    event: schema.Experts, columns: Sequence[tuple[int, list[int], list[int]]]
) -> schema.Experts:
    """The event with these nodes, in order, their experts and uses."""
    columns = sorted(columns)
    return replace(
        event,
        node=[node for node, _, _ in columns],
        expert=[expert for _, expert, _ in columns],
        uses=[uses for _, _, uses in columns],
    )


class _Raw:
    """The events of a log; `latest` is the last one as it was written."""

    def __init__(self, reader: EventReader) -> None:
        self._reader = reader
        self.latest: Event

    @property
    def path(self) -> str:
        return self._reader.path

    @property
    def end(self) -> Any:
        return self._reader.end

    @end.setter
    def end(self, end: Any) -> None:
        self._reader.end = end

    def __iter__(self) -> Iterator[tuple[int, Event]]:
        for line, event in self._reader:
            self.latest = event
            yield line, event


def _uncertainty(clock: Clock, ops: schema.Ops) -> int:
    """The uncertainty of the times of kernels, whose durations are on the server's clock."""
    took = sum(ops.dur) + sum(ops.gap or ())
    ends = clock.uncertainty_at(np.array([ops.t, ops.t + took]))
    return int(ends.max()) + int(abs(clock.drift) * took) + 1
