"""Logs of one sequence whose times are written down, for figures that can be computed by hand."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

from msgspec.structs import replace

from llamacpp_instr.log import schema as s
from tests.kit.made_log import make_log

Ops = tuple[Sequence[int], Sequence[int]]
"""durations of two kernels, of which the first reads the weight; and their waiting"""


class Sketch:
    """A log of `events`; steps follow each other without a pause, unless `pause` is called."""

    def __init__(self, weight: str = "f16") -> None:
        made = make_log(Random(1).randint, 1, "verbose")
        kinds = s.SessionStart | s.Model | s.Context
        self.events: list[s.Event] = [replace(e, t=0) for e in made if isinstance(e, kinds)]
        self.t = self.pos = self.n_steps = self.n_tokens = self.n_computes = 0
        nodes = s.Nodes(
            name=["Qcur-0", "ffn_inp-0"], op=["MUL_MAT", "ADD"], layer=[0, 0],
            type=["f32", "f32"], ne=[[8], [8]], bytes=[32, 32], src=[[-1, -2], [0, -2]],
            buffer=[0, 0], params=[[], []], exec=[1, 1],
        )  # fmt: skip
        leafs = [
            s.Leaf(name="blk.0.attn_q.weight", type=weight, ne=[4, 8], bytes=64, tensor=0),
            s.Leaf(name="inp", type="f32", ne=[4], bytes=16),
        ]
        splits = [s.Split(start=0, end=2, backend="CPU")]
        self.events += [
            s.Graph(t=0, graph=0, ctx=0, uid=1, source="decode", why="first", n_nodes=2, n_exec=2,
                    splits=splits, buffers=["CPU"], leafs=leafs, nodes=nodes),
            s.Plan(t=0, plan=0, graph=0, node=[0, 1]),
        ]  # fmt: skip

    def weight(self, n_bytes: int, type_: str, buffer: str) -> None:
        """A tensor of the model, which has none otherwise."""
        n = sum(isinstance(event, s.Tensor) for event in self.events)
        self.events.append(s.Tensor(
            t=0, model=0, tensor=n, name=f"blk.0.w{n}.weight", type=type_, ne=[8], bytes=n_bytes,
            buffer=buffer, layer=0,
        ))  # fmt: skip

    def pause(self, ns: int) -> None:
        self.t += ns

    def step(
        self,
        ns: int,
        tokens: int = 1,
        sampled: int | None = None,
        computes: Sequence[dict[str, int]] = (),
        ops: Ops | None = None,
        threads: int = 1,
        faults: int = 0,
        others: Sequence[Ops] = (),
    ) -> None:
        """A step of `ns` and `tokens`, then a sampler of `sampled` ns; each of `computes` has keys
        of its event. `ops` are those of the first: of thread 0, and of `others`."""
        begin, number = self.t, self.n_steps
        self.n_steps += 1
        phase = "prefill" if tokens > 1 else "decode"
        self.events.append(s.StepBegin(
            t=begin, step=number, ctx=0, kind="decode", phase=phase, n_tokens=tokens, n_outputs=1,
            n_seqs=1, pos=self.pos, seq=[0], seq_pos=[self.pos], seq_tokens=[tokens],
            seq_outputs=[int(sampled is not None)],
        ))  # fmt: skip
        self.pos += tokens
        for of in computes or [{}]:
            known = {"dur": ns, "n_tokens": tokens, "reused": True, **of}
            self.events.append(s.Compute(
                t=begin, compute=self.n_computes, graph=0, ctx=0, step=number, source="decode",
                n_threads=threads, **known,
            ))  # fmt: skip
            for thread, (dur, wait) in enumerate([ops, *others] if ops else []):
                self.events.append(s.Ops(
                    t=begin, compute=self.n_computes, plan=0, thread=thread, dur=[*dur],
                    wait=[*wait],
                ))  # fmt: skip
            ops = None
            self.n_computes += 1
        self.t += ns
        self.events.append(s.StepEnd(
            t=self.t, step=number, status=0, n_ubatch=len(computes) or 1, n_reused=0, prepare=0,
            readback=0, minflt=faults,
        ))  # fmt: skip
        if sampled is not None:
            self.events.append(s.Token(
                t=self.t, ctx=0, step=number, seq=0, index=self.n_tokens, id=1, text="x",
                dur=sampled,
            ))  # fmt: skip
            self.n_tokens += 1
            self.t += sampled
