"""When results were ready, which steps count, and which logs are one run, by hand."""

from __future__ import annotations

from pathlib import Path
from random import Random

import numpy as np
import pytest
from msgspec.structs import replace

from llamacpp_instr.base.errors import UsageError
from llamacpp_instr.log.columns import interval_problems, kernel_times, sequence_problems
from llamacpp_instr.log.numbers import Numbers
from llamacpp_instr.log.runs import Run, find_runs
from llamacpp_instr.log.schema import (
    CONTEXTS_KEPT,
    LATEST,
    Layers,
    Mark,
    Ops,
    StepBegin,
    StepEnd,
    Sync,
)
from llamacpp_instr.log.session import (
    WAITED,
    Table,
    with_result_times,
)
from llamacpp_instr.log.steps import LatestSteps, counted_steps, step_rows, steps_inside
from tests.kit.made_log import make_log
from tests.kit.reports import session_of
from tests.kit.sketched_log import Sketch
from tests.kit.split_log import split_log
from tests.kit.steady_log import write


def table(**columns: list[int]) -> Table:
    return Table({name: np.array(column, np.int64) for name, column in columns.items()})


# --- results ---

LONG = 20_000


@pytest.mark.parametrize(
    ("waits", "ends"),
    [
        ([], [150, 350, 250]),
        ([(0, 150, LONG)], [150 + LONG, 350, 250]),
        ([(0, 150, LONG - 1)], [150, 350, 250]),
        # of the step that began last before it: at 100 and at 300
        ([(0, 100, LONG)], [100 + LONG, 350, 250]),
        ([(0, 99, LONG)], [150, 350, 250]),
        ([(0, 299, LONG)], [299 + LONG, 350, 250]),
        ([(0, 300, LONG)], [150, 300 + LONG, 250]),
        # of its context, whose steps may end in another order
        ([(1, 400, LONG)], [150, 350, 400 + LONG]),
        ([(2, 400, LONG)], [150, 350, 250]),
        ([(0, 200, LONG), (0, 150, LONG)], [200 + LONG, 350, 250]),
    ],
)
def test_a_step_ends_with_the_wait_for_its_result(
    waits: list[tuple[int, int, int]], ends: list[int]
) -> None:
    assert WAITED == LONG
    steps = table(ctx=[0, 0, 1], begin=[100, 300, 200], end=[150, 350, 250])
    ctx, t, dur = (list(of) for of in zip(*waits, strict=True)) if waits else ([], [], [])
    for order in ([0, 1, 2], [2, 1, 0]):
        found = with_result_times(steps.rows(np.array(order)), table(ctx=ctx, t=t, dur=dur))
        assert found["end"].tolist() == [ends[i] for i in order]
        assert found["returned"].tolist() == [[150, 350, 250][i] for i in order]


def sync(ctx: int, t: int, dur: int) -> Sync:
    return Sync(t=t, ctx=ctx, dur=dur)


def test_the_latest_step_of_a_context_waits_for_its_result() -> None:
    settled: list[tuple[str, int]] = []
    latest = LatestSteps[str](lambda *of: settled.append(of))
    latest.add(0, "a", 100)
    latest.add(1, "b", 200)
    latest.wait(sync(0, 110, LONG))
    latest.wait(sync(0, 90, LONG))
    latest.wait(sync(1, 210, LONG - 1))
    latest.wait(sync(7, 300, LONG))
    assert settled == []
    latest.settle(0)
    latest.settle(0)
    latest.settle(7)
    assert settled == [("a", 110 + LONG)]
    latest.add(1, "c", 300)
    assert settled[1:] == [("b", 200)]
    latest.settle_all()
    assert settled[2:] == [("c", 300)]


def test_steps_of_a_limited_number_of_contexts_wait() -> None:
    settled: list[tuple[int, int]] = []
    latest = LatestSteps[int](lambda *of: settled.append(of))
    for ctx in range(CONTEXTS_KEPT):
        latest.add(ctx, ctx, 5)
    assert settled == []
    latest.add(CONTEXTS_KEPT, 77, 5)
    assert settled == [(0, 5)]


# --- steps ---


def test_failed_steps_warm_up_and_those_without_an_end_do_not_count(tmp_path: Path) -> None:
    sketch = Sketch()
    for _ in range(5):
        sketch.step(1000)
    marks = [Mark(t=t, mark=1, name="warm-up", phase=p) for t, p in ((0, "begin"), (2000, "end"))]
    events = [replace(e, status=1) if isinstance(e, StepEnd) and e.step == 2 else e
              for e in sketch.events[:-1]]  # fmt: skip
    session = session_of(tmp_path / "a.log", [*events, *marks])
    steps, notes = counted_steps(session)
    assert steps["step"].tolist() == [3]
    assert notes == [
        "Left out: 1 failed step.", "Left out: 2 steps of warm-up runs.",
        "Left out: 1 step without an end.",
    ]  # fmt: skip
    assert counted_steps(session, warm_up=True)[0]["step"].tolist() == [0, 1, 3]
    assert step_rows(session, steps) == {3: 0}
    assert steps["phase"].tolist() == ["prefill"], "nothing was sampled before it"


def test_a_log_without_such_steps_has_no_notes(tmp_path: Path) -> None:
    sketch = Sketch()
    sketch.step(1000, 6, sampled=10)
    sketch.step(1000, sampled=10)
    session = session_of(tmp_path / "a.log", sketch.events)
    steps, notes = counted_steps(session)
    assert (len(steps), notes) == (2, [])
    assert step_rows(session, steps) == {0: 0, 1: 1}
    assert step_rows(session, steps.rows(np.array([1]))) == {1: 0}
    assert step_rows(session, steps.rows(np.array([], np.int64))) == {}


