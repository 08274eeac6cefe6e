"""Recording changes no output: every logit equals the unpatched library's to the bit."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.kit.native_kit import DEMO, random_model, run_probe

pytestmark = pytest.mark.native

LEVELS = [None, "minimal", "detailed", "verbose"]
THREADS = [1, 2]

# dense, mixture of experts, recurrent, hybrid, sliding window, latent attention, gated, diffusion
MODELS = [
    "demo",
    "llama-dense", "llama4-moe", "mamba-dense", "jamba-dense", "gemma3-dense", "deepseek2-moe",
    "qwen3next-moe", "llada-dense",
]  # fmt: skip


def model_path(name: str) -> Path:
    return DEMO if name == "demo" else random_model(name)


def outputs(path: Path) -> dict[str, np.ndarray]:
    with np.load(path) as saved:
        return {name: saved[name] for name in saved.files}


@pytest.mark.parametrize("name", MODELS)
def test_logits_are_bit_identical_at_every_level(tmp_path: Path, name: str) -> None:
    """Also from one session to the next in a process; the first run of the process has none."""
    model = model_path(name)

    def run(runs: list[tuple[int, str | None]], unpatched: bool) -> list[dict[str, np.ndarray]]:
        paths = [tmp_path / f"{unpatched}-{threads}-{level}" for threads, level in runs]
        words: list[str] = []
        for (threads, level), path in zip(runs, paths, strict=True):
            recording = ["--level", level, "--log", f"{path}.log"] if level else []
            words += ["--then", str(model), f"{path}.npz", "--threads", str(threads), *recording]
        first, out, *others = words[1:]
        run_probe(Path(out), Path(first), *others, unpatched=unpatched)
        return [outputs(Path(f"{path}.npz")) for path in paths]

    plain = run([(threads, None) for threads in THREADS], unpatched=True)
    runs = [(threads, level) for level in LEVELS for threads in THREADS]
    for (threads, level), got in zip(runs, run(runs, unpatched=False), strict=True):
        expected = plain[THREADS.index(threads)]
        assert len(expected) >= 1
        assert got.keys() == expected.keys()
        for step, logits in expected.items():
            assert got[step].tobytes() == logits.tobytes(), (threads, level, step)


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
