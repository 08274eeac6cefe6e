"""A model file on which ggml ends the process gives one line, and no partial log looks complete."""

from __future__ import annotations

import math
import os
import shutil
import signal
import sys
from pathlib import Path

import pytest

from tests.conftest import Instr, assert_refused, read_events, start_run
from tests.kit.mutants import N, damaged, texts, write_mutant
from tests.kit.native_kit import random_model
from tests.kit.programs import run_python

pytestmark = pytest.mark.native


@pytest.fixture
def instr(started_instr: Instr) -> Instr:
    """A process from its start to its end, which are tested here."""
    return started_instr


@pytest.mark.parametrize(
    ("architecture", "key", "value"),
    [
        ("gemma3", "attention.key_length", 0),
        ("gemma3", "attention.value_length", 2**31),
        ("gpt2", "attention.key_length", 3),
        ("gpt2", "attention.head_count", 3),
        ("gpt2", "attention.head_count", 2**31 - 1),
    ],
)
def test_a_file_that_cannot_be_loaded_is_one_line_and_leaves_no_log(
    instr: Instr, tmp_path: Path, architecture: str, key: str, value: int
) -> None:
    source = random_model(f"{architecture}-dense")
    model = damaged(source, tmp_path / "bad.gguf", f"{architecture}.{key}", value)
    done = instr("run", model, "-p", "hello")
    assert_refused(done, "bad.gguf: llama.cpp ended the process: ", ": GGML_ASSERT(")
    assert "vendor" not in done.stderr, "not where it was built"
    assert [path.name for path in tmp_path.iterdir()] == ["bad.gguf"]


def assert_unclosed(log: Path) -> None:
    """It ends with a whole line that is not its end."""
    assert log.read_text().endswith("\n")
    assert read_events(log, "session_end") == []


@pytest.mark.parametrize("threads", [1, 2])
def test_a_compute_that_fails_is_one_line_and_leaves_an_unclosed_log(
    instr: Instr, models: Path, tmp_path: Path, threads: int
) -> None:
    key = "gpt2.attention.layer_norm_epsilon"
    model = damaged(models / "gpt2.gguf", tmp_path / "bad.gguf", key, math.nan)
    done = instr("run", model, "-p", "hello", "--threads", threads)
    assert done.returncode == 1
    assert done.stdout == ""
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"Error: {model}, recorded in session.log: llama.cpp ended the process")
    assert line.endswith(": GGML_ASSERT(eps >= 0.0f) failed")
    assert_unclosed(tmp_path / "session.log")
    checked = instr("check", "session.log")
    assert checked.returncode == 1
    assert "closed" in checked.stdout


def test_a_model_that_becomes_shorter_is_one_line(
    environment: dict[str, str], tmp_path: Path, demo_model: Path
) -> None:
    """The file is mapped: reading truncated bytes raises SIGBUS."""
    model = tmp_path / "cut.gguf"
    shutil.copyfile(demo_model, model)
    words = ("cut.gguf", "-p", "Once", "--repeat", 1000, "--threads", 1)
    with start_run(environment, tmp_path, *words) as process:
        assert process.stdout is not None
        process.stdout.read(10)
        os.truncate(model, 4096)
        _, errors = process.communicate(timeout=60)
    assert process.returncode == 1
    line = errors.decode().splitlines()[-1]
    assert line == "Error: cut.gguf, recorded in session.log: llama.cpp ended the process: SIGBUS"
    assert_unclosed(tmp_path / "session.log")


def test_quality_says_the_same(instr: Instr, models: Path, tmp_path: Path) -> None:
    good = models / "gpt2.gguf"
    key = "gpt2.attention.layer_norm_epsilon"
    bad = damaged(good, tmp_path / "bad.gguf", key, math.nan)
    (tmp_path / "text.txt").write_text("hello " * 500)
    done = instr("quality", good, bad, "--text", "text.txt", "--ctx", 64, "--only", "outputs")
    assert done.returncode == 1
    assert done.stdout == ""
    (line,) = done.stderr.splitlines()
    assert "bad.gguf: llama.cpp ended the process: ops.cpp:" in line


