"""The angles of ROPE against ggml's formulas, pair by pair."""

from __future__ import annotations

import math

import pytest

from llamacpp_instr.log.graph.ops import yarn

PARAMS = {
    "n_dims": 64, "freq_base": 10000.0, "freq_scale": 0.3, "n_ctx_orig": 4096, "ext_factor": 1.0,
    "attn_factor": 1.0, "beta_fast": 32.0, "beta_slow": 1.0,
}  # fmt: skip


def ramp(n: int, base: float, n_ctx: int, fast: float, slow: float, pair: int) -> float:
    """`ggml_rope_yarn_corr_dims` and `rope_yarn_ramp` for one pair."""
    low, high = (
        n * math.log(n_ctx / (turns * 2 * math.pi)) / (2 * math.log(base)) for turns in (fast, slow)
    )
    low, high = max(0, math.floor(low)), min(n - 1, math.ceil(high))
    return 1 - min(1, max(0, (pair - low) / max(0.001, high - low)))


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"n_dims": 16},
        {"freq_base": 500000.0},
        {"n_ctx_orig": 32768},
        {"n_ctx_orig": 200},
        {"freq_base": 10.0},
        {"freq_base": 10.0, "beta_fast": 1000.0},
        {"beta_fast": 64.0, "beta_slow": 2.0},
        {"ext_factor": 0.5},
    ],
)
def test_pairs_that_turn_often_keep_their_frequency(changes: dict[str, float]) -> None:
    of = PARAMS | changes
    kept, _ = yarn(of)
    fixed = int(of["n_dims"]), of["freq_base"], int(of["n_ctx_orig"])
    wanted = [
        of["ext_factor"] * ramp(*fixed, of["beta_fast"], of["beta_slow"], pair)
        for pair in range(int(of["n_dims"]) // 2)
    ]
    assert kept.tolist() == pytest.approx(wanted)


def test_the_pairs_between_are_mixed() -> None:
    """With 64 dimensions, base 10,000 and 4,096 tokens: pair 10 turns 32 times, pair 23 once."""
    kept, _ = yarn(PARAMS)
    assert kept[:11].tolist() == [1] * 11
    assert kept[11] == pytest.approx(12 / 13)
    assert kept[22] == pytest.approx(1 / 13)
    assert kept[23:].tolist() == [0] * 9


@pytest.mark.parametrize(
    ("attn", "scale", "factor"), [(1.0, 0.3, 1 + 0.1 * math.log(1 / 0.3)), (2.0, 1.0, 2.0)]
)
def test_the_result_grows_with_the_logarithm_of_the_scale(
    attn: float, scale: float, factor: float
) -> None:
    assert yarn(PARAMS | {"attn_factor": attn, "freq_scale": scale})[1] == pytest.approx(factor)


def test_without_an_extension_nothing_is_kept_and_the_result_is_not_scaled() -> None:
    kept, factor = yarn(PARAMS | {"ext_factor": 0.0, "attn_factor": 1.5})
    assert kept.tolist() == [0] * 32
    assert factor == 1.5
