"""`instr quality` as a user runs it, and the text that a reference writes."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from llamacpp_instr.lab.quality import logits
from llamacpp_instr.lab.quality.divergence import Outputs
from llamacpp_instr.lab.quality.logits import (
    OutputOptions,
    WritingContext,
    compare_outputs,
    write_chunks,
)
from llamacpp_instr.llama.engine import ContextOptions, LoadedModel, ModelContext
from llamacpp_instr.llama.log import captured
from llamacpp_instr.model.file import load_model_file
from tests.conftest import Instr, assert_refused
from tests.kit import tiny_models
from tests.kit.in_process import titled
from tests.kit.native_kit import DEMO, random_model
from tests.kit.quantized_kit import quantized_demo

pytestmark = pytest.mark.native

TEXT = "Once upon a time there was a cat. " * 40


def compared(*paths: Path, **options: Any) -> Outputs:
    return compare_outputs(
        [load_model_file(path) for path in paths], None, OutputOptions(threads=1, **options)
    )


def outputs(instr: Instr, *arguments: object) -> Any:
    done = instr("quality", *arguments, "--only", "outputs", "--threads", 1, "--json")
    assert done.returncode == 0, done.stderr
    return titled(json.loads(done.stdout))


def test_a_model_does_not_differ_from_itself(instr: Instr) -> None:
    overview, _, tokens = outputs(instr, "demo", "demo", "--ctx", 64, "--chunks", 3)
    reference, candidate = overview["rows"]
    assert candidate["perplexity"] == reference["perplexity"]
    assert (candidate["mean KL"], candidate["same top"], candidate["RMS Δp"]) == (0, 1, 0)
    assert {row["KL"] for row in tokens["rows"]} <= {0, None}


def test_it_says_what_it_was_measured_on(instr: Instr, tmp_path: Path) -> None:
    small = ("demo", quantized_demo("Q8_0"), "--ctx", 64, "--chunks", 2)
    notes = " ".join(outputs(instr, *small, "--seed", 5)[0]["notes"])
    assert "written by demo.gguf itself (temperature 1, seed 5)" in notes
    assert "2 chunks of 64 tokens" in notes
    assert "62 tokens in the second halves" in notes
    assert "Fewer than 100 tokens give unreliable figures" in notes
    (tmp_path / "story.txt").write_text(TEXT)
    assert "Text: story.txt; " in outputs(instr, *small, "--text", "story.txt")[0]["notes"][0]


def test_text_may_come_from_standard_input(instr: Instr) -> None:
    arguments = ("quality", "demo", "demo", "--only", "outputs", "--ctx", 64, "--threads", 1)
    done = instr(*arguments, "--text", "-", input=TEXT)
    assert done.returncode == 0, done.stderr
    assert "Text: standard input;" in done.stdout


def test_the_errors_of_weights_stand_beside(instr: Instr) -> None:
    command = ("quality", "demo", quantized_demo("Q8_0"), "--ctx", 64, "--chunks", 1)
    reports = titled(json.loads(instr(*command, "--threads", 1, "--json").stdout))
    assert reports[0]["rows"][0]["SQNR"] is None, "the reference"
    (weights,) = (r for r in reports if r["title"].startswith("Error of the weights of"))
    assert reports[0]["rows"][1]["SQNR"] == weights["rows"][0]["SQNR"] > 40
    assert reports[-1]["title"] == "Each tensor"
    weights_only = instr(*command[:3], "--only", "weights").stdout
    assert weights_only.startswith("Error of the weights of demo-Q8_0.gguf against demo.gguf")
    assert "Each tensor" not in weights_only
    assert "Each tensor" in instr(*command[:3], "--only", "weights", "--tensors").stdout


def test_it_fits_a_terminal_and_comes_in_every_form(instr: Instr, tmp_path: Path) -> None:
    long = tmp_path / "A-very-long-name-of-a-model-Instruct-v0.1-Q8_0.gguf"
    long.write_bytes(quantized_demo("Q8_0").read_bytes())
    small = ("--ctx", 64, "--chunks", 1, "--threads", 1)
    command = ("quality", "demo", long, "--only", "outputs", *small)
    text = instr(*command).stdout
    assert "mean KL" in text
    assert max(map(len, text.splitlines())) <= 80
    for form, start in (("--md", "## Outputs"), ("--csv", "model,size"), ("--html", "<!doctype")):
        assert instr(*command, form).stdout.startswith(start)
    assert instr(*command, "--csv", "-o", "it.csv").returncode == 0
    assert "demo.gguf" in (tmp_path / "it.csv").read_text()
    assert_refused(instr(*command, "-o", "it.csv"), "it.csv exists", "--force")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("demo", "llama.gguf"), "demo.gguf have different vocabularies: 64 and 1,024 tokens"),
        (("llama.gguf", "other.gguf"), "token 7 is '<x>' and '<7>'"),
        (
            ("bert.gguf", "bert.gguf"),
            "an encoder; it does not predict the next token (`instr quality --only weights`",
        ),
        (("t5.gguf", "t5.gguf"), "has an encoder"),
        (("vocabulary.gguf", "vocabulary.gguf"), "only a vocabulary"),
        (("no_tokenizer.gguf", "no_tokenizer.gguf", "--text", "story.txt"), "has no tokenizer"),
        (("gpt2.gguf", "gpt2.gguf", "--ctx", 300), "exceeds the 256 positions"),
        (("demo", "demo", "--text", "short.txt"), "at least 1,024 are needed for chunks of 512"),
        (("demo", "demo", "--text", "none.txt"), "none.txt cannot be read"),
        (("demo", "demo", "--text", "latin.txt"), "latin.txt is not UTF-8: byte 3"),
        (("demo", "demo", "--ctx", 4), "--ctx is 4; it must be at least 8"),
        (("demo", "demo", "--chunks", 0), "'--chunks': 0 is not in the range"),
        (("demo", "demo", "--chunks", 10**8), "is not in the range 1<=x<=65536"),
        (("demo", "demo", "--batch", 0), "--batch is 0"),
        (("demo", "demo", "--seed", -1), "--seed is -1"),
        (("demo", "demo", "--seed", 3, "--text", "story.txt"), "--seed has no effect"),
        (("demo", "demo", "--ctx", 64, "--only", "weights"), "--ctx has no effect"),
        (("demo",), "CANDIDATE"),
    ],
)
def test_wrong_input_is_one_clear_line(
    instr: Instr, models: Path, tmp_path: Path, arguments: tuple[str | int, ...], words: str
) -> None:
    (tmp_path / "story.txt").write_text(TEXT)
    (tmp_path / "short.txt").write_text("Once upon a time")
    (tmp_path / "latin.txt").write_bytes("caf\u00e9".encode("latin-1"))
    other = (models / "llama.gguf").read_bytes().replace(b"<7>", b"<x>")
    (tmp_path / "other.gguf").write_bytes(other)
    named = [models / str(a) if (models / str(a)).is_file() else a for a in arguments]
    only = () if "--only" in arguments else ("--only", "outputs")
    done = instr("quality", *named, *only)
    for directory in (models, DEMO.parent):
        done.stderr = done.stderr.replace(f"{directory}/", "")
    assert_refused(done, words)


def test_logits_that_are_no_numbers_are_an_error_of_one_line(instr: Instr, tmp_path: Path) -> None:
    tiny_models.write_llama(tmp_path / "good.gguf")
    tiny_models.write_llama(tmp_path / "bad.gguf", nan_in="output_norm.weight")
    done = instr("quality", "good.gguf", "bad.gguf", "--only", "outputs", "--threads", 1)
    assert done.returncode == 1
    assert done.stdout == ""
    assert len(done.stderr.splitlines()) == 1
    assert "bad.gguf: the model computes logits that are NaN or infinite" in done.stderr


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells what a process has mapped")
def test_ctrl_c_ends_it_and_leaves_nothing(tmp_path: Path, environment: dict[str, str]) -> None:
    command = ("quality", "demo", "demo", "--only", "outputs", "--threads", "1")
    process = subprocess.Popen(
        [sys.executable, "-m", "llamacpp_instr", *command, "--chunks", "50000", "-o", "it.txt"],
        cwd=tmp_path, env=environment, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    while b"demo.gguf" not in Path(f"/proc/{process.pid}/maps").read_bytes():
        assert process.poll() is None
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    _, stderr = process.communicate(timeout=120)
    assert process.returncode == 130, stderr
    assert "Traceback" not in stderr
    assert list(tmp_path.iterdir()) == []


def test_a_model_writes_what_it_considers_probable(models: Path) -> None:
    """In 800 texts, the frequency of each first token is the model's probability."""
    n, options = 800, ContextOptions(ctx=8, threads=1)
    with captured() as log, LoadedModel(models / "llama.gguf", log) as model:
        with WritingContext(model, options) as context:
            chunks = list(write_chunks(context, n, 1, lambda _n: None))
        with ModelContext(model, options) as context:
            context.decode(chunks[0][:1])
            row = model.api.llama_get_logits(context.handle)
            p = np.exp(np.ctypeslib.as_array(row, (1, model.n_vocab))[0].astype(np.float64))
    p /= p.sum()
    assert {len(chunk) for chunk in chunks} == {8}
    assert len({chunk[0] for chunk in chunks}) == 1
    counts = np.bincount([chunk[1] for chunk in chunks], minlength=len(p))
    spread = np.sqrt(n * p * (1 - p)) + 1
    assert np.abs(counts - n * p).max() < 5 * spread.max()
    assert (np.abs(counts - n * p) < 5 * spread).all()


