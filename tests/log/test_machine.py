"""What other processes took, from intervals written by hand, over whole sessions."""

from __future__ import annotations

from pathlib import Path

import pytest

from llamacpp_instr.log import schema as s
from llamacpp_instr.log.session import Session
from llamacpp_instr.log.steps import (
    DISTURBED,
    TICK,
    disturbed_steps,
    taken_in_all,
    taken_share,
    taken_shares,
    taken_times,
)
from tests.kit.reports import session_of
from tests.kit.sketched_log import Sketch

MS = 10**6


def interval(t: int, dur: int = 100, **known: int | None) -> s.Machine:
    """An interval up to `t`, in ms, of two CPUs: 40 ms of CPU time, 10 of delay, others busy."""
    of = {"cpu": 40 * MS, "delay": 10 * MS, "busy": 400 * MS, "steal": 0, **known}
    return s.Machine(t=t * MS, dur=dur * MS, nvcsw=0, nivcsw=0, **of)


def session(path: Path, *intervals: s.Machine) -> Session:
    """Four steps of 100 ms, one every 200 ms, from 100 ms on."""
    sketch = Sketch()
    for _ in range(4):
        sketch.pause(100 * MS)
        sketch.step(100 * MS)
    return session_of(path, [*sketch.events, *intervals])


@pytest.mark.parametrize(
    ("intervals", "disturbed"),
    [
        ([], []),
        ([interval(150)], [0]),
        ([interval(100)], []),
        ([interval(300)], []),
        ([interval(300, 101)], [0]),
        ([interval(301, 1)], [1]),
        ([interval(301, 101)], [1]),
        ([interval(301, 102)], [0, 1]),
        ([interval(750, 500)], [1, 2, 3]),
        # in another order, beside quiet ones and one that tells nothing
        ([interval(710), interval(150), interval(350, delay=0), interval(500, delay=None)], [0, 3]),
        # five percent exactly, and more
        ([interval(150, cpu=95 * MS, delay=5 * MS)], []),
        ([interval(150, cpu=95 * MS, delay=5 * MS + 1)], [0]),
    ],
)
def test_a_step_with_a_part_in_a_disturbed_interval_is_disturbed(
    intervals: list[s.Machine], disturbed: list[int], tmp_path: Path
) -> None:
    assert DISTURBED == 0.05
    of = session(tmp_path / "a.log", *intervals)
    assert disturbed_steps(of, of.steps).nonzero()[0].tolist() == disturbed


CASES = [
    (interval(1), 10 * MS),
    (interval(1, busy=45 * MS + TICK), 5 * MS),
    (interval(1, busy=40 * MS + TICK), 0),
    (interval(1, busy=None), 10 * MS),
    # stolen from two CPUs: of 200 ms the process used or wanted 50, so a quarter
    (interval(1, steal=20 * MS), 10 * MS + 5 * MS),
    (interval(1, steal=None), 10 * MS),
    (interval(1, steal=20 * MS, cpu=300 * MS, delay=0), 20 * MS),
    (interval(1, cpu=0, delay=0), 0),
    (interval(1, 0, steal=20 * MS, cpu=0, delay=0), 0),
]


@pytest.mark.parametrize(("event", "taken"), CASES)
def test_the_time_that_was_taken_in_an_interval(
    event: s.Machine, taken: int, tmp_path: Path
) -> None:
    assert TICK == 10 * MS
    of = session(tmp_path / "a.log", event)
    share = taken / max(taken + event.cpu, 1)
    assert taken_times(of.machine.columns, of.start.host.cores).tolist() == [taken]
    assert taken_shares(of, of.machine).tolist() == [pytest.approx(share)]
    assert taken_in_all(of, of.machine) == taken
    assert taken_share(event, of.start.host.cores) == pytest.approx(share)


def test_sums_over_intervals_are_more_exact_than_each(tmp_path: Path) -> None:
    """A tick of the machine's clock counts once; a sum with an unknown part is unknown."""
    busy = 44 * MS + TICK // 2
    of = session(tmp_path / "a.log", *(interval(100 * i, busy=busy) for i in range(1, 5)))
    assert taken_times(of.machine.columns, of.start.host.cores).tolist() == [0] * 4
    assert taken_in_all(of, of.machine) == 4 * 4 * MS + 2 * TICK - TICK
    events = interval(100, busy=0), interval(200, busy=None)
    of = session(tmp_path / "b.log", *events)
    assert taken_in_all(of, of.machine) == 20 * MS


def test_without_a_delay_nothing_is_known() -> None:
    assert taken_share(interval(1, delay=None), 2) is None
    assert taken_share(interval(1, steal=20 * MS), 0) == pytest.approx(20 / 60), "of one CPU"
