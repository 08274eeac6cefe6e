"""`instr live --tui`: the figures in a terminal, at any size, and what it leaves there."""

from __future__ import annotations

import asyncio
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from textual.pilot import Pilot

from llamacpp_instr.converters.live.live_session import LiveSession
from llamacpp_instr.converters.live.tui import Help, LiveApp, draw
from tests.conftest import Instr, assert_refused
from tests.kit.commands_kit import one_line
from tests.kit.programs import line, program, say
from tests.kit.pseudo_terminal import PATIENCE_S, PseudoTerminal
from tests.live.followed_logs import followed, open_log

RUNS = [one_line("docs/reference/commands.md", "instr live server.log --tui")]


async def until(pilot: Pilot[None], is_so: Callable[[], bool]) -> None:
    end = time.monotonic() + PATIENCE_S
    while not is_so():
        assert time.monotonic() < end
        await pilot.pause(0.01)


@pytest.mark.parametrize("size", [(80, 24), (160, 48)], ids=str)
def test_it_follows_a_log_until_it_is_paused(size: tuple[int, int], tmp_path: Path) -> None:
    log, rest = open_log(tmp_path, seed=6)
    middle = rest.index(b"\n", len(rest) // 2) + 1

    async def use(app: LiveApp, session: LiveSession) -> None:
        def counts() -> tuple[int, int]:
            assert app.frame is not None
            return app.frame["n_steps"], app.frame["n_tokens"]

        async with app.run_test(size=size) as pilot:
            with log.open("ab") as file:
                file.write(rest[:middle])
            await until(pilot, lambda: counts()[0] > 0)
            await pilot.press("p")
            paused = counts()
            with log.open("ab") as file:
                file.write(rest[middle:])
            await until(pilot, lambda: session.over is not None)
            app.look()  # as its timer does
            assert counts() == paused
            assert "PAUSED" in screen(app)
            await pilot.press("p")
            state = session.look(lambda state: state)
            assert counts() == (state.n_steps, state.n_tokens)
            assert f"{state.n_steps:,} steps" in screen(app)
            assert "the session has ended" in screen(app)
            await pilot.press("question_mark")
            assert isinstance(app.screen, Help)
            await pilot.press("escape")
            assert not isinstance(app.screen, Help)
            await pilot.press("q")
        assert app.return_code == 0

    with followed(log) as (session, _):
        asyncio.run(use(LiveApp(session), session))


def screen(app: LiveApp) -> str:
    assert app.frame is not None
    width, height = app.size
    lines = draw(app.frame, width, height, app.phase, app.paused)
    return "\n".join(line.plain for line in lines)


def test_each_phase_is_shown_in_turn(tmp_path: Path) -> None:
    log, rest = open_log(tmp_path, seed=6)
    with log.open("ab") as file:
        file.write(rest.rpartition(b'{"event":"session_end"')[0])

    async def use(app: LiveApp) -> None:
        async with app.run_test(size=(100, 40)) as pilot:
            await until(pilot, lambda: app.frame is not None and len(app.frame["heat"]) > 1)
            phases = [next(p for p in app.frame["heat"] if f"{p}: latest" in screen(app))]
            for _ in range(2):
                await pilot.press("h")
                phases.append(next(p for p in app.frame["heat"] if f"{p}: latest" in screen(app)))
        assert phases == ["decode", "prefill", "decode"]

    with followed(log) as (session, _):
        asyncio.run(use(LiveApp(session)))


@contextmanager
def recorded(log: Path) -> Iterator[subprocess.Popen[str]]:
    """A real program, which begins to generate once it gets a line."""
    with program("-m", "tests.kit.watched", log, "--requests", 400) as process:
        assert line(process) == "recording"
        yield process


@pytest.mark.native
@pytest.mark.parametrize(
    ("columns", "leave"),
    [(80, "q"), (160, "\x03"), (80, signal.SIGTERM)],
    ids=["q", "Ctrl-C", "SIGTERM"],
)
def test_a_terminal_is_drawn_on_and_left_clean(
    columns: int, leave: str | signal.Signals, tmp_path: Path
) -> None:
    command = [sys.executable, "-m", "llamacpp_instr", *RUNS[0].text.split()[1:]]
    size = columns, columns // 3
    with (
        recorded(tmp_path / "server.log") as watched,
        PseudoTerminal(command, tmp_path, *size) as terminal,
    ):
        terminal.wait_for("recording", "Pause")
        say(watched)
        lines = terminal.wait_for("▸", "layer 0", "✓ story")
        assert max(map(len, lines)) <= columns
        assert "llamacpp-instr demo" in lines[0]
        terminal.resize(100, 30)
        terminal.wait_for("Requests", "Messages")
        if isinstance(leave, str):
            terminal.press(leave)
        else:
            terminal.process.send_signal(leave)
        assert terminal.wait() == 0
        assert terminal.is_as_before
        end = terminal.written.rpartition(b"\x1b[?1049l")[2]
        assert b"\x1b[?1049h" in terminal.written, "it has its own screen"
        assert end, "and leaves it"
        assert b"\x1b[?25h" in end, "with a cursor"
        assert not re.search(rb"[A-Za-z]{4,}", end), "and nothing else"
        assert watched.poll() is None, "the recorded program goes on"


def test_it_needs_a_terminal_and_serves_nothing(instr: Instr, tmp_path: Path) -> None:
    log, _ = open_log(tmp_path)
    assert_refused(instr("live", log, "--tui"), "--tui needs a terminal")
    for options in (["--port", "8124"], ["--no-browser"]):
        refused = instr("live", log, "--tui", *options)
        assert_refused(refused, "--tui serves no page; leave out --port and --no-browser")
