"""The critical path explains every nanosecond of the makespan."""

from __future__ import annotations

from dataclasses import astuple, replace
from itertools import pairwise

import numpy as np
from hypothesis import given, settings

from llamacpp_instr.converters.scheduling.report import critical_path
from llamacpp_instr.converters.scheduling.schedule import Schedule, schedule_list, schedule_program
from llamacpp_instr.converters.scheduling.tasks import EngineKind, Engines, equal_engines
from tests.kit.schedule_kit import assert_valid, fed_core, graphs, machines, make_tasks


def assert_whole(made: Schedule) -> None:
    parts = critical_path(made)
    assert parts[0].begin == 0
    assert parts[-1].end == made.makespan
    assert all(a.end == b.begin for a, b in pairwise(parts))
    assert sum(part.end - part.begin for part in parts) == made.makespan
    for part in parts:
        if part.what == "task":
            assert (part.begin, part.end) == (made.begin[part.task], made.end[part.task])
            assert part.engine == made.engine[part.task]
        if part.what == "transfer":
            assert part.begin == made.transfer_begin[part.task]
            assert part.end == made.transfer_end[part.task]
        if part.what == "hand-over":
            assert part.end - part.begin == made.engines.handover_ns


@settings(max_examples=45)
@given(graphs(), machines())
def test_the_parts_add_up_and_nothing_waits_without_a_cause(tasks, engines) -> None:
    for made in (schedule_list(tasks, engines), schedule_program(tasks, engines)):
        assert_whole(made)
        assert all(part.what != "wait" for part in critical_path(made))
    shifted = made.activities.shifted_left()
    assert_whole(shifted)
    assert all(part.what != "wait" for part in critical_path(shifted))


@settings(max_examples=20)
@given(graphs(), machines())
def test_a_schedule_that_could_begin_earlier_has_waits(tasks, engines) -> None:
    made = schedule_list(tasks, engines)
    late = replace(
        made,
        begin=made.begin + 5,
        end=made.end + 5,
        transfer_begin=made.transfer_begin + 5,
        transfer_end=made.transfer_end + 5,
    )
    assert_whole(late)
    waits = [part for part in critical_path(late) if part.what == "wait"]
    assert [(part.begin, part.end) for part in waits] == [(0, 5)]


def test_it_says_what_was_waited_for() -> None:
    tasks = make_tasks([("ADD", 10, []), ("ADD", 20, []), ("MUL_MAT", 5, [0]), ("ADD", 7, [1, 2])])
    kinds = (EngineKind("m", 1, frozenset({"MUL_MAT"})), EngineKind("v", 1, frozenset({"ADD"})))
    made = schedule_list(tasks, Engines(kinds, handover_ns=3))
    # t1 first: its path is longer
    parts = [
        (part.what, part.task, part.begin, part.end, part.after) for part in critical_path(made)
    ]
    assert parts == [
        ("task", 1, 0, 20, "start"),
        ("task", 0, 20, 30, "engine"),
        ("hand-over", 2, 30, 33, "source"),
        ("task", 2, 33, 38, "source"),
        ("hand-over", 3, 38, 41, "source"),
        ("task", 3, 41, 48, "source"),
    ]


def test_in_program_order_it_says_that_none_may_overtake() -> None:
    # t2 is ready at once, but t1 begins at 10
    tasks = make_tasks([("ADD", 10, []), ("ADD", 5, [0]), ("ADD", 9, [])])
    made = schedule_program(tasks, equal_engines(3))
    assert [(part.task, part.after) for part in critical_path(made)] == [(0, "start"), (2, "order")]


def test_transfers_are_on_the_path_if_they_bind() -> None:
    engines = fed_core()
    tasks = make_tasks([("MUL_MAT", 10, [])] * 4, load=[20] * 4)
    parts = critical_path(schedule_list(tasks, engines))
    assert [part.what for part in parts] == ["transfer"] * 4 + ["task"]
    tasks = make_tasks([("MUL_MAT", 50, [])] * 4, load=[20] * 4)
    parts = critical_path(schedule_list(tasks, engines))
    assert [part.what for part in parts] == ["transfer"] + ["task"] * 4


def test_a_task_waits_for_its_load_even_from_the_first_engine() -> None:
    """The first engine brings loads to a core with room for two of 100 bytes. The three tasks do
    not depend on each other."""
    kinds = (
        EngineKind("dma", 1, frozenset({"memory"}), {}, 1e9),
        EngineKind("core", 1, frozenset({"matrix"}), {}, None, 200),
    )
    rows = [("MUL_MAT", ns, []) for ns in (300, 310, 320)]
    tasks = make_tasks(rows, load=[100] * 3, bytes=[100] * 3)
    made = schedule_list(tasks, Engines(kinds, transfers=True))
    shifted = made.activities.shifted_left()
    assert_valid(shifted)
    assert set(shifted.transfer_engine.tolist()) == {0}
    for begin, brought in zip(shifted.begin.tolist(), shifted.transfer_end.tolist(), strict=True):
        assert begin >= brought
    begins = sorted(shifted.transfer_begin.tolist())
    # there is room for the third once a task has ended
    assert begins == [0, 100, max(200, min(shifted.end.tolist()))]


def test_a_load_waits_for_the_buffer_that_was_emptied_last_before_it() -> None:
    """Two buffers, three loads: t2 runs first, then t1, then t0, whose load needs t2's buffer."""
    tasks = make_tasks(
        [("MUL_MAT", ns, []) for ns in (30, 20, 150)], load=[100] * 3, bytes=[100] * 3
    )
    made = Schedule(
        tasks, fed_core(), "list",
        engine=np.array([0, 0, 0], np.int32),
        begin=np.array([350, 250, 100]),
        end=np.array([380, 270, 250]),
        transfer_engine=np.array([1, 1, 1], np.int32),
        transfer_begin=np.array([250, 100, 0]),
        transfer_end=np.array([350, 200, 100]),
    )  # fmt: skip
    assert_valid(made)
    assert [astuple(part) for part in critical_path(made)] == [
        ("transfer", 2, 1, 0, 100, "start"),
        ("task", 2, 0, 100, 250, "transfer"),
        ("transfer", 0, 1, 250, 350, "buffer"),
        ("task", 0, 0, 350, 380, "transfer"),
    ]
