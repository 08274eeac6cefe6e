"""The figures of a followed log are those of the finished one."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from random import Random
from statistics import median
from typing import Any

import msgspec
import pytest

from llamacpp_instr.converters.live.frames import FrameMaker, figures_of, step_details
from llamacpp_instr.converters.live.metrics import metrics_text
from llamacpp_instr.converters.live.state import MESSAGES, LiveState
from llamacpp_instr.converters.live.times import BETWEEN, DURATION, TO_FIRST, Histogram
from llamacpp_instr.log.graph.ops import BLOCKS
from llamacpp_instr.log.reader import read_events
from llamacpp_instr.log.requests import find_requests
from llamacpp_instr.log.schema import Kv, Mark, Token
from llamacpp_instr.log.session import Session, load_session
from tests.kit.computes import one_by_one
from tests.kit.made_log import encode, make_log


@pytest.fixture(scope="module", params=range(6))
def log(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("log") / "made.log"
    path.write_bytes(encode(make_log(Random(request.param).randint)))
    return path


@pytest.fixture(scope="module")
def session(log: Path) -> Session:
    return load_session(log)


@pytest.fixture(scope="module")
def state(log: Path) -> LiveState:
    """What a viewer knows when the log has ended."""
    return state_of(log)[0]


def state_of(log: Path, pause: int = 0) -> tuple[LiveState, list[dict[str, object]]]:
    """The state after the log, and a frame after every `pause` events."""
    state, frames = LiveState(), []
    maker = FrameMaker(state)
    for n, (_, event) in enumerate(state.refs.follow(read_events(log)), 1):
        if take := state.takers.get(type(event)):
            take(event)
        if pause and n % pause == 0:
            frames.append(maker.next_frame(catching_up=False))
    frames.append(maker.next_frame(catching_up=False))
    frames.append(maker.key_frame(catching_up=False))
    return state, frames


def test_the_figures_are_those_of_the_session(
    log: Path, session: Session, state: LiveState
) -> None:
    good = session.steps.rows(session.steps["status"] == 0)
    assert state.n_steps == len(good)
    assert state.n_failed == len(session.steps) - len(good)
    assert state.n_tokens == len(session.tokens)
    assert state.n_messages == len(session.messages)
    assert [row.step for row in state.steps] == good["step"].tolist()
    assert sum(second.tokens for second in state.seconds) == len(session.tokens)
    assert sum(second.steps for second in state.seconds) == len(good)
    kv = [event for _, event in read_events(log) if isinstance(event, Kv)]
    assert sum(cache.moves for cache in state.caches.values()) == sum(
        event.op in ("shift", "seq_cp", "seq_add", "seq_div") for event in kv
    )
    latest = {(event.ctx, event.cache): (event.used, event.size) for event in kv}
    assert {key: (c.used, c.size) for key, c in state.caches.items()} == latest


def test_the_heat_is_the_time_of_the_kernels(session: Session, state: LiveState) -> None:
    for phase, heat in state.heat.items():
        expected = kernel_times(session, phase)
        found = {
            (layer - 1, BLOCKS[block]): heat.sum[layer, block]
            for layer in range(len(heat.sum))
            for block in range(len(BLOCKS))
            if heat.sum[layer, block]
        }
        assert found == pytest.approx(expected)


def kernel_times(session: Session, phase: str) -> dict[tuple[int, str], float]:
    """By layer and block: thread 0's kernels in the successful steps of a phase; its layers in a
    log without kernels."""
    times: dict[tuple[int, str], float] = {}
    steps = session.steps
    wanted = set(steps["step"][(steps["phase"] == phase) & (steps["status"] == 0)].tolist())
    step_of = dict(
        zip(session.computes["compute"].tolist(), session.computes["step"].tolist(), strict=True)
    )
    minimal = session.start.level == "minimal"
    for timed in one_by_one(session.layers if minimal else session.ops):
        if timed.thread or step_of[timed.compute] not in wanted:
            continue
        if minimal:
            places = [(layer, "other") for layer in timed.label.tolist()]
        else:
            kernels = session.kernels(timed.plan)
            places = list(zip(kernels.layer.tolist(), kernels.block, strict=True))
        for place, dur in zip(places, timed.dur.tolist(), strict=True):
            if dur:
                times[place] = times.get(place, 0) + dur
    return times


def test_the_steps_of_some_seconds_are_those_that_ended_in_them(
    session: Session, state: LiveState
) -> None:
    steps = session.steps
    assert state.start is not None
    good = steps["status"] == 0
    ended = (steps["returned"][good] - state.start.t) // 10**9
    numbers = steps["step"][good]
    for first, last in ((0, 10**6), (0, 0), (int(ended.max(initial=0)), 10**6), (10**6, 10**7)):
        inside = numbers[(ended >= first) & (ended <= last)]
        found = state.steps_between(first, last)
        if len(inside):
            assert found is not None
            assert found[0] <= inside.min()
            assert found[1] == inside.max()
        else:
            assert found is None


def test_the_lanes_are_the_requests(session: Session, state: LiveState) -> None:
    _, requests = find_requests(session)
    lanes = sorted(state.lanes, key=lambda lane: (lane.request.begin, lane.request.ctx))
    assert len(lanes) == state.lanes.n_requests
    found = {(r.ctx, r.seq, r.begin, r.prompt, tuple(r.token_times)) for r in requests}
    shown = {
        (r.ctx, r.seq, r.begin, r.prompt, tuple(r.token_times))
        for r in (lane.request for lane in lanes)
    }
    assert shown == found


@pytest.mark.parametrize("phases", [("begin",), ("end",), ("begin", "end"), ()], ids=" ".join)
def test_a_mark_names_the_request_that_it_served(phases: tuple[str, ...], tmp_path: Path) -> None:
    """Whether the application named its sequence when it began or when it ended."""
    events = make_log(Random(0).randint, 1, "detailed")
    last = max(event.t for event in events)
    for phase, t in (("end", last), ("begin", events[0].t)):
        mark = Mark(t=t, mark=99, name="chat", phase=phase)
        mark.seq = 0 if phase in phases else -1
        if phase == "end":
            events.insert(-1, mark)
        else:
            events.insert(1, mark)
    events = [e for e in events if not isinstance(e, Mark) or e.mark == 99]
    (tmp_path / "it.log").write_bytes(encode(events))
    (lane,) = state_of(tmp_path / "it.log")[0].lanes
    _, (request,) = find_requests(load_session(tmp_path / "it.log"))
    arrival = events[0].t if phases else -1
    for found in (lane.request, request):
        assert (found.name, found.arrival) == ("chat" if phases else "", arrival)
    assert lane.over


@pytest.mark.parametrize("pause", [1, 7, 100])
def test_frames_tell_what_a_key_frame_tells(log: Path, pause: int) -> None:
    _, frames = state_of(log, pause)
    *deltas, key = msgspec.json.decode(msgspec.json.encode(frames))
    assert [frame["frame"] for frame in deltas] == list(range(1, len(deltas) + 1))
    assert key["frame"] == len(deltas)
    seconds: dict[int, object] = {}
    for frame in deltas:
        # the latest second sent may have changed; earlier ones are not repeated
        assert all(of[0] >= max(seconds, default=0) for of in frame["seconds"])
        seconds.update({of[0]: of for of in frame["seconds"]})
    assert list(seconds.values()) == key["seconds"]
    assert [step for frame in deltas for step in frame["steps"]][-2000:] == key["steps"]
    assert [message for frame in deltas for message in frame["messages"]] == key["messages"]
    lanes: dict[int, dict[str, object]] = {}
    for frame in deltas:
        for lane in frame["lanes"]:
            before = lanes.get(lane["lane"], {"tokens": []})["tokens"]
            lanes[lane["lane"]] = {**lane, "tokens": before + lane["tokens"]}
    kept = {lane["lane"] for lane in key["lanes"]}
    assert [lane for number, lane in lanes.items() if number in kept] == key["lanes"]


def test_a_key_frame_between_two_frames_repeats_nothing(log: Path) -> None:
    state = LiveState()
    maker = FrameMaker(state)
    steps, messages = [], []
    n_events = sum(1 for _ in read_events(log))
    for n, (_, event) in enumerate(state.refs.follow(read_events(log)), 1):
        if take := state.takers.get(type(event)):
            take(event)
        if n == n_events // 2:
            maker.next_frame(catching_up=False)
        if n == n_events * 3 // 4:
            key = maker.key_frame(catching_up=False)
            steps, messages = key["steps"], key["messages"]
    last = maker.next_frame(catching_up=False)
    whole = maker.key_frame(catching_up=False)
    assert steps + last["steps"] == whole["steps"]
    assert messages + last["messages"] == whole["messages"]


def unclosed(log: Path, path: Path) -> Path:
    """The log without its end."""
    path.write_bytes(b"".join(log.read_bytes().splitlines(keepends=True)[:-1]))
    return path


def test_while_nothing_happens_the_figures_go_down(log: Path, tmp_path: Path) -> None:
    state, _ = state_of(unclosed(log, tmp_path / "open.log"))
    busy = figures_of(state)
    assert bool(busy.active) == bool(state.lanes.n_requests)
    state.idle = 10**10
    idle = figures_of(state)
    assert (idle.rate, idle.active) == (0, [])
    assert (idle.to_first, idle.cells) == (busy.to_first, busy.cells)


def test_the_first_figures_are_those_of_the_requests(session: Session, state: LiveState) -> None:
    _, requests = find_requests(session)
    firsts = [request.to_first_token for request in requests if request.token_times]
    betweens = [r.between_tokens.mean() for r in requests if len(r.token_times) > 1]
    figures = figures_of(state)
    assert figures.to_first == (pytest.approx(median(firsts)) if firsts else None)
    assert figures.between == (pytest.approx(median(betweens)) if betweens else None)


def test_a_kept_step_has_its_kernels(session: Session, state: LiveState) -> None:
    for row in list(state.steps)[:20]:
        details = step_details(state, row.step)
        assert details is not None
        computes = session.computes["compute"][session.computes["step"] == row.step].tolist()
        durs = [
            d for ops in one_by_one(session.ops) if ops.compute in computes and not ops.thread
            for d in ops.dur.tolist()
        ]  # fmt: skip
        assert sorted(kernel[4] for kernel in details["kernels"]) == sorted(durs)
    assert step_details(state, 10**9) is None


Samples = dict[tuple[str, ...], float]
"""metrics by their names, without the common beginning, and labels"""


def metrics_of(state: LiveState) -> Samples:
    from prometheus_client.parser import text_string_to_metric_families

    return {
        (sample.name.removeprefix("llamacpp_instr_"), *sample.labels.values()): sample.value
        for family in text_string_to_metric_families(metrics_text(state).decode())
        for sample in family.samples
    }


def total(samples: Samples, name: str) -> float:
    """The sum of a metric over all labels."""
    return sum(value for key, value in samples.items() if key[0] == name)


def eventful(log: Path, path: Path) -> list[dict[str, Any]]:
    """The log with messages and, for the last step of each context, a failure; its lines."""
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    ctx = {line["step"]: line["ctx"] for line in lines if line["event"] == "step_begin"}
    last = {ctx[line["step"]]: line for line in lines if line["event"] == "step_end"}
    for line in last.values():
        line["status"] = 1
    failed = {line["step"] for line in last.values()}
    lines = [of for of in lines if of["event"] != "token" or of["step"] not in failed]
    message = {"event": "message", "t": lines[0]["t"], "level": "warn", "text": "x"}
    lines[1:1] = [message] * (MESSAGES + 5)
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return lines


def histogram(seconds: list[float], bounds: tuple[float, ...]) -> list[int]:
    """How many are at most each bound, and how many there are."""
    return [sum(of <= bound for of in seconds) for bound in bounds] + [len(seconds)]


def test_metrics_are_what_the_lines_of_the_log_say(log: Path, tmp_path: Path) -> None:
    """Each context of such a log serves one request: a prompt, and a token from each step."""
    lines = eventful(log, tmp_path / "it.log")
    of: dict[str, list[dict[str, Any]]] = {}
    for line in lines:
        of.setdefault(line["event"], []).append(line)
    begins = {line["step"]: line for line in of.get("step_begin", ())}
    ends = {line["step"]: line for line in of.get("step_end", ())}
    good = [begins[step] for step, line in ends.items() if line["status"] == 0]
    times: dict[int, list[int]] = {}
    for token in of.get("token", ()):
        times.setdefault(token["ctx"], []).append(token["t"] + token["dur"])
    first_step = {ctx: min(b["t"] for b in good if b["ctx"] == ctx) for ctx in times}
    prompts = sum(b["n_tokens"] for b in good if b["pos"] == 0)
    firsts = [(t[0] - first_step[ctx]) / 1e9 for ctx, t in times.items()]
    durations = [(t[-1] - first_step[ctx]) / 1e9 for ctx, t in times.items()]
    per_token = [(t[-1] - t[0]) / (len(t) - 1) / 1e9 for t in times.values() if len(t) > 1]
    gaps = [(b - a) / 1e9 for t in times.values() for a, b in pairwise(t)]

    state, _ = state_of(unclosed(tmp_path / "it.log", tmp_path / "open.log"))
    before = metrics_of(state)
    assert before["up",] == 1
    n_requests = len({b["ctx"] for b in good})
    assert before["active_requests", "running"] == before["requests_total",] == n_requests
    assert before["active_requests", "queued"] == 0
    held = {line["ctx"]: line["buffers"] for line in of["memory"]}
    assert {key[1:]: value for key, value in before.items() if key[0] == "memory_bytes"} == {
        (str(ctx), kind): sum(buffer[kind] for buffer in buffers)
        for ctx, buffers in held.items()
        for kind in ("model", "context", "compute")
    }
    cells = {(line["ctx"], line.get("cache", 0)): line for line in of.get("kv", ())}
    assert {key[1:]: value for key, value in before.items() if key[0] == "cache_cells"} == {
        (str(cache), str(ctx), what): n
        for (ctx, cache), line in cells.items()
        for what, n in (("used", line["used"]), ("free", line["size"] - line["used"]))
    }

    after = metrics_of(state_of(tmp_path / "it.log")[0])
    assert after["up",] == after["active_requests", "running"] == 0
    assert not {name for name, *_ in after} & {"memory_bytes", "cache_cells", "slots"}
    for samples in (before, after):
        assert samples.get(("tokens_total", "model.gguf", "input_computed"), 0) == prompts
        n_tokens = len(of.get("token", ()))
        assert samples.get(("tokens_total", "model.gguf", "output"), 0) == n_tokens
        assert samples["steps_total",] == len(good)
        assert samples["failed_steps_total",] == len(ends) - len(good)
        busy = sum(ends[b["step"]]["t"] - b["t"] for b in good) / 1e9
        assert samples["busy_seconds_total",] == pytest.approx(busy)
        assert samples["messages_total",] == MESSAGES + 5
    for name, seconds, bounds in (
        ("gen_ai_server_request_duration_seconds", durations, DURATION),
        ("gen_ai_server_time_to_first_token_seconds", firsts, TO_FIRST),
        ("gen_ai_server_time_per_output_token_seconds", per_token, BETWEEN),
        ("time_between_tokens_seconds", gaps, BETWEEN),
    ):
        buckets = [value for key, value in after.items() if key[0] == f"{name}_bucket"]
        assert buckets == (histogram(seconds, bounds) if seconds else [])
        assert total(after, f"{name}_count") == len(seconds)
        assert total(after, f"{name}_sum") == pytest.approx(sum(seconds))


def test_a_histogram_has_a_time_in_the_first_bucket_that_holds_it() -> None:
    found = Histogram(BETWEEN)
    for bound in BETWEEN:
        found.add(int(bound * 1e9))
        found.add(int(bound * 1e9) + 1)
    assert [n for _, n in found.cumulative()] == [*range(1, 2 * len(BETWEEN), 2), 2 * len(BETWEEN)]


def test_the_times_of_a_request_count_once_it_has_ended(log: Path, tmp_path: Path) -> None:
    """As soon as its context has computed nothing for a while, and only once."""
    state, _ = state_of(unclosed(log, tmp_path / "open.log"))
    name = "gen_ai_server_time_to_first_token_seconds_count"
    n = len({token.ctx for _, token in read_events(log) if isinstance(token, Token)})
    assert total(metrics_of(state), name) == 0
    state.idle = 10**10
    for _ in range(2):
        assert total(metrics_of(state), name) == n
    state.finish()
    assert total(metrics_of(state), name) == n
