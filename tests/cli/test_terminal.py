"""No text from a model, a log or a file name can control a terminal; a pipe gets all of it."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import re
import struct
import termios
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llamacpp_instr.base.terminal import printable, printable_text, render_json
from tests.conftest import Instr
from tests.kit import tiny_models
from tests.kit.native_kit import ROOT
from tests.kit.nursery import Nursery

# a title, a colour, clearing the screen, CSI in one character, a direction override, a beep
EVIL = ["\x1b]0;owned\x07", "\x1b[31m", "\x1b[2J", "\x9b1A", "\u202eabc", "\x08\x7f\u061c"]
HARMLESS = ["a\n", "\tb", "é", "😀", "\u200dz"]
STEERS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069]")
DEMO_LOG = ROOT / "tests" / "fixtures" / "demo-verbose.log"
EVERY_EVENT = ROOT / "tests" / "fixtures" / "every-event.log"


OnATerminal = Callable[..., tuple[int, str]]


@pytest.fixture
def on_a_terminal(nursery: Nursery, tmp_path: Path, environment: dict[str, str]) -> OnATerminal:
    """Runs a command with a terminal as all its streams; returns its status and what is shown."""
    sized = {name: value for name, value in environment.items() if name != "COLUMNS"}

    def run(*command: object, columns: int = 80) -> tuple[int, str]:
        ours, theirs = pty.openpty()
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
        received = bytearray()

        def listen() -> None:
            try:
                while piece := os.read(ours, 4096):
                    received.extend(piece)
            except OSError:  # Linux reports a closed other end like this
                pass

        listener = threading.Thread(target=listen)
        listener.start()
        terminal = os.ttyname(theirs)
        words = [str(word) for word in command]
        nursery.start(words, tmp_path, terminal, input=terminal, environment=sized)
        status = nursery.status()
        os.close(theirs)
        listener.join()
        os.close(ours)
        # the terminal itself converts newlines
        return status, received.decode().replace("\r\n", "\n")

    return run


# what steers is rare among all characters
TEXTS = st.text() | st.text("\n\t\x07\x1b\x7f\x9b\u061c\u200e\u2028\u202e\u2066\ud800a")


@given(TEXTS)
@settings(max_examples=50)
def test_what_is_printable_steers_nothing(text: str) -> None:
    for shown in (printable(text), printable_text(text)):
        assert not STEERS.search(shown)
        shown.encode()
    assert not re.search("[\n\t]", printable(text))
    kept = re.sub("[^\n\t]", "", text)
    assert re.sub("[^\n\t]", "", printable_text(text)) == kept


@given(st.text(st.characters(categories=("L", "M", "N", "P", "S", "Zs")), max_size=30))
@settings(max_examples=50)
def test_what_steers_nothing_stays_as_it_is(text: str) -> None:
    assert printable(text) == printable_text(text) == text


@given(TEXTS)
@settings(max_examples=50)
def test_json_may_be_printed_and_says_the_same(text: str) -> None:
    shown = render_json([text])
    assert json.loads(shown) == [text]
    assert not STEERS.search(shown)


@pytest.fixture(scope="module")
def evil_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose tokens are mostly escape sequences."""
    path = tmp_path_factory.mktemp("evil") / "evil.gguf"
    # so many that it hardly ever reaches the end-of-text token
    pieces = [f"{piece}{i}" for i in range(500) for piece in EVIL + HARMLESS]
    return tiny_models.write_speaker(path, pieces)


@pytest.mark.native
def test_a_models_text_is_shown_without_steering(
    evil_model: Path, instr: Instr, on_a_terminal: OnATerminal
) -> None:
    args = ("run", evil_model, "-p", "a", "-n", 200, "--temp", 100, "--seed", 3, "--threads", 1)
    status, shown = on_a_terminal(*args)
    assert status == 0
    assert not STEERS.search(shown)

    piped = instr(*args, "--force")
    assert piped.returncode == 0
    text = piped.stdout
    for piece in EVIL + HARMLESS:
        assert piece in text, "a pipe gets the model's text"
    assert shown.startswith(printable_text(text)), "a terminal gets it escaped"
    assert "\\x1b]0;owned\\x07" in shown
    assert "\\u202eabc" in shown


