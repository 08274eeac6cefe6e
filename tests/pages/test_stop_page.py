"""What docs/tutorials/stop-a-decode.md says that `instr debug` prints, it prints."""

from __future__ import annotations

import re

import pytest

from tests.conftest import Instr
from tests.kit.debug_page import PAGE, played

pytestmark = pytest.mark.native

_NUMBER = re.compile(r"-?\d+\.\d+(?:e-\d+)?")


def test_the_page_shows_what_its_commands_print(instr: Instr) -> None:
    """Words and whole numbers exactly; kernels of another CPU round other numbers otherwise."""

    def debug(words: list[str], commands: str) -> str:
        done = instr("debug", *words, "--log", "debug.log", "--force", input=commands)
        assert done.returncode == 0, done.stderr
        return done.stderr

    page = PAGE.read_text(encoding="utf-8")
    now = played(page, debug)
    assert _words(now) == _words(page)
    assert _numbers(now) == pytest.approx(_numbers(page), rel=0.05, abs=0.02)


def _words(page: str) -> list[str]:
    # runs of spaces and shades depend on the numbers beside them
    return re.sub(r"[ ░▒▓█]+", " ", _NUMBER.sub("#", page)).splitlines()


def _numbers(page: str) -> list[float]:
    return [float(found) for found in _NUMBER.findall(page)]
