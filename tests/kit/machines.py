"""Sessions over several machines whose times are made: a client, links of a known delay and rate,
and machines that take a known time."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice, pairwise
from pathlib import Path
from random import Random

import numpy as np
from msgspec.structs import replace

from llamacpp_instr.log import schema as s
from llamacpp_instr.log.calls import CALLS, merged_call
from llamacpp_instr.log.schema import RPC_COMMANDS
from llamacpp_instr.log.session import Session, Table
from tests.kit.made_log import make_log
from tests.kit.reports import session_of


def calls_table(rows: Iterable[dict[str, int]]) -> Table:
    """The commands as `Session.calls` has them; what a row lacks is -1."""
    every = list(rows)
    return Table({
        name: np.array([row.get(name, -1) for row in every], np.int64) for name in CALLS
    })  # fmt: skip


@dataclass
class Wire:
    """A connection to a machine that serves one command after the other."""

    connection: int
    random: Random
    delay: tuple[int, int] = (0, 0)
    """ns of the transit there and back"""
    rate: float | None = None
    """bytes per second in each direction; None without a limit"""
    jitter: int = 5_000
    """ns by which threads begin late"""
    rows: list[dict[str, int]] = field(default_factory=list)
    _client_free: int = 0
    _wire_free: int = 0
    _server_free: int = 0

    def call(self, t: int, command: str, out: int, back: int = 0, run: int = 0, **of: int) -> int:
        """Queues a command at `t`; returns when the client has the reply of `back` bytes, or has
        sent a command without one. The machine computes for `run` ns; `of` are the step, compute
        and split."""
        late = [self.random.randint(0, self.jitter) for _ in range(5)]
        sent = max(t, self._client_free) + late[0]
        there = max(sent, self._wire_free) + self._moving(out)
        self._wire_free = there
        received = max(there + self.delay[0], self._server_free) + late[1]
        ran = received + 1_000 + late[2]
        done = ran + run + 300 if run else received + 500 + late[3]
        self._server_free = done
        row = {
            "connection": self.connection, "number": len(self.rows),
            "command": RPC_COMMANDS.index(command), "out": out, "in": back, "queued": t,
            "sent": sent, "written": sent + 900, "arrived": received - 100,
            "received": received, "started": received,
            "done": done, "replied": done, **of,
        }  # fmt: skip
        if run:
            row |= {"ran": ran, "ran_end": ran + run}
        self._client_free = sent + 900
        if back:
            self._client_free = done + self._moving(back) + self.delay[1] + late[4]
            row |= {"answered": self._client_free, "replied": done + 400}
        self.rows.append(row)
        return self._client_free

    def load(self, t: int, weights: Sequence[int]) -> int:
        """What loading a model sends: small commands, and weights of these bytes."""
        for _ in range(20):
            t = self.call(t, "ALLOC_BUFFER", 24, 24)
        for n_bytes in weights:
            t = self.call(t, "SET_TENSOR", n_bytes)
        return self.call(t, "GET_TENSOR", 300, 16)

    def compute(self, t: int, run: int, again: bool = False, **of: int) -> int:
        """One part of a step: its input, the graph and its result."""
        self.call(t, "SET_TENSOR", 2_700, **of)
        name, n_bytes = ("GRAPH_COMPUTE", 82_000) if again else ("GRAPH_RECOMPUTE", 13)
        self.call(t + 500, name, n_bytes, run=run, **of)
        return self.call(t + 900, "GET_TENSOR", 313, 2_312, **of)

    def _moving(self, n_bytes: int) -> int:
        return int(n_bytes / self.rate * 1e9) if self.rate else 0


HOSTS = ("10.0.0.2:50052", "10.0.0.3:50052")
US = 1000


@dataclass
class Made:
    """A session of a client over machines, each of which has one layer of the model."""

    events: list[s.Event]
    """without the commands"""
    wires: list[Wire]

    @property
    def rows(self) -> list[dict[str, int]]:
        """The commands."""
        return [row for wire in self.wires for row in wire.rows]

    def log(self, merged: bool = True) -> list[s.Event]:
        """The events with the commands, 50 of a connection per line, after what they name. What the
        machines recorded is included if their logs are `merged`."""
        lines: list[s.Event] = []
        for event in self.events:
            theirs = isinstance(event, s.Device) or (isinstance(event, s.Ops) and event.device)
            if theirs and not merged:
                continue
            if isinstance(event, s.Connection) and merged:
                host = s.Host(cpu="A CPU", features=[], cores=2, memory=1 << 30, os="Linux")
                event = replace(
                    event, id="0" * 16, host=host, offset=0, drift=0.0, uncertainty=7000
                )
            lines.append(event)
        for wire in self.wires:
            rows = iter(wire.rows)
            while some := [*islice(rows, 50)]:
                lines.append(rpc_event(some, merged))
        return lines


def over_machines(
    wires: Sequence[Wire],
    runs: Sequence[int],
    n_steps: int = 40,
    again: bool = False,
    weights: Sequence[int] = (),
    hosts: Sequence[str] = HOSTS,
    **context: bool,
) -> Made:
    """Loading `weights` and `n_steps` decodes over `wires`, whose machines compute for `runs` ns in
    each; `again` sends each graph again. `context` are keys of that event."""
    return Made([*_events(wires, runs, n_steps, again, weights, hosts, context)], [*wires])


def session_over_machines(path: Path, made: Made, merged: bool = True) -> Session:
    """The session of a client's log, which is `merged` with those of the machines."""
    return session_of(path, made.log(merged))