def test_a_seed_names_a_text(models: Path) -> None:
    llama = models / "llama.gguf"
    first = compared(llama, ctx=32, chunks=2, seed=1)
    assert compared(llama, ctx=32, chunks=2, seed=1) == first
    assert compared(llama, ctx=32, chunks=2, seed=2).perplexity != first.perplexity


def test_chunks_do_not_know_of_each_other() -> None:
    """A model with a state instead of positions: it is cleared between chunks."""
    mamba = random_model("mamba-dense")
    whole = compared(mamba, mamba, ctx=32, chunks=3, seed=1)
    assert whole.divergences[0].kl.value == 0
    parts = [compared(mamba, ctx=32, chunks=1, seed=seed) for seed in (1, 2, 3)]
    mean = np.mean([np.log(part.perplexity.value) for part in parts])
    assert np.log(whole.perplexity.value) == pytest.approx(mean, abs=1e-4)


def test_progress_counts_every_token_once(models: Path) -> None:
    calls: list[tuple[int, int]] = []
    files = [load_model_file(models / "llama.gguf")] * 2
    options = OutputOptions(ctx=32, chunks=3, threads=1)
    compare_outputs(files, None, options, lambda done, total: calls.append((done, total)))
    done, totals = zip(*calls, strict=True)
    assert set(totals) == {3 * 31 + 3 * 2 * 32}
    assert list(done) == sorted(set(done))
    assert done[-1] == totals[-1]


@pytest.mark.parametrize("n_vocab", [64, 32_000, 128_256, 262_144, 10**6])
def test_logits_in_memory_are_bounded(n_vocab: int) -> None:
    batch = logits._choose_batch(n_vocab)
    assert batch % 64 == 0
    assert 4 * n_vocab * batch <= 64 * 2**20 or batch == 64
