"""What `instr live` shows of a llama-server, whose log is written down: queue, slots and cache."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from llamacpp_instr.converters.live.frames import FrameMaker, figures_of, is_active
from llamacpp_instr.converters.live.state import LiveState
from llamacpp_instr.converters.live.tui import draw
from llamacpp_instr.log import schema as s
from tests.kit.batched_log import Batch, batched_log
from tests.kit.made_log import encode
from tests.live.server_log import END, mark, served, server_events, taken
from tests.live.test_state import Samples, metrics_of, state_of, total

Frame = dict[str, Any]


def state_at(t: int, path: Path) -> LiveState:
    """What is known `t` ns after the facts."""
    events, start = server_events()
    path.write_bytes(encode([event for event in events if event.t <= start + t]))
    state, _ = state_of(path)
    state.idle = max(start + t - state.latest, 0)
    return state


def frame_at(t: int, path: Path) -> Frame:
    return FrameMaker(state_at(t, path)).next_frame(catching_up=False)


def slots_of(frame: Frame) -> list[str]:
    """The task and the state of each slot, as the page has them."""
    lanes, active = {lane["lane"]: lane for lane in frame["lanes"]}, frame["active"]
    found = []
    for number in frame["slots"]:
        if number not in active:
            found.append("free")
        else:
            lane = lanes[number]
            state = "prompt" if lane["to_first"] is None else "generating"
            task = "copy" if lane["task"] is None else f"task {lane['task']}"
            found.append(f"{task} {state}")
    return found


@pytest.mark.parametrize(
    ("t", "slots", "queued"),
    [
        (1660, [], 0),
        (1760, ["task 11 prompt", "task 10 prompt"], 0),
        (2520, ["task 11 generating", "task 10 generating"], 0),
        (2660, ["task 11 generating", "task 10 generating"], 2),
        (3600, ["task 11 generating", "free"], 2),
        (3700, ["task 11 generating", "task 12 prompt"], 1),
        (4600, ["task 11 generating", "task 12 generating"], 0),
        (END, ["free", "free"], 0),
    ],
)
def test_slots_and_queue_are_those_of_the_moment(
    t: int, slots: list[str], queued: int, tmp_path: Path
) -> None:
    """Before the first slot is taken, the log does not say that it is of a server."""
    frame = frame_at(t, tmp_path / "server.log")
    assert slots_of(frame) == slots
    assert frame["queued"] == queued
    samples = metrics_of(state_at(t, tmp_path / "server.log"))
    n = sum(slot != "free" for slot in slots)
    assert samples["active_requests", "queued"] == queued
    assert samples["active_requests", "running"] == samples["slots", "used"] == n
    assert samples["slots", "free"] == 2 - n


def test_the_first_in_the_queue_has_waited_longest(tmp_path: Path) -> None:
    figures = figures_of(state_at(3000, tmp_path / "server.log"))
    assert (figures.queued, figures.waits) == (2, 400)


def test_a_lane_says_what_the_server_noted(tmp_path: Path) -> None:
    lanes = frame_at(END, tmp_path / "server.log")["lanes"]
    keys = ("task", "seq", "arrived", "prompt", "reused", "size", "n_tokens", "reason", "over",
            "to_first")  # fmt: skip
    assert [tuple(lane[key] for key in keys) for lane in lanes] == [
        (10, 1, True, 6, 0, 6, 2, "limit", True, 919),
        (11, 0, True, 2, 2, 4, 3, "cancelled", True, 869),
        (12, 1, True, 3, 6, 9, 2, "end token", True, 1919),
    ]
    assert ["".join(token[1] for token in lane["tokens"]) for lane in lanes] == ["ac", "bdg", "ef"]


def test_a_long_prompt_does_not_end_a_request_of_a_slot(tmp_path: Path) -> None:
    """Its mark is open, however long nothing arrives."""
    state = state_at(1760, tmp_path / "server.log")
    state.idle = 10**12
    assert [is_active(lane, state.now) for lane in state.lanes] == [True, True]


def test_figures_count_every_token_once_and_no_warm_up(tmp_path: Path) -> None:
    state = state_at(END, tmp_path / "server.log")
    assert (state.n_requests, state.n_steps) == (4, 4)
    assert (state.n_prompt, state.n_cached, state.n_tokens) == (11, 8, 7)
    assert figures_of(state).reused == 8 / 19
    assert sum(second.tokens for second in state.seconds) == 7
    assert sum(second.prompt for second in state.seconds) == 11


def count(samples: Samples, name: str, error: str | None = None) -> float:
    return sum(
        value for key, value in samples.items()
        if key[0] == f"{name}_count" and (error is None or error in key)
    )  # fmt: skip


def test_metrics_have_each_request_once(tmp_path: Path) -> None:
    """Tokens of a cancelled one have no times; one that left the queue has only a duration."""
    samples = metrics_of(state_at(END, tmp_path / "server.log"))
    duration = "gen_ai_server_request_duration_seconds"
    assert (count(samples, duration), count(samples, duration, "cancelled")) == (4, 2)
    assert count(samples, duration, "chat") == 4
    assert total(samples, f"{duration}_sum") == pytest.approx((2000 + 3950 + 3100 + 1950) / 1e9)
    queue = "time_in_queue_seconds"
    assert count(samples, queue) == 3
    assert total(samples, f"{queue}_sum") == pytest.approx((400 + 350 + 1400) / 1e9)
    to_first, per_token = [919, 1919], [1000, 1000]
    for name, times in (("time_to_first_token", to_first), ("time_per_output_token", per_token)):
        of = f"gen_ai_server_{name}_seconds"
        assert count(samples, of) == len(times)
        assert total(samples, f"{of}_sum") == pytest.approx(sum(times) / 1e9)
    assert samples["requests_total",] == 4
    kinds = {"input_computed": 11, "input_cached": 8, "output": 7}
    assert {key[2]: n for key, n in samples.items() if key[0] == "tokens_total"} == kinds


def test_requests_under_way_when_the_program_ends_have_no_duration(tmp_path: Path) -> None:
    state = state_at(4600, tmp_path / "server.log")
    state.finish()
    samples = metrics_of(state)
    assert count(samples, "gen_ai_server_request_duration_seconds") == 2
    assert samples["active_requests", "running"] == samples["active_requests", "queued"] == 0


@pytest.mark.parametrize(
    ("t", "held", "copies"),
    [
        (1600, [], None),
        (1740, [0, 0], (1, 500, 1, 0)),
        (2500, [4, 6], (2, 1000, 2, 0)),
        (3700, [5, 6], (1, 500, 2, 1)),
        (END, [6, 10], (1, 500, 2, 1)),
    ],
)
def test_slots_keep_tokens_and_prompts_have_copies(
    t: int, held: list[int], copies: tuple[int, ...] | None, tmp_path: Path
) -> None:
    frame = frame_at(t, tmp_path / "server.log")
    assert frame["held"] == held
    keys = ("prompts", "bytes", "save", "load")
    assert (frame["copies"] and tuple(frame["copies"][key] for key in keys)) == copies
    samples = metrics_of(state_at(t, tmp_path / "server.log"))
    assert [samples["slot_tokens", str(slot)] for slot, n in enumerate(held) if n] == [
        n for n in held if n
    ]
    if copies is not None:
        assert samples["prompt_copies",] == copies[0]
        assert samples["prompt_copies_bytes",] == copies[1]
        assert samples["prompt_moves_total", "load"] == copies[3]


def test_cells_that_are_removed_are_no_longer_kept(tmp_path: Path) -> None:
    state = state_at(END, tmp_path / "server.log")
    for p0, p1, left in ((4, -1, 4), (2, 3, 4), (-1, -1, 0)):
        state.takers[s.Kv](
            s.Kv(t=state.latest, ctx=0, op="seq_rm", used=8, size=512, seq=0, p0=p0, p1=p1)
        )
        assert state.held == {0: left, 1: 10}


def test_the_terminal_shows_the_queue_and_the_cache(tmp_path: Path) -> None:
    frame = {**frame_at(3000, tmp_path / "server.log"), "over": None}
    drawn = " ".join(" ".join(line.plain for line in draw(frame, 100, 24, None, False)).split())
    for words in ("in the queue 2, 400 ns", "from cache 20 %", "slots keep 10 tokens",
                  "copies in RAM 2, 1000 B", "copied 2 in, 0 out", "▸ slot 0 #11 "):  # fmt: skip
        assert words in drawn


def test_frames_tell_of_a_prompt_that_was_read(tmp_path: Path) -> None:
    """Before its first token; the frames in sequence have what a key frame has."""
    events, _ = server_events()
    (tmp_path / "server.log").write_bytes(encode(events))
    _, frames = state_of(tmp_path / "server.log", 1)
    *deltas, key = map(dict[str, Any], frames)
    known = {lane["lane"]: lane for frame in deltas for lane in frame["lanes"]}
    facts = ("prompt", "reused", "n_tokens", "over", "reason")
    assert [[known[lane["lane"]][fact] for fact in facts] for lane in key["lanes"]] == [
        [lane[fact] for fact in facts] for lane in key["lanes"]
    ]


def test_a_copy_of_a_prompt_has_a_slot_and_does_not_wait(tmp_path: Path) -> None:
    """The server notes a slot only for the request that it copies."""
    events = batched_log([Batch([(0, 0, 4)], sampled=[(0, 1, "a"), (1, 2, "b")])])
    start = max(event.t for event in events if isinstance(event, s.Graph))
    more = [mark(100, 1, "begin"), mark(101, 2, "begin"), taken(200, 1, 10, 0, 4, 0),
            served(2000, 2, 11, 1, 0, 4, 1, "limit")]  # fmt: skip
    for event in more:
        event.t += start
    events = sorted([*events, *more], key=lambda event: event.t)
    (tmp_path / "server.log").write_bytes(encode(events))
    state, frames = state_of(tmp_path / "server.log")
    assert state.queue == []
    assert slots_of(dict(frames[-1])) == ["task 10 generating", "copy generating"]
    assert [lane.request.served and lane.request.served.task for lane in state.lanes] == [None, 11]


# --- applications that do their own sampling ---


def test_outputs_are_tokens_if_the_log_has_none(tmp_path: Path) -> None:
    """That of a prompt counts once a decode follows: an application may want no token."""
    prompt, decode = Batch([(0, 0, 4)]), Batch([(0, 4, 1)])
    again = Batch([(0, 0, 3)])
    for batches, n in (
        ([prompt], 0), ([prompt, decode], 2), ([prompt, decode, again], 2),
        ([prompt, decode, again, Batch([(0, 3, 1)])], 4),
    ):  # fmt: skip
        (tmp_path / "it.log").write_bytes(encode(batched_log(batches)))
        state, _ = state_of(tmp_path / "it.log")
        assert state.n_tokens == sum(second.tokens for second in state.seconds) == n


def test_frames_tell_of_outputs_that_are_tokens(tmp_path: Path) -> None:
    batches = [Batch([(0, 0, 4)]), Batch([(0, 4, 1)]), Batch([(0, 5, 1)])]
    (tmp_path / "it.log").write_bytes(encode(batched_log(batches)))
    _, frames = state_of(tmp_path / "it.log", 1)
    lanes = [lane for frame in map(dict[str, Any], frames[:-1]) for lane in frame["lanes"]]
    assert [lane["n_tokens"] for lane in lanes] == [1, 2, 3]


def test_a_token_of_the_log_counts_once(tmp_path: Path) -> None:
    sampled = [Batch([(0, 0, 4)], sampled=[(0, 1, "a")]), Batch([(0, 4, 1)], sampled=[(0, 1, "b")])]
    (tmp_path / "it.log").write_bytes(encode(batched_log(sampled)))
    state, _ = state_of(tmp_path / "it.log")
    assert state.n_tokens == sum(lane.n_tokens for lane in state.lanes) == 2
