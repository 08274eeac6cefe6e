"""A model file on which ggml ends the process is told in one line; no half of a log looks whole."""

from __future__ import annotations

import json
import math
import shutil
import subprocess
import sys
from pathlib import Path

import gguf
import pytest

from tests.conftest import Instr, assert_refused
from tests.native_kit import random_models


def damaged(source: Path, path: Path, key: str, value: float) -> Path:
    """A copy of a model that claims something else of itself."""
    shutil.copyfile(source, path)
    field = gguf.GGUFReader(path, "r+").fields[key]
    field.parts[field.data[0]][0] = value
    return path


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
    source = random_models() / f"{architecture}-dense.gguf"
    model = damaged(source, tmp_path / "bad.gguf", f"{architecture}.{key}", value)
    done = instr("run", model, "-p", "hello")
    assert_refused(done, "bad.gguf: llama.cpp ended the process: ", ": GGML_ASSERT(")
    assert "vendor" not in done.stderr, "not where it was built"
    assert [path.name for path in tmp_path.iterdir()] == ["bad.gguf"]


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
    lines = (tmp_path / "session.log").read_text()
    assert lines.endswith("\n")
    assert "session_end" not in [json.loads(text)["event"] for text in lines.splitlines()]
    checked = instr("check", "session.log")
    assert checked.returncode == 1
    assert "closed" in checked.stdout


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


def test_who_uses_the_library_by_themselves_keeps_ggmls_way(models: Path, tmp_path: Path) -> None:
    """Also after a run of ours in the same process."""
    bad = damaged(
        random_models() / "gpt2-dense.gguf", tmp_path / "bad.gguf", "gpt2.attention.head_count", 3
    )
    program = f"""
import io, llama_cpp
from pathlib import Path
from llamacpp_instr import record
from llamacpp_instr.run import RunOptions, run
run(RunOptions({str(models / "gpt2.gguf")!r}, ["hello"], Path("good.log"), n=1), io.BytesIO())
with record("session.log"):
    llama_cpp.Llama({str(bad)!r}, verbose=False)
"""
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=tmp_path, env={"PYTHONPATH": ":".join(sys.path), "GGML_NO_BACKTRACE": "1"},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == -6, done.stderr
    assert "GGML_ASSERT" in done.stderr
    assert "ended the process" not in done.stderr


@pytest.mark.parametrize("length", [0, 2**31, 2**32 - 1])
def test_a_claimed_context_takes_no_memory(
    instr: Instr, models: Path, tmp_path: Path, length: int
) -> None:
    """2³¹ and more are negative to llama.cpp: a context of so many tokens was asked for."""
    key = "llama.context_length"
    model = damaged(models / "llama.gguf", tmp_path / "bad.gguf", key, length)
    done = instr("run", model, "-p", "hello", "-n", 2)
    assert done.returncode == 0, done.stderr
    events = map(json.loads, (tmp_path / "session.log").read_text().splitlines())
    assert [event["n_ctx"] for event in events if event["event"] == "context"] == [4096]
