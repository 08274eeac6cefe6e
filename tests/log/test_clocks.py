"""The clocks of two processes, joined by what they sent each other; simulated clocks are true."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from llamacpp_instr.log.clocks import WANDER, Clock, Exchanges, join_clocks
from llamacpp_instr.log.session import Int64

HOUR = 3_600_000_000_000
Delays = tuple[int, int]
"""ns; the least, and the mean of what may come on top of it"""
AT_ONCE = ((0, 0), (0, 0))


def exchanged(
    seed: int,
    server_time: Callable[[Int64], Int64],
    n: int = 2000,
    out: Delays = (5_000, 2_000),
    back: Delays = (5_000, 2_000),
    every: int = 1_000_000,
    work: int = 200_000,
    replies: float = 0.6,
) -> tuple[Exchanges, Int64, Int64]:
    """Commands whose transits take `out` and `back`, with a pause of about `every` after each; and
    the moments at which the server began and ended its work, on the client's clock."""
    random = np.random.default_rng(seed)

    def delays(of: Delays) -> Int64:
        return of[0] + random.exponential(of[1], n).astype(np.int64)

    there, again = delays(out), delays(back)
    worked, paused = (random.exponential(of, n).astype(np.int64) for of in (work, every))
    took = there + again + worked + paused
    sent = 10**15 + np.cumsum(took) - took
    began = sent + there
    ended = began + worked
    has = random.random(n) < replies
    has[0] = True
    exchanges = Exchanges(
        sent,
        server_time(began),
        server_time(ended),
        np.where(has, ended + again, -1),
    )
    return exchanges, began, ended


def steady(offset: int, ppm: float) -> Callable[[Int64], Int64]:
    """A clock that runs at a rate of its own."""
    return lambda x: x + offset + np.floor((x - 10**15) * (ppm * 1e-6)).astype(np.int64)


def errors(clock: Clock, server: Int64, truth: Int64) -> Int64:
    return clock.to_client(server) - truth


@settings(max_examples=60)
@given(
    seed=st.integers(0, 2**32),
    offset=st.integers(-HOUR, HOUR),
    ppm=st.floats(-400, 400),
    n=st.integers(1, 3000),
    ways=st.tuples(*[st.tuples(st.integers(0, 10_000_000), st.integers(0, 3_000_000))] * 2),
    every=st.sampled_from([10_000, 1_000_000, 50_000_000]),
    replies=st.floats(0, 1),
)
# nothing takes any time, so the clocks differ from their lines only because they count whole ns
@example(seed=0, offset=0, ppm=8.0, n=3, ways=AT_ONCE, every=10_000, replies=0.0)
@example(seed=0, offset=0, ppm=3.0, n=10, ways=AT_ONCE, every=10_000, replies=0.0)
# little is known of a slow clock
@example(
    seed=0, offset=0, ppm=-400.0, n=3, ways=((0, 0), (10_000_000, 0)), every=10_000, replies=1.0
)
def test_the_truth_lies_inside_the_stated_bound(
    seed: int, offset: int, ppm: float, n: int, ways: tuple[Delays, Delays], every: int,
    replies: float,
) -> None:  # fmt: skip
    """Whatever the clocks, their rates, the transit times in both directions and the pauses."""
    server_time = steady(offset, ppm)
    exchanges, began, ended = exchanged(seed, server_time, n, *ways, every, replies=replies)
    clock = join_clocks(exchanges)
    assert clock is not None
    for truth in (began, ended):
        server = server_time(truth)
        assert (abs(errors(clock, server, truth)) <= clock.uncertainty_at(server)).all()
        mapped = clock.to_client(np.sort(server))
        assert (np.diff(mapped) >= 0).all(), "later times stay later"


def test_a_local_connection_joins_clocks_to_some_microseconds() -> None:
    server_time = steady(100_000 * 10**9, 0)
    exchanges, began, _ = exchanged(1, server_time, n=20_000)
    clock = join_clocks(exchanges)
    assert clock is not None
    assert clock.uncertainty < 7_000
    assert abs(errors(clock, server_time(began), began)).max() < 3_000
    assert abs(clock.offset - 100_000 * 10**9) < 3_000