@pytest.mark.native
def test_the_log_of_such_text_is_shown_without_steering(
    evil_model: Path, instr: Instr, on_a_terminal: OnATerminal
) -> None:
    instr("run", evil_model, "-p", "a", "-n", 50, "--temp", 100, "--log", "evil.log")
    for command in (
        ("cat", "evil.log"),
        ("cat", "evil.log", "--expand"),
        ("summary", "evil.log"),
        ("summary", "evil.log", "--json"),
        ("check", "evil.log"),
        ("stats", "evil.log", "--by", "tensor"),
        ("stats", "evil.log", "--csv"),
        ("inspect", evil_model),
    ):
        status, shown = on_a_terminal(*command)
        assert status == 0, shown
        assert not STEERS.search(shown), command


@pytest.mark.native
@pytest.mark.parametrize(
    "command",
    [
        ("run", "NAME.gguf", "-p", "a"),
        ("inspect", "NAME"),
        ("cat", "NAME"),
        ("cat", "NAME.log", "--event", "NAME"),
        ("check", "NAME.log"),
        ("summary", "NAME.log", "--json"),
        ("stats", "NAME"),
        ("tree", "NAME.log", "--folded"),
        ("page", "NAME.log"),
        ("roofline", "NAME.log", "--machine", "NAME"),
        ("schedule", "NAME.log", "--engines", "NAME"),
        ("schedule", "NAME.toml"),
        ("predict", "demo", "--machine", "NAME"),
        ("diff", "NAME.log", "NAME.log"),
        ("to-perfetto", "NAME.log", "--force"),
        ("to-perfetto", "NAME.log", "-o", "NAME.json", "--format", "json"),
        ("to-parquet", "NAME.log", "--csv", "-o", "NAME"),
        ("to-flashinfer", "NAME.log", "-o", "NAME"),
        ("to-torch", "NAME.log", "-o", "NAME"),
        ("to-otlp", "NAME.log", "--force"),
        ("to-otlp", "NAME.log", "--endpoint", "NAME"),
        ("blocks", "demo", "NAME"),
        ("weights", "demo", "NAME"),
        ("weights", "NAME", "--view"),
        ("exec", "--", "NAME"),
        ("NAME",),
    ],
)
def test_names_are_shown_without_steering(
    command: tuple[str, ...], tmp_path: Path, on_a_terminal: OnATerminal
) -> None:
    name = "\x1b]0;owned\x07\x9b2J\u202e[red]\x7f\x0b"
    (tmp_path / f"{name}.log").write_bytes(EVERY_EVENT.read_bytes())
    words = [word.replace("NAME", name) for word in command]
    status, shown = on_a_terminal(*words)
    assert status in (0, 1, 2)
    assert "Traceback" not in shown
    assert not STEERS.search(shown)


def test_a_script_gets_the_name_that_was_written(instr: Instr, tmp_path: Path) -> None:
    name = os.fsdecode(b"\xff\x1b.pftrace")
    done = instr("to-perfetto", EVERY_EVENT, "-o", name)
    assert done.stdout == f"{name}\n", done.stderr
    assert (tmp_path / name).is_file()


@pytest.mark.parametrize("form", ["protobuf", "json"])
def test_a_trace_is_not_thrown_at_a_terminal(form: str, on_a_terminal: OnATerminal) -> None:
    command = ("to-perfetto", EVERY_EVENT, "-o", "-", "--format", form)
    status, shown = on_a_terminal(*command)
    assert status == 2
    assert (
        shown == "Error: a trace is binary and the output is a terminal; name a file, or pipe it\n"
    )


def test_a_report_is_as_wide_as_its_terminal(
    on_a_terminal: OnATerminal, nursery: Nursery, tmp_path: Path, environment: dict[str, str]
) -> None:
    """In a pipe or a file it has 160 columns, whatever the terminal."""
    command = ("stats", DEMO_LOG, "--by", "layer,op")
    shown = {columns: on_a_terminal(*command, columns=columns)[1] for columns in (60, 80, 200)}
    assert [max(map(len, text.splitlines())) <= wide for wide, text in shown.items()] == [True] * 3
    assert [text.count("layer  op") for text in shown.values()] == [4, 3, 1]
    assert on_a_terminal(*command, "-o", "wide.txt", columns=60)[0] == 0
    del (sized := dict(environment))["COLUMNS"]
    piped = nursery.run([str(word) for word in command], tmp_path, environment=sized).stdout
    assert piped == shown[200] == (tmp_path / "wide.txt").read_text()