def rpc_event(rows: Sequence[dict[str, int]], merged: bool = True) -> s.Rpc:
    """Commands of one connection as a client's log has them."""
    columns = calls_table(rows).columns
    ends = np.maximum(columns["written"], columns["answered"])
    begin = int(columns["sent"][0])
    names = "command", "out", "in", "step", "compute", "split"
    command, out, back, step, compute, split = (columns[name].tolist() for name in names)
    event = s.Rpc(
        t=begin, connection=rows[0]["connection"], first=rows[0]["number"], command=command,
        request=out, reply=back, step=step, compute=compute, split=split,
        gap=(columns["sent"] - np.concatenate([[begin], ends[:-1]])).tolist(),
        queue=(columns["sent"] - columns["queued"]).tolist(),
        send=(columns["written"] - columns["sent"]).tolist(),
        wait=(ends - columns["written"]).tolist(),
    )  # fmt: skip
    return merged_call(event, columns) if merged else event


def _events(
    wires: Sequence[Wire],
    runs: Sequence[int],
    n_steps: int,
    again: bool,
    weights: Sequence[int],
    hosts: Sequence[str],
    context: dict[str, bool],
) -> Iterator[s.Event]:
    made = make_log(lambda low, high: high, 1, "detailed", n_layers=len(wires))  # noqa: ARG005
    t = 10**9
    for event in made:
        if isinstance(event, s.SessionStart | s.Model | s.Tensor):
            yield replace(event, t=t)
        elif isinstance(event, s.Context):
            yield replace(event, t=t, n_threads=1, **context)
    graph = next(event for event in made if isinstance(event, s.Graph))
    nodes = graph.whole
    last = [max(i for i, of in enumerate(nodes.layer) if of == il) for il in range(len(wires))]
    bounds = [0, 1, *(at + 1 for at in last[:-1]), graph.n_nodes]
    devices = [f"RPC0[{host}]" for host in hosts[: len(wires)]]
    splits = [
        s.Split(start=begin, end=end, backend=name)
        for (begin, end), name in zip(pairwise(bounds), ["CPU", *devices], strict=True)
    ]
    for wire, host in zip(wires, hosts, strict=False):
        yield s.Connection(
            t=t, connection=wire.connection, side="client", local=f"10.0.0.1:4{wire.connection}",
            peer=host, endpoint=host,
        )  # fmt: skip
        t = wire.load(t, weights)
    for name in devices:
        yield s.Device(
            t=t, name=name, description="A CPU", clock="joined", tick=1.0, uncertainty=7_000
        )
    yield replace(graph, t=t, graph=0, splits=splits)
    kernels = [
        [node for node in range(of.start, of.end) if nodes.exec[node]] for of in splits
    ]  # fmt: skip
    for i, of in enumerate(kernels):
        yield s.Plan(t=t, plan=i, graph=0, node=of)
    for step in range(n_steps):
        begin = t = t + 50 * US
        yield s.StepBegin(
            t=t, step=step, ctx=0, kind="decode", phase="decode", n_tokens=1, n_outputs=1,
            n_seqs=1, pos=step, seq=[0], seq_pos=[step],
        )  # fmt: skip
        gap, dur, lines = [0], [10 * US], list[s.Event]()
        t += 20 * US + dur[0]
        for i, (wire, run) in enumerate(zip(wires, runs, strict=True), start=1):
            submitted = t
            t = wire.compute(t, run, again or not step, step=step, compute=step, split=i)
            ran = wire.rows[-2]["ran"]
            each = np.diff(np.linspace(0, run, len(kernels[i]) + 1).astype(int)).tolist()
            lines.append(s.Ops(
                t=ran, compute=step, plan=i, device=devices[i - 1], split=i, dur=each
            ))  # fmt: skip
            gap.append(submitted - (begin + 20 * US + sum(gap) + sum(dur)))
            dur.append(20 * US)
        end = begin + 20 * US + sum(gap) + sum(dur)
        yield s.Compute(
            t=begin, compute=step, graph=0, ctx=0, step=step, source="decode", reused=step > 0,
            n_tokens=1, n_threads=1, start=20 * US, dur=end - begin - 20 * US,
        )  # fmt: skip
        yield s.Ops(t=begin + 20 * US, compute=step, plan=0, dur=dur[:1])
        yield s.Splits(
            t=begin + 20 * US, compute=step, split=[*range(len(gap))], gap=gap, dur=dur,
            asynchronous=[0, *[1] * len(wires)],
        )  # fmt: skip
        yield s.StepEnd(
            t=end + 5 * US, step=step, status=0, n_ubatch=1, n_reused=int(step > 0),
            prepare=20 * US, readback=0,
        )  # fmt: skip
        yield s.Sync(t=end + 5 * US, ctx=0, dur=t - end)
        yield from lines
        t += 5 * US