@pytest.mark.parametrize("hours", [0.01, 0.2, 3])
def test_drift_is_followed_over_hours(hours: float) -> None:
    server_time = steady(-HOUR, 40)
    n = 20_000
    every = int(hours * HOUR / n)
    exchanges, began, _ = exchanged(2, server_time, n, every=every)
    clock = join_clocks(exchanges)
    assert clock is not None
    assert clock.drift == pytest.approx(40e-6, abs=2 * clock.uncertainty / (hours * HOUR))
    assert clock.usual_uncertainty < 20_000
    assert abs(errors(clock, server_time(began), began)).max() < clock.uncertainty


def test_a_rate_that_wanders_is_followed() -> None:
    """As with temperature: by 5 ppm up or down, within half an hour."""

    def server_time(x: Int64) -> Int64:
        phase = 2 * np.pi * (x - 10**15) / (HOUR / 2)
        return x + 77 + np.floor(5e-6 * HOUR / 4 / np.pi * np.sin(phase)).astype(np.int64)

    exchanges, began, ended = exchanged(3, server_time, 30_000, every=60_000_000)
    clock = join_clocks(exchanges)
    assert clock is not None
    assert WANDER < 5e-6
    for truth in (began, ended):
        server = server_time(truth)
        assert (abs(errors(clock, server, truth)) <= clock.uncertainty_at(server)).all()
    assert clock.usual_uncertainty < 20_000


def test_a_clock_that_jumps_is_followed() -> None:
    """As after a machine has slept: the CLOCK_MONOTONIC of only one of them counted that time."""

    def server_time(x: Int64) -> Int64:
        return x + np.where(x < 10**15 + 2 * 10**9, 0, 5 * 10**9)

    exchanges, began, _ = exchanged(4, server_time, 4000)
    clock = join_clocks(exchanges)
    assert clock is not None
    server = server_time(began)
    assert (abs(errors(clock, server, began)) <= clock.uncertainty_at(server)).all()


def test_pauses_cost_nothing() -> None:
    """Between the turns of a conversation, what the clocks did is unknown and does not matter."""
    server_time = steady(5, 40)
    turns = [exchanged(seed, server_time, n=60) for seed in range(20)]
    shifts = np.arange(len(turns)) * HOUR
    parts, truths = [], []
    for (exchanges, began, ended), shift in zip(turns, shifts, strict=True):
        truths += [began + shift, ended + shift]
        answered = np.where(exchanges.answered < 0, -1, exchanges.answered + shift)
        times = exchanges.sent + shift, server_time(began + shift), server_time(ended + shift)
        parts.append(Exchanges(*times, answered))
    clock = join_clocks(Exchanges(*map(np.concatenate, zip(*parts, strict=True))))
    assert clock is not None
    assert clock.uncertainty < 20_000
    assert clock.drift == pytest.approx(40e-6, abs=1e-9)
    for truth in truths:
        server = server_time(truth)
        assert (abs(errors(clock, server, truth)) <= clock.uncertainty_at(server)).all()


def test_a_long_compute_is_no_pause() -> None:
    """30 s pass between a command and its reply, and the kernels lie between them."""
    server_time = steady(-9, 40)
    exchanges, began, ended = exchanged(8, server_time, 300, work=30_000_000_000, replies=1)
    clock = join_clocks(exchanges)
    assert clock is not None
    for truth in (began, (began + ended) // 2, ended):
        server = server_time(truth)
        assert (abs(errors(clock, server, truth)) <= clock.uncertainty_at(server)).all()
    assert clock.uncertainty < 1_000_000


def test_unequal_ways_give_an_honest_interval() -> None:
    """0.2 ms there, 2 ms back: no log can say how the sum is divided."""
    server_time = steady(0, 0)
    exchanges, began, _ = exchanged(5, server_time, out=(200_000, 0), back=(2_000_000, 0))
    clock = join_clocks(exchanges)
    assert clock is not None
    error = abs(errors(clock, server_time(began), began))
    assert 800_000 < error.max() <= clock.uncertainty < 1_200_000


def test_clocks_that_cannot_be_joined() -> None:
    exchanges, _, _ = exchanged(6, steady(0, 0))
    mixed = exchanges._replace(arrived=np.roll(exchanges.arrived, 7))
    assert join_clocks(mixed) is None
    early = exchanges._replace(done=exchanges.done + 10**9)
    assert join_clocks(early) is None
    no_replies = exchanges._replace(answered=np.full_like(exchanges.sent, -1))
    assert join_clocks(no_replies) is None


def test_what_is_no_time_stays_none() -> None:
    clock = join_clocks(exchanged(7, steady(5, 0))[0])
    assert clock is not None
    assert clock.to_client(np.array([-1])).tolist() == [-1]
