"""`instr imatrix` computes the file that llama-imatrix computes from the same text."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from itertools import islice
from pathlib import Path

import gguf
import numpy as np
import pytest

from tests.conftest import Instr, assert_refused
from tests.kit import tiny_models
from tools.demo_model.grammar import stories

pytestmark = pytest.mark.native
TEXT = "\n\n".join(story.text for story in islice(stories(7), 8)) + "\n"


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text(TEXT, encoding="utf-8")
    return path


def tensors_of(matrix: gguf.GGUFReader) -> dict[str, np.ndarray]:
    return {tensor.name: tensor.data.reshape(-1) for tensor in matrix.tensors}


def test_standard_input_and_output(instr: Instr, text: Path, environment: dict[str, str]) -> None:
    small = ("--ctx", "64", "--chunks", "1", "--threads", "1")
    assert instr("imatrix", "demo", "--text", "text.txt", "-o", "file.gguf", *small).returncode == 0
    command = [sys.executable, "-m", "llamacpp_instr", "imatrix", "demo", "--text", "-", "-o", "-"]
    piped = subprocess.run(
        [*command, *small], input=TEXT.encode(), env=environment, capture_output=True, check=True
    )
    assert b"standard output: 28 tensors, 64 tokens of standard input" in piped.stderr
    path = text.with_name("piped.gguf")
    path.write_bytes(piped.stdout)
    file, stream = (gguf.GGUFReader(text.with_name(f"{name}.gguf")) for name in ("file", "piped"))
    assert stream.fields["imatrix.datasets"].contents() == ["standard input"]
    for name, values in tensors_of(file).items():
        assert values.tolist() == tensors_of(stream)[name].tolist()


def test_a_short_text_is_pointed_out(instr: Instr, text: Path) -> None:
    done = instr("imatrix", "demo", "--text", text, "-o", "i.gguf", "--ctx", 64, "--chunks", 2)
    assert done.stderr.splitlines() == [
        f"i.gguf: 28 tensors, 128 tokens of {text}",
        "i.gguf: it was computed from only 128 tokens; give it 8,192 or more",
    ]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("demo", "-o", "i.gguf", "--ctx", 15), "--ctx is 15; it must be at least 16"),
        (("demo", "-o", "i.gguf", "--batch", 31), "--batch is 31; it must be at least 32"),
        (("demo", "-o", "i.gguf", "--ctx", 8000), "at least 16,000 are needed for chunks of 8,000"),
        (("demo", "-o", "nowhere/i.gguf"), "no directory nowhere"),
        (("demo", "-o", "model.gguf", "--force"), "model.gguf is a model; name another file"),
        (("demo", "-o", "matrix.gguf"), "matrix.gguf exists; use --force"),
        (("matrix.gguf", "-o", "i.gguf"), "general.type is 'imatrix'; `instr inspect` shows"),
        (("t5.gguf", "-o", "i.gguf"), "t5.gguf is like T5; models with a separate encoder"),
        (
            ("bert.gguf", "-o", "i.gguf", "--ctx", 64, "--batch", 32),
            "bert.gguf computes a whole chunk at once; give --batch 64, or a smaller --ctx",
        ),
        (("vocabulary.gguf", "-o", "i.gguf"), "only a vocabulary"),
        (("no_tokenizer.gguf", "-o", "i.gguf"), "has no tokenizer"),
    ],
)
def test_wrong_input_is_one_clear_line(
    instr: Instr, models: Path, text: Path, arguments: tuple[object, ...], words: str
) -> None:
    folder = text.parent
    tiny_models.write_llama(folder / "model.gguf")
    for name in ("t5", "bert", "vocabulary", "no_tokenizer"):
        (folder / f"{name}.gguf").write_bytes((models / f"{name}.gguf").read_bytes())
    if "matrix.gguf" in arguments:
        small = ("--text", text, "--ctx", 16, "--chunks", 1)
        assert instr("imatrix", "demo", "-o", "matrix.gguf", *small).returncode == 0
    before = (folder / "model.gguf").read_bytes()
    assert_refused(instr("imatrix", *arguments, "--text", text), words)
    assert not (folder / "i.gguf").exists()
    assert (folder / "model.gguf").read_bytes() == before


def test_a_matrix_may_replace_a_matrix(instr: Instr, text: Path) -> None:
    command = ("imatrix", "demo", "--text", text, "-o", "i.gguf", "--ctx", 16, "--chunks")
    assert instr(*command, 1).returncode == 0
    assert instr(*command, 2, "--force").returncode == 0
    assert "32 tokens" in instr("inspect", "i.gguf").stdout


def test_inputs_that_are_no_numbers(instr: Instr, text: Path) -> None:
    model = tiny_models.write_llama(text.with_name("nan.gguf"), nan_in="blk.1.attn_q.weight")
    done = instr("imatrix", model, "--text", text, "-o", "i.gguf", "--ctx", 32)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("Error: the inputs of blk.1.attn_output.weight are NaN")
    assert not text.with_name("i.gguf").exists()


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells what a process has mapped")
def test_ctrl_c_leaves_nothing(text: Path, environment: dict[str, str]) -> None:
    text.write_text(TEXT * 400, encoding="utf-8")
    process = subprocess.Popen(
        [sys.executable, "-m", "llamacpp_instr", "imatrix", "demo", "--text", "text.txt", "-o",
         "i.gguf", "--threads", "1"],
        cwd=text.parent, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    while b"demo.gguf" not in Path(f"/proc/{process.pid}/maps").read_bytes():
        assert process.poll() is None
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert (process.returncode, errors.strip()) == (130, "Interrupted")
    assert [path.name for path in text.parent.iterdir()] == ["text.txt"]
