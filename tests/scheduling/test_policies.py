"""Schedules by rule are valid, and as good as the textbook says."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.schedule_scale import ENGINES, random_tasks
from llamacpp_instr.base.errors import UsageError
from llamacpp_instr.converters.scheduling.optimum import compute_bounds
from llamacpp_instr.converters.scheduling.schedule import (
    costs_of,
    schedule_list,
    schedule_program,
    upward_ranks,
)
from llamacpp_instr.converters.scheduling.tasks import EngineKind, Engines, Tasks, equal_engines
from tests.kit.schedule_kit import (
    assert_valid,
    fed_core,
    graphs,
    machines,
    make_tasks,
    shortest_makespan,
    sources_of,
)


@settings(max_examples=20)
@given(graphs(), machines())
def test_the_same_input_gives_the_same_valid_schedule_above_the_bounds(tasks, engines) -> None:
    bound = compute_bounds(tasks, engines)[0].ns
    for policy in (schedule_program, schedule_list):
        made, again = policy(tasks, engines), policy(tasks, engines)
        assert_valid(made)
        assert made.makespan >= bound
        assert made.proven is None
        assert (made.engine == again.engine).all()
        assert (made.begin == again.begin).all()


@settings(max_examples=15)
@given(graphs(), machines())
def test_in_program_order_none_overtakes(tasks, engines) -> None:
    assert (np.diff(schedule_program(tasks, engines).begin) >= 0).all()


@settings(max_examples=60)
@given(graphs(longest=3), st.integers(1, 4))
def test_tasks_begin_when_a_simulation_of_the_rule_begins_them(tasks, m) -> None:
    """On equal engines without hand-over, where it does not matter which engine it is."""
    rest = longest_to_the_end(tasks)
    n, sources = len(tasks), [sources_of(tasks, i) for i in range(len(tasks))]
    end: dict[int, int] = {}
    begin: dict[int, int] = {}
    now = 0
    while len(begin) < n:
        running = sum(until > now for until in end.values())
        ready = [
            i for i in range(n)
            if i not in begin and all(s in end and end[s] <= now for s in sources[i])
        ]  # fmt: skip
        if ready and running < m:
            first = max(ready, key=lambda i: (rest[i], -i))
            begin[first], end[first] = now, now + int(tasks.ns[first])
        else:
            now = min(until for until in end.values() if until > now)
    assert schedule_list(tasks, equal_engines(m)).begin.tolist() == [begin[i] for i in range(n)]
    free, begun, wanted = [0] * m, 0, []
    for i in range(n):
        begun = max(min(free), begun, *(wanted[s] + int(tasks.ns[s]) for s in sources[i]), 0)
        wanted.append(begun)
        free[free.index(min(free))] = begun + int(tasks.ns[i])
    assert schedule_program(tasks, equal_engines(m)).begin.tolist() == wanted


def test_the_longest_path_goes_first_among_tasks_for_different_engines() -> None:
    """The product could also run on the other engine, where it would keep the chain waiting."""
    kinds = (EngineKind("any", 1), EngineKind("matrix", 1, frozenset({"matrix"})))
    tasks = make_tasks([("MUL_MAT", 10, []), ("ADD", 10, []), ("ADD", 10, [1])])
    made = schedule_list(tasks, Engines(kinds))
    assert (made.engine.tolist(), made.begin.tolist()) == ([1, 0, 0], [0, 0, 10])


def longest_to_the_end(tasks: Tasks) -> list[int]:
    rest = tasks.ns.tolist()
    for i in reversed(range(len(tasks))):
        for source in sources_of(tasks, i):
            rest[source] = max(rest[source], int(tasks.ns[source]) + rest[i])
    return rest


def test_ranks_have_the_mean_over_the_engines_that_can_and_the_mean_hand_over() -> None:
    tasks = make_tasks([("MUL_MAT", 40, []), ("ADD", 10, [0]), ("ADD", 20, [0]), ("CPY", 8, [1])])
    kinds = (
        EngineKind("any", 1, None, {"MUL_MAT": 0.5}),
        EngineKind("matrix", 2, frozenset({"matrix"}), {"matrix": 2.0}),
    )
    engines = Engines(kinds, handover_ns=10)
    # 80 on one engine and 20 on each of two; two of three readers run elsewhere: 10 * 2 // 3
    copy, product = 8, (80 + 2 * 20) // 3
    add = 10 + 6 + copy
    assert upward_ranks(tasks, engines, costs_of(tasks, engines)).tolist() == [
        product + 6 + max(add, 20), add, 20, copy,
    ]  # fmt: skip


@settings(max_examples=15)
@given(graphs(most=60), st.integers(1, 6))
def test_list_scheduling_stays_within_grahams_bound(tasks, m) -> None:
    work = int(tasks.ns.sum())
    path = next(b.ns for b in compute_bounds(tasks, equal_engines(m)) if b.kind == "path")
    assert schedule_list(tasks, equal_engines(m)).makespan * m <= work + (m - 1) * path


@settings(max_examples=20)
@given(graphs(most=6, longest=9), machines(most=2).filter(lambda e: not e.transfers))
def test_no_bound_is_above_the_shortest_schedule(tasks, engines) -> None:
    shortest = shortest_makespan(tasks, engines)
    for bound in compute_bounds(tasks, engines):
        assert bound.ns <= shortest, bound
    assert schedule_list(tasks, engines).makespan >= shortest


@settings(max_examples=15)
@given(graphs())
def test_one_engine_does_all_the_work_in_sequence(tasks) -> None:
    for policy in (schedule_program, schedule_list):
        assert policy(tasks, equal_engines(1)).makespan == tasks.ns.sum()
    assert compute_bounds(tasks, equal_engines(1))[0].ns == tasks.ns.sum()


@pytest.mark.parametrize("engines", ENGINES)
def test_a_large_schedule_is_valid_and_near_its_bound(engines: str) -> None:
    tasks = random_tasks(10_000)
    made = schedule_list(tasks, ENGINES[engines])
    assert_valid(made)
    assert made.makespan <= 1.02 * compute_bounds(tasks, ENGINES[engines])[0].ns


def test_the_longest_path_goes_first() -> None:
    # in program order the long chain begins last
    tasks = make_tasks(
        [("ADD", 10, []), ("ADD", 10, []), ("ADD", 10, []), ("MUL_MAT", 10, [2]), ("ADD", 10, [3])]
    )
    assert schedule_list(tasks, equal_engines(2)).makespan == 30
    assert schedule_program(tasks, equal_engines(2)).makespan == 40
    ranks = upward_ranks(tasks, equal_engines(2), costs_of(tasks, equal_engines(2)))
    assert ranks.tolist() == [10, 10, 30, 20, 10]


def test_a_task_waits_for_a_faster_engine_if_it_ends_earlier_there() -> None:
    slow = EngineKind("slow", 1, None, {"*": 0.01})
    fast = EngineKind("fast", 1, None, {"*": 1.0})
    tasks = make_tasks([("ADD", 10, []), ("ADD", 10, [])])
    made = schedule_list(tasks, Engines((slow, fast)))
    assert made.engine.tolist() == [1, 1]
    assert made.makespan == 20


def test_a_reader_stays_where_its_source_ran_if_the_hand_over_costs_more() -> None:
    tasks = make_tasks([("ADD", 10, []), ("ADD", 10, []), ("ADD", 5, [0]), ("ADD", 5, [1])])
    made = schedule_list(tasks, Engines(equal_engines(2).kinds, handover_ns=100))
    assert made.engine[0] == made.engine[2] != made.engine[1] == made.engine[3]
    assert made.makespan == 15


def test_double_buffering_hides_the_transfers() -> None:
    # ten loads of 10 ns each, ten tasks of 10 ns: the first load is all that is added
    engines = fed_core()
    tasks = make_tasks([("MUL_MAT", 10, [i - 1] if i else []) for i in range(10)], load=[10] * 10)
    made = schedule_list(tasks, engines)
    assert_valid(made)
    assert made.makespan == 110
    # with twice the load the transfers bind
    tasks = make_tasks([("MUL_MAT", 10, [])] * 10, load=[20] * 10)
    assert schedule_list(tasks, engines).makespan == 210
    bound = compute_bounds(tasks, engines)[0]
    assert (bound.kind, bound.name) == ("bandwidth", "loads, by the bandwidth of dma engines")
    assert 199 <= bound.ns <= 200


def test_the_binding_bound_is_named() -> None:
    chain = make_tasks([("ADD", 10, [i - 1] if i else []) for i in range(5)])
    assert compute_bounds(chain, equal_engines(4))[0].name == "the longest path"
    wide = make_tasks([("ADD", 10, [])] * 10)
    bound = compute_bounds(wide, equal_engines(3))[0]
    assert (bound.name, bound.ns) == ("the work of all engines", 34)


def test_the_work_of_engines_of_equal_speed_is_shared_and_rounded_up() -> None:
    tasks = make_tasks([("MUL_MAT", 10, []), ("ADD", 11, []), ("MUL_MAT", 10, [])])
    kinds = (EngineKind("any", 1), EngineKind("matrix", 1, frozenset({"matrix"})))
    bounds = {bound.kind: bound for bound in compute_bounds(tasks, Engines(kinds))}
    assert (bounds["work"].name, bounds["work"].ns) == ("the work of all engines", 16)
    assert (bounds["path"].name, bounds["path"].ns) == ("the longest path", 11)
    assert "bandwidth" not in bounds


def test_work_that_only_some_engines_can_do_bounds_these() -> None:
    tasks = make_tasks([("MUL_MAT", 10, []), ("ADD", 40, []), ("ADD", 41, [])])
    kinds = (EngineKind("any", 2), EngineKind("matrix", 1, frozenset({"matrix"})))
    bound = compute_bounds(tasks, Engines(kinds))[0]
    assert (bound.kind, bound.ns) == ("path", 41)
    kinds = (EngineKind("any", 1), EngineKind("matrix", 1, frozenset({"matrix"})))
    bound = compute_bounds(tasks, Engines(kinds))[0]
    assert (bound.kind, bound.name, bound.ns) == ("work", "the work of any engines", 81)


def test_what_engines_move_bounds_them_if_all_have_a_bandwidth() -> None:
    rows = [("ADD", 10, []), ("MUL_MAT", 10, []), ("ADD", 10, [])]
    tasks = make_tasks(rows, bytes=[600, 200, 400])
    slow = EngineKind("slow", 2, frozenset({"vector"}), {}, 1e9)
    fast = EngineKind("fast", 1, frozenset({"matrix"}), {}, 4e9)
    bounds = compute_bounds(tasks, Engines((slow, fast)))
    found = next(bound for bound in bounds if bound.kind == "bandwidth")
    assert found.name == "the bandwidth of slow engines"
    assert 499 <= found.ns <= 500  # 1000 bytes by two engines
    assert max(bounds, key=lambda bound: bound.ns) is bounds[0]
    free = EngineKind("free", 1, None)
    for bound in compute_bounds(tasks, Engines((slow, fast, free))):
        assert bound.kind != "bandwidth"


def test_a_hand_over_that_cannot_be_avoided_is_on_the_path() -> None:
    tasks = make_tasks([("MUL_MAT", 40, []), ("MUL_MAT", 20, [0]), ("ADD", 10, [1])])
    kinds = (EngineKind("m", 2, frozenset({"matrix"})), EngineKind("v", 1, frozenset({"ADD"})))
    bound = compute_bounds(tasks, Engines(kinds, handover_ns=4))[0]
    assert (bound.kind, bound.ns) == ("path", 74)


def test_engines_of_unlike_speed_have_the_bound_of_all_their_speeds() -> None:
    tasks = make_tasks([("ADD", 600, [])] * 100)
    kinds = (EngineKind("slow", 2), EngineKind("fast", 1, None, {"*": 3.0}))
    bound = compute_bounds(tasks, Engines(kinds))[0]
    assert bound.name == "the work of all engines"
    assert 11_999 <= bound.ns <= 12_000  # 60,000 ns by a speed of 2 + 3
    assert schedule_list(tasks, Engines(kinds)).makespan == 12_000


def test_engines_that_do_not_fit_are_refused() -> None:
    tasks = make_tasks([("ADD", 10, [])])
    idle = Engines((EngineKind("any", 1), EngineKind("m", 1, frozenset({"matrix"}))))
    with pytest.raises(UsageError, match=r"engine m: it runs matrix, but there is no such task"):
        schedule_list(tasks, idle)
    lacking = Engines((EngineKind("m", 1, frozenset({"MUL_MAT"})),))
    tasks = make_tasks([("ADD", 10, []), ("MUL_MAT", 10, [])])
    with pytest.raises(UsageError, match=r'no engine runs ADD \(vector\), such as t0; add "ADD"'):
        schedule_program(tasks, lacking)


def test_what_takes_too_long_is_refused() -> None:
    slow = Engines((EngineKind("slow", 1, None, {"*": 1e-6}),))
    with pytest.raises(UsageError, match="the tasks take up to 2000000 s in sequence"):
        schedule_list(make_tasks([("ADD", 10**9, [])] * 2), slow)
