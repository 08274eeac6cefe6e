"""CP-SAT finds what exhaustive search finds, and its schedules are valid."""

from __future__ import annotations

import pytest
from hypothesis import given, settings

from llamacpp_instr.base.errors import UsageError
from llamacpp_instr.converters.scheduling.optimum import (
    MOST_TASKS,
    compute_bounds,
    schedule_optimal,
)
from llamacpp_instr.converters.scheduling.schedule import schedule_list
from llamacpp_instr.converters.scheduling.tasks import EngineKind, Engines, equal_engines
from tests.kit.schedule_kit import (
    assert_valid,
    fed_core,
    graphs,
    machines,
    make_tasks,
    shortest_makespan,
)


@settings(max_examples=20)
@given(graphs(most=6, longest=9), machines(most=2).filter(lambda e: not e.transfers))
def test_the_optimum_is_that_of_exhaustive_search(tasks, engines) -> None:
    made = schedule_optimal(tasks, engines, 30)
    assert_valid(made)
    assert made.makespan == made.proven == shortest_makespan(tasks, engines)


@settings(max_examples=15)
@given(graphs(most=8), machines(most=2))
def test_it_is_valid_and_no_worse_than_the_rules(tasks, engines) -> None:
    made = schedule_optimal(tasks, engines, 20)
    assert_valid(made)
    assert made.makespan <= schedule_list(tasks, engines).makespan
    assert compute_bounds(tasks, engines)[0].ns <= made.proven <= made.makespan


@settings(max_examples=45)
@given(graphs(), machines())
def test_shifting_leaves_a_schedule_valid_and_begins_nothing_later(tasks, engines) -> None:
    made = schedule_list(tasks, engines)
    shifted = made.activities.shifted_left()
    assert_valid(shifted)
    assert (shifted.begin <= made.begin).all()
    assert (shifted.engine == made.engine).all()


def test_a_known_schedule_is_never_called_infeasible() -> None:
    # OR-Tools 9.15 does, with its default settings
    tasks = make_tasks(
        [("MUL_MAT", 1, []), ("FLASH_ATTN_EXT", 1, [0]), ("FLASH_ATTN_EXT", 1, [0])],
        bytes=[10, 10, 7],
    )
    kinds = (
        EngineKind("any", 1, None, {}, 2e9),
        EngineKind("matrix", 1, frozenset({"MUL_MAT"})),
    )
    made = schedule_optimal(tasks, Engines(kinds), 20)
    assert made.makespan == made.proven == 10


def test_it_beats_list_scheduling_where_that_is_not_optimal() -> None:
    # longest first gives 3+2+2, but 3+3 and 2+2+2 are 6 each
    tasks = make_tasks([("ADD", ns, []) for ns in (3, 3, 2, 2, 2)])
    assert schedule_list(tasks, equal_engines(2)).makespan == 7
    made = schedule_optimal(tasks, equal_engines(2), 20)
    assert (made.makespan, made.proven, made.policy) == (6, 6, "optimal")


def test_transfers_are_ordered_so_that_no_engine_waits() -> None:
    # the short load first: the long one comes while its task runs (Johnson's rule)
    tasks = make_tasks([("MUL_MAT", 10, []), ("MUL_MAT", 60, [])], load=[60, 10])
    made = schedule_optimal(tasks, fed_core(), 20)
    assert_valid(made)
    assert made.makespan == made.proven == 80


def test_two_buffers_are_all_that_an_engine_has() -> None:
    # while the first runs, the load of the second can come, but not that of the third
    rows = [("MUL_MAT", ns, [i - 1] if i else []) for i, ns in enumerate((100, 1, 1, 1))]
    made = schedule_optimal(make_tasks(rows, load=[10] * 4), fed_core(), 20)
    assert_valid(made)
    assert made.makespan == made.proven == 131


def test_cached_keys_are_loaded_after_they_have_been_written() -> None:
    tasks = make_tasks([("CPY", 10, []), ("MUL_MAT", 10, [0])], load=[0, 20])
    made = schedule_optimal(tasks, fed_core(runs=None, dmas=2), 20)
    assert_valid(made)
    assert made.makespan == made.proven == 40


def test_what_was_proven_is_a_bound_even_without_time() -> None:
    tasks = make_tasks([("ADD", 7 + i % 11, [i - 5] if i > 5 else []) for i in range(60)])
    made = schedule_optimal(tasks, equal_engines(3), 0.0)
    assert_valid(made)
    assert compute_bounds(tasks, equal_engines(3))[0].ns <= made.proven <= made.makespan


def test_too_many_tasks_are_refused() -> None:
    tasks = make_tasks([("ADD", 1, [])] * (MOST_TASKS + 1))
    with pytest.raises(UsageError, match="5001 tasks are too many for the optimum"):
        schedule_optimal(tasks, equal_engines(2), 1)
    tasks = make_tasks([("ADD", 1, [])] * 1000)
    with pytest.raises(UsageError, match="1000 tasks on 201 engines are too many for the optimum"):
        schedule_optimal(tasks, Engines(equal_engines(201).kinds, handover_ns=5), 1)
