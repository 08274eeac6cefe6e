"""Attention computed from what flash attention reads is the soft-max of a run without it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from llamacpp_instr.base.errors import UsageError
from llamacpp_instr.debugger.attention import AttentionWeights, attention, flash_attention
from llamacpp_instr.debugger.capture import Captured, Patch
from llamacpp_instr.debugger.stop import Stop
from tests.kit.debugger_kit import opened, run
from tests.kit.native_kit import DEMO, random_model

GROUPED_QUERIES, ALIBI, SOFTCAP, WINDOW, SINKS, LATENT = (
    "llama-dense", "mpt-dense", "gemma2-dense", "cohere2-dense", "gpt-oss-moe", "deepseek2-moe",
)  # fmt: skip


def seen(model: Path, log: Path, flash: str, place: str, **how: object) -> list[AttentionWeights]:
    found = []

    def on_stop(stop: Stop) -> None:
        found.append(attention(stop))

    with opened(model) as loaded:
        run(loaded, log, breakpoints=[place], on_stop=on_stop, flash_attn=flash, **how)
    return found


@pytest.mark.native
@pytest.mark.parametrize(
    "architecture", [GROUPED_QUERIES, ALIBI, SOFTCAP, WINDOW, SINKS, LATENT, "bloom-dense", "demo"]
)
def test_computed_attention_is_the_soft_max_of_a_run_without_flash_attention(
    architecture: str, tmp_path: Path
) -> None:
    model = DEMO if architecture == "demo" else random_model(architecture)
    # the demo model's later layers would amplify the rounding of flash attention itself (up to
    # 1.3e-3, by the processor's kernels), so each of its layers gets the same input in both runs
    inputs = Captured("l_out-*")
    both = architecture == "demo"
    computed = seen(
        model, tmp_path / "log", "on", "op=FLASH_ATTN_EXT", followers=[inputs] if both else []
    )
    real = seen(
        model, tmp_path / "log", "off", "kq_soft_max-*",
        followers=lambda debugging: [Patch(inputs, debugging.recording.note)] if both else [],
    )  # fmt: skip
    assert len(computed) == len(real) >= 6
    for ours, theirs in zip(computed, real, strict=True):
        assert (ours.computed, theirs.computed) == (True, False)
        assert ours.layer == theirs.layer
        cells = min(ours.weights.shape[2], theirs.weights.shape[2])
        assert np.abs(ours.weights[..., :cells] - theirs.weights[..., :cells]).max() < 1e-3
        sums = ours.weights.sum(axis=-1)
        assert ours.sinks == theirs.sinks == (architecture == SINKS)
        if ours.sinks:
            assert (sums < 1).all()
        else:
            assert np.abs(sums - 1).max() < 1e-9


@pytest.mark.native
def test_a_quantized_cache_is_read_as_the_kernel_reads_it(tmp_path: Path) -> None:
    exact = seen(DEMO, tmp_path / "log", "on", "op=FLASH_ATTN_EXT layer=0", decodes=0)
    coarse = seen(
        DEMO, tmp_path / "log", "on", "op=FLASH_ATTN_EXT layer=0", decodes=0, cache_type_k="q8_0"
    )
    difference = np.abs(exact[0].weights - coarse[0].weights).max()
    assert 0 < difference < 0.02


@pytest.mark.native
def test_heads_tokens_and_cells_are_the_axes(tmp_path: Path) -> None:
    prompt, *_ = seen(DEMO, tmp_path / "log", "on", "op=FLASH_ATTN_EXT layer=1")
    heads, tokens, cells = prompt.weights.shape
    assert (heads, tokens) == (4, 20)
    assert cells >= 20
    # no token sees a later one
    assert not np.triu(prompt.weights[0, :, :20], 1).any()
    assert prompt.weights[0, 0, 0] == 1


@pytest.mark.native
@pytest.mark.parametrize(
    ("model", "place", "layer", "reason"),
    [
        ("demo", "ffn_out-0", 3, "has not been computed yet"),
        ("demo", "embd", None, "has not been computed yet"),
        ("demo", "ffn_out-0", 77, "layer 77 has no attention"),
        ("demo", "result_norm", 2, "layer 2 is gone; stop at"),
        ("mamba2-dense", "result_norm", 0, "layer 0 has no attention"),
    ],
)
def test_a_layer_without_attention_to_show_is_one_line(
    model: str, place: str, layer: int | None, reason: str, tmp_path: Path
) -> None:
    path = DEMO if model == "demo" else random_model(model)
    with pytest.raises(UsageError, match=reason), opened(path) as loaded:
        run(
            loaded, tmp_path / "log", breakpoints=[place],
            on_stop=lambda stop: attention(stop, layer) and None,
        )  # fmt: skip


def test_a_row_that_sees_nothing_gives_no_weights() -> None:
    queries, keys = np.ones((1, 1, 2, 4)), np.ones((1, 1, 3, 4))
    mask = np.full((1, 1, 2, 3), -np.inf)
    mask[0, 0, 0, :2] = 0
    weights = flash_attention(queries, keys, mask, None, 1.0, 0.0, 0.0)
    assert weights[0, 0].tolist() == [[0.5, 0.5, 0], [0, 0, 0]]


def test_a_sink_takes_its_share_of_a_row() -> None:
    queries, keys = np.zeros((1, 2, 1, 4)), np.zeros((1, 1, 3, 4))
    weights = flash_attention(queries, keys, None, np.array([0.0, -np.inf]), 1.0, 0.0, 0.0)
    assert weights[0, 0, 0] == pytest.approx([0.25] * 3)
    assert weights[0, 1, 0] == pytest.approx([1 / 3] * 3)
