"""A server written by others, recorded under load: `make load`, for seconds instead of minutes."""

from __future__ import annotations

import json
import signal
import sys
import threading
from pathlib import Path

import pytest

from llamacpp_instr.log.reader import read_events
from llamacpp_instr.log.schema import Token
from tests.load.client import Answer, ask
from tests.load.hold import Expected, Held, check_sizes, hold, take_answer
from tests.load.mix import COMPLETIONS, Request
from tests.load.server import Server

pytestmark = pytest.mark.native


@pytest.fixture(scope="module")
def held(tmp_path_factory: pytest.TempPathFactory) -> Held:
    directory = tmp_path_factory.mktemp("load")
    return hold(directory, seconds=0, clients=3, rotate=1_000_000, tell=lambda _: None)


def test_an_answer_that_is_another_is_seen() -> None:
    held, right = Held(clients=1), Expected(Answer(200, ("a", "b", "c")), outcome=None)
    whole, part = Request(COMPLETIONS, "{}"), Request(COMPLETIONS, "{}", leave_after=2)
    take_answer(held, "plain", whole, Answer(200, ("a", "b", "c")), right)
    take_answer(held, "recorded", part, Answer(200, ("a", "b")), right)
    assert held.problems == []
    take_answer(held, "recorded", whole, Answer(200, ("a", "b", "d")), right)
    take_answer(held, "recorded", whole, Answer(500, ("a", "b", "c")), right)
    take_answer(held, "recorded", part, Answer(200, ("a",)), right)
    assert held.differing == len(held.problems) == 3


def test_parts_of_another_size_are_seen() -> None:
    assert check_sizes([1_000_100, 1_002_000, 900], rotate=1_000_000) == []
    assert len(check_sizes([999_999, 6_000_000, 6_000_000], rotate=1_000_000)) == 3


STORY = Request(COMPLETIONS, json.dumps({"prompt": "Once upon a time", "max_tokens": 400}))


@pytest.mark.parametrize(
    ("how", "code", "states"),
    [
        (signal.SIGINT, 0, ["closed"]),
        # uvicorn shuts down, then sends itself the signal again, so the process cannot close the
        # log
        (signal.SIGTERM, 128 + signal.SIGTERM, ["closed", "unclosed"]),
    ],
)
def test_a_signal_to_exec_ends_the_server_after_what_it_was_doing(
    tmp_path: Path, how: signal.Signals, code: int, states: list[str]
) -> None:
    log = tmp_path / "server.log"
    under = (sys.executable, "-m", "llamacpp_instr", "exec", "--log", str(log), "--")
    answers: list[Answer] = []
    stopping = threading.Event()

    def client() -> None:
        # one story may be over before its first step is in the log
        while not stopping.is_set():
            answers.append(ask(server, STORY))

    with Server(tmp_path / "server.txt", under=under) as server:
        server.wait_until_it_answers()
        asking = threading.Thread(target=client)
        asking.start()
        while not (log.exists() and b'"step_begin"' in log.read_bytes()):
            assert asking.is_alive()
        stopping.set()
        assert server.stop(how) == code
        asking.join()
    assert {answer.status for answer in answers} == {200}
    assert f"log: {log}" in server.text()
    reader = read_events(log)
    sampled = [event.id for _, event in reader if isinstance(event, Token)]
    assert reader.end is not None
    assert reader.end.state in states
    assert reader.end.skipped == 0
    if reader.end.state == "closed":
        # the token that ends a story is not part of it
        ended = sum(answer.finished == "stop" for answer in answers)
        written = sum(answer.usage("completion_tokens") for answer in answers)
        assert len(sampled) == written + ended
