"""Recording changes no output: every logit equals the unpatched library's to the bit."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.kit.native_kit import DEMO, random_models, run_probe

pytestmark = pytest.mark.native

LEVELS = [None, "minimal", "detailed", "verbose"]

# dense, mixture of experts, recurrent, hybrid, sliding window, latent attention, gated, diffusion
MODELS = [
    "demo",
    "llama-dense", "llama4-moe", "mamba-dense", "jamba-dense", "gemma3-dense", "deepseek2-moe",
    "qwen3next-moe", "llada-dense",
]  # fmt: skip


def model_path(name: str) -> Path:
    return DEMO if name == "demo" else random_models() / f"{name}.gguf"


def outputs(path: Path) -> dict[str, np.ndarray]:
    with np.load(path) as saved:
        return {name: saved[name] for name in saved.files}


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("threads", [1, 2])
def test_logits_are_bit_identical_at_every_level(tmp_path: Path, name: str, threads: int) -> None:
    model = model_path(name)
    run_probe(tmp_path / "plain.npz", model, "--threads", str(threads), unpatched=True)
    expected = outputs(tmp_path / "plain.npz")
    assert len(expected) >= 1
    for level in LEVELS:
        log = tmp_path / f"{level}.log"
        recording = ["--level", level, "--log", str(log)] if level else []
        run_probe(tmp_path / "patched.npz", model, "--threads", str(threads), *recording)
        got = outputs(tmp_path / "patched.npz")
        assert got.keys() == expected.keys()
        for step, logits in expected.items():
            assert got[step].tobytes() == logits.tobytes(), (level, step)


def test_reading_values_changes_no_value(tmp_path: Path) -> None:
    # the kernels may differ (no fusion), so the numbers are equal within rounding
    run_probe(tmp_path / "plain.npz", DEMO, unpatched=True)
    run_probe(
        tmp_path / "stats.npz", DEMO, "--level", "detailed", "--log", str(tmp_path / "s.log"),
        "--stats", "^l_out",
    )  # fmt: skip
    expected, got = outputs(tmp_path / "plain.npz"), outputs(tmp_path / "stats.npz")
    for step, logits in expected.items():
        np.testing.assert_allclose(got[step], logits, rtol=1e-4, atol=1e-4)
