"""What machines took of the steps, beside a clock that is painted nanosecond by nanosecond, and
links beside the delay and the rate that they were made with."""

from __future__ import annotations

from random import Random
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llamacpp_instr.log.machines import AWAY, COMPUTE, PARTS, WAITING, Machines
from llamacpp_instr.log.session import Session, Table
from tests.kit.machines import HOSTS, Wire, calls_table


def session_of(calls: Table, uncertainty: int | None = 9) -> Session:
    connections = {
        i: SimpleNamespace(connection=i, side="client", endpoint=name, uncertainty=uncertainty)
        for i, name in enumerate(HOSTS)
    }
    return cast(Session, SimpleNamespace(calls=calls, connections=connections))


def steps_of(spans: list[tuple[int, int]]) -> Table:
    begin, end = np.array(spans, np.int64).reshape(-1, 2).T
    return Table({"step": np.arange(len(begin)), "begin": begin, "end": end})


times = st.integers(0, 120)


@st.composite
def a_call(draw: st.DrawFn) -> dict[str, int]:
    """A command whose times are in order; the machine's own are unknown, or a little off."""
    t = sorted(draw(st.lists(times, min_size=8, max_size=8)))
    row = {"connection": draw(st.integers(0, 1)), "out": 20, "in": 0, "queued": t[0], "sent": t[1]}
    row["written"] = t[2]
    if draw(st.booleans()):
        row["answered"] = t[7]
    if draw(st.booleans()):
        off = draw(st.integers(-3, 3))
        row |= {
            name: max(t[i] + off, 0)
            for name, i in (("received", 2), ("started", 3), ("done", 6), ("replied", 7))
        }
        if draw(st.booleans()):
            row |= {"ran": max(t[4] + off, 0), "ran_end": max(t[5] + off, 0)}
    return row


def painted(rows: list[dict[str, int]]) -> np.ndarray:
    """The number of the part of each nanosecond on one machine."""
    paint = np.full(200, PARTS.index(WAITING))
    ordered = sorted(rows, key=lambda row: row["number"])
    intervals: list[tuple[int, int, int]] = []
    for i, row in enumerate(ordered):
        known = "started" in row
        answered = row.get("answered", -1)
        if "ran" in row:
            intervals.append((0, row["ran"], row["ran_end"]))
        if known:
            intervals.append((1, row["started"], row["done"]))
            intervals.append((2, row["sent"], row["received"]))
            intervals.append((4, row["received"], row["started"]))
            if answered >= 0:
                intervals.append((2, row["done"], answered))
        else:
            replies = [of["answered"] for of in ordered[i:] if "answered" in of]
            intervals.append((3, row["sent"], replies[0] if replies else row["written"]))
        intervals.append((4, row["queued"], row["sent"]))
    for part, begin, end in sorted(intervals, reverse=True):
        paint[begin:end] = part
    return paint


@given(st.lists(a_call(), max_size=6), st.lists(st.tuples(times, times).map(sorted), max_size=3))
@settings(max_examples=200)
def test_each_nanosecond_is_in_one_part(rows: list[dict[str, int]], spans: Any) -> None:
    """On each machine, on all together, for any commands and any steps."""
    for number, row in enumerate(rows):
        row["number"] = number
    steps = steps_of(spans)
    machines = Machines(session_of(calls_table(rows)), steps)
    paints = {}
    for number, name in enumerate(HOSTS):
        mine = [row for row in rows if row["connection"] == number]
        assert (name in machines.names) == bool(mine)
        if not mine:
            continue
        paints[name] = painted(mine)
        for i, (begin, end) in enumerate(spans):
            count = np.bincount(paints[name][begin:end], minlength=len(PARTS))
            assert [int(ns[i]) for ns in machines.parts(name).values()] == count.tolist()
    if paints:
        kernels = [(np.array([7, 40]), np.array([19, 41]))]
        first = np.min([*paints.values()], axis=0)
        first[7:19] = first[40] = PARTS.index(COMPUTE)
        together = machines.together(kernels)
        for i, (begin, end) in enumerate(spans):
            count = np.bincount(first[begin:end], minlength=len(PARTS))
            assert [int(ns[i]) for ns in together.values()] == count.tolist()


def recorded(delay: tuple[int, int], rate: float | None = None) -> tuple[Session, Table]:
    """Loading a model and 40 decodes over two links, the second without a delay."""
    random = Random(3)
    wires = [Wire(0, random, delay, rate), Wire(1, random)]
    t, spans = 10**9, []
    for wire in wires:
        t = wire.load(t, [1 << 20] * 6)
    for step in range(40):
        begin = t = t + 50_000
        for wire in wires:
            t = wire.compute(t + 20_000, run=3_000_000, step=step)
        spans.append((begin, t + 10_000))
    rows = [row for wire in wires for row in wire.rows]
    return session_of(calls_table(rows)), steps_of(spans)


@pytest.mark.parametrize("delay", [(0, 0), (500_000, 500_000), (5_000_000, 5_000_000), (0, 10**6)])
def test_the_delay_of_a_link_is_found(delay: tuple[int, int]) -> None:
    """0, 1 and 10 ms within 5 %, even if the paths there and back differ."""
    session, steps = recorded(delay)
    slow, fast = (Machines(session, steps).link(name) for name in HOSTS)
    assert slow.round_trip is not None
    assert fast.round_trip is not None
    assert slow.round_trip - fast.round_trip == pytest.approx(sum(delay), rel=0.05, abs=2_000)


def test_the_rate_of_a_link_is_found() -> None:
    session, steps = recorded((200_000, 200_000), rate=12.5e6)
    slow, _ = (Machines(session, steps).link(name) for name in HOSTS)
    assert slow.rate_out == pytest.approx(12.5e6, rel=0.05)


def test_a_step_is_compute_wire_and_waits() -> None:
    """The kernels take the time that they were made with, and the parts all of the step."""
    session, steps = recorded((500_000, 500_000))
    machines = Machines(session, steps)
    for name in HOSTS:
        parts = machines.parts(name)
        assert (parts[COMPUTE] == 3_000_000).all()
        assert (sum(parts.values()) == steps["end"] - steps["begin"]).all()
    together = machines.together([])
    assert (together[COMPUTE] == 6_000_000).all()
    assert (sum(together.values()) == steps["end"] - steps["begin"]).all()
    slow = machines.parts(HOSTS[0])["wire"]
    assert slow.mean() == pytest.approx(1_000_000, rel=0.05)


def test_a_log_of_the_client_alone_has_round_trips() -> None:
    """The machine's share of them is not known."""
    session, steps = recorded((500_000, 500_000))
    calls = {**session.calls.columns}
    for name in ("received", "started", "done", "replied", "ran", "ran_end"):
        calls[name] = np.full_like(calls[name], -1)
    machines = Machines(session_of(Table(calls), None), steps)
    assert not machines.is_known(HOSTS[0])
    parts = machines.parts(HOSTS[0])
    assert not parts[COMPUTE].any()
    assert parts[AWAY].mean() == pytest.approx(4_000_000, rel=0.05)
    link = machines.link(HOSTS[0])
    assert link.uncertainty is None
    assert link.round_trip == pytest.approx(1_000_000, rel=0.05)


def test_traffic_is_that_of_the_step_that_queued_it() -> None:
    session, steps = recorded((0, 0))
    n, out, back = Machines(session, steps).traffic(HOSTS[0])
    assert (n == 3).all()
    assert (out == 2_700 + 13 + 313).all()
    assert (back == 2_312).all()
