"""Every figure of a frame is that of the lines of the log, with hours where the log has ms."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest

from llamacpp_instr.converters.live.frames import MOST_STEPS, FrameMaker, glance, step_details
from llamacpp_instr.converters.live.state import Heat, LiveState
from tests.kit.made_log import encode, make_log
from tests.live.test_state import metrics_of, state_of

Line = dict[str, Any]
SECOND = 10**9
BOUNDS = {
    # https://opentelemetry.io/docs/specs/semconv/gen-ai/gen-ai-metrics/
    "gen_ai_server_request_duration_seconds": (
        "0.01 0.02 0.04 0.08 0.16 0.32 0.64 1.28 2.56 5.12 10.24 20.48 40.96 81.92"
    ),
    "gen_ai_server_time_to_first_token_seconds": (
        "0.001 0.005 0.01 0.02 0.04 0.06 0.08 0.1 0.25 0.5 0.75 1.0 2.5 5.0 7.5 10.0"
    ),
    "gen_ai_server_time_per_output_token_seconds": (
        "0.01 0.025 0.05 0.075 0.1 0.15 0.2 0.3 0.4 0.5 0.75 1.0 2.5"
    ),
}


def slow_lines(seed: int) -> list[Line]:
    """The lines of a log of one context, with clocks that run 300,000 times as fast, a failed step,
    and fields that such logs lack."""
    events = make_log(Random(seed).randint, 1, "verbose")
    lines = [json.loads(line) for line in encode(events).splitlines()]
    begin, rss = lines[0]["t"], 0
    for line in lines:
        line["t"] = begin + (line["t"] - begin) * 300_000
        if line["event"] == "memory":
            line["rss"] = rss = rss + 4096
        elif line["event"] == "ops":
            line["tail"] = 77
        elif line["event"] == "kv" and line["used"] % 2:
            line["op"] = "shift"
    ends = [line for line in lines if line["event"] == "step_end"]
    if len(ends) > 2:
        ends[1]["status"] = 1
        lines = [e for e in lines if e["event"] != "token" or e["step"] != ends[1]["step"]]
    return lines


@pytest.fixture(scope="module", params=[0, 4, 5, 6, 10])
def lines(request: pytest.FixtureRequest) -> list[Line]:
    return slow_lines(request.param)


@pytest.fixture(scope="module")
def state(lines: list[Line], tmp_path_factory: pytest.TempPathFactory) -> LiveState:
    return state_after(lines, tmp_path_factory.mktemp("log") / "it.log")


def state_after(lines: list[Line], path: Path) -> LiveState:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return state_of(path)[0]


def of(lines: list[Line], event: str) -> list[Line]:
    return [line for line in lines if line["event"] == event]


def good_steps(lines: list[Line]) -> list[tuple[Line, Line]]:
    """Begin and end of each step that succeeded."""
    begins = {line["step"]: line for line in of(lines, "step_begin")}
    return [(begins[e["step"]], e) for e in of(lines, "step_end") if e["status"] == 0]


def test_a_second_is_what_its_lines_say(lines: list[Line], state: LiveState) -> None:
    begin = lines[0]["t"]
    of_seconds: dict[int, Counter[str]] = {}
    begins = {line["step"]: line for line in of(lines, "step_begin")}
    used = rss = 0
    for line in lines:
        at = line["t"] + (line["dur"] if line["event"] == "token" else 0)
        second = of_seconds.get((at - begin) // SECOND, Counter())
        match line["event"]:
            case "kv":
                used = line["used"]
                continue
            case "memory":
                rss = line["rss"]
                continue
            case "token":
                second["tokens"] += 1
            case "machine":
                second["cpu"] += line["cpu"]
                second["delay"] += line["delay"]
            case "step_end" if line["status"] == 0:
                step = begins[line["step"]]
                second["steps"] += 1
                second["busy"] += line["t"] - step["t"]
                second["prompt"] += step["n_tokens"] * (step["phase"] == "prefill")
            case _:
                continue
        second["cells"], second["rss"] = used, rss
        of_seconds[(at - begin) // SECOND] = second
    names = ("tokens", "prompt", "steps", "busy", "cells", "rss", "cpu", "delay")
    expected = [[n, *(of_seconds[n][name] for name in names)] for n in sorted(of_seconds)]
    frame = FrameMaker(state).next_frame(catching_up=True)
    assert frame["seconds"] == expected
    assert len(expected) == len(state.seconds)
    assert glance(state, False, 9, 2)["seconds"] == expected[-2:]


def test_only_seconds_that_may_have_changed_are_repeated(state: LiveState) -> None:
    maker = FrameMaker(state)
    numbers = [second[0] for second in maker.next_frame(catching_up=False)["seconds"]]
    again = [second[0] for second in maker.next_frame(catching_up=False)["seconds"]]
    assert again == numbers[-1:]


def test_the_figures_beside_the_seconds(lines: list[Line], state: LiveState) -> None:
    frame = FrameMaker(state).next_frame(catching_up=True)
    steps = good_steps(lines)
    assert frame["late"]
    assert frame["frame"] == 1
    assert frame["closed"] == "closed"
    assert frame["n_tokens"] == len(of(lines, "token"))
    assert frame["n_prompt"] == sum(b["n_tokens"] for b, _ in steps if b["phase"] == "prefill")
    assert frame["busy"] == sum(e["t"] - b["t"] for b, e in steps)
    assert frame["steps"] == [
        [b["step"], 0, b["phase"], b["n_tokens"], 1, b["t"], e["t"] - b["t"]] for b, e in steps
    ]
    moves = sum(kv["op"] == "shift" for kv in of(lines, "kv"))
    caches = [[0, 0, kv["used"], 512, kv["bytes"], moves] for kv in of(lines, "kv")]
    assert frame["caches"] == caches[-1:]
    last = of(lines, "memory")[-1]
    (buffer,) = last["buffers"]
    held = [buffer[name] for name in ("buffer", "model", "context", "compute")]
    assert frame["memory"] == [[0, last["rss"], [held]]]
    machines = [
        {"cpus": 2, **{name: m[name] for name in ("load", "dur", "cpu", "delay", "busy")}}
        for m in of(lines, "machine")
    ]
    assert frame["machine"] == (machines[-1] if machines else None)
    model, context = of(lines, "model")[0], of(lines, "context")[0]
    assert frame["session"] == {
        "id": lines[0]["id"], "begin": lines[0]["t"], "wall": lines[0]["wall"], "level": "verbose",
        "perturbed": False, "cpu": "A CPU", "cores": 2, "pid": 42,
        "models": [[0, "model.gguf", "F16", model["bytes"]]],
        "contexts": [[0, 0, context["n_ctx"], context["n_threads"]]],
    }  # fmt: skip


def test_threads_work_or_wait_as_the_latest_compute_has_it(
    lines: list[Line], state: LiveState
) -> None:
    frame = FrameMaker(state).next_frame(catching_up=False)
    ops = of(lines, "ops")
    if not ops:
        assert (frame["threads"], frame["working"]) == ([], None)
        return
    latest = [line for line in ops if line["compute"] == ops[-1]["compute"]]
    assert len(latest) == of(lines, "context")[0]["n_threads"]
    working = [sum(line["dur"]) - sum(line["wait"]) for line in latest]
    waiting = [sum(line["wait"]) + sum(line.get("gap") or ()) + 77 for line in latest]
    assert frame["threads"] == [[0, working, waiting]]
    whole = sum(working) + sum(waiting)
    assert frame["working"] == pytest.approx(sum(working) / whole)


def test_the_map_has_the_latest_step_and_the_average(lines: list[Line], state: LiveState) -> None:
    step_of = {line["compute"]: line["step"] for line in of(lines, "compute")}
    took: Counter[int] = Counter()
    for ops in of(lines, "ops"):
        if ops.get("thread", 0) == 0:
            took[step_of[ops["compute"]]] += sum(ops["dur"])
    heat = FrameMaker(state).next_frame(catching_up=False)["heat"]
    n_layers = of(lines, "model")[0]["hparams"]["n_layer"]
    phases = {b["phase"] for b, _ in good_steps(lines)}
    assert set(heat) == phases
    for phase in phases:
        steps = [b["step"] for b, _ in good_steps(lines) if b["phase"] == phase]
        last, mean = np.array(heat[phase]["last"]), np.array(heat[phase]["mean"])
        assert heat[phase]["steps"] == len(steps)
        assert last.shape == (n_layers + 1, len(heat[phase]["blocks"]))
        assert last.sum() == took[steps[-1]]
        # each cell lost less than one
        lost = sum(took[step] for step in steps) / len(steps) - mean.sum()
        assert 0 <= lost < mean.size


def test_the_average_of_no_step_is_nothing() -> None:
    heat = Heat(2)
    assert not heat.mean.any()
    for ns, mean in ((4.0, 4.0), (8.0, 6.0), (0.0, 4.0), (1.0, 3.25)):
        heat.add(np.full_like(heat.sum, ns))
        assert (heat.mean == mean).all()
        assert (heat.last == ns).all()


def test_only_a_step_that_is_kept_has_kernels(lines: list[Line], state: LiveState) -> None:
    """A failed one has none, though steps before and after it do."""
    kept = {b["step"] for b, _ in good_steps(lines)}
    for begin in of(lines, "step_begin"):
        found = step_details(state, begin["step"])
        assert (found is not None) == (begin["step"] in kept)
        if found is not None:
            assert found["step"][:3] == [begin["step"], 0, begin["phase"]]
    assert step_details(state, -1) is None


def test_the_rate_is_that_of_the_last_whole_second(lines: list[Line], tmp_path: Path) -> None:
    tokens = Counter((t["t"] + t["dur"] - lines[0]["t"]) // SECOND for t in of(lines, "token"))
    rate_of = state_after(lines, tmp_path / "it.log")
    ended = rate_of.elapsed
    for second in range(ended // SECOND + 1, ended // SECOND + 4):
        # in the middle of a second, and in its first ns
        for ns in (SECOND // 2, 0):
            rate_of.idle = second * SECOND + ns - ended
            frame = FrameMaker(rate_of).next_frame(catching_up=False)
            assert frame["rate"] == tokens[second - 1]
            assert frame["t"] == second * SECOND + ns


def test_a_step_under_way_has_the_time_since_its_begin(tmp_path: Path) -> None:
    lines = slow_lines(5)
    at = max(i for i, line in enumerate(lines) if line["event"] == "step_begin")
    state = state_after(lines[: at + 1], tmp_path / "it.log")
    for idle in (0, 12345):
        state.idle = idle
        computing = FrameMaker(state).next_frame(catching_up=False)["computing"]
        late = state.latest - lines[at]["t"]
        assert computing == (lines[at]["phase"], lines[at]["n_tokens"], late + idle)
    state.finish()
    assert FrameMaker(state).next_frame(catching_up=False)["computing"] is None


def test_a_frame_has_the_latest_of_many_steps(tmp_path: Path) -> None:
    lines = slow_lines(5)
    begin, end = of(lines, "step_begin")[-1], of(lines, "step_end")[-1]
    last = lines.pop()
    for i in range(MOST_STEPS + 7):
        step, t = begin["step"] + 1 + i, end["t"] + (i + 1) * SECOND
        lines += [{**begin, "step": step, "t": t}, {**end, "step": step, "t": t + SECOND // 2}]
    state = state_after(lines, tmp_path / "it.log")
    steps = FrameMaker(state).next_frame(catching_up=False)["steps"]
    numbers = [b["step"] for b, _ in good_steps(lines)]
    assert last["event"] == "session_end"
    assert [step[0] for step in steps] == numbers[-MOST_STEPS:]


def test_bounds_are_those_that_the_conventions_advise() -> None:
    state = LiveState()
    of = state.lanes.times
    for times, error in ((of.duration, [""]), (of.to_first, []), (of.per_token, [])):
        times.add(1, "model", "text_completion", *error)
    found = metrics_of(state)
    for name, bounds in BOUNDS.items():
        buckets = [key[-1] for key in found if key[0] == f"{name}_bucket"]
        assert buckets == [*bounds.split(), "+Inf"]
