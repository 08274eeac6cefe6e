"""Every input of the fuzzers' corpus (seeds and former findings) on every surface that reads its
kind: at most an error of ours, bounded time and memory, escaped text."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from llamacpp_instr.cli import main
from llamacpp_instr.log.reader import read_events
from llamacpp_instr.model.file import load_model_file
from llamacpp_instr.recording.session import record
from tests.fuzz import growth, guard
from tests.fuzz.guard import CONTROL, Finding, try_input
from tests.fuzz.targets import SURFACES, attempt_of, dap

pytestmark = pytest.mark.native

CORPUS = Path(__file__).parent.parent / "fuzz" / "corpus"
INPUTS = sorted(path for path in CORPUS.rglob("*") if path.is_file())


@pytest.fixture(scope="module", autouse=True)
def _nothing_stays_stopped(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    yield
    dap.end()
    with record(tmp_path_factory.mktemp("after") / "session.log"):
        pass


@pytest.mark.parametrize("path", INPUTS, ids=lambda path: f"{path.parent.name}-{path.name}")
def test_no_input_does_what_none_may(path: Path, tmp_path: Path) -> None:
    data = path.read_bytes()
    for surface, kind in SURFACES.items():
        if path.parent.name == kind:
            try_input(attempt_of(surface), data, tmp_path)


def test_every_surface_has_inputs() -> None:
    kinds = {path.parent.name for path in INPUTS}
    assert set(SURFACES.values()) == kinds
    assert sum(path.stat().st_size for path in INPUTS) < 400_000


@pytest.mark.parametrize(
    "command",
    [
        "check LOG", "check LOG --json", "cat LOG", "cat LOG --expand", "summary LOG",
        "summary LOG --json", "stats LOG", "stats LOG --by tensor --csv", "stats LOG --md",
        "tree LOG --folded", "diff LOG LOG", "report LOG", "compare LOG LOG", "stats BAD",
        "check BAD",
        "inspect GGUF --tensors", "inspect GGUF --csv", "inspect GGUF --json", "inspect NAMED",
        "blocks GGUF ABSENT", "weights GGUF ABSENT", "report NAMED",
    ],
)  # fmt: skip
def test_no_command_steers_the_terminal(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    log = CORPUS / "log" / "seed-hostile.log"
    bad = tmp_path / "bad.log"
    bad.write_bytes(log.read_bytes() + '{"event":"\\u001b[31m\x9b2J"}\n'.encode())
    model = CORPUS / "gguf" / "seed-hostile.gguf"
    named = tmp_path / "named.gguf"
    # the first name twice is an error that quotes it
    named.write_bytes(model.read_bytes().replace(b"general.name", b"a\x1b[31m\xc2\x9b2Jxyz"))
    files = {"LOG": log, "BAD": bad, "GGUF": model, "NAMED": named, "ABSENT": "\x1b[31m\x9b"}
    arguments = [str(files.get(word, word)) for word in command.split()]
    monkeypatch.setattr(sys, "argv", ["instr", *arguments])
    with pytest.raises(SystemExit) as left:
        main()
    printed = capfd.readouterr()
    assert left.value.code in (0, 1, 2)
    assert printed.out + printed.err
    assert not CONTROL.search(printed.out + printed.err)


# --- inputs that are long in one respect ---


@pytest.mark.parametrize("respect", growth.INPUTS["log"])
def test_long_logs_are_logs(respect: str, tmp_path: Path) -> None:
    path = tmp_path / "long.log"
    path.write_bytes(growth.INPUTS["log"][respect](20))
    assert sum(1 for _ in read_events(path)) > 20


@pytest.mark.parametrize("respect", growth.INPUTS["gguf"])
def test_long_models_are_models(respect: str, tmp_path: Path) -> None:
    path = tmp_path / "long.gguf"
    path.write_bytes(growth.INPUTS["gguf"][respect](20))
    model = load_model_file(path)
    assert model.weights


# --- the guard itself ---


def _crash(_path: Path) -> None:
    raise KeyError


def _ask_for_memory(path: Path) -> None:
    bytearray(1 << 40 * len(path.read_bytes()))


def _use_memory(_path: Path) -> None:
    bytearray(guard.RESIDENT * 2).count(b"x")


def _steer(_path: Path) -> None:
    guard.check_terminal("a \x1b[31m")


def _mark_up(_path: Path) -> None:
    guard.check_page("<p>a</p><script>alert(1)</script>")


@pytest.mark.parametrize(
    ("attempt", "error"),
    [
        (_crash, KeyError),
        (_ask_for_memory, MemoryError),
        (_use_memory, Finding),
        (_steer, Finding),
        (_mark_up, Finding),
    ],
)
def test_the_guard_sees_what_it_has_to_see(
    attempt: Callable[[Path], None], error: type[Exception], tmp_path: Path
) -> None:
    with pytest.raises(error):
        try_input(attempt, b"x", tmp_path)