CRASHES = {
    "SIGABRT": "ctypes.CDLL(None).abort()",
    "SIGFPE": "getattr(ctypes.CDLL(None), 'raise')(signal.SIGFPE)",
    "SIGSEGV": "ctypes.string_at(8)",
    "unordered_map::at": "model.tokenize('hello')",  # an uncaught C++ exception
}


@pytest.mark.parametrize("words", CRASHES)
@pytest.mark.parametrize("thread", [False, True])
def test_every_crash_is_one_line(tmp_path: Path, words: str, thread: bool) -> None:
    model = tmp_path / "no_bytes.gguf"
    write_mutant(model, {"tokens": texts([f"[{i}]" for i in range(N)])})
    program = f"""
import ctypes, signal, threading
from pathlib import Path
from llamacpp_instr.llama.engine import LoadedModel
from llamacpp_instr.llama.log import Interrupt
from llamacpp_instr.llama.crashes import last_words
from llamacpp_instr.llama.log import captured
def crash():
    {CRASHES[words]}
with captured(Interrupt()) as log, LoadedModel(Path({str(model)!r}), log) as model:
    with last_words(lambda: ("the model", 2)):
        if {thread}:
            other = threading.Thread(target=crash)
            other.start()
            other.join()
        else:
            crash()
"""
    environment = {"PYTHONPATH": ":".join(sys.path), "PATH": os.environ["PATH"]}
    done = run_python(program, cwd=tmp_path, env=environment)
    assert done.stderr == f"Error: the model: llama.cpp ended the process: {words}\n"
    assert done.returncode == 2


@pytest.mark.parametrize("name", ["SIGSEGV", "SIGABRT"])
def test_a_crash_outside_is_what_it_was(tmp_path: Path, name: str) -> None:
    program = f"""
import faulthandler, signal
from llamacpp_instr.llama.crashes import last_words
faulthandler.enable()
with last_words(lambda: ("nothing", 0)):
    pass
signal.raise_signal(signal.{name})
"""
    done = run_python(program, cwd=tmp_path, env={"PYTHONPATH": ":".join(sys.path)})
    assert done.returncode == -getattr(signal, name)
    assert "Fatal Python error" in done.stderr


def test_a_program_that_uses_the_library_itself_is_aborted_by_ggml(
    models: Path, tmp_path: Path
) -> None:
    """Also after a run of ours in the same process."""
    bad = damaged(
        random_model("gpt2-dense"), tmp_path / "bad.gguf", "gpt2.attention.head_count", 3
    )
    program = f"""
import io, llama_cpp
from pathlib import Path
from llamacpp_instr import record
from llamacpp_instr.run.session import RunOptions, run
run(RunOptions({str(models / "gpt2.gguf")!r}, ["hello"], Path("good.log"), n=1), io.BytesIO())
with record("session.log"):
    llama_cpp.Llama({str(bad)!r}, verbose=False)
"""
    environment = {"PYTHONPATH": ":".join(sys.path), "GGML_NO_BACKTRACE": "1"}
    done = run_python(program, cwd=tmp_path, env=environment)
    assert done.returncode == -6, done.stderr
    assert "GGML_ASSERT" in done.stderr
    assert "ended the process" not in done.stderr


@pytest.mark.parametrize("length", [0, 2**31, 2**32 - 1])
def test_a_claimed_context_takes_no_memory(
    instr: Instr, models: Path, tmp_path: Path, length: int
) -> None:
    """2³¹ and more are negative to llama.cpp, which would then create such a large context."""
    key = "llama.context_length"
    model = damaged(models / "llama.gguf", tmp_path / "bad.gguf", key, length)
    done = instr("run", model, "-p", "hello", "-n", 2)
    assert done.returncode == 0, done.stderr
    assert [of["n_ctx"] for of in read_events(tmp_path / "session.log", "context")] == [4096]
