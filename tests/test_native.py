"""The recorder's C API under stress (contexts at once, sessions that come and go, errors), and what
it writes of numbers and texts."""

from __future__ import annotations

import json
import random
import subprocess
from pathlib import Path

import pytest

from llamacpp_instr.check import check_log
from tests.native_kit import DEMO, ROOT, compile_program, installed_library


def test_the_recorder_under_stress(tmp_path: Path) -> None:
    source = ROOT / "tests" / "native" / "recorder_stress.cpp"
    program = compile_program(source, installed_library(), tmp_path)
    logs = tmp_path / "logs"
    logs.mkdir()
    done = subprocess.run([program, DEMO, logs], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "recorder_stress: passed\n"
    written = sorted(logs.glob("*.log"))
    assert len(written) == 26
    for log in written:
        assert list(check_log(log)) == []


@pytest.fixture(scope="module")
def json_line(tmp_path_factory: pytest.TempPathFactory) -> Path:
    source = ROOT / "tests" / "native" / "json_line.cpp"
    return compile_program(source, installed_library(), tmp_path_factory.mktemp("json_line"))


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
