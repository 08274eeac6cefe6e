"""Hypothesis strategies for whole logs: closed ones and ones that stop anywhere."""

from __future__ import annotations

from hypothesis import strategies as st

from llamacpp_instr.schema import Event
from tests.kit.made_log import make_log


@st.composite
def logs(draw: st.DrawFn) -> list[Event]:
    return make_log(lambda low, high: draw(st.integers(low, high)))


@st.composite
def unclosed_logs(draw: st.DrawFn) -> list[Event]:
    """The first events of a log, without its end."""
    events = draw(logs())
    return events[: draw(st.integers(1, len(events) - 1))]
