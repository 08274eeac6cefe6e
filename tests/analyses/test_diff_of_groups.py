"""The comparison of two groups of logs: how much processes differ, few logs, runs in turns."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from scipy import stats

from llamacpp_instr.converters.analyses.diff import compute_diff
from llamacpp_instr.converters.analyses.step_times import StepTimes
from llamacpp_instr.log import schema as s
from llamacpp_instr.log.session import Session, Table, load_session
from llamacpp_instr.report.render import render_text
from tests.conftest import Instr, assert_refused
from tests.kit.reports import session_of
from tests.kit.steady_log import group, slowed, steady_log


def test_groups_show_how_much_processes_differ(tmp_path):
    """Welch's t of the logarithms, computed here by its formula."""
    before = group(tmp_path, "a", range(5), 1.0, 0.02)
    after = group(tmp_path, "b", range(5, 10), 1.3, 0.02)
    sides = [[load_session(path) for path in paths] for paths in (before, after)]
    ratio = compute_diff(*sides).steps["decode"]
    a, b = (
        np.log([np.median(StepTimes(session).whole_steps("decode")) for session in side])
        for side in sides
    )
    se = np.sqrt(a.var(ddof=1) / 5 + b.var(ddof=1) / 5)
    assert ratio.value == pytest.approx(np.exp(b.mean() - a.mean()))
    t = np.log(ratio.high / ratio.value) / se
    assert 2.306 <= t <= 2.777, "between Student's t of 8 and of 4 degrees of freedom"
    assert ratio.differs


def test_equal_groups_rarely_differ(tmp_path):
    """The speeds of processes differ at random, by at most 10 %."""
    sessions = [session_of(tmp_path / f"{i}.log", steady_log(i, noise=0.01)) for i in range(8)]

    def of_a_process(session: Session, factor: float) -> Session:
        steps = dict(session.steps.columns)
        steps["end"] = steps["begin"] + np.rint((steps["end"] - steps["begin"]) * factor)
        return replace(session, steps=Table(steps))

    wrong = 0
    for seed in range(10):
        factors = 1 + np.random.default_rng(seed).uniform(-0.1, 0.1, len(sessions))
        processes = list(map(of_a_process, sessions, factors))
        wrong += compute_diff(processes[:4], processes[4:]).steps["decode"].differs
    assert wrong <= 2, "more than 2 of 10 has a probability of 0.012 at 5 %"


def processes(directory: Path, name: str, factors: Sequence[float]) -> list[Session]:
    """Logs without noise of processes with these speeds."""
    return [
        session_of(directory / f"{name}{i}.log", slowed(steady_log(i), factor))
        for i, factor in enumerate(factors)
    ]


APART = 2 * 0.02
"""the deviation above which a few logs are not enough: twice the 2 % between processes that
docs/explanation/accuracy.md assumes"""


@pytest.mark.parametrize("n", [2, 3, 4])
def test_a_few_logs_tell_what_their_samples_show(tmp_path, n):
    """Equal logs have the assumed 2 %, divided by the root of their number, and 10 degrees of
    freedom each."""
    before, after = (processes(tmp_path, name, [f] * n) for name, f in (("a", 1.0), ("b", 1.2)))
    found = compute_diff(before, after)
    ratio = found.steps["decode"]
    reach = stats.t.ppf(0.975, 2 * 10 * n) * 0.02 * np.sqrt(2 / n)
    assert math.log(ratio.high / ratio.value) == pytest.approx(reach, rel=1e-2)
    assert ratio.verdict == "slower"
    text = " ".join(render_text(found.reports).split())
    assert f"record {5 - n} more of A, {5 - n} more of B." in text


@pytest.mark.parametrize(("apart", "tells"), [(0.98 * APART, True), (1.02 * APART, False)])
def test_logs_of_a_side_that_differ_too_much_are_too_few(tmp_path, apart, tells):
    """The deviation of two numbers is their distance divided by the root of 2."""
    distance = math.exp(apart * math.sqrt(2))
    before, after = processes(tmp_path, "a", [1, distance]), processes(tmp_path, "b", [3, 3])
    found = compute_diff(before, after)
    assert (found.steps["decode"].low is not None) is tells
    few = "Too few logs to tell (3 more of A, 3 more of B) in decode."
    assert (found.reports[0].title == few) is not tells
    if tells:
        reach = math.log(found.steps["decode"].high / found.steps["decode"].value)
        assert reach > 1.96 * math.hypot(0.98 * APART, 0.02) / math.sqrt(2)


def test_runs_in_turns_are_compared_in_pairs(tmp_path):
    """Each round is slowed by another load; the pairs' ratios are nearly equal."""
    loads, of_pair = (1, 2, 1.3, 3, 1.1), (1.7, 1.8, 1.76, 1.74, 1.8)
    sides: list[list[Session]] = [[], []]
    for i, (load, factor) in enumerate(zip(loads, of_pair, strict=True)):
        for side, slower in enumerate((load, load * factor)):
            events = slowed(steady_log(i), slower)
            assert isinstance(events[0], s.SessionStart)
            events[0].wall = 1000 * 10**9 * (2 * i + side)
            sides[side].append(session_of(tmp_path / f"{side}-{i}.log", events))
    found = compute_diff(*sides)
    logs = np.log(of_pair)
    reach = stats.t.ppf(0.975, 4) * logs.std(ddof=1) / math.sqrt(5)
    ratio = found.steps["decode"]
    bounds = [math.exp(logs.mean() + sign * reach) for sign in (0, -1, 1)]
    assert [ratio.value, ratio.low, ratio.high] == pytest.approx(bounds, rel=1e-5)
    assert "of 5 pairs" in " ".join(found.reports[1].notes)
    backwards = compute_diff(*(side[::-1] for side in sides)).steps["decode"]
    assert (backwards.low, backwards.high) == pytest.approx((ratio.low, ratio.high)), "by time"
    # not in turns: first one side, then the other
    for i, session in enumerate(sides[1]):
        session.start.wall = 10**15 + i
    assert compute_diff(*sides).steps["decode"].verdict in ("within noise", "too noisy to tell")


def test_a_note_that_holds_for_many_logs_is_one_line(tmp_path):
    """Ten logs were not closed, and all but one were recorded on a disturbed machine."""
    sides: list[list[Session]] = [[], []]
    for i in range(10):
        events = steady_log(i)
        if i:
            t, end = events[0].t, max(event.t for event in events)
            events.append(s.Machine(t=end, dur=end - t, cpu=end - t, delay=end - t, nvcsw=0,
                nivcsw=9))  # fmt: skip
        sides[i % 2].append(session_of(tmp_path / f"{i}.log", events))
    notes = compute_diff(*sides).reports[0].notes
    busy = [note for note in notes if "descheduled" in note]
    assert [note.partition(":")[0] for note in busy] == ["A, 4 of 5 logs", "B, 5 of 5 logs"]
    assert sum("not closed" in note for note in notes) == 1


def test_groups_on_the_command_line(tmp_path, instr: Instr):
    before = group(tmp_path, "a", range(3), 1.0, 0.01)
    after = group(tmp_path, "b", range(3, 6), 2.0, 0.01)
    done = instr("diff", "--before", *before, "--after", *after, "--by", "op")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("B decodes 0.5")
    assert_refused(instr("diff", "--before", *before), "--before once, then --after")
    assert_refused(instr("diff", "--before", before[0], "--after", *after), "at least two logs")
    assert_refused(instr("diff", before[0]), "only one log")
