"""The times of steps and of their parts, in logs whose times are written by hand."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from llamacpp_instr.base.errors import UsageError
from llamacpp_instr.converters.analyses import step_times
from llamacpp_instr.converters.analyses.step_times import StepTimes, took_turns, verb
from llamacpp_instr.log import schema as s
from tests.kit.reports import session_of
from tests.kit.sketched_log import Sketch


class Decodes(Sketch):
    """A log that begins in the middle of a request, and samples a token in each step."""

    def __init__(self) -> None:
        super().__init__()
        self.pos = 1

    def step(self, ns: int, tokens: int = 1, **of: Any) -> None:
        super().step(ns, tokens, sampled=0, **of)


def times_of(tmp_path: Path, events: Sequence[s.Event]) -> StepTimes:
    return StepTimes(session_of(tmp_path / "a.log", events))


def machine(t: int, dur: int, cpu: int) -> s.Machine:
    return s.Machine(t=t, dur=dur, cpu=cpu, delay=0, nvcsw=0, nivcsw=0)


def test_steps_that_fail_are_left_out_and_named(tmp_path: Path) -> None:
    sketch = Decodes()
    for ns in (100, 200, 300):
        sketch.step(ns)
    failed = [event for event in sketch.events if isinstance(event, s.StepEnd)][1]
    failed.status = 1
    times = times_of(tmp_path, sketch.events)
    assert times.whole_steps("decode").tolist() == [100, 300]
    assert times.account.row == {0: 0, 2: 1}
    path = tmp_path / "a.log"
    assert times.notes[0] == f"{path}: Left out: 1 failed step."
    assert times.notes[1:] == [f"{path}: {times.session.log_end.sentence()}."]


def test_the_time_of_the_recorder_is_not_the_step_s(tmp_path: Path) -> None:
    sketch = Decodes()
    sketch.step(100)
    for event in sketch.events:
        if isinstance(event, s.StepEnd):
            event.recorder = 30
    assert times_of(tmp_path, sketch.events).whole_steps("decode").tolist() == [70]


def test_the_clock_is_that_of_the_wall(tmp_path: Path) -> None:
    """From the start of the session to the end of its last step."""
    sketch = Decodes()
    empty = times_of(tmp_path, sketch.events)
    wall = empty.session.start.wall
    assert empty.clock == (wall, wall)
    sketch.pause(50)
    sketch.step(100)
    sketch.step(30)
    assert times_of(tmp_path, sketch.events).clock == (wall, wall + 180)


def test_the_rate_is_the_median_of_the_steps(tmp_path: Path) -> None:
    sketch = Decodes()
    for ns in (100, 400, 200):
        sketch.step(ns)
    sketch.step(100, tokens=5)
    times = times_of(tmp_path, sketch.events)
    assert times.phases == {"decode", "prefill"}
    assert times.tokens_per_second("decode") == pytest.approx(1e9 / 200)
    assert times.tokens_per_second("prefill") == pytest.approx(5e9 / 100)
    assert times.tokens_per_second("encode") is None


def test_a_step_of_no_time_counts_as_one_ns(tmp_path: Path) -> None:
    sketch = Decodes()
    sketch.step(0)
    assert times_of(tmp_path, sketch.events).tokens_per_second("decode") == pytest.approx(1e9)


# --- runs ---


def test_runs_are_marks_with_a_number(tmp_path: Path) -> None:
    """Steps outside of them are of run 0; one that is open goes on to the end."""
    sketch = Decodes()

    def mark(number: int, name: str, phase: Any) -> None:
        sketch.events.append(s.Mark(t=sketch.t, mark=number, name=name, phase=phase))

    sketch.step(10, tokens=3)
    mark(0, "run 7", "begin")
    sketch.step(10)
    sketch.step(10)
    mark(0, "run 7", "end")
    mark(1, "run away", "begin")
    sketch.step(10)
    mark(1, "run away", "end")
    mark(2, "run 12", "begin")
    sketch.step(10)
    sketch.step(10, tokens=3)
    times = times_of(tmp_path, sketch.events)
    assert times.run.tolist() == [0, 7, 7, 0, 12, 12]
    assert times.runs("decode").tolist() == [7, 7, 0, 12]
    assert times.runs("prefill").tolist() == [0, 12]


# --- CPU time ---


@pytest.mark.parametrize(
    ("interval", "last"),
    [(99, True), (100, True), (101, False)],
    ids=["less", "equal", "more"],
)
def test_steps_have_a_cpu_time_if_they_last_as_long_as_an_interval(
    interval: int, last: bool, tmp_path: Path
) -> None:
    sketch = Decodes()
    sketch.step(100)
    events = [*sketch.events, machine(sketch.t, interval, 1)]
    assert times_of(tmp_path, events).last_intervals("decode") == last


def test_without_intervals_there_is_no_cpu_time(tmp_path: Path) -> None:
    sketch = Decodes()
    sketch.step(100)
    assert not times_of(tmp_path, sketch.events).last_intervals("decode")


def test_an_interval_is_spread_evenly_over_its_steps(tmp_path: Path) -> None:
    """Two intervals of 200 ns, with 400 and 100 ns of CPU time."""
    sketch = Decodes()
    sketch.step(50)
    sketch.step(50, tokens=2)
    sketch.step(200)
    sketch.step(100)
    events = [*sketch.events, machine(200, 200, 400), machine(400, 200, 100)]
    times = times_of(tmp_path, events)
    assert times.cpu_times("decode").tolist() == [100, 200 + 50, 50]
    assert times.cpu_times("prefill").tolist() == [100]


# --- units ---


def with_ops(*steps: tuple[int, int]) -> Decodes:
    """Decodes of two kernels; a step without a time has none."""
    sketch = Decodes()
    for first, second in steps:
        sketch.step(1000, ops=([first, second], [0, 0]) if first or second else None)
    return sketch


def test_units_have_the_sums_of_their_kernels(tmp_path: Path) -> None:
    times = times_of(tmp_path, with_ops((10, 3), (0, 0), (20, 4)).events)
    assert times.plans == [0]
    apart = times.by_unit({0: np.array([2, 0])}, 3)
    np.testing.assert_equal(apart, [[3, np.nan, 4], [np.nan] * 3, [10, np.nan, 20]])
    together = times.by_unit({0: np.array([1, 1])}, 2)
    np.testing.assert_equal(together, [[np.nan] * 3, [13, np.nan, 24]])
    work = times.work_by_unit({0: np.array([5.0, 7.0])}, 2)
    assert work.tolist() == [[5, 0, 5], [7, 0, 7]]


def test_units_add_up_over_the_computes_of_a_step(tmp_path: Path) -> None:
    sketch = Decodes()
    sketch.step(1000, computes=[{"dur": 500}, {"dur": 500}], ops=([10, 3], [0, 0]))
    sketch.events.insert(-2, s.Ops(t=sketch.t, compute=1, plan=0, dur=[20, 4], wait=[0, 0]))
    times = times_of(tmp_path, sketch.events)
    assert times.by_unit({0: np.array([0, 1])}, 2).tolist() == [[30], [7]]
    assert times.work_by_unit({0: np.array([5.0, 7.0])}, 2).tolist() == [[10], [14]]


def test_only_the_first_thread_counts(tmp_path: Path) -> None:
    sketch = Decodes()
    sketch.step(1000, ops=([10, 3], [0, 0]), threads=2)
    other = s.Ops(t=sketch.t, compute=0, plan=0, thread=1, dur=[99, 99], wait=[0, 0])
    sketch.events.insert(-2, other)
    times = times_of(tmp_path, sketch.events)
    assert times.by_unit({0: np.array([0, 1])}, 2).tolist() == [[10], [3]]
    assert times.work_by_unit({0: np.array([5.0, 7.0])}, 2).tolist() == [[5], [7]]


def test_layers_add_up_over_the_computes_of_a_step(tmp_path: Path) -> None:
    sketch = Decodes()
    sketch.step(1000, computes=[{"dur": 500}, {"dur": 500}])
    sketch.step(1000)
    for compute, layers, dur in ((0, [0, 1], [5, 7]), (1, [0], [30]), (2, [1], [2])):
        (at,) = (
            i
            for i, event in enumerate(sketch.events)
            if isinstance(event, s.Compute) and event.compute == compute
        )
        event = s.Layers(t=sketch.events[at].t, compute=compute, layer=layers, dur=dur)
        sketch.events.insert(at + 1, event)
    found = times_of(tmp_path, sketch.events).by_layer()
    assert list(found) == [0, 1]
    np.testing.assert_equal(found[0], [35, np.nan])
    np.testing.assert_equal(found[1], [7, 2])


@pytest.mark.parametrize(("few", "refused"), [(18, False), (17, True)])
def test_a_table_that_would_be_nearly_empty_is_refused(
    few: int, refused: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """10 rows of 3 steps are 30 cells; the 4 that are measured allow for 12 of them."""
    monkeypatch.setattr(step_times, "FEW_CELLS", few)
    monkeypatch.setattr(step_times, "MOST_EMPTY", 3)
    times = times_of(tmp_path, with_ops((10, 3), (0, 0), (20, 4)).events)
    units = {0: np.array([0, 1])}
    if not refused:
        assert times.by_unit(units, 10).shape == (10, 3)
        return
    with pytest.raises(UsageError, match="its 3 steps share too few of 10 parts to be compared"):
        times.by_unit(units, 10)


# --- several sessions ---


@pytest.mark.parametrize(
    ("tokens", "expected"),
    [
        ([[1, 1]], "decodes"),
        ([[1], [2]], "decodes 1 to 2 tokens"),
        ([[2, 2], [2]], "decodes 2 tokens"),
        ([[1000], [2000, 500]], "decodes 500 to 2,000 tokens"),
    ],
)
def test_what_steps_do(tokens: list[list[int]], expected: str) -> None:
    sessions: list[Any] = [
        SimpleNamespace(
            steps={"phase": np.array(["decode"] * len(of) + ["other"]),
                   "n_tokens": np.array([*of, 9999])}
        )
        for of in tokens
    ]  # fmt: skip
    assert verb("decode", sessions) == expected


def rounds(n: int, begin: int, ns: int = 10) -> list[Any]:
    return [SimpleNamespace(clock=(begin + 100 * i, begin + 100 * i + ns)) for i in range(n)]


@pytest.mark.parametrize(
    ("a", "b", "in_turns"),
    [
        (rounds(5, 0), rounds(5, 20), True),
        (rounds(5, 20), rounds(5, 0), True),
        (rounds(4, 0), rounds(4, 20), False),
        (rounds(5, 0), rounds(6, 20), False),
        (rounds(6, 0), rounds(5, 20), False),
        (rounds(5, 0), rounds(5, 20, ns=79), True),
        (rounds(5, 0), rounds(5, 20, ns=80), False),
        (rounds(5, 0), rounds(5, 1000), False),
    ],
    ids=["a first", "b first", "few", "b has more", "a has more", "just ended", "at once", "later"],
)
def test_sides_took_turns_if_each_round_ended_before_the_next(
    a: list[Any], b: list[Any], in_turns: bool
) -> None:
    assert took_turns(a, b) == in_turns
