"""A server written by others, recorded under load: `make load`, for seconds instead of minutes."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from pathlib import Path

import pytest

from tests.conftest import log_parts
from tests.load.account import match_answers, read_recording
from tests.load.hold import Held
from tests.recording.test_server_load import held

__all__ = ["held"]  # fixtures

pytestmark = pytest.mark.native
MIB = 2**20


def test_answers_are_the_unrecorded_servers_and_the_log_holds_each(held: Held) -> None:
    assert held.problems == []
    assert held.refused > 0
    assert held.hung_up > 0
    assert held.recording is not None
    assert len(held.recording.parts) >= 2


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


def copy_of(held: Held, directory: Path) -> Path:
    assert held.recording is not None
    for part in held.recording.parts:
        shutil.copyfile(part, directory / part.name)
    return directory / held.recording.parts[0].name
