"""`instr run` that is interrupted, or whose reader closes the pipe."""

from __future__ import annotations

import signal
import subprocess
import time
from pathlib import Path

import pytest

from tests.conftest import read_events, start_run

pytestmark = pytest.mark.native

DEMO = ("demo", "--threads", "1")
PROMPT = "Once upon a time there was a little"


def test_ctrl_c_keeps_the_text_and_closes_the_log(
    environment: dict[str, str], tmp_path: Path
) -> None:
    process = start_run(environment, tmp_path, *DEMO, "-p", PROMPT, "-n", 100, "--repeat", 100000)
    assert process.stdout is not None
    first = process.stdout.read(100)
    process.send_signal(signal.SIGINT)
    rest, errors = process.communicate(timeout=60)
    assert process.returncode == 130, errors
    (first + rest).decode()
    assert b"Traceback" not in errors
    assert b"Exception ignored" not in errors
    end = read_events(tmp_path / "session.log")[-1]
    assert end["event"] == "session_end"
    assert end["dropped"] == 0


def test_ctrl_c_stops_a_long_prefill_at_once(environment: dict[str, str], tmp_path: Path) -> None:
    """This prefill takes more than ten seconds in one call of llama.cpp."""
    (tmp_path / "long.txt").write_text("Once upon a time there was a little girl. " * 3000)
    process = start_run(
        environment, tmp_path, *DEMO, "--prompt-file", "long.txt", "-n", 1, "--ctx", 60000,
        "--batch", 60000, "--level", "minimal",
    )  # fmt: skip
    log = tmp_path / "session.log"
    while not (log.exists() and b'"event":"step_begin"' in log.read_bytes()):
        assert process.poll() is None
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130, errors
    assert read_events(tmp_path / "session.log", "step_end")[-1]["status"] == 2
    assert read_events(tmp_path / "session.log")[-1]["event"] == "session_end"


def test_ctrl_c_stops_tokenization(environment: dict[str, str], tmp_path: Path) -> None:
    """llama.cpp takes minutes for this many special tokens in one call."""
    (tmp_path / "long.txt").write_text("a<s>" * (1 << 18))
    process = start_run(environment, tmp_path, *DEMO, "--prompt-file", "long.txt", "-n", 1)
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(timeout=5)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert (process.returncode, errors.split()) == (130, [b"Interrupted"])
    assert [path.name for path in tmp_path.iterdir()] == ["long.txt"]


def test_a_reader_that_leaves_stops_the_run(environment: dict[str, str], tmp_path: Path) -> None:
    process = start_run(environment, tmp_path, *DEMO, "-p", PROMPT, "--repeat", 100000)
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.read(10)
    process.stdout.close()
    errors = process.stderr.read()
    assert process.wait(timeout=60) == 1
    [last] = [line for line in errors.splitlines() if b"warm-up" not in line and b"run" not in line]
    assert last == b"Error: the output was closed; stopped, log: session.log"
    assert read_events(tmp_path / "session.log")[-1]["event"] == "session_end"


def test_ctrl_c_while_the_library_loads_is_no_fault_of_the_library(
    environment: dict[str, str], tmp_path: Path
) -> None:
    """Some modules report an interrupted import as a damaged installation."""
    package = tmp_path / "llama_cpp"
    package.mkdir()
    (package / "__init__.py").write_text(
        "import os, signal, time\ntry:\n    os.kill(os.getpid(), signal.SIGINT)\n"
        "    time.sleep(0.1)\nexcept KeyboardInterrupt:\n    raise ImportError('half of it')\n"
    )
    environment = environment | {"PYTHONPATH": f"{tmp_path}:{environment['PYTHONPATH']}"}
    done = start_run(environment, tmp_path, "demo", "-p", "a")
    _, errors = done.communicate(timeout=60)
    assert (done.returncode, errors.decode().split()) == (130, ["Interrupted"])
