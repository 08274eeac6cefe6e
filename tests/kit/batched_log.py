"""Logs of batches that a test writes down: what each step has of each sequence."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from llamacpp_instr.log import schema as s
from tests.kit.made_log import make_log

STEP_NS, PERIOD_NS = 500, 1000


@dataclass(frozen=True)
class Batch:
    """A step of 500 ns; one begins every microsecond."""

    parts: Sequence[tuple[int, int, int]]
    """sequence, position and tokens; the last token of each has an output"""
    computes: Sequence[int] = ()
    """tokens of each compute, by default all in one"""
    sampled: Sequence[tuple[int, int, str]] = field(default_factory=list)
    """sequence, id and text of the tokens that were sampled then, each in 9 ns"""
    status: int = 0
    ctx: int = 0
    """1 drafts for 0"""
    outputs: Sequence[int] = ()
    """of each part, by default one"""


def batched_log(batches: Sequence[Batch]) -> list[s.Event]:
    """One context, and a second one if a batch belongs to it. The first step begins 1 µs after the
    last of the facts; the first event that is not a fact is a graph."""
    n_contexts = max((batch.ctx for batch in batches), default=0) + 1
    made = make_log(lambda _low, high: high, n_contexts=n_contexts, level="detailed")
    kept = (s.SessionStart, s.Model, s.Tensor, s.Context)
    events: list[s.Event] = [event for event in made if isinstance(event, kept)]
    graphs = {event.ctx: event for event in made if isinstance(event, s.Graph)}
    for event in events:
        if isinstance(event, s.Context):
            event.target = event.ctx - 1
    for graph in graphs.values():
        graph.t = max(event.t for event in events)
        events.append(graph)
    compute = index = 0
    for step, batch in enumerate(batches):
        graph = graphs[batch.ctx]
        t = graph.t + PERIOD_NS * (step + 1)
        outputs = list(batch.outputs or [1] * len(batch.parts))
        seqs, positions, tokens = zip(*batch.parts, strict=True)
        n = sum(tokens)
        phase = "prefill" if max(tokens) > 1 else "decode"
        ctx = batch.ctx
        events.append(s.StepBegin(t=t, step=step, ctx=ctx, kind="decode", phase=phase, n_tokens=n,
            n_outputs=sum(outputs), n_seqs=len(seqs), pos=positions[0], seq=list(seqs),
            seq_pos=list(positions), seq_tokens=list(tokens),
            seq_outputs=outputs))  # fmt: skip
        for of in batch.computes or [n]:
            events.append(s.Compute(t=t + 10, compute=compute, graph=graph.graph, ctx=ctx,
                step=step, source="decode", reused=compute > 0, n_tokens=of, n_threads=1,
                dur=100))  # fmt: skip
            compute += 1
        n_ubatch = len(batch.computes or [n])
        events.append(s.StepEnd(t=t + STEP_NS, step=step, status=batch.status, n_ubatch=n_ubatch,
            n_reused=0, prepare=0, readback=0))  # fmt: skip
        for seq, id, text in batch.sampled:
            events.append(s.Token(t=t + STEP_NS + 10, ctx=ctx, step=step, seq=seq, index=index,
                id=id, text=text, dur=9))  # fmt: skip
            index += 1
    return events
