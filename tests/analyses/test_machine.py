"""What other processes took from a session's steps, from intervals that are written by hand."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from llamacpp_instr.converters.analyses.clock import Machine, compute_machine, machine_notes
from llamacpp_instr.log import schema as s
from llamacpp_instr.log.steps import TICK, counted_steps, taken_share
from tests.kit.reports import session_of
from tests.kit.sketched_log import Sketch

MS = 10**6
QUIET = Machine(cpus=4, switches=3, taken=5, cpu=95, load=None, steal=0)


def test_the_sentence_says_what_is_known() -> None:
    sentence = "the process was descheduled 3 times and lost 5 % of its CPU time to other work"
    assert QUIET.sentence() == sentence
    assert replace(QUIET, load=2.46810).sentence() == f"{sentence}; load 2.47 on 4 CPUs"
    assert replace(QUIET, load=0.0).sentence() == f"{sentence}; load 0 on 4 CPUs"
    one = replace(QUIET, switches=1, taken=100, cpu=100, steal=5)
    sentence = "the process was descheduled 1 time and lost 50 % of its CPU time to other work"
    assert one.sentence() == sentence
    assert replace(one, steal=6).sentence() == f"{sentence}, some of it to the hypervisor"


def test_more_than_a_twentieth_is_disturbed() -> None:
    assert (QUIET.share, QUIET.is_disturbed) == (0.05, False)
    assert replace(QUIET, taken=6, cpu=94).is_disturbed
    idle = replace(QUIET, taken=0, cpu=0)
    assert (idle.share, idle.is_disturbed) == (0, False)


def test_disturbed_logs_of_a_side_are_named_together() -> None:
    busy = replace(QUIET, taken=30, cpu=70, load=1.0, steal=1)
    other = replace(busy, taken=10, cpu=90, switches=4, load=3.0, steal=9)
    end = "Its noise includes that; record it again on an idle machine."
    assert machine_notes([("A", [QUIET, None]), ("B", [])]) == []
    assert machine_notes([("A", [busy])]) == [f"A: {busy.sentence()}. {end}"]
    assert machine_notes([("A", [busy, QUIET])])[0].startswith("A, 1 of 2 logs: the process")
    (note,) = machine_notes([("B", [busy, QUIET, other, None])])
    assert note == (
        "B, 2 of 4 logs: the process was descheduled 7 times and lost 20 % of its CPU time to"
        f" other work, some of it to the hypervisor; load 3 on 4 CPUs. {end}"
    )


def machine(t: int, dur: int, **known: float | None) -> s.Machine:
    """An interval up to `t`, in ms, in which the machine computed all the time."""
    of = {"cpu": 40 * MS, "delay": 10 * MS, "busy": 400 * MS, "load": None, "running": None,
          "nvcsw": 0, "nivcsw": 2, "steal": None, **known}  # fmt: skip
    return s.Machine(t=t * MS, dur=dur * MS, **of)


def machine_of(path: Path, *intervals: s.Machine) -> Machine | None:
    """The machine during two steps: from 100 to 200 ms, and from 300 to 400."""
    sketch = Sketch()
    for _ in range(2):
        sketch.pause(100 * MS)
        sketch.step(100 * MS)
    session = session_of(path, [*sketch.events, *intervals])
    steps, _ = counted_steps(session)
    return compute_machine(session, steps)


@pytest.mark.parametrize(
    ("t", "dur", "counts"),
    [(100, 100, False), (101, 100, True), (150, 10, True), (300, 100, False), (301, 100, True),
     (500, 101, True), (500, 100, False), (290, 80, False), (290, 95, True)],
)  # fmt: skip
def test_intervals_with_a_part_of_a_step_count(
    tmp_path: Path, t: int, dur: int, counts: bool
) -> None:
    assert (machine_of(tmp_path / "a.log", machine(t, dur)) is not None) == counts


def test_figures_are_sums_over_the_intervals_that_count(tmp_path: Path) -> None:
    intervals = [
        machine(150, 100, load=0.5, running=1, nivcsw=2),
        machine(350, 100, load=1.5, running=4, nivcsw=5, delay=0),
        machine(290, 50, load=9.0, running=9, nivcsw=9),
        machine(160, 10, delay=None),
    ]
    found = machine_of(tmp_path / "a.log", *intervals)
    assert found is not None
    assert (found.cpus, found.switches, found.taken, found.cpu) == (2, 7, 10 * MS, 80 * MS)
    assert (found.load, found.steal) == (1.5, 0)
    unknown = machine_of(tmp_path / "b.log", machine(150, 100))
    assert unknown is not None
    assert unknown.load is None
    assert machine_of(tmp_path / "c.log", machine(150, 100, delay=None)) is None
    assert machine_of(tmp_path / "d.log") is None
    session = session_of(tmp_path / "e.log", [*Sketch().events, machine(150, 100)])
    assert compute_machine(session, counted_steps(session)[0]) is None, "no step"


@pytest.mark.parametrize(
    ("known", "share"),
    [
        ({}, 10 / 50),
        ({"delay": None}, None),
        ({"delay": 0}, 0),
        # others computed for 5 ms besides the tick by which the clock may err
        ({"busy": 45 * MS + TICK}, 5 / 45),
        ({"busy": 40 * MS + TICK}, 0),
        ({"busy": 0}, 0),
        ({"busy": None}, 10 / 50),
        # stolen from two CPUs, of which the process used a quarter of 200 ms
        ({"steal": 20 * MS}, 15 / 55),
        ({"steal": 20 * MS, "cpu": 190 * MS, "busy": 900 * MS}, 30 / 220),
        ({"cpu": 0, "delay": 0}, 0),
    ],
)
def test_the_share_that_was_taken(known: dict[str, float | None], share: float | None) -> None:
    found = taken_share(machine(150, 100, **known), cpus=2)
    assert found == (None if share is None else pytest.approx(share))
