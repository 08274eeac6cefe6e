"""The progress bar appears on a terminal after two seconds, and nowhere else."""

from __future__ import annotations

import io
from pathlib import Path

import pytest

from llamacpp_instr.base import terminal as progress
from llamacpp_instr.base.terminal import progress_bar
from llamacpp_instr.log.reader import read_events
from tests.kit.native_kit import ROOT

EVERY_EVENT = ROOT / "tests" / "fixtures" / "every-event.log"


@pytest.fixture(autouse=True)
def capable_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_short_work_shows_nothing() -> None:
    terminal = Terminal()
    with progress_bar("Reading", terminal) as on_progress:
        on_progress(1, 2)
    assert terminal.getvalue() == ""


def test_long_work_shows_a_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "SILENT_SECONDS", 0.0)
    terminal = Terminal()
    with progress_bar("Reading x.log", terminal) as on_progress:
        on_progress(1, 2)
    assert "Reading x.log" in terminal.getvalue()
    assert "50%" in terminal.getvalue()


@pytest.mark.parametrize(("out", "kind"), [(Terminal(), "dumb"), (io.StringIO(), "xterm")])
def test_a_file_and_a_terminal_that_cannot_erase_show_nothing(
    out: io.StringIO, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TERM", kind)
    monkeypatch.setattr(progress, "SILENT_SECONDS", 0.0)
    with progress_bar("Reading", out) as on_progress:
        on_progress(1, 2)
    assert out.getvalue() == ""


def test_reading_a_log_tells_how_much_of_the_file_was_read(tmp_path: Path) -> None:
    text = EVERY_EVENT.read_bytes()
    lines = text.splitlines(keepends=True)
    path = tmp_path / "long.log"
    path.write_bytes(lines[0] + lines[-2] * (1_000_000 // len(lines[-2])))
    calls: list[tuple[int, int]] = []
    for _ in read_events(path, lenient=True, on_progress=lambda *call: calls.append(call)):
        pass
    size = path.stat().st_size
    assert calls == sorted(calls)
    assert {total for _, total in calls} == {size}
    assert calls[-1][0] == size
