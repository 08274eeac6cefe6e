"""A server written by others, recorded under load: `make load`, for seconds instead of minutes."""

from __future__ import annotations

import json
import shutil
import signal
import sys
import threading
from collections import Counter
from pathlib import Path

import pytest

from llamacpp_instr.log.reader import read_events
from llamacpp_instr.log.schema import Token
from tests.conftest import log_parts
from tests.load.account import match_answers, read_recording
from tests.load.client import Answer, ask
from tests.load.hold import Expected, Held, check_sizes, hold, take_answer
from tests.load.mix import COMPLETIONS, Request
from tests.load.server import Server

pytestmark = pytest.mark.native

MIB = 2**20


@pytest.fixture(scope="module")
def held(tmp_path_factory: pytest.TempPathFactory) -> Held:
    directory = tmp_path_factory.mktemp("load")
    return hold(directory, seconds=0, clients=3, rotate=1_000_000, tell=lambda _: None)


def test_answers_are_the_unrecorded_servers_and_the_log_holds_each(held: Held) -> None:
    assert held.problems == []
    assert held.refused > 0
    assert held.hung_up > 0
    assert held.recording is not None
    assert len(held.recording.parts) >= 2
    # within seconds, none of the few rotations may have been during an answer; see test_rotation.py


def test_the_recorder_takes_little_memory(held: Held) -> None:
    # `make load` checks the memory: within seconds a server is still warming up
    assert held.last("recorded") - held.last("plain") < 16 * MIB


def test_a_part_that_is_missing_is_seen(held: Held, tmp_path: Path) -> None:
    log = copy_of(held, tmp_path)
    log_parts(log)[1].unlink()
    assert read_recording(log).wrong


def test_a_step_that_is_missing_is_seen(held: Held, tmp_path: Path) -> None:
    log = copy_of(held, tmp_path)
    lines = log.read_bytes().splitlines(keepends=True)
    begins = [n for n, line in enumerate(lines) if line.startswith(b'{"event":"step_begin"')]
    del lines[begins[10] : begins[11]]
    log.write_bytes(b"".join(lines))
    wrong = read_recording(log).wrong
    assert any("the step's number" in text for text in wrong)
    assert any("lines is" in text for text in wrong)


def test_a_token_that_is_another_is_seen(held: Held, tmp_path: Path) -> None:
    log = copy_of(held, tmp_path)
    lines = log.read_text().splitlines(keepends=True)
    at = next(n for n, line in enumerate(lines) if line.startswith('{"event":"token"'))
    lines[at] = json.dumps({**json.loads(lines[at]), "text": " zebra"}) + "\n"
    log.write_text("".join(lines))
    recording = read_recording(log)
    assert recording.wrong == []
    # the right one, and the false one
    assert len(match_answers(recording, held.outcomes).wrong) == 2


def test_an_answer_that_is_not_recorded_is_seen(held: Held) -> None:
    assert held.recording is not None
    whole = next(answer for answer in held.outcomes if not answer.left)
    assert match_answers(held.recording, held.outcomes + Counter([whole])).wrong


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


def copy_of(held: Held, directory: Path) -> Path:
    assert held.recording is not None
    for part in held.recording.parts:
        shutil.copyfile(part, directory / part.name)
    return directory / held.recording.parts[0].name


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
