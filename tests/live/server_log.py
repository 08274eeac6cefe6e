"""The log of a llama-server that is written down: two slots, four requests and a warm-up.

| request | arrives | has slot | prompt, of it cached | tokens | ends |
|---|---|---|---|---|---|
| task 10 | 1,600 | 1 from 1,700 | 6, 0 | 2 | limit, at 3,600 |
| task 11 | 1,650 | 0 from 1,750 | 4, 2 | 3 | cancelled, at 5,600 |
| task 12 | 2,600 | 1 from 3,700 | 9, 6 | 2 | end token, at 5,700 |
| task 13 | 2,650 | never | | | leaves at 4,600 |

Two prompts move to RAM, and one of them into slot 1 before task 12.

Times are in ns after the facts.
"""

from __future__ import annotations

from llamacpp_instr.log import schema as s
from tests.kit.batched_log import Batch, batched_log

SLOTS = 2
END = 6000


def server_events() -> tuple[list[s.Event], int]:
    """The events, which are not closed, and the time after the facts."""
    events = batched_log([
        Batch([(0, 0, 2)]),
        Batch([(1, 0, 6), (0, 2, 2)], sampled=[(1, 5, "a"), (0, 6, "b")]),
        Batch([(1, 6, 1), (0, 4, 1)], sampled=[(1, 7, "c"), (0, 8, "d")]),
        Batch([(1, 6, 3)], sampled=[(1, 9, "e")]),
        Batch([(1, 9, 1), (0, 5, 1)], sampled=[(1, 10, "f"), (0, 11, "g")]),
    ])  # fmt: skip
    start = max(event.t for event in events if isinstance(event, s.Graph))
    for event in events:
        if isinstance(event, s.Context):
            event.n_seq_max = SLOTS
    buffer = s.BufferUse(buffer="CPU", model=2_000_000, context=262_144, compute=65_536)
    more = [
        s.Memory(t=800, ctx=0, buffers=[buffer], rss=50_000_000),
        s.Kv(t=2100, ctx=0, op="apply", used=8, size=512),
        mark(900, 0, "begin", name="warm-up"), mark(1550, 0, "end", name="warm-up"),
        mark(1600, 1, "begin"), mark(1650, 2, "begin"),
        taken(1700, 1, 10, 1, 6, 0), taken(1750, 2, 11, 0, 4, 2),
        mark(2600, 3, "begin"), mark(2650, 4, "begin"),
        served(3600, 1, 10, 1, 6, 0, 2, "limit"), mark(3600, 1, "end", seq=1),
        taken(3700, 3, 12, 1, 9, 6),
        served(4600, 4, -1, -1, 0, 0, 0, "none"), mark(4600, 4, "end"),
        copied(1690, "save", 1, 9, 1), copied(1750, "save", 1, 5, 2), copied(3690, "load", 1, 6, 1),
        served(5600, 2, 11, 0, 2, 2, 3, "none"), mark(5600, 2, "end", seq=0),
        served(5700, 3, 12, 1, 3, 6, 2, "eos"), mark(5700, 3, "end", seq=1),
    ]  # fmt: skip
    for event in more:
        event.t += start
    return sorted([*events, *more], key=lambda event: event.t), start


def mark(t: int, number: int, phase: str, seq: int = -1, name: str = "request") -> s.Event:
    return s.Mark(t=t, mark=number, name=name, phase=phase, seq=seq)  # type: ignore[arg-type]


def taken(t: int, number: int, task: int, slot: int, prompt: int, cached: int) -> s.Event:
    data = {"mark": number, "task": task, "slot": slot, "prompt": prompt, "cached": cached,
            "here": cached, "elsewhere": 0, "before": 0, "moved": 0, "reuse": True}  # fmt: skip
    return s.Note(t=t, name="slot", data=data)


def copied(t: int, op: str, slot: int, tokens: int, copies: int) -> s.Event:
    data = {"op": op, "slot": slot, "tokens": tokens, "bytes": 100 * tokens, "dur": 10,
            "copies": copies, "held": 500 * copies, "limit": 4096}  # fmt: skip
    return s.Note(t=t, name="prompt-copy", data=data)


def served(
    t: int, number: int, task: int, slot: int, computed: int, cached: int, n: int, stop: str
) -> s.Event:
    data = {"mark": number, "task": task, "slot": slot, "cached": cached, "computed": computed,
            "generated": n, "drafted": 0, "accepted": 0, "verified": 0, "stream": True,
            "truncated": False, "stop": stop, "path": "/v1/chat/completions"}  # fmt: skip
    return s.Note(t=t, name="request", data=data)
