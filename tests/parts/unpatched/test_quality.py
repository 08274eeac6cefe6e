"""`instr quality`: figures of outputs, compared with llama-perplexity of the same upstream."""

from __future__ import annotations

import functools
import math
import re
import subprocess
from pathlib import Path

import pytest

from llamacpp_instr.lab.quality.divergence import SHARES, Estimate, Outputs
from llamacpp_instr.lab.quality.logits import OutputOptions, compare_outputs
from llamacpp_instr.model.file import load_model_file
from tests.kit.native_kit import DEMO, unpatched_library
from tests.kit.quality_kit import CHUNKS, text
from tests.kit.quantized_kit import quantized_demo

__all__ = ["text"]  # a fixture
pytestmark = pytest.mark.native

FILE_TYPES = ("Q8_0", "Q4_K_M", "Q2_K")


@functools.cache
def measured(text: str) -> Outputs:
    files = [load_model_file(path) for path in (DEMO, *map(quantized_demo, FILE_TYPES))]
    return compare_outputs(files, text, OutputOptions(chunks=CHUNKS, threads=1))


def perplexity(*arguments: object, until: str) -> str:
    """The output of llama-perplexity up to and including the line `until`."""
    program = unpatched_library() / "llama-perplexity"
    for _ in range(50):  # often it ends before its log is complete, above all on a busy machine
        done = subprocess.run(
            [program, "-t", "1", "-b", "512", *map(str, arguments)],
            capture_output=True,
            text=True,
            check=True,
        )
        if until in done.stdout + done.stderr:
            return done.stdout + done.stderr
    raise AssertionError(f"no {until!r} in {done.stdout}{done.stderr}")


def divergence(model: Path, logits: Path, *options: str) -> dict[str, tuple[float, float]]:
    """llama-perplexity's figures of a candidate: values and errors by name, shares in percent."""
    compare = ("--kl-divergence", "--kl-divergence-base", logits)
    printed = perplexity("-m", model, *compare, *options, until="Same top p:")
    lines = re.finditer(r"^ *(\S.*?) *: +([-\d.]+)%?(?: ± +([\d.]+))?", printed, re.M)
    return {" ".join(line[1].split()): (float(line[2]), float(line[3] or 0)) for line in lines}


@pytest.fixture(scope="module")
def base(text: Path) -> tuple[Path, str]:
    """The reference's logits in llama-perplexity's format, and its output."""
    logits = text.with_name("logits.dat")
    store = ("--chunks", CHUNKS, "--kl-divergence-base", logits)
    return logits, perplexity("-m", DEMO, "-f", text, *store, until="Final estimate:")


def test_perplexity_is_that_of_llama_perplexity(text: Path, base: tuple[Path, str]) -> None:
    printed = re.search(r"Final estimate: PPL = ([\d.]+) \+/- ([\d.]+)", base[1])
    assert printed, base[1]
    ours = measured(text.read_text().rstrip()).perplexity
    assert f"{ours.value:.4f}" == printed[1]
    assert f"{ours.error:.5f}" == printed[2]


@pytest.mark.parametrize("file_type", FILE_TYPES)
def test_divergence_is_that_of_llama_perplexity(
    text: Path, base: tuple[Path, str], file_type: str
) -> None:
    """It stores the reference's logits in 16 bits, and cuts them off at e^-16 of the largest."""
    theirs = divergence(quantized_demo(file_type), base[0])
    outputs = measured(text.read_text().rstrip())
    its = outputs.divergences[FILE_TYPES.index(file_type)]
    assert f"{its.perplexity.value:.4f}" == f"{theirs['Mean PPL(Q)'][0]:.4f}"
    assert f"{its.perplexity.error:.4f}" == f"{theirs['Mean PPL(Q)'][1]:.4f}"
    assert (its.kl.value, its.kl.error) == pytest.approx(theirs["Mean KLD"], rel=0.01, abs=1e-5)
    for name, ours in (
        ("Mean Δp", its.delta_p),
        ("RMS Δp", its.delta_p_rms),
        ("Same top p", its.same_top),
    ):
        percent = (100 * ours.value, 100 * ours.error)
        assert percent == pytest.approx(theirs[name], abs=1.1e-3), name
    for share, kl, delta_p in zip(SHARES, its.kl_percentiles, its.delta_p_percentiles, strict=True):
        name = {0: "Minimum", 0.5: "Median", 1: "Maximum"}.get(share, f"{100 * share:.1f}%")
        if f"{name} KLD" in theirs:
            assert kl == pytest.approx(theirs[f"{name} KLD"][0], rel=0.01, abs=1e-4), name
        assert 100 * delta_p == pytest.approx(theirs[f"{name} Δp"][0], abs=0.02), name


def test_ratios_are_those_of_llama_perplexity(models: Path, text: Path, tmp_path: Path) -> None:
    """With a model that is rarely surprised, because llama-perplexity clips surprising logits."""
    reference, candidate = models / "llama.gguf", tmp_path / "q4_0.gguf"
    subprocess.run(
        [unpatched_library() / "llama-quantize", reference, candidate, "Q4_0", "1"],
        capture_output=True, check=True,
    )  # fmt: skip
    logits = tmp_path / "logits.dat"
    store = ("-c", 128, "--chunks", 8, "--kl-divergence-base", logits)
    perplexity("-m", reference, "-f", text, *store, until="Final estimate:")
    theirs = divergence(candidate, logits)
    outputs = compare_outputs(
        [load_model_file(reference), load_model_file(candidate)],
        text.read_text().rstrip(),
        OutputOptions(ctx=128, chunks=8, threads=1, batch=64),
    )
    (its,) = outputs.divergences
    for name, ours in (
        ("Mean PPL(base)", outputs.perplexity),
        ("Mean PPL(Q)", its.perplexity),
        ("Mean PPL(Q)-PPL(base)", its.difference),
    ):
        assert (ours.value, ours.error) == pytest.approx(theirs[name], rel=3e-4), name
    log_ratio = Estimate(math.log(its.ratio.value), its.ratio.error / its.ratio.value)
    for name, ours in (
        ("Mean ln(PPL(Q)/PPL(base))", log_ratio),
        ("Mean PPL(Q)/PPL(base)", its.ratio),
        ("Mean KLD", its.kl),
    ):
        assert (ours.value, ours.error) == pytest.approx(theirs[name], abs=2e-4), name
    correlation = theirs["Cor(ln(PPL(Q)), ln(PPL(base)))"][0]
    assert 100 * its.correlation == pytest.approx(correlation, abs=0.006)
