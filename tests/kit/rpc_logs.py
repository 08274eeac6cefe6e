"""Made logs of a client and of its servers, and the kernels that a merged log has to have.

The client computes some parts of each graph and the servers the others, one after the other. Every
time is made on the client's clock, so it is the truth; a server's log has what its clock shows.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory

import numpy as np
from msgspec import structs

from llamacpp_instr.log import schema as s
from llamacpp_instr.log.connections import join_processes, read_process
from llamacpp_instr.log.merge import write_merged
from llamacpp_instr.log.runs import Run
from tests.kit.made_log import Row, encode, llama_rows, llama_weights, make_log

START = 10**15
MS = 1_000_000
CODE = {name: code for code, name in enumerate(s.RPC_COMMANDS)}
LINE = 50
"""commands of a line"""
SIZES = {
    "HELLO": (33, 36), "SET_TENSOR": (1201, 0), "GRAPH_COMPUTE": (41808, 0),
    "GRAPH_RECOMPUTE": (13, 0), "GET_TENSOR": (325, 4008),
}  # fmt: skip


@dataclass
class Server:
    """A server, its link to the client, and its clock."""

    name: str
    offset: int = 0
    ppm: float = 0.0
    out: int = 20_000
    back: int = 20_000
    """minimum ns of each direction"""
    proxy: str = ""
    """the address that the client connects to, if it is another"""
    # what happened, in ns of the client's clock
    commands: list[dict[str, int]] = field(default_factory=list)
    computes: list[tuple[int, int, int, int, list[int], list[int]]] = field(default_factory=list)
    """step, first node, one past the last, begin, gaps and durations"""
    free: int = START + 2 * MS
    client_free: int = START + 2 * MS

    def time(self, t: int) -> int:
        """What its clock shows."""
        return t + self.offset + round((t - START) * self.ppm * 1e-6)

    @property
    def address(self) -> str:
        return f"{self.name}:50052"

    @property
    def endpoint(self) -> str:
        return self.proxy or self.address

    @property
    def device(self) -> str:
        return f"RPC0[{self.endpoint}]"


@dataclass
class MadeLogs:
    """The events of each log, and the truth."""

    client: list[s.Event]
    servers: list[list[s.Event]]
    kernels: dict[tuple[int, int], tuple[str, list[tuple[int, int, int]]]]
    """by compute and split: the device, and each kernel's first node, begin and end"""
    experts: dict[int, dict[int, list[int]]]
    """by compute and node of the client's graph"""

    def write(self, folder: Path) -> list[Path]:
        """Writes the client's log, then the servers'."""
        names = ["client.log", *(f"server-{'abc'[i]}.log" for i in range(len(self.servers)))]
        paths = [folder / name for name in names]
        for path, events in zip(paths, (self.client, *self.servers), strict=True):
            path.write_bytes(encode(events))
        return paths


def made_logs(
    seed: int, servers: Sequence[Server], n_steps: int = 20, per_server: int = 1,
    experts: bool = False,
) -> MadeLogs:  # fmt: skip
    """`n_steps` decodes over `servers`, each of which has `per_server` splits of a graph; with
    `experts`, each layer uses 2 of 4."""
    return _Maker(Random(seed), servers, per_server, experts).logs(n_steps)


def write_merged_log(path: Path, seed: int, servers: Sequence[Server]) -> None:
    """Merges `made_logs` as `instr merge` does."""
    with TemporaryDirectory() as folder:
        paths = made_logs(seed, servers).write(Path(folder))
        joined = join_processes([read_process(Run((str(of),))) for of in paths])
        with path.open("wb") as file:
            write_merged(joined, file)


