"""Lanes, seconds and frames by hand: what is kept, what is forgotten, and who is under way."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest

from llamacpp_instr.converters.live import frames, lanes
from llamacpp_instr.converters.live.frames import ended, figures_of, is_active, step_details
from llamacpp_instr.converters.live.lanes import Lane, LiveLanes
from llamacpp_instr.converters.live.live_session import KEPT, LiveSession
from llamacpp_instr.converters.live.state import (
    SECOND,
    Cache,
    LiveState,
    Second,
    Threads,
    add_times,
)
from llamacpp_instr.converters.live.times import Times
from llamacpp_instr.log import schema as s
from llamacpp_instr.log.batches import Part
from llamacpp_instr.log.graph.ops import BLOCKS
from llamacpp_instr.log.requests import Request
from tests.kit.made_log import encode
from tests.kit.sketched_log import Sketch
from tests.live.test_state import state_of


def lane_of(*times: int, number: int = 0, first: int = 0, end: int = 0, over: bool = False) -> Lane:
    request = Request(0, 0, begin=first, end=end or max(times, default=0))
    request.token_times.extend(times)
    return Lane(number, request, over=over)


def step(of: LiveLanes, number: int, seq: int, pos: int, tokens: int, prompt: bool) -> None:
    """A step of 100 ns; one begins every microsecond."""
    part = Part(seq, pos, tokens, 1, prompt)
    of.step(number, 0, 1000 * number, 1000 * number + 100, [part])


def token(number: int, seq: int, text: str = "x", **of: Any) -> s.Token:
    """A token that is ready 150 ns after its step began."""
    return s.Token(t=1000 * number + 120, ctx=0, step=number, seq=seq, index=0, id=1, text=text,
                   dur=30, **of)  # fmt: skip


def n_of(times: Times) -> float:
    """How many there are."""
    return sum(histogram.cumulative()[-1][1] for _, histogram in times)


# --- lanes ---


def test_a_lane_has_the_tokens_of_its_request() -> None:
    of = LiveLanes()
    for number, pos in enumerate((0, 4, 5)):
        step(of, number, 0, pos, 1 if pos else 4, not pos)
        of.token(token(number, 0, "abc"[number], p=0.5))
    (lane,) = of
    assert [(t.index, t.text, t.t, t.p) for t in lane.tokens] == [
        (0, "a", 150, 0.5), (1, "b", 1150, 0.5), (2, "c", 2150, 0.5),
    ]  # fmt: skip
    assert (lane.number, lane.n_tokens, lane.n_times, lane.between) == (0, 3, 3, 1000)
    (between,) = (histogram for _, histogram in of.times.between)
    assert between.cumulative()[0] == ("0.01", 2)
    assert between.sum == pytest.approx(2e-6)
    assert not lane.over
    assert n_of(of.times.to_first) == 0, "it goes on"
    of.finish()
    assert lane.over
    assert n_of(of.times.to_first) == 1
    assert [histogram.sum for _, histogram in of.times.per_token] == [pytest.approx(1e-6)]


def test_a_character_may_need_several_tokens() -> None:
    of = LiveLanes()
    for number, part in enumerate(("c3", "a4")):
        step(of, number, 0, 3 + number, 1 if number else 4, not number)
        of.token(token(number, 0, "\ufffd", hex=part))
    (lane,) = of
    assert [of.text for of in lane.tokens] == ["", "ä"]


def test_the_next_request_of_a_sequence_ends_the_lane() -> None:
    of = LiveLanes()
    for number, (pos, tokens) in enumerate(((0, 4), (0, 5))):
        step(of, number, 0, pos, tokens, True)
        of.token(token(number, 0))
    step(of, 2, 1, 0, 3, True)
    assert [lane.number for lane in of] == [0, 1, 2]
    assert [lane.over for lane in of] == [True, False, False]
    assert of.n_requests == 3


@pytest.mark.parametrize(
    ("begin", "end", "over"),
    [(-1, 0, True), (0, -1, True), (1, 0, True), (-1, -1, False), (0, 1, False)],
)
def test_the_mark_of_a_sequence_ends_its_lane(begin: int, end: int, over: bool) -> None:
    of = LiveLanes()
    step(of, 1, 0, 0, 4, True)
    of.token(token(1, 0))
    marks = [
        s.Mark(t=t, mark=0, name="chat", phase=phase, seq=seq)  # type: ignore[arg-type]
        for t, phase, seq in ((500, "begin", begin), (2000, "end", end))
    ]
    of.mark(*marks)
    (lane,) = of
    assert lane.over == over
    assert lane.request.name == ("chat" if over else "")


def test_the_times_of_a_lane_count_once_and_only_with_a_token() -> None:
    of = LiveLanes()
    none, one, two = lane_of(), lane_of(5_000_000), lane_of(5_000_000, 25_000_000)
    for lane in (none, one, two, two):
        of.count(lane)
    assert [lane.counted for lane in (none, one, two)] == [False, True, True]
    assert (n_of(of.times.to_first), n_of(of.times.per_token)) == (2, 1)
    assert (none.between, one.between, two.between) == (None, None, 20_000_000)


@pytest.mark.parametrize(("end_of", "left"), [(None, [1, 2, 3]), (1, [0, 2, 3])])
def test_the_oldest_lane_that_is_over_is_forgotten(
    end_of: int | None, left: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lanes, "LANES", 3)
    of = LiveLanes()
    for number in range(3):
        step(of, number, number, 0, 4, True)
        of.token(token(number, number))
    for lane in of:
        lane.over = lane.number == end_of
    assert len(list(of)) == 3
    step(of, 3, 3, 0, 4, True)
    assert [lane.number for lane in of] == left
    assert n_of(of.times.to_first) == 1, "that of the one that was forgotten"


# --- figures ---


@pytest.mark.parametrize(
    ("lane", "now", "active"),
    [
        (lane_of(end=10), 10 + SECOND - 1, True),
        (lane_of(end=10), 10 + SECOND, False),
        (lane_of(end=10, over=True), 10, False),
        # 20 times 0.1 s between its tokens
        (lane_of(0, SECOND // 10), SECOND // 10 + 2 * SECOND - 1, True),
        (lane_of(0, SECOND // 10), SECOND // 10 + 2 * SECOND, False),
        (lane_of(0, SECOND // 100), SECOND // 100 + SECOND, False),
    ],
)
def test_a_request_is_under_way_until_it_gets_no_token(lane: Lane, now: int, active: bool) -> None:
    assert is_active(lane, now) == active


@pytest.mark.parametrize(
    ("idle", "under_way", "found"),
    [(SECOND - 1, False, [1]), (SECOND, False, [0, 1]), (SECOND, True, [1]), (0, False, [1])],
)
def test_requests_have_ended_if_nothing_is_computed(
    idle: int, under_way: bool, found: list[int]
) -> None:
    of = [lane_of(end=50, number=0), lane_of(end=70, number=1, over=True)]
    state: Any = SimpleNamespace(lanes=of, now=70 + idle, under_way=[1] if under_way else [])
    assert [lane.number for lane in ended(state)] == found


def test_medians_are_of_the_latest_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(frames, "RECENT", 3)
    state = LiveState()
    many = [lane_of(9, 99), lane_of(), lane_of(2, 8), lane_of(4, 6)]
    state.lanes._lanes = dict(enumerate(many))
    found = figures_of(state)
    assert (found.to_first, found.between) == (3, 4)
    assert (figures_of(LiveState()).to_first, figures_of(LiveState()).between) == (None, None)


@pytest.mark.parametrize(
    ("seconds", "rate"),
    [
        ([], 0), ([(3, 7)], 7), ([(2, 7)], 0), ([(4, 9)], 0), ([(2, 5), (3, 7), (4, 9)], 7),
        ([(1, 5), (4, 9)], 0), ([(0, 5), (2, 6)], 0),
    ],
)  # fmt: skip
def test_the_rate_is_that_of_the_second_before(seconds: list[tuple[int, int]], rate: int) -> None:
    state = LiveState()
    state.start = Sketch().events[0]  # type: ignore[assignment]
    state.seconds.extend(Second(number, tokens=n) for number, n in seconds)
    state.latest = 4 * SECOND
    assert figures_of(state).rate == rate


def test_figures_of_caches_and_threads() -> None:
    state = LiveState()
    assert (figures_of(state).cells, figures_of(state).working) == (None, None)
    state.caches = {(0, 0): Cache(3, 10), (0, 1): Cache(4, 20)}
    state.threads = {0: Threads([99], [1]), 1: Threads([6, 4], [2, 8])}
    found = figures_of(state)
    assert found.cells == (7, 30)
    assert found.working == 0.5, "of the latest context"


def test_the_step_under_way_is_the_one_that_began_first() -> None:
    state = LiveState()
    events = [SimpleNamespace(t=t, n_tokens=n) for t, n in ((30, 1), (10, 7), (20, 2))]
    state.refs.open_steps = {  # type: ignore[assignment]
        i: SimpleNamespace(phase="prefill", event=event) for i, event in enumerate(events)
    }
    state.latest = 110
    assert figures_of(state).computing == ("prefill", 7, 100)
    state.latest = 5
    assert figures_of(state).computing == ("prefill", 7, 0)
    state.finish()
    assert figures_of(state).computing is None


# --- the state ---


def seconds_of(*seconds: tuple[int, int, int]) -> LiveState:
    """A state with these seconds: number, steps that ended in it, and the latest of them."""
    state = LiveState()
    state.seconds.extend(Second(number, steps=n, step=step) for number, n, step in seconds)
    return state


@pytest.mark.parametrize(
    ("first", "last", "found"),
    [(0, 9, (3, 9)), (5, 5, (3, 5)), (6, 7, (6, 7)), (7, 7, (6, 7)), (6, 6, None), (8, 9, (8, 9)),
     (0, 4, None), (9, 20, (8, 9)), (10, 20, None)],
)  # fmt: skip
def test_the_steps_of_some_seconds(first: int, last: int, found: tuple[int, int] | None) -> None:
    """Steps before the third are not kept any more."""
    state = seconds_of((5, 3, 5), (6, 0, 5), (7, 2, 7), (9, 2, 9))
    assert state.steps_between(first, last) == found


def test_an_event_that_comes_late_belongs_to_the_latest_second(tmp_path: Path) -> None:
    sketch = Sketch()
    sketch.pause(2 * SECOND)
    sketch.step(1000, 4, sampled=10)
    late = s.Machine(t=SECOND // 2, dur=9, cpu=5, delay=None, nvcsw=0, nivcsw=0)
    sketch.events.append(late)
    (tmp_path / "a.log").write_bytes(encode(sketch.events))
    state, _ = state_of(tmp_path / "a.log")
    (second,) = state.seconds
    assert (second.number, second.tokens, second.prompt, second.busy) == (2, 1, 4, 1000)
    assert (second.cpu, second.delay, second.step) == (5, 0, 0)
    assert state.latest == 2 * SECOND + 1010
    assert (state.n_prompt, state.n_tokens, state.busy) == (4, 1, 1000)


def test_a_step_has_the_kernels_of_its_computes(tmp_path: Path) -> None:
    """Those of the first thread, with the gaps before them."""
    sketch = Sketch()
    sketch.step(1000, 4, sampled=10, ops=([600, 30], [100, 0]), threads=2)
    other = s.Ops(t=0, compute=0, plan=0, thread=1, dur=[9, 9], gap=[1, 2], wait=[3, 4], tail=5)
    sketch.events.insert(-2, other)
    (tmp_path / "a.log").write_bytes(encode(sketch.events))
    state, _ = state_of(tmp_path / "a.log")
    found = step_details(state, 0)
    assert found is not None
    assert [(layer, gap, dur) for _, layer, _, gap, dur, _ in found["kernels"]] == [
        (0, 0, 600), (0, 0, 30),
    ]  # fmt: skip
    (threads,) = state.threads.values()
    assert threads.working == [530, 11]
    assert threads.waiting == [100, 15]


def test_layers_beyond_the_map_are_in_its_last_row() -> None:
    """Row 0 is outside of layers."""
    step = np.zeros((3, len(BLOCKS)))
    add_times(step, np.array([-1, 0, 1, 7]), np.array([0, 1, 1, 1]), [1, 2, 4, 8])
    assert step[:, :2].tolist() == [[1, 0], [0, 2], [0, 12]]
    step[:] = 0
    other = BLOCKS.index("other")
    add_times(step, np.array([-1, 0, 1, 7]), np.full(4, other), [1, 2, 4, 8])
    assert step[:, other].tolist() == [1, 2, 12]
    assert step.sum() == 15


# --- the frames that a session keeps ---


def session_after(n: int) -> LiveSession:
    """A session that made `n` frames and has not begun to read."""
    log: Any = SimpleNamespace(is_catching_up=False, end=None)
    session = LiveSession(log)
    for _ in range(n):
        session._frames.next_frame(catching_up=False)
        session._latest += 1
        session._kept.append((session._latest, b"%d" % session._latest))
    return session


@pytest.mark.parametrize(
    ("made", "after", "frame", "behind"),
    [
        (0, -1, None, True), (0, 0, None, False), (3, -1, None, True), (3, 0, 1, False),
        (3, 2, 3, False), (3, 3, None, False), (3, 4, None, True),
        (KEPT + 5, 4, None, True), (KEPT + 5, 5, 6, False), (KEPT + 5, KEPT + 4, KEPT + 5, False),
    ],
)  # fmt: skip
def test_a_viewer_gets_the_frame_after_its_last_if_it_is_kept(
    made: int, after: int, frame: int | None, behind: bool
) -> None:
    session = session_after(made)
    if not (made == 0 or after == -1):
        assert session.frame_after(after) == (None if frame is None else (frame, b"%d" % frame))
    assert session.is_behind(after) == behind


@pytest.mark.parametrize(("after", "lost"), [(-1, 0), (0, 3), (1, 2), (2, 1), (3, 0), (4, 0)])
def test_a_key_frame_says_how_many_frames_a_viewer_lost(after: int, lost: int) -> None:
    latest, data = session_after(3).key_frame(after)
    frame = msgspec.json.decode(data)
    assert (latest, frame["frame"], frame["lost"], frame["key"]) == (3, 3, lost, True)
    assert frame["over"] is None


@pytest.mark.parametrize(
    ("problem", "state", "why"),
    [(None, None, "not closed"), (None, "closed", "closed"), (None, "crashed", "not closed"),
     ("no JSON", "closed", "no JSON")],
)  # fmt: skip
def test_why_following_ended(problem: str | None, state: str | None, why: str) -> None:
    session = session_after(0)
    session.problem = problem
    session._log = SimpleNamespace(end=None if state is None else SimpleNamespace(state=state))  # type: ignore[assignment]
    assert session._why() == why


def test_a_context_that_the_log_forgets_is_forgotten_with_all_it_had() -> None:
    state = LiveState()
    contexts = [event for event in Sketch().events if isinstance(event, s.Context)]
    for ctx in (0, 1):
        context = msgspec.structs.replace(contexts[0], ctx=ctx)
        state.refs.contexts[ctx] = context  # type: ignore[assignment]
        state._context(context)
        state.caches |= {(ctx, 0): Cache(1, 2), (ctx, 1): Cache(1, 2)}
        state.threads[ctx] = Threads([1], [1])
        state._take_memory(s.Memory(t=0, ctx=ctx, buffers=[], rss=50 * (1 - ctx)))
    assert state.contexts.keys() == state.memory.keys() == state.threads.keys() == {0, 1}
    assert state.rss == 50, "the latest that is known"
    del state.refs.contexts[0]
    state._context(state.contexts[1])
    assert state.contexts.keys() == state.memory.keys() == state.threads.keys() == {1}
    assert state.caches.keys() == {(1, 0), (1, 1)}
