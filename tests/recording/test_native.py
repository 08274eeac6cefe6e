"""The recorder's C API under stress (several contexts, sessions that begin and end, errors), and
its output of numbers and texts."""

from __future__ import annotations

import json
import random
import resource
import signal
import subprocess
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from llamacpp_instr.log.check import check_log
from tests.kit.native_kit import DEMO
from tests.kit.programs import native_program

pytestmark = pytest.mark.native


def test_the_recorder_under_stress(tmp_path: Path) -> None:
    program = native_program("recorder_stress", tmp_path)
    logs = tmp_path / "logs"
    logs.mkdir()
    done = subprocess.run([program, DEMO, logs], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "recorder_stress: passed\n"
    written = sorted(logs.glob("*.log"))
    assert len(written) == 27
    for log in written:
        assert list(check_log(log)) == []


@pytest.fixture(scope="module")
def json_line(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return native_program("json_line", tmp_path_factory.mktemp("json_line"))


@pytest.fixture(scope="module")
def log_threads(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return native_program("log_threads", tmp_path_factory.mktemp("log_threads"))


def _numbers() -> list[int]:
    """Around every power of ten, and of every length."""
    powers = [10**n + near for n in range(20) for near in (-1, 0, 1)]
    rng = random.Random(0)
    anywhere = [rng.getrandbits(rng.randint(1, 64)) for _ in range(2000)]
    return [*powers, *range(1100), 2**63 - 1, 2**63, 2**64 - 1, *anywhere]


@pytest.mark.parametrize(
    "text",
    ["", "plain", "\n", 'a "quoted" \\ one', "\x01\x1f \x7f", "é\u4e2d\U0001f600 end", "end\t"],
    ids=repr,
)
def test_numbers_and_texts_are_read_back_as_they_were(text: str, json_line: Path) -> None:
    numbers = _numbers()
    printed = subprocess.run(
        [json_line, text], input=" ".join(map(str, numbers)), check=True, capture_output=True,
        encoding="utf-8",
    ).stdout.splitlines()  # fmt: skip
    signed = [number - 2**64 if number >= 2**63 else number for number in numbers]
    for line, expected in zip(printed, (numbers, signed), strict=True):
        assert json.loads(line) == {
            "event": "numbers",
            "t": numbers[0],
            "text": text,
            "column": expected,
            "fields": expected,
        }


def test_bytes_that_are_no_utf8_are_replaced(json_line: Path) -> None:
    printed = subprocess.run([json_line, b"a\xff\xc3(b\xe2\x82"], input=b"0", capture_output=True)
    text = json.loads(printed.stdout.splitlines()[0])["text"]
    assert text == "a\ufffd\ufffd(b\ufffd\ufffd"


def _events(log: Path) -> Counter[str]:
    return Counter(json.loads(line)["event"] for line in log.read_text().splitlines())


def _added(
    log_threads: Path, log: Path, *numbers: int, preexec_fn: Callable[[], None] | None = None
) -> tuple[dict[str, int], int]:
    """How many of each event the threads added, and the memory that it took."""
    command = [log_threads, log, *map(str, numbers)]
    printed = subprocess.run(
        command, check=True, capture_output=True, text=True, preexec_fn=preexec_fn
    ).stdout
    counts = {event: int(n) for event, n in (line.split() for line in printed.splitlines())}
    return counts, counts.pop("memory")


@pytest.mark.parametrize("entries", [0, 3, 20000])
def test_threads_add_while_another_writes(entries: int, log_threads: Path, tmp_path: Path) -> None:
    log = tmp_path / "session.log"
    counts, _ = _added(log_threads, log, 3, entries, 97)
    assert counts == {**_events(log) - Counter(["end"]), "dropped": 0, "unwritten": 0}
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    assert lines.pop() == {"event": "end"}
    for thread in range(3):
        assert [line["t"] for line in lines if line["thread"] == thread] == list(range(entries))


def _stop_files_at_300_kb() -> None:
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (300_000, 300_000))


def test_what_cannot_be_written_is_dropped_from_there_on(log_threads: Path, tmp_path: Path) -> None:
    whole, cut = tmp_path / "whole.log", tmp_path / "cut.log"
    _added(log_threads, whole, 1, 20000, 97)
    counts, _ = _added(log_threads, cut, 1, 20000, 97, preexec_fn=_stop_files_at_300_kb)
    kept = cut.read_bytes().splitlines()[:-1]
    assert 0 < len(kept) < 20000
    assert kept == whole.read_bytes().splitlines()[: len(kept)]
    assert counts.pop("dropped") == counts.pop("unwritten") == 20000 - len(kept)
    assert counts == _events(cut) - Counter(["end"])
