"""Hypothesis strategies for whole logs: closed ones, ones that stop anywhere, and damaged ones."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from hypothesis import strategies as st

from llamacpp_instr.log.schema import Event
from tests.kit.made_log import make_log


@st.composite
def logs(draw: st.DrawFn) -> list[Event]:
    return make_log(lambda low, high: draw(st.integers(low, high)))


@st.composite
def unclosed_logs(draw: st.DrawFn) -> list[Event]:
    """The first events of a log, without its end."""
    events = draw(logs())
    return events[: draw(st.integers(1, len(events) - 1))]


IDS = ("model", "ctx", "graph", "plan", "step", "compute", "mark")


@st.composite
def damaged_logs(draw: st.DrawFn, sound: Sequence[bytes]) -> bytes:
    """One of the logs with some lines left out, repeated, exchanged or with another id."""
    lines = draw(st.sampled_from(sound)).splitlines()
    change = draw(st.sampled_from(["leave out", "leave out a kind", "repeat", "exchange", "id"]))
    for _ in range(draw(st.integers(1, 4))):
        at, to = (draw(st.integers(1, len(lines) - 1)) for _ in range(2))
        if change == "leave out":
            del lines[at]
        elif change == "leave out a kind":
            kind = lines[at].split(b",")[0]
            lines = [lines[0], *(line for line in lines[1:] if not line.startswith(kind))]
        elif change == "repeat":
            lines.insert(to, lines[at])
        elif change == "exchange":
            lines[at], lines[to] = lines[to], lines[at]
        else:
            event: dict[str, Any] = json.loads(lines[at])
            if keys := [key for key in IDS if key in event]:
                event[draw(st.sampled_from(keys))] = draw(st.integers(0, 6))
                lines[at] = json.dumps(event).encode()
        if len(lines) < 2:
            break
    return b"".join(line + b"\n" for line in lines)