class _Maker:
    def __init__(
        self, random: Random, servers: Sequence[Server], per_server: int, experts: bool
    ) -> None:
        self.random, self.servers = random, servers
        made = make_log(lambda low, _high: low, 1, "detailed", n_layers=3)
        self.facts = [
            of for of in made if isinstance(of, s.Model | s.Tensor | s.Context | s.Memory)
        ]
        self.begin = next(of for of in made if isinstance(of, s.SessionStart))
        weights = llama_weights(3)
        self.rows: list[Row] = llama_rows(weights, 3)
        for i, row in enumerate(self.rows if experts else ()):
            if row.name.startswith("ffn_up"):
                self.rows[i] = replace(row, op="MUL_MAT_ID", src=[-1, -2, -35 - row.layer])
        self.leafs = [
            s.Leaf(name=f"leaf {i}", ne=[256, 64, 4] if i < 30 else [2, 1]) for i in range(40)
        ]
        self.experts: dict[int, dict[int, list[int]]] = {}
        n, parts = len(self.rows), len(servers) * per_server
        starts = [i for i in range(2, n) if self.rows[i].executed]
        cuts = sorted(random.sample(starts, parts))
        bounds = zip([1, *cuts[:-1]], cuts, strict=True)
        self.splits = [s.Split(start=0, end=1, backend="CPU")]
        for i, (start, end) in enumerate(bounds):
            backend = servers[i % len(servers)].device
            self.splits.append(s.Split(start=start, end=end, backend=backend))
        self.splits.append(s.Split(start=cuts[-1], end=n, backend="CPU"))
        self.kernels: dict[tuple[int, int], tuple[str, list[tuple[int, int, int]]]] = {}
        self.t = START + 3 * MS

    # --- the client ---

    def logs(self, n_steps: int) -> MadeLogs:
        for server in self.servers:
            self.command(server, "HELLO")
        lines = [*self.steps(n_steps)]
        connections = [
            s.Connection(
                t=START + 2 * MS, connection=i, side="client", local=f"10.0.0.1:{41000 + i}",
                peer=of.endpoint, endpoint=of.endpoint,
            )
            for i, of in enumerate(self.servers)
        ]  # fmt: skip
        commands = [line for i, of in enumerate(self.servers) for line in self.rpc(i, of)]
        client = [*self.facts, *connections, *lines, *commands]
        for event in self.facts:
            event.t = START + MS
        return MadeLogs(
            self.closed(client, "c" * 16, START),
            [self.server_log(i, of) for i, of in enumerate(self.servers)],
            self.kernels,
            self.experts,
        )

    def closed(self, events: list[s.Event], number: str, t: int) -> list[s.Event]:
        start = structs.replace(self.begin, t=t, id=number, level="detailed", clock="monotonic")
        every = [start, *events]
        end = s.SessionEnd(
            t=max(of.t for of in every) + 10**10,
            reason="closed",
            events=dict(Counter(map(s.event_name, every))),
            bytes=len(encode(every)),
            dropped=0,
            dropped_ops=0,
            decode_ns=0,
            overhead_ns=0,
        )
        return [*every, end]

    def passed(self, most: int) -> int:
        dur = self.random.randrange(1, most)
        self.t += dur
        return dur

    def steps(self, n: int) -> Iterator[s.Event]:
        nodes = self.nodes(range(len(self.rows)))
        yield s.Graph(
            t=self.t, graph=0, ctx=0, uid=1, source="decode", why="first", n_nodes=len(self.rows),
            n_exec=sum(of.executed for of in self.rows), splits=self.splits, buffers=["CPU"],
            leafs=self.leafs, nodes=nodes,
        )  # fmt: skip
        own = [k for of in self.splits if of.backend == "CPU" for k in self.executed(of)]
        for step in range(n):
            self.passed(3 * MS)
            begin = self.t
            yield s.StepBegin(
                t=begin, step=step, ctx=0, kind="decode", phase="decode", n_tokens=1, n_outputs=1,
                n_seqs=1, pos=step,
            )  # fmt: skip
            prepare = self.passed(1000)
            t = self.t
            gaps, durs, kernels = [], [], list[tuple[int, int]]()
            ends = self.t
            for i, split in enumerate(self.splits):
                at = self.t
                if split.backend == "CPU":
                    gaps.append(0)
                    for _ in self.executed(split):
                        self.passed(200)
                        begins = self.t
                        kernels.append((begins, self.passed(20_000)))
                    durs.append(self.t - at)
                else:
                    server = next(of for of in self.servers if of.device == split.backend)
                    self.command(server, "SET_TENSOR", step=step, compute=step, split=i)
                    gaps.append(self.t - at)
                    at = self.t
                    self.serve(server, split, i, step)
                    durs.append(self.t - at)
                    # the next split reads the result
                    self.command(server, "GET_TENSOR", step=step, compute=step, split=i + 1)
            ends = self.t
            yield s.Compute(
                t=t, compute=step, graph=0, ctx=0, step=step, source="decode", reused=step > 0,
                n_tokens=1, n_threads=1, dur=ends - t,
            )  # fmt: skip
            if step == 0:
                yield s.Plan(t=t, plan=0, graph=0, node=own)
            first = kernels[0][0]
            times = np.array(kernels)
            gap_column = np.diff(times[:, 0]) - times[:-1, 1]
            yield from self.experts_of(step, step, own, t, 0)
            yield s.Ops(
                t=first, compute=step, plan=0, gap=[0, *gap_column.tolist()],
                dur=times[:, 1].tolist(),
            )  # fmt: skip
            yield s.Splits(
                t=t + gaps[0], compute=step, split=[*range(len(self.splits))], gap=[0, *gaps[1:]],
                dur=durs, asynchronous=[int(of.backend != "CPU") for of in self.splits],
            )  # fmt: skip
            readback = self.passed(1000)
            yield s.StepEnd(
                t=self.t, step=step, status=0, n_ubatch=1, n_reused=int(step > 0), prepare=prepare,
                readback=readback,
            )  # fmt: skip

    def experts_of(
        self, step: int, compute: int, nodes: Iterable[int], t: int, start: int
    ) -> Iterator[s.Event]:
        used = {
            node: sorted(self.random.sample(range(4), 2))
            for node in nodes
            if self.rows[node].op == "MUL_MAT_ID"
        }
        self.experts.setdefault(step, {}).update(used)
        if used:
            yield s.Experts(
                t=t, compute=compute, node=[of - start for of in used], expert=[*used.values()]
            )

    def executed(self, split: s.Split) -> list[int]:
        return [i for i in range(split.start, split.end) if self.rows[i].executed]

    def nodes(self, numbers: range) -> s.Nodes:
        rows = [self.rows[i] for i in numbers]
        return s.Nodes(
            name=[row.name for row in rows], op=[row.op for row in rows],
            layer=[row.layer for row in rows], type=["f32"] * len(rows), ne=[[256]] * len(rows),
            bytes=[1024] * len(rows),
            src=[[i for i in row.src if i < 0] for row in rows], buffer=[0] * len(rows),
            params=[[] for _ in rows], exec=[row.executed for row in rows],
        )  # fmt: skip

    def serve(self, server: Server, split: s.Split, number: int, step: int) -> None:
        """What a server computes for a split."""
        gap = [0, *(self.random.randrange(200) for _ in self.executed(split)[1:])]
        dur = [self.random.randrange(30_000) for _ in gap]
        alone = sum(of.backend == split.backend for of in self.splits) == 1
        name = "GRAPH_RECOMPUTE" if step > 0 and alone else "GRAPH_COMPUTE"
        at = {"step": step, "compute": step, "split": number}
        run = self.command(server, name, sum(gap) + sum(dur), **at)
        server.computes.append((step, split.start, split.end, run, gap, dur))
        begins = run + np.cumsum(np.array(gap) + np.array(dur)) - np.array(dur)
        self.kernels[step, number] = (
            server.device,
            [
                (k, int(t), int(t) + d)
                for k, t, d in zip(self.executed(split), begins, dur, strict=True)
            ],
        )

    def command(self, server: Server, name: str, run: int = 0, **of: int) -> int:
        """One command; returns when the graph compute begins."""
        random = self.random
        out, back = SIZES[name]
        queued = self.t
        sent = max(queued, server.client_free) + random.randrange(1000, 5000)
        written = sent + random.randrange(500, 3000)
        arrived = max(sent + server.out + int(random.expovariate(1e-4)), server.free)
        received = arrived + random.randrange(500)
        begins = received + random.randrange(200, 2000)
        done = begins + run + random.randrange(200, 2000)
        replied = done + (random.randrange(300, 900) if back else 0)
        server.free = replied
        answered = done + server.back + int(random.expovariate(1e-4)) if back else written
        server.client_free = max(answered, written)
        if back:
            self.t = answered + random.randrange(500)
        else:
            self.t += random.randrange(100, 900)
        server.commands.append({
            "command": CODE[name], "out": out, "in": back, "queued": queued, "sent": sent,
            "written": written, "answered": max(answered, written), "arrived": arrived,
            "received": received, "done": done, "replied": replied,
            "step": -1, "compute": -1, "split": -1, **of,
        })  # fmt: skip
        return begins

    def rpc(self, number: int, of: Server) -> Iterator[s.Event]:
        for first in range(0, len(of.commands), LINE):
            rows = of.commands[first : first + LINE]
            column: dict[str, list[int]] = {name: [row[name] for row in rows] for name in rows[0]}
            gaps = zip(column["answered"], column["sent"][1:], strict=False)
            yield s.Rpc(
                t=rows[0]["sent"], connection=number, first=first, command=column["command"],
                request=column["out"], reply=column["in"], gap=[0, *(b - a for a, b in gaps)],
                queue=[row["sent"] - row["queued"] for row in rows],
                send=[row["written"] - row["sent"] for row in rows],
                wait=[row["answered"] - row["written"] for row in rows],
                step=column["step"], compute=column["compute"], split=column["split"],
            )  # fmt: skip

    # --- a server ---

    def server_log(self, number: int, of: Server) -> list[s.Event]:
        """Its log, with a short connection before the client's, as a health check makes one."""
        shift = number + 3
        time = of.time
        events: list[s.Event] = [
            s.Connection(
                t=time(START + MS), connection=shift, side="server", local=of.address,
                peer="10.0.0.9:40000",
            ),
            s.Rpc(
                t=time(START + MS), connection=shift, first=0, command=[CODE["HELLO"]],
                request=[33], reply=[36], gap=[0], receive=[10], work=[20], answer=[30],
            ),
            s.ConnectionEnd(t=time(START + 2 * MS), connection=shift, reason="peer", commands=1),
            s.Connection(
                t=time(START + 2 * MS), connection=shift + 1, side="server", local=of.address,
                peer=f"10.0.0.1:{41000 + number}" if not of.proxy else "10.0.0.7:9999",
            ),
        ]  # fmt: skip
        graphs: dict[int, int] = {}
        for n, (step, start, end, run, gap, dur) in enumerate(of.computes):
            t = time(run)
            if new := start not in graphs:
                graphs[start] = len(graphs)
                nodes = self.nodes(range(start, end))
                events.append(s.Graph(
                    t=t, graph=graphs[start], ctx=-1, uid=n, source="rpc", why="changed",
                    n_nodes=end - start, n_exec=sum(nodes.exec),
                    splits=[s.Split(start=0, end=end - start, backend="CPU")], buffers=["CPU"],
                    leafs=self.leafs, nodes=nodes,
                ))  # fmt: skip
            took = sum(gap) + sum(dur)
            events.append(s.Compute(
                t=t, compute=n, graph=graphs[start], ctx=-1, source="rpc", reused=not new,
                n_threads=2, dur=took + 1,
            ))  # fmt: skip
            if new:
                node = [i - start for i in range(start, end) if self.rows[i].executed]
                events.append(s.Plan(t=t, plan=graphs[start], graph=graphs[start], node=node))
            events += self.experts_of(step, n, range(start, end), t, start)
            events.append(s.Ops(t=t, compute=n, plan=graphs[start], gap=gap, dur=dur))
        rows = [
            {name: time(row[name]) for name in ("arrived", "received", "done", "replied")}
            | {name: row[name] for name in ("command", "out", "in")}
            for row in of.commands
        ]
        graph_codes = CODE["GRAPH_COMPUTE"], CODE["GRAPH_RECOMPUTE"]
        computes = iter(range(len(of.computes)))
        for first in range(0, len(rows), LINE):
            these = rows[first : first + LINE]
            gaps = zip(these[1:], these, strict=False)
            events.append(s.Rpc(
                t=these[0]["arrived"], connection=shift + 1, first=first,
                command=[row["command"] for row in these], request=[row["out"] for row in these],
                reply=[row["in"] for row in these],
                gap=[0, *(row["arrived"] - before["replied"] for row, before in gaps)],
                receive=[row["received"] - row["arrived"] for row in these],
                work=[row["done"] - row["received"] for row in these],
                answer=[row["replied"] - row["done"] for row in these],
                compute=[next(computes) if row["command"] in graph_codes else -1 for row in these],
            ))  # fmt: skip
        events.append(s.ConnectionEnd(
            t=rows[-1]["replied"], connection=shift + 1, reason="peer", commands=len(rows)
        ))  # fmt: skip
        return self.closed(events, f"{number}" * 16, time(START))
