"""A simulated llama-server: its rules, what no server may do, and the requests of recorded ones."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from random import Random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from llamacpp_instr.base.errors import UsageError
from llamacpp_instr.converters.scheduling.capacity import server
from llamacpp_instr.converters.scheduling.capacity.batches import split
from llamacpp_instr.converters.scheduling.capacity.capacity import (
    Capacity,
    Load,
    Recorded,
    parse_goal,
    reach,
    recorded_server,
)
from llamacpp_instr.converters.scheduling.capacity.server import Settings, simulate
from llamacpp_instr.converters.scheduling.capacity.step_times import Curve, Shape, StepTimes
from llamacpp_instr.converters.scheduling.capacity.workload import (
    Request,
    Workload,
    as_recorded,
    closed_loop,
    common,
    repeated,
    scaled,
)
from llamacpp_instr.log.session import load_session
from tests.kit.native_kit import ROOT

MS = 1_000_000
LOGS = [ROOT / "docs" / "tutorials" / f"{name}-server.log.gz" for name in ("slow", "faster")]


def times(**given: float) -> StepTimes:
    """A token takes 2 ms in a decode and 1 ms in a prompt, whatever it sees."""
    of = {"cell_ns": 0.0, "prompt_cell_ns": 0.0, **given}
    return StepTimes(Curve([1, 1000], [2 * MS, 2000 * MS]), Curve([1, 1000], [MS, 1000 * MS]), **of)


def asked(prompt: int, output: int, number: int, arrival: int = 0, shared: int = 0) -> Request:
    own = ((number + 1, prompt - shared),) if prompt > shared else ()
    return Request(arrival, (*(((0, shared),) if shared else ()), *own), output)


# --- what is arithmetic ---


def test_one_client_and_one_slot_are_arithmetic() -> None:
    of = times(between_ns=5, token_ns=7, end_ns=11, launch_ns=13, step_ns=17, rebuild_ns=19)
    requests = [asked(10, 4, 0), asked(20, 3, 1)]
    found = simulate(Workload(requests, clients=1), Settings(1, 512, cache_ram=0), of)
    # the prompt, built anew, and its token; the first decode is also built anew
    first = 13 + 10 * MS + 17 + 19 + 7
    end = first + 5 + (2 * MS + 17 + 7) * 3 + 19 + 2 * 5 + 11
    assert (found.first[0], found.end[0]) == (first, end)
    # the second arrives at that end, which is before the server is ready again
    again = end + 5 + 13 + 20 * MS + 17 + 19 + 7
    assert found.first[1] == again
    assert found.end[1] == again + 5 + (2 * MS + 17 + 7) * 2 + 19 + 5 + 11


def test_cells_take_their_time_each() -> None:
    found = simulate(
        Workload([asked(100, 3, 0)]), Settings(1, 512), times(cell_ns=10.0, prompt_cell_ns=1.0)
    )
    assert found.first[0] == 100 * MS + 100 * 101 // 2
    assert found.end[0] - found.first[0] == 2 * 2 * MS + 10 * (101 + 102)


def test_a_step_of_several_slots_gives_each_a_token() -> None:
    requests = [asked(1, 50, i) for i in range(4)]
    found = simulate(Workload(requests), Settings(4, 2048), times())
    assert found.output.tolist() == [50] * 4
    assert (found.end - found.first).tolist() == [49 * 4 * 2 * MS] * 4
    assert found.steps == 50


# --- the rules of the server ---


def by_tokens(parts: Sequence[tuple[int, int]], ubatch: int) -> list[list[int]]:
    """llama_batch_allocr::split_equal, one token after the other: the slots of each ubatch."""
    waiting = [slot for slot, n in parts for _ in range(n)]
    found = []
    while waiting:
        chosen: list[int] = []
        for slot in waiting:
            if slot not in chosen and (not chosen or slot == chosen[-1] + 1):
                chosen.append(slot)
        taken: list[int] = []
        while all(waiting.count(slot) for slot in chosen):
            for slot in chosen:
                waiting.remove(slot)
                taken.append(slot)
            if len(taken) + len(chosen) > ubatch:
                break
        found.append(sorted(taken))
    return found


PARTS = st.lists(st.tuples(st.integers(0, 7), st.integers(1, 20)), min_size=1, max_size=8,
                 unique_by=lambda part: part[0])  # fmt: skip


@given(PARTS, st.integers(8, 32))
def test_batches_of_several_streams_are_divided_as_llama_cpp_does(
    parts: list[tuple[int, int]], ubatch: int
) -> None:
    found = split(parts, ubatch, unified=False)
    slots = [sorted(parts[i][0] for i, n in of for _ in range(n)) for of in found]
    assert slots == by_tokens(parts, ubatch)


@given(PARTS, st.integers(1, 32))
def test_batches_of_one_stream_are_divided_in_order(
    parts: list[tuple[int, int]], ubatch: int
) -> None:
    found = split(parts, ubatch, unified=True)
    order = [i for of in found for i, n in of for _ in range(n)]
    assert order == [i for i, (_, n) in enumerate(parts) for _ in range(n)]
    sizes = [sum(n for _, n in of) for of in found]
    assert all(size == ubatch for size in sizes[:-1])
    assert 0 < sizes[-1] <= ubatch


def test_a_gap_between_slots_is_another_ubatch() -> None:
    assert len(split([(0, 1), (1, 1), (3, 1)], 512, unified=False)) == 2
    assert len(split([(0, 1), (1, 1), (3, 1)], 512, unified=True)) == 1
    # a prompt gives one token beside those of its neighbours
    assert [[n for _, n in of] for of in split([(0, 1), (1, 1), (2, 200)], 512, False)] == [
        [1, 1, 1], [199],
    ]  # fmt: skip


def test_the_last_of_unused_slots_comes_first_and_then_the_least_recently_used() -> None:
    requests = [asked(10, 5 + 5 * i, i, arrival=i) for i in range(3)]
    requests += [asked(10, 5, 3, arrival=10**12), asked(10, 5, 4, arrival=10**12 + 1)]
    found = simulate(Workload(requests), Settings(3, 3 * 256), times())
    assert found.slot[:3].tolist() == [2, 1, 0]
    assert found.slot[3:].tolist() == [2, 1]


def test_a_prompt_goes_to_the_slot_that_has_most_of_it() -> None:
    requests = [asked(100, 5, 0, 0, shared=50), asked(100, 5, 1, 10**10)]
    requests += [asked(100, 5, 2, 2 * 10**10, shared=50)]
    found = simulate(Workload(requests), Settings(2, 1024), times())
    assert found.slot.tolist() == [1, 0, 1]
    assert found.cached.tolist() == [0, 0, 50]
    assert found.computed.tolist() == [100, 100, 50]


def test_less_than_a_tenth_of_a_prompt_is_no_reason_for_a_slot() -> None:
    requests = [asked(100, 5, 0, 0, shared=9), asked(100, 5, 1, 10**10)]
    requests += [asked(100, 5, 2, 2 * 10**10), asked(100, 5, 3, 3 * 10**10, shared=9)]
    found = simulate(Workload(requests), Settings(2, 1024, cache_ram=0), times())
    assert found.slot.tolist() == [1, 0, 1, 0]


def test_a_repeated_prompt_computes_one_token() -> None:
    requests = [asked(100, 5, 0), replace(asked(100, 5, 0), arrival=10**10)]
    found = simulate(Workload(requests), Settings(1, 1024), times())
    assert found.cached.tolist() == [0, 99]


def test_a_prompt_that_lost_its_slot_comes_back_from_ram() -> None:
    first, other = asked(100, 5, 0), asked(100, 5, 1, 10**10)
    again = replace(first, arrival=2 * 10**10)
    of = times(bytes_of_token=1.0, copy_ns=1000.0)
    with_copies = simulate(Workload([first, other, again]), Settings(1, 1024), of)
    without = simulate(Workload([first, other, again]), Settings(1, 1024, cache_ram=0), of)
    assert with_copies.cached.tolist() == [0, 0, 99]
    assert without.cached.tolist() == [0, 0, 0]
    # the copy of 104 tokens delays the request whose slot it leaves
    assert with_copies.first[1] - without.first[1] == 104 * 1000


def test_an_answer_ends_where_the_context_of_its_slot_does() -> None:
    found = simulate(Workload([asked(250, 100, 0), asked(300, 9, 1)]), Settings(2, 512), times())
    assert found.output.tolist() == [6, 0]


def test_a_prompt_is_divided_by_the_batch_and_answers_go_on_beside_it() -> None:
    requests = [asked(1, 100, 0), asked(100, 2, 1, arrival=MS)]
    found = simulate(Workload(requests), Settings(2, 2048, batch=33, ubatch=33), times())
    assert found.largest == 33
    # 32 tokens of the prompt beside one of the answer: four steps
    assert found.first[1] > found.first[0] + 100 * MS


def test_a_request_that_ends_lets_the_first_of_the_queue_in() -> None:
    requests = [asked(1, 10 + i, i, arrival=i) for i in range(6)]
    found = simulate(Workload(requests), Settings(2, 512), times())
    assert found.begin.tolist() == sorted(found.begin.tolist())
    assert (found.begin[2:] > 0).all()


def test_drafts_give_more_tokens_a_step_and_no_more_than_asked() -> None:
    of = times()
    of.drafts, of.draft, of.follow = [(3, 3)], Curve([1], [100.0]), Curve([1, 4], [10.0, 40.0])
    plain, drafted = (
        simulate(Workload([asked(1, 10, 0)]), Settings(1, 512, drafts=on), of)
        for on in (False, True)
    )
    assert (plain.steps, drafted.steps) == (10, 1 + 3)
    assert plain.output.tolist() == drafted.output.tolist() == [10]


# --- what no server may do ---


@st.composite
def workloads(draw: st.DrawFn) -> Workload:
    n = draw(st.integers(1, 30))
    found = []
    for i in range(n):
        shared = draw(st.sampled_from([0, 0, 5, 20]))
        prompt = draw(st.integers(max(shared, 1), 120))
        arrival = draw(st.integers(0, 2 * 10**9))
        of = asked(prompt, draw(st.integers(1, 40)), i, arrival, shared)
        of.think = draw(st.integers(0, 10**8))
        found.append(of)
    clients = draw(st.sampled_from([0, 1, 3, 9]))
    return Workload(found, clients)


SERVERS = st.builds(
    Settings, slots=st.integers(1, 6), ctx=st.just(6 * 256), batch=st.sampled_from([8, 64, 2048]),
    ubatch=st.just(8), unified=st.booleans(), cache_ram=st.sampled_from([0, 300, 10**9]),
)  # fmt: skip
NOISY = times(
    cell_ns=900.0, prompt_cell_ns=300.0, rebuild_ns=MS / 2, step_ns=MS / 5, between_ns=MS / 50,
    token_ns=MS / 5, end_ns=MS / 2, launch_ns=MS / 3, wake_ns=MS / 9, copy_ns=9000.0,
    bytes_of_token=1.0,
)  # fmt: skip
NOISY.decode_noise, NOISY.prompt_noise = [-0.1, 0.3, -0.2], [-0.1, 0.1]


@given(workloads(), SERVERS, st.integers(0, 3))
def test_every_request_is_served_once_in_order_of_time(
    load: Workload, of: Settings, seed: int
) -> None:
    found = simulate(load, of, NOISY, seed)
    assert (found.arrival <= found.begin).all()
    assert (found.begin < found.first).all()
    assert (found.first <= found.end).all()
    for i, request in enumerate(load.requests):
        assert found.cached[i] + found.computed[i] == request.prompt
        assert found.computed[i] >= 1
        assert found.output[i] == min(request.output, of.slot_ctx - request.prompt)
    assert found.largest <= max(of.batch, of.slots)
    for slot in range(of.slots):
        mine = np.flatnonzero(found.slot == slot)
        mine = mine[np.argsort(found.begin[mine])]
        assert (found.end[mine[:-1]] <= found.begin[mine[1:]]).all()
    busy = found.prompt_ns + found.decode_ns + found.between_ns
    assert busy <= found.took + 1000 * NOISY.copy_ns + 10 * MS
    again = simulate(load, of, NOISY, seed)
    assert all(
        np.array_equal(getattr(found, name), getattr(again, name)) for name in ("first", "end")
    )


@given(workloads(), SERVERS)
def test_steps_at_once_take_as_long_as_one_by_one(load: Workload, of: Settings) -> None:
    calm = NOISY.without_noise()
    found = simulate(load, of, calm)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(server, "MOST_RUN", 1)
        single = simulate(load, of, calm)
    for name in ("begin", "first", "end"):
        assert np.abs(getattr(found, name) - getattr(single, name)).max() <= 2
    assert found.slot.tolist() == single.slot.tolist()


# --- loads ---


def test_clients_wait_for_their_answers() -> None:
    requests = [asked(5, 5, i) for i in range(60)]
    for of in requests:
        of.think = 3 * MS
    found = simulate(closed_loop(Workload(requests), 7, 60, 0), Settings(2, 512), times())
    order = sorted([*((t, 1) for t in found.arrival), *((t, -1) for t in found.end)])
    assert max(np.cumsum([change for _, change in order])) == 7
    later = np.sort(found.arrival)[7:]
    assert (later - np.sort(found.end)[: len(later)]).tolist() == [3 * MS] * len(later)


def test_repeated_requests_share_what_they_shared_and_nothing_else() -> None:
    first, second = asked(50, 5, 0, shared=20), asked(60, 5, 1, shared=20)
    second.next, third = 2, Request(0, (*second.text, (-2, 5), (9, 10)), 5, goes_on=True)
    found = repeated([first, second, third], 9, Random(0))
    assert len(found) == 9
    texts = [of.text for of in found]
    for i, of in enumerate(found):
        for j in range(i):
            goes_on = of.goes_on and found[i - 1].next == i and j == i - 1
            assert common(of.text, texts[j]) == (60 if goes_on else 20)


def test_longer_prompts_keep_what_they_share() -> None:
    of = Workload([asked(50, 4, 0, shared=20), asked(60, 8, 1, shared=20)])
    found = scaled(of, 2.0, 0.5).requests
    assert [request.text for request in found] == [((0, 20), (1, 60)), ((0, 20), (2, 80))]
    assert [request.output for request in found] == [2, 4]


# --- recorded servers ---


@pytest.fixture(scope="module", params=LOGS, ids=["slow", "faster"])
def recorded(request: pytest.FixtureRequest) -> Recorded:
    return recorded_server(load_session(request.param))


def test_a_recorded_session_gives_its_own_times(
    recorded: Recorded, request: pytest.FixtureRequest
) -> None:
    load = as_recorded(recorded.workload)
    found = simulate(load, recorded.settings, recorded.times.without_noise())
    total = np.array([of.total for of in recorded.requests])
    first = np.array([of.to_first_token for of in recorded.requests])
    for simulated, measured in ((found.end, total), (found.first, first)):
        error = np.abs(simulated - found.arrival - measured) / total
        assert np.median(error) < 0.03
        # the slow one was recorded on a machine with other work
        assert np.percentile(error, 90 if "slow" in request.node.name else 99) < 0.10
    assert found.cached.tolist() == [of.reused for of in recorded.requests]
    assert found.slot.tolist() == [of.seq for of in recorded.requests]
    assert found.output.sum() == sum(len(of.token_times) for of in recorded.requests)


def test_the_rules_choose_the_recorded_slots(recorded: Recorded) -> None:
    found = simulate(recorded.workload, recorded.settings, recorded.times.without_noise())
    assert found.slot.tolist() == [of.seq for of in recorded.requests]
    assert found.cached.tolist() == [of.reused for of in recorded.requests]


def test_what_was_not_recorded_has_the_shape_of_the_prediction() -> None:
    curve = Curve([1, 4], [30.0, 60.0], [0, 10, 15, 18, 20, 22, 24, 26, 28])
    assert [curve.at(n) for n in (1, 4, 8)] == [30.0, 60.0, 84.0]
    assert curve.at(2) == pytest.approx(45.0)
    assert [curve.is_near(n) for n in (1, 2, 4, 8)] == [True, False, True, False]


def test_another_cache_is_as_much_slower_as_predicted() -> None:
    own = Shape([0, 10, 20, 30], [0, 10, 20, 30], 4.0, 2.0)
    of = replace(times(cell_ns=8.0, prompt_cell_ns=2.0), shape=own)

    def predict(shapes: Sequence[tuple[int, int, int]], *_: str) -> list[float]:
        return [2 * (10 * n + 4 * n * past) + n * (n + 1) * (1 if n > outputs else 4)
                for n, outputs, past in shapes]  # fmt: skip

    found = of.predicted(predict, "q8_0", "q8_0", 3)
    assert found.others
    assert found.cell_ns == pytest.approx(8.0 * 2)
    assert found.ubatch(1, 1) == pytest.approx(2 * of.ubatch(1, 1), rel=0.3)


# --- goals ---


def capacity_of(**given: float) -> Capacity:
    requests = [asked(50, 20, i) for i in range(40)]
    made = Recorded(Settings(4, 4096), times(**given), Workload(requests), [], 0, 0)
    return Capacity(made, Load(made.workload))


def most(capacity: Capacity, goal: str) -> tuple[float, int]:
    wishes = parse_goal(goal)
    found = reach(capacity, wishes, [Settings(2, 4096), Settings(4, 4096)], 64, lambda *_: None)
    assert all(wish.of(found) <= wish.most for wish in wishes)
    return found.load, found.settings.slots


def test_a_goal_has_the_most_clients_that_keep_it() -> None:
    capacity = capacity_of()
    load, slots = most(capacity, "first token p95 < 2 s")
    wish = parse_goal("first token p95 < 2 s")[0]
    assert wish.of(capacity.point(load + 1, Settings(slots, 4096))) > wish.most
    assert most(capacity, "first token p95 < 2 s, 200 tokens/s")[0] < load


def test_a_goal_that_nothing_reaches_names_the_nearest() -> None:
    with pytest.raises(UsageError, match=r"nothing reaches 'first token < 1 ms'; the nearest is"):
        most(capacity_of(), "first token < 1 ms")


@pytest.mark.parametrize("text", ["", "fast", "first token", "first token p90 < 2 s", "0 tokens/s",
                                  "queue < 2"])  # fmt: skip
def test_a_goal_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="write it like"):
        parse_goal(text)


def test_settings_that_do_not_fit_are_refused() -> None:
    capacity = capacity_of(bytes_of_token=1e6)
    small = Capacity(replace(capacity.recorded, memory=10**9, other_bytes=10**8), capacity.load)
    small.check(Settings(4, 512))
    with pytest.raises(UsageError, match="this machine has 954 MiB; give a smaller --ctx"):
        small.check(Settings(4, 4096))
    with pytest.raises(UsageError, match="a prompt has 50 tokens; give fewer --slots"):
        capacity.check(Settings(1, 50, unified=True))


def test_a_long_simulation_says_how_far_it_is_and_can_be_interrupted() -> None:
    load = Workload([asked(5, 2, i) for i in range(5000)], clients=4)
    calls: list[tuple[int, int]] = []
    simulate(load, Settings(4, 1024), times(), on_progress=lambda *of: calls.append(of))
    assert [total for _, total in calls] == [5000] * 5
    assert [done // 1000 for done, _ in calls] == [1, 2, 3, 4, 5]

    def interrupt(*_: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        simulate(load, Settings(4, 1024), times(), on_progress=interrupt)
