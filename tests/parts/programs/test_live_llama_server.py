"""`instr live` of a recorded llama-server: the server's own figures, and its clients' clocks."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import pytest

from llamacpp_instr.converters.live.live_session import LiveSession
from llamacpp_instr.converters.live.metrics import metrics_text
from llamacpp_instr.converters.live.state import LiveState
from tests.kit.llama_programs import Answer, llama_server
from tests.kit.prometheus import check_metrics
from tests.live.followed_logs import followed
from tests.live.test_slots import count
from tests.live.test_state import Samples, metrics_of, total

pytestmark = pytest.mark.native

CLIENTS = 8
PATIENCE_S = 100


@dataclass(frozen=True)
class Watched:
    """What the live view had of a server when its clients were done, and what they saw."""

    answers: list[Answer]
    server: dict[str, float]
    """its own metrics"""
    frame: dict[str, Any]
    samples: Samples
    text: bytes
    """of all metrics"""


def wait_for(session: LiveSession, what: Callable[[LiveState], bool]) -> None:
    end = time.monotonic() + PATIENCE_S
    while not session.look(what):
        assert time.monotonic() < end
        time.sleep(0.01)


@pytest.fixture(scope="module", params=[2, 6], ids=lambda each: f"{CLIENTS * each} requests")
def watched(
    request: pytest.FixtureRequest, demo_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Watched:
    """Eight clients ask a server with four slots, again and again; every other prompt begins like
    the previous one."""
    log = tmp_path_factory.mktemp("watched") / "server.log"
    each = range(request.param)
    cats = [["there was a cat " * (i + k % 2) for k in each] for i in range(CLIENTS)]
    prompts = [[f"Once upon a time {cat}" for cat in of] for of in cats]
    n = [[4 + i + k for k in each] for i in range(CLIENTS)]
    with (
        llama_server(demo_model, log, "-c", "2048", "-np", "4") as server,
        followed(log) as (session, _),
    ):
        answers = server.complete_all(prompts, n)
        found = re.findall(r"^llamacpp:(\w+) (\S+)$", server.get("/metrics"), re.MULTILINE)
        over = CLIENTS * request.param
        wait_for(session, lambda of: sum(lane.over for lane in of.lanes) == over)
        samples, text = session.look(metrics_of), session.look(metrics_text)
        frame = msgspec.json.decode(session.key_frame(-1)[1])
    return Watched(answers, {name: float(value) for name, value in found}, frame, samples, text)


def test_every_request_is_on_the_page_and_in_the_metrics(watched: Watched) -> None:
    lanes, n = watched.frame["lanes"], len(watched.answers)
    assert len({lane["task"] for lane in lanes}) == len(lanes) == watched.frame["n_requests"] == n
    assert {lane["reason"] for lane in lanes} == {"limit"}
    assert watched.samples["requests_total",] == n
    for name in ("request_duration", "time_to_first_token", "time_per_output_token"):
        assert count(watched.samples, f"gen_ai_server_{name}_seconds") == n
    assert count(watched.samples, "time_in_queue_seconds") == n
    assert len(watched.frame["slots"]) == watched.samples["slots", "free"] == 4


def test_tokens_are_those_of_the_server(watched: Watched) -> None:
    kinds = {key[2]: n for key, n in watched.samples.items() if key[0] == "tokens_total"}
    assert kinds["input_computed"] == watched.server["prompt_tokens_total"]
    assert kinds["output"] == watched.server["tokens_predicted_total"]
    assert kinds["input_cached"] == sum(answer.timings["cache_n"] for answer in watched.answers) > 0
    lanes = watched.frame["lanes"]
    assert sorted((lane["prompt"], lane["reused"], lane["n_tokens"]) for lane in lanes) == sorted(
        tuple(answer.timings[key] for key in ("prompt_n", "cache_n", "predicted_n"))
        for answer in watched.answers
    )
    assert all(len(lane["tokens"]) == lane["n_tokens"] for lane in lanes)


def test_times_lie_between_the_servers_and_the_clients(watched: Watched) -> None:
    """A client waits longer than its request takes; the server counts from the slot on."""
    answers, samples = watched.answers, watched.samples
    computed = sum(of.timings["prompt_ms"] + of.timings["predicted_ms"] for of in answers) / 1e3
    waited = sum(of.end - of.begin for of in answers) / 1e9
    assert computed < total(samples, "gen_ai_server_request_duration_seconds_sum") < waited
    first = sum(of.first - of.begin for of in answers) / 1e9
    assert total(samples, "gen_ai_server_time_to_first_token_seconds_sum") < first
    queued = total(samples, "time_in_queue_seconds_sum")
    assert 0 < queued < total(samples, "gen_ai_server_time_to_first_token_seconds_sum")


def test_promtool_finds_no_fault(watched: Watched) -> None:
    check_metrics(watched.text)


def test_each_answer_to_one_prompt_is_in_the_metrics(demo_model: Path, tmp_path: Path) -> None:
    log = tmp_path / "server.log"
    with (
        llama_server(demo_model, log, "-c", "2048", "-np", "4") as server,
        followed(log) as (session, _),
    ):
        server.complete("Once upon a time there was a cat", 8, n_cmpl=3)
        wait_for(session, lambda of: sum(lane.over for lane in of.lanes) == 3)
        samples = session.look(metrics_of)
        found = dict(re.findall(r"^llamacpp:(\w+) (\S+)$", server.get("/metrics"), re.MULTILINE))
    assert samples["requests_total",] == 3
    assert count(samples, "gen_ai_server_request_duration_seconds") == 3
    kinds = {key[2]: n for key, n in samples.items() if key[0] == "tokens_total"}
    assert kinds["output"] == 24
    assert kinds["input_computed"] == float(found["prompt_tokens_total"])


def test_a_request_waits_until_the_only_slot_is_free(demo_model: Path, tmp_path: Path) -> None:
    log = tmp_path / "server.log"
    with (
        llama_server(demo_model, log, "-c", "32768", "-np", "1") as server,
        followed(log) as (session, _),
        ThreadPoolExecutor() as clients,
    ):
        leave = threading.Event()
        clients.submit(server.complete, "Once", 30_000, leave=leave)
        wait_for(session, lambda of: of.n_tokens > 2)
        clients.submit(server.complete, "A dog", 4)
        wait_for(session, lambda of: len(of.queue) == 1)
        queued = session.look(metrics_of)
        leave.set()
        wait_for(session, lambda of: sum(lane.over for lane in of.lanes) == 2)
        frame = msgspec.json.decode(session.key_frame(-1)[1])
    assert queued["active_requests", "queued"] == queued["active_requests", "running"] == 1
    assert (queued["slots", "used"], queued["slots", "free"]) == (1, 0)
    assert [lane["reason"] for lane in frame["lanes"]] == ["cancelled", "limit"]
    assert (frame["queued"], frame["active"]) == (0, [])