def test_steps_inside_of_marks() -> None:
    """Marks of 10 to 20, at 20, from 15 on, and one that ends before it begins."""
    marks = table(begin=[10, 20, 15, 25], end=[20, 20, -1, 5])
    first, end = steps_inside(marks, np.array([5, 10, 15, 20, 25]))
    assert (first, end) == ([1, 3, 2, 4], [3, 3, 5, 4])
    first, end = steps_inside(table(begin=[0], end=[0]), np.array([0, 1]))
    assert (first, end) == ([0], [0])


# --- columns and numbers ---


def test_columns_of_sequences_are_as_long_as_their_numbers() -> None:
    begin = StepBegin(t=0, step=0, ctx=0, kind="decode", phase="decode", n_tokens=2, n_outputs=1,
                      n_seqs=2, seq=[0, 1], seq_pos=[0, 0])  # fmt: skip
    assert list(sequence_problems(begin)) == []
    assert list(sequence_problems(replace(begin, seq=None, seq_pos=None))) == []
    for name in ("seq_pos", "seq_tokens", "seq_outputs"):
        for column in ([1], [1, 1, 1]):
            n = len(column)
            problem = f"column `{name}` has {n} entries, `seq` has 2"
            assert list(sequence_problems(replace(begin, **{name: column}))) == [problem]
        assert list(sequence_problems(replace(begin, **{name: [1, 1]}))) == []
    missing = replace(begin, seq_pos=None)
    assert list(sequence_problems(missing)) == ["column `seq_pos` has 0 entries, `seq` has 2"]


def test_columns_of_intervals_are_as_long_as_their_durations_and_end_in_time() -> None:
    layers = Layers(t=0, compute=0, layer=[0, 1], dur=[1, 2])
    assert list(interval_problems(layers, layer=[0, 1], gap=None)) == []
    assert list(interval_problems(layers, layer=[0], gap=[0, 0, 0])) == [
        "column `layer` has 1 entries, `dur` has 2", "column `gap` has 3 entries, `dur` has 2"
    ]  # fmt: skip
    for late, problems in ((0, []), (1, ["an impossible time"])):
        assert list(interval_problems(replace(layers, dur=[LATEST - 2, 2 + late]))) == problems
        long = replace(layers, gap=[0, LATEST - 3 + late])
        assert list(interval_problems(long)) == problems


def test_kernels_follow_each_other_with_gaps() -> None:
    ops = Ops(t=100, compute=0, plan=0, dur=[5, 7])
    for gap, begins in (([0, 3], [100, 108]), (None, [100, 105])):
        begin, end = kernel_times(replace(ops, gap=gap))
        assert begin.tolist() == begins
        assert (end - begin).tolist() == [5, 7]


def test_numbers_count_up_from_the_first() -> None:
    numbers = Numbers()
    assert (0 in numbers, len(numbers)) == (False, 0)
    for number in (5, 6, 9):
        numbers.add(number)
    assert [n for n in range(12) if n in numbers] == [5, 6, 9]
    assert len(numbers) == 3
    for number in (8, 7):
        numbers.add(number)
    assert [n for n in range(12) if n in numbers] == [5, 6, 7, 8, 9]
    assert len(numbers) == 5
    numbers.add(2)
    assert [n for n in range(12) if n in numbers] == [2, 5, 6, 7, 8, 9]


# --- runs ---


@pytest.mark.parametrize(
    ("paths", "name"),
    [(("a",), "a"), (("-",), "standard input"), (("a", "b"), "a and 1 more part"),
     (("a", "b", "c"), "a and 2 more parts")],
)  # fmt: skip
def test_the_name_of_a_run(paths: tuple[str, ...], name: str) -> None:
    assert Run(paths).name == name


def test_parts_that_are_missing_lie_between_others() -> None:
    assert Run(("a", "b", "c"), (2, 3, 6)).missing == [4, 5]
    assert Run(("a",)).missing == []


def test_parts_of_a_session_are_one_run_in_their_order(tmp_path: Path) -> None:
    parts = split_log(make_log(Random(9).randint, 2, "minimal"), 3, Random(5))
    paths = [str(write(tmp_path / f"{i}.log", part)) for i, part in enumerate(parts)]
    other = str(write(tmp_path / "other.log", make_log(Random(4).randint, 1, "minimal")))
    runs = find_runs([paths[2], other, paths[0], paths[1]])
    assert [(of.paths, of.numbers) for of in runs] == [(tuple(paths), (1, 2, 3)), ((other,), (1,))]
    with pytest.raises(UsageError, match=r"0\.log and .*0\.log are the same part of one session"):
        find_runs([paths[0], paths[1], paths[0]])
    twice = find_runs([paths[0], paths[1], paths[0]], repeated=True)
    assert [of.numbers for of in twice] == [(1, 2), (1,)]


def test_parts_of_an_old_recorder_are_runs_of_their_own(tmp_path: Path) -> None:
    """Before ABI 2 ids did not count through all parts."""
    parts = split_log(make_log(Random(9).randint, 2, "minimal"), 2, Random(5))
    for abi, n in ((1, 2), (2, 1)):
        paths = []
        for i, (start, *rest) in enumerate(parts):
            old = replace(start, producer=replace(start.producer, abi=abi))  # type: ignore[attr-defined]
            paths.append(write(tmp_path / f"{abi}-{i}.log", [old, *rest]))
        assert len(find_runs(paths)) == n


def test_standard_input_is_one_log() -> None:
    (run,) = find_runs(["-"])
    assert run == Run(("-",))
    with pytest.raises(UsageError, match="only one of the logs can be standard input"):
        find_runs(["-", "-"])
