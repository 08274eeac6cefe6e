"""Logs of requests with what llama-server notes when they end."""

from __future__ import annotations

from random import Random
from typing import Any

from llamacpp_instr.log import schema as s
from tests.kit.served_log import served

STOPS = ("none", "eos", "word", "limit", "done")
TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


def note(mark: int, t: int, seq: int = 0, **of: Any) -> s.Note:
    """What llama-server notes of the request with a mark."""
    known = {
        "mark": mark, "task": mark, "slot": seq, "cached": 0, "computed": 4, "generated": 9,
        "drafted": 0, "accepted": 0, "verified": 0, "stream": True, "truncated": False,
        "stop": "limit",
    }  # fmt: skip
    return s.Note(t=t, name="request", data={**known, **of})


def closed(events: list[s.Event]) -> list[s.Event]:
    """The events and the end of the log, which counts none of them."""
    end = s.SessionEnd(
        t=max(event.t for event in events), reason="closed", events={}, bytes=0, dropped=0,
        dropped_ops=0, decode_ns=0, overhead_ns=0,
    )  # fmt: skip
    return [*events, end]


def noted(random: Random) -> list[s.Event]:
    """The log of `served`, in which most marks have a note, and some of these a client's span."""
    events: list[s.Event] = []
    names: dict[int, str] = {}
    for event in served(random):
        if isinstance(event, s.Mark):
            names.setdefault(event.mark, event.name)
            if event.phase == "end" and names[event.mark] != "warm-up" and random.random() < 0.8:
                of: dict[str, Any] = {"stop": random.choice(STOPS), "stream": random.random() < 0.5}
                if random.random() < 0.3:
                    of["traceparent"] = f"00-{TRACE}-{PARENT}-01"
                events.append(note(event.mark, event.t, event.seq, **of))
        events.append(event)
    return events
