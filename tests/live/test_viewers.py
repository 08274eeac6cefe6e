"""Many viewers of a real recording, one of them stopped: nobody else notices, least the program."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from tests.kit import ui_kit
from tests.kit.programs import line, program, say

pytestmark = pytest.mark.native
PATIENCE_S = 300
Frames = list[tuple[int, int, bool, int, int]]
"""number, lost, is key, bytes, checksum"""


def watched(log: Path, *options: object) -> list[object]:
    return ["-m", "tests.kit.watched", log, "--pace", 0, *options]


def viewers(address: str, *options: object) -> list[object]:
    return ["-m", "tests.kit.live_viewers", address, *options]


def see_frame(process: subprocess.Popen[str], number: int = 0, n_bytes: int = 0) -> int:
    """Wait until the first viewer has a frame of at least that number, and gets at least as many
    bytes meanwhile; returns its number."""
    seen = -1
    while seen < number or n_bytes > 0:
        seen, size = map(int, line(process).split()[1:])
        n_bytes -= size
    return seen


def what_they_got(process: subprocess.Popen[str]) -> list[Frames]:
    printed, _ = process.communicate(timeout=PATIENCE_S)
    frames: list[Frames] = json.loads(printed.strip().splitlines()[-1])
    return frames


def test_logits_with_viewers_are_those_without(tmp_path: Path) -> None:
    options = ("--requests", 60)
    with program(*watched(tmp_path / "alone.log", *options)) as alone:
        assert line(alone) == "recording"
        say(alone)
        expected = line(alone)
    log = tmp_path / "seen.log"
    with program(*watched(log, *options)) as seen:
        assert line(seen) == "recording"
        with ui_kit.served(log, command="live") as address, program(*viewers(address)) as eight:
            see_frame(eight, 1)
            say(seen)
            assert line(seen) == expected
            got = what_they_got(eight)
    assert len(expected) == 64
    for frames in got:
        numbers = [number for number, *_ in frames]
        assert numbers == list(range(numbers[0], numbers[-1] + 1)), "each frame, once"
        assert numbers[0] < numbers[-1] == got[0][-1][0], "to the last"
        assert sum(lost for _, lost, *_ in frames) == 0
