"""Generates whole logs that are valid in every respect, from a source of choices.

The events are those that a recorder writes for a small Llama: several contexts that decode at once
in separate threads, graphs that are reused or rebuilt, fused kernels, levels.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from random import Random
from typing import Literal

import msgspec

from llamacpp_instr.log import schema as s


@dataclass
class Row:
    """A node; negative sources are leafs: the weights, then the tokens, then a cache."""

    name: str
    op: str
    layer: int
    src: list[int]
    executed: int = 1
    params: tuple[int, ...] = ()


def llama_weights(n_layers: int) -> list[str]:
    weights = ["token_embd.weight"]
    for il in range(n_layers):
        parts = "attn_norm attn_q attn_k attn_v attn_output ffn_norm ffn_gate ffn_up ffn_down"
        weights += [f"blk.{il}.{part}.weight" for part in parts.split()]
    return [*weights, "output_norm.weight", "output.weight"]


def llama_rows(weights: list[str], n_layers: int) -> list[Row]:
    """The nodes of a Llama; negative sources are leafs: the weights, then the inputs."""
    weight = {name: -1 - i for i, name in enumerate(weights)}
    tokens, cache = -1 - len(weights), -2 - len(weights)
    rows = [Row("inp_embd", "GET_ROWS", -1, [weight["token_embd.weight"], tokens])]

    def add(name: str, op: str, il: int, *src: int, executed: int = 1) -> int:
        rows.append(Row(name, op, il, list(src), executed))
        return len(rows) - 1

    x = 0
    for il in range(n_layers):
        w = {n.split(".")[2]: i for n, i in weight.items() if n.startswith(f"blk.{il}.")}
        h = add(f"norm-{il}", "RMS_NORM", il, x)
        h = add(f"attn_norm-{il}", "MUL", il, h, w["attn_norm"])
        q = add(f"Qcur-{il}", "MUL_MAT", il, w["attn_q"], h)
        q = add(f"Qcur-{il}", "ROPE", il, q)
        k = add(f"Kcur-{il}", "MUL_MAT", il, w["attn_k"], h)
        k = add(f"cache_k_l{il}", "SET_ROWS", il, k, cache)
        v = add(f"cache_v_l{il} (view)", "VIEW", il, cache, executed=0)
        h = add(f"node_{len(rows)}", "FLASH_ATTN_EXT", il, q, k, v)
        h = add(f"attn_out-{il}", "MUL_MAT", il, w["attn_output"], h)
        x = add(f"ffn_inp-{il}", "ADD", il, h, x)
        h = add(f"norm-{il}", "RMS_NORM", il, x)
        h = add(f"ffn_norm-{il}", "MUL", il, h, w["ffn_norm"])
        g = add(f"ffn_gate-{il}", "MUL_MAT", il, w["ffn_gate"], h)
        u = add(f"ffn_up-{il}", "MUL_MAT", il, w["ffn_up"], h)
        g = add(f"ffn_swiglu-{il}", "GLU", il, g, u)
        h = add(f"ffn_out-{il}", "MUL_MAT", il, w["ffn_down"], g)
        x = add(f"l_out-{il}", "ADD", il, h, x)
    x = add("norm", "RMS_NORM", -1, x)
    x = add("result_norm", "MUL", -1, x, weight["output_norm.weight"])
    add("result_output", "MUL_MAT", -1, weight["output.weight"], x)
    return rows


Pick = Callable[[int, int], int]
"""a number between two bounds, inclusive"""


def make_log(
    pick: Pick, n_contexts: int = 0, level: s.Level | None = None, n_layers: int = 0
) -> list[s.Event]:
    """The events of one closed log."""
    level = level or s.LEVELS[pick(0, 2)]
    maker = _Maker(pick, Random(pick(0, 2**32)), level, n_layers or pick(1, 3))
    streams = [list(maker.context(ctx)) for ctx in range(n_contexts or pick(1, 3))]
    events = [maker.session_start(), *maker.model(), *maker.interleave(streams)]
    return [*events, maker.session_end(events)]


def encode(events: list[s.Event]) -> bytes:
    return b"".join(line + b"\n" for line in map(msgspec.json.Encoder().encode, events))


class _Maker:
    def __init__(self, pick: Pick, random: Random, level: s.Level, n_layers: int) -> None:
        self.pick, self.random, self.level, self.n_layers = pick, random, level, n_layers
        self.ids: Counter[str] = Counter()
        self.start = 10**12 + random.randrange(10**6)
        self.decode_ns = 0
        self.latest = self.start
        self.weights = llama_weights(n_layers)

    def new(self, kind: str) -> int:
        self.ids[kind] += 1
        return self.ids[kind] - 1

    # --- the session and its facts ---

    def session_start(self) -> s.SessionStart:
        return s.SessionStart(
            t=self.start,
            schema=s.SCHEMA_VERSION,
            id=f"{self.random.getrandbits(64):016x}",
            time="2025-06-01T12:00:00.000Z",
            wall=1_748_779_200_000_000_000,
            level=self.level,
            clock=("tsc", "cntvct", "monotonic")[self.pick(0, 2)],
            producer=s.Producer(llama_cpp="0.3.36+instr.1", commit="abc", patches="def", abi=2),
            host=s.Host(cpu="A CPU", features=["AVX2"], cores=2, memory=8 << 30, os="Linux"),
            process=s.Process(pid=42, argv=["python", "app.py"]),
            args={"prompt": "Once upon a time, ünïcödé", "repeat": 1},
        )

    def model(self) -> Iterator[s.Event]:
        yield s.Model(
            t=self.start + 100,
            model=0,
            path="model.gguf",
            arch="llama",
            params=1_000_000,
            bytes=2_000_000,
            ftype="F16",
            hparams={"n_layer": self.n_layers, "n_embd": 256, "rope.freq_base": 10000.0},
            dur=1_000_000,
            n_tensors=len(self.weights),
        )
        for i, name in enumerate(self.weights):
            layer = int(name.split(".")[1]) if name.startswith("blk.") else -1
            yield s.Tensor(
                t=self.start + 200,
                model=0,
                tensor=i,
                name=name,
                type="F32" if "norm" in name else "F16",
                ne=[256] if "norm" in name else [256, 256],
                bytes=1024 if "norm" in name else 131072,
                buffer="CPU_Mapped",
                layer=layer,
            )

    def session_end(self, events: list[s.Event]) -> s.SessionEnd:
        return s.SessionEnd(
            t=self.latest + 10,
            reason="closed",
            events=dict(Counter(map(s.event_name, events))),
            bytes=len(encode(events)),
            dropped=0,
            dropped_ops=0,
            decode_ns=self.decode_ns,
            overhead_ns=self.decode_ns // 200,
        )

    def interleave(self, streams: list[list[s.Event]]) -> Iterator[s.Event]:
        """Merge streams like contexts that write into one log: each keeps its order."""
        streams = [stream[::-1] for stream in streams]
        while streams := [stream for stream in streams if stream]:
            yield self.random.choice(streams).pop()

    # --- a context ---

    def context(self, ctx: int) -> Iterator[s.Event]:
        t = self.start + 2_000_000 + self.random.randrange(1000)
        n_threads = self.pick(1, 3)
        yield s.Context(
            t=t,
            ctx=ctx,
            model=0,
            n_ctx=512,
            n_ctx_seq=512,
            n_batch=64,
            n_ubatch=32,
            n_seq_max=1,
            n_threads=n_threads,
            n_threads_batch=n_threads,
            type_k="f16",
            type_v="f16",
            flash_attn=True,
            causal=True,
            embeddings=False,
            kv_unified=False,
            offload_kqv=True,
            backends=["CPU"],
        )
        yield self.memory(ctx, t + 10)
        work = _Context(self, ctx, n_threads, t + 1000)
        for i in range(self.pick(0, 4)):
            yield from work.step(n_tokens=self.pick(2, 40) if i == 0 else 1)
        self.latest = max(self.latest, work.t)

    def memory(self, ctx: int, t: int) -> s.Memory:
        use = s.BufferUse(buffer="CPU", model=2_000_000, context=262_144, compute=65_536)
        return s.Memory(t=t, ctx=ctx, buffers=[use], rss=50_000_000)


@dataclass
class _Context:
    maker: _Maker
    ctx: int
    n_threads: int
    t: int
    pos: int = 0
    n_sampled: int = 0
    graph: int = -1
    plan: int = -1

    def __post_init__(self) -> None:
        self.rows = llama_rows(self.maker.weights, self.maker.n_layers)
        self.kernels = [i for i, row in enumerate(self.rows) if row.executed]
        self.counts = [1] * len(self.kernels)

    def pass_time(self, most: int = 2000) -> int:
        """A duration, by which the context's clock advances."""
        dur = self.maker.random.randrange(most)
        self.t += dur
        return dur

    def step(self, n_tokens: int) -> Iterator[s.Event]:
        pick = self.maker.pick
        mark = self.maker.new("mark") if pick(0, 3) == 0 else -1
        if mark >= 0:
            yield s.Mark(t=self.t, mark=mark, name="turn", phase="begin", thread=100 + self.ctx)
        step, begin = self.maker.new("step"), self.t
        yield s.StepBegin(
            t=begin,
            step=step,
            ctx=self.ctx,
            kind="decode",
            phase="prefill" if n_tokens > 1 else "decode",
            n_tokens=n_tokens,
            n_outputs=1,
            n_seqs=1,
            pos=self.pos,
            thread=100 + self.ctx,
            seq=[0],
            seq_pos=[self.pos],
            seq_tokens=[n_tokens] if n_tokens > 1 else None,
        )
        prepare = self.pass_time()
        n_ubatch, n_reused = (2 if n_tokens > 32 else 1), 0
        for i in range(n_ubatch):
            new = self.graph < 0 or i > 0 or pick(0, 2) == 0
            n_reused += not new
            share = n_tokens // n_ubatch + (n_tokens % n_ubatch if i == 0 else 0)
            yield from self.ubatch(step, share, new)
        readback = self.pass_time()
        yield s.StepEnd(
            t=self.t,
            step=step,
            status=0,
            n_ubatch=n_ubatch,
            n_reused=n_reused,
            prepare=prepare,
            readback=readback,
            minflt=pick(0, 5),
        )
        self.maker.decode_ns += self.t - begin
        token = s.Token(
            t=self.t + 5,
            ctx=self.ctx,
            step=step,
            seq=0,
            index=self.n_sampled,
            id=self.maker.random.randrange(1000),
            text=" wörd" if pick(0, 3) else "\ufffd",
            dur=200,
        )
        if token.text == "\ufffd":
            token.hex = "ff"
        yield token
        if pick(0, 3) == 0:
            yield s.Machine(
                t=self.t + 210, dur=self.t - begin, cpu=2 * (self.t - begin), delay=pick(0, 2000),
                busy=2 * (self.t - begin) + 10_001_000 * (self.n_sampled % 3),
                nvcsw=pick(0, 3), nivcsw=pick(0, 3),
                load=0.25 * pick(0, 8), running=pick(0, 4),
                steal=0,
            )  # fmt: skip
        self.n_sampled += 1
        self.t += 300
        if mark >= 0:
            yield s.Mark(t=self.t, mark=mark, name="turn", phase="end", thread=100 + self.ctx)

    def ubatch(self, step: int, n_tokens: int, new: bool) -> Iterator[s.Event]:
        maker, level = self.maker, self.maker.level
        t = self.t
        apply = self.pass_time(500)
        first = self.pos
        self.pos += n_tokens
        yield s.Kv(
            t=t,
            ctx=self.ctx,
            step=step,
            op="apply",
            used=self.pos,
            size=512,
            bytes=self.pos * 512,
            n_kv=256,
            cells=list(range(first, self.pos)) if level == "verbose" else None,
        )
        build = alloc = 0
        if new:
            why: Literal["first", "changed"] = "first" if self.graph < 0 else "changed"
            build, alloc = self.pass_time(), self.pass_time()
            yield self.new_graph(why)
            if maker.pick(0, 1):
                yield maker.memory(self.ctx, self.t)
        inputs = self.pass_time(100)
        start = self.t - t
        compute = maker.new("compute")
        gap, dur = self.columns()
        took = sum(gap) + sum(dur) + maker.random.randrange(100)
        yield s.Compute(
            t=t,
            compute=compute,
            graph=self.graph,
            ctx=self.ctx,
            step=step,
            source="decode",
            reused=not new,
            n_tokens=n_tokens,
            n_threads=self.n_threads,
            apply=apply,
            build=build,
            alloc=alloc,
            inputs=inputs,
            start=start,
            dur=took,
        )
        if level != "minimal" and self.plan < 0:
            self.plan = maker.new("plan")
            fused = any(n > 1 for n in self.counts)
            yield s.Plan(
                t=self.t,
                plan=self.plan,
                graph=self.graph,
                node=self.kernels,
                n=self.counts if fused else None,
            )
        yield self.layers(compute, gap, dur)
        if level != "minimal":
            for thread in range(self.n_threads if level == "verbose" else 1):
                wait = [d // 2 for d in dur] if level == "verbose" else None
                all_zero = not any(gap)
                yield s.Ops(
                    t=self.t,
                    compute=compute,
                    plan=self.plan,
                    thread=thread,
                    gap=None if all_zero else gap,
                    dur=dur,
                    wait=wait,
                )
        self.t += took

    def columns(self) -> tuple[list[int], list[int]]:
        random = self.maker.random
        gaps = bool(self.maker.pick(0, 1))
        gap = [random.randrange(50) * gaps * (i > 0) for i in range(len(self.kernels))]
        weight = {"MUL_MAT": 9000, "FLASH_ATTN_EXT": 3000}
        dur = [random.randrange(weight.get(self.rows[i].op, 300)) for i in self.kernels]
        return gap, dur

    def layers(self, compute: int, gap: list[int], dur: list[int]) -> s.Layers:
        layers, gaps, durs = list[int](), list[int](), list[int]()
        for i, node in enumerate(self.kernels):
            if not layers or layers[-1] != self.rows[node].layer:
                layers.append(self.rows[node].layer)
                gaps.append(gap[i])
                durs.append(dur[i])
            else:
                durs[-1] += gap[i] + dur[i]
        gap_column = gaps if any(gaps) else None
        return s.Layers(t=self.t, compute=compute, layer=layers, gap=gap_column, dur=durs)

    def new_graph(self, why: Literal["first", "changed"]) -> s.Graph:
        maker = self.maker
        if maker.pick(0, 1):
            self.fuse()
        self.graph, self.plan = maker.new("graph"), -1
        rows = self.rows
        nodes = s.Nodes(
            name=[row.name for row in rows],
            op=[row.op for row in rows],
            layer=[row.layer for row in rows],
            type=["f32"] * len(rows),
            ne=[[256]] * len(rows),
            bytes=[1024] * len(rows),
            src=[row.src for row in rows],
            buffer=[0] * len(rows),
            params=[list(row.params) for row in rows],
            exec=[row.executed for row in rows],
            nb=[[4, 1024, 1024, 1024]] * len(rows) if maker.level == "verbose" else None,
        )
        leafs = [
            s.Leaf(name=name, type="F16", ne=[256, 256], bytes=131072, tensor=i)
            for i, name in enumerate(maker.weights)
        ]
        leafs.append(s.Leaf(name="inp_tokens", type="i32", ne=[1], bytes=4))
        leafs.append(s.Leaf(name="cache_k_l0", type="f16", ne=[256, 512], bytes=262144))
        minimal = maker.level == "minimal"
        return s.Graph(
            t=self.t,
            graph=self.graph,
            ctx=self.ctx,
            uid=1000 + self.graph,
            source="decode",
            why=why,
            n_nodes=len(rows),
            n_exec=sum(row.executed for row in rows),
            splits=[s.Split(start=0, end=len(rows), backend="CPU")],
            buffers=["CPU"],
            leafs=[] if minimal else leafs,
            nodes=None if minimal else nodes,
        )

    def fuse(self) -> None:
        """From now on, RMS_NORM and the MUL after it are one kernel."""
        rows = self.rows
        self.kernels = [
            i
            for i, row in enumerate(rows)
            if row.executed and not (row.op == "MUL" and rows[i - 1].op == "RMS_NORM")
        ]
        self.counts = [2 if rows[i].op == "RMS_NORM" else 1 for i in self.kernels]
