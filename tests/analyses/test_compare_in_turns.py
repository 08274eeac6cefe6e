"""Models that ran in turns are compared in pairs, and by their kernels on a disturbed machine."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from scipy import stats

from llamacpp_instr.converters.analyses.compare import (
    Candidate,
    Pair,
    compute_comparison,
    recorded_model,
)
from llamacpp_instr.converters.analyses.memory import stored_in_log
from llamacpp_instr.log import schema as s
from tests.kit.reports import session_of
from tests.kit.steady_log import scaled, slowed, steady_log

LOADS = (1.0, 2.0, 1.3, 3.0, 1.1)
"""what other processes do to both runs of a round"""
OF_PAIR = (1.70, 1.80, 1.76, 1.74, 1.80)


def candidates(
    directory: Path,
    steps: Sequence[float],
    kernels: Sequence[float],
    loads: Sequence[float] = LOADS,
    *,
    disturbed: bool = False,
    in_turns: bool = True,
    interrupted: Sequence[Sequence[int]] = (),
    cpu: Sequence[float] = (),
) -> list[Candidate]:
    """Two models with one run per round; `steps` and `kernels` multiply the second's times.
    `interrupted` has, by side and round, in how many of ten steps all kernels take three times as
    long; `cpu` multiplies the CPU time of the second's steps, which is read four times a step."""
    sides = []
    for side in range(2):
        sessions = []
        for i, load in enumerate(loads):
            log = scaled(steady_log(10 * i + side), "MUL_MAT", kernels[i] if side else 1)
            for at, ops in enumerate(e for e in log if isinstance(e, s.Ops) and interrupted):
                ops.dur = [d * (3 if at % 10 < interrupted[side][i] else 1) for d in ops.dur]
            log = slowed(log, load * (steps[i] if side else 1))
            start, end = log[0], max(event.t for event in log)
            assert isinstance(start, s.SessionStart)
            start.wall = (10**15) * (1 + (2 * i + side if in_turns else i + 10 * side))
            n_parts = 4 * sum(isinstance(e, s.StepEnd) for e in log) if cpu else 1
            times = np.linspace(start.t, end, n_parts + 1).astype(int).tolist()
            used = (cpu[i] / steps[i] if side else 1) / load if cpu else 1
            log += [s.Machine(t=t, dur=t - before, cpu=round((t - before) * used),
                delay=(t - before) // 2 if disturbed else 0, nvcsw=0, nivcsw=9)
                for before, t in pairwise(times)]  # fmt: skip
            sessions.append(session_of(directory / f"{side}-{i}.log", log))
        model = stored_in_log(sessions[0], recorded_model(sessions[0]), None)
        sides.append(Candidate("AB"[side], model, sessions=sessions))
    return sides


def by_pairs(factors: Sequence[float], n_family: int = 1) -> list[float]:
    """Student's interval of the logarithms: value, low, high."""
    logs = np.log(factors)
    reach = stats.t.ppf(1 - 0.05 / 2 / n_family, len(logs) - 1) * logs.std(ddof=1)
    reach /= math.sqrt(len(logs))
    return [math.exp(logs.mean() + sign * reach) for sign in (0, -1, 1)]


def test_a_difference_in_every_round_is_reported_under_load(tmp_path: Path) -> None:
    pair = Pair(*candidates(tmp_path, OF_PAIR, OF_PAIR))
    ratio = pair.step_ratio("decode")
    assert [ratio.value, ratio.low, ratio.high] == pytest.approx(by_pairs(OF_PAIR), rel=1e-4)
    products = [row for row in pair.tensors() if "attn_q" in row.name]
    times = [row.times["decode"].ratio for row in products]
    n_family = sum(bool(row.times) for row in pair.tensors())
    for found in times:
        figures = [found.value, found.low, found.high]
        assert figures == pytest.approx(by_pairs(OF_PAIR, n_family), rel=1e-4)
    answer = compute_comparison([pair.a, pair.b])[0]
    assert "B against A: same bytes, decodes 0.568 times as fast (0.5" in answer.title
    assert "The models took turns: their speeds are compared in 5 pairs." in answer.notes


@pytest.mark.parametrize(
    ("loads", "in_turns"), [(LOADS, False), (LOADS[:4], True)], ids=["not in turns", "four rounds"]
)
def test_without_five_rounds_in_turns_there_are_no_pairs(
    tmp_path: Path, loads: Sequence[float], in_turns: bool
) -> None:
    pair = Pair(*candidates(tmp_path, OF_PAIR, OF_PAIR, loads, in_turns=in_turns))
    assert not pair.in_turns
    ratio = pair.step_ratio("decode")
    assert ratio.high is not None
    assert ratio.value is not None
    assert ratio.high / ratio.value > 1.4, "the pairs differ by 3 %"


def test_on_a_disturbed_machine_the_kernels_tell_what_the_clock_cannot(tmp_path: Path) -> None:
    """The rounds' steps say nothing; the products take half as long again in each."""
    steps, kernels = (3.0, 0.4, 2.0, 0.5, 1.0), (1.5,) * 5
    for disturbed, verdict in ((False, "too noisy to tell"), (True, "slower")):
        pair = Pair(*candidates(tmp_path, steps, kernels, disturbed=disturbed))
        ratio = pair.step_ratio("decode")
        assert ratio.verdict == verdict
    events = steady_log(0)
    (nodes,) = [e.nodes for e in events if isinstance(e, s.Graph) and e.nodes is not None]
    (plan,) = [e for e in events if isinstance(e, s.Plan)]
    ops = next(e for e in events if isinstance(e, s.Ops))
    products = sum(ns for ns, i in zip(ops.dur, plan.node, strict=True) if nodes.op[i] == "MUL_MAT")
    assert ratio.a == pytest.approx(sum(ops.dur))
    assert ratio.value == pytest.approx(1 + 0.5 * products / sum(ops.dur))
    notes = compute_comparison([pair.a, pair.b])[0].notes
    assert any("by the sum of their kernels' lower deciles" in note for note in notes)


@pytest.mark.parametrize(("factor", "verdict"), [(1.2, "slower"), (1.0, "within noise")])
def test_interruptions_of_most_steps_do_not_hide_or_make_a_difference(
    tmp_path: Path, factor: float, verdict: str
) -> None:
    interrupted = (8, 2, 7, 3, 1), (2, 8, 4, 8, 6)
    steps, kernels = (1.0,) * 5, (factor,) * 5
    pair = Pair(*candidates(tmp_path, steps, kernels, disturbed=True, interrupted=interrupted))
    ratio = pair.step_ratio("decode")
    assert ratio.verdict == verdict
    assert ratio.a == pytest.approx(sum(next(e for e in steady_log(0) if isinstance(e, s.Ops)).dur))


@pytest.mark.parametrize(("factor", "verdict"), [(1.2, "slower"), (1.0, "within noise")])
def test_the_cpu_time_of_long_steps_tells_what_clock_and_kernels_cannot(
    tmp_path: Path, factor: float, verdict: str
) -> None:
    """No part of a long step runs without interruptions, as in a prefill beside other work."""
    steps, cpu = (3.0, 0.4, 2.0, 0.5, 1.0), [factor * x for x in (0.97, 1.03, 1, 1.02, 0.98)]
    pair = Pair(*candidates(tmp_path, steps, steps, disturbed=True, cpu=cpu))
    ratio = pair.step_ratio("decode")
    assert [ratio.value, ratio.low, ratio.high] == pytest.approx(by_pairs(cpu), rel=0.02)
    assert ratio.verdict == verdict
    notes = compute_comparison([pair.a, pair.b])[0].notes
    assert any("more than 100 ms are compared by the CPU time" in note for note in notes)
