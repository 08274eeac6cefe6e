"""Attention, positions and recurrent ops as standard operators, against ggml's loops in numpy."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from llamacpp_instr.converters.exports.onnx.export import export_graph
from tests.exports.test_onnx_ops import Array, close, computed, graph_of, some, words

# --- positions: `ggml_rope_cache_init`, `rope_yarn`, `ggml_mrope_cache_init` ---

NORMAL, NEOX, MROPE, VISION, IMROPE = 0, 2, 8, 24, 40


def rope_params(
    mode: int, n_dims: int, ext_factor: float = 0.0, sections: tuple[int, ...] = (0, 0, 0, 0),
    skipped: int = 0,
) -> list[int]:  # fmt: skip
    scaled = words(10_000.0, 0.25, ext_factor, 0.75, 32.0, 1.0)
    return [0, n_dims, mode, 0, 4096, *scaled, *sections, skipped]


def turned(
    x: Array, angle: Any, n_dims: int, neox: bool, factor: float, skipped: int = 0
) -> Array:  # fmt: skip
    """Each pair of a row turned by `angle(token, pair)`."""
    out = x.astype(np.float64)
    for token in range(x.shape[1]):
        for pair in range(n_dims // 2):
            a, b = (pair, pair + n_dims // 2) if neox else (2 * pair, 2 * pair + 1)
            a, b, by = a + skipped, b + skipped, angle(token, pair)
            cos, sin = factor * math.cos(by), factor * math.sin(by)
            x0, x1 = out[:, token, :, a].copy(), out[:, token, :, b].copy()
            out[:, token, :, a] = x0 * cos - x1 * sin
            out[:, token, :, b] = x0 * sin + x1 * cos
    return out


def of_pair(pair: int, n_dims: int, ext_factor: float) -> float:
    """What a pair turns by for one position."""
    whole = 10_000.0 ** (-2 * pair / n_dims)
    if not ext_factor:
        return 0.25 * whole

    def dim(turns: float) -> float:
        return n_dims * math.log(4096 / (turns * 2 * math.pi)) / (2 * math.log(10_000))

    low, high = max(0, math.floor(dim(32))), min(n_dims - 1, math.ceil(dim(1)))
    mix = ext_factor * (1 - min(1, max(0, (pair - low) / max(0.001, high - low))))
    return 0.25 * whole * (1 - mix) + whole * mix


POSITIONS = np.array([3, 40, 7], np.int32)


@pytest.mark.parametrize("neox", [False, True])
@pytest.mark.parametrize("n_dims", [32, 24])
@pytest.mark.parametrize("ext_factor", [0.0, 1.0, 0.5])
def test_pairs_turn_by_their_position(neox: bool, n_dims: int, ext_factor: float) -> None:
    x = some(1, 3, 2, 32)
    params = rope_params(NEOX if neox else NORMAL, n_dims, ext_factor)
    factor = 0.75 * (1 + 0.1 * math.log(1 / 0.25) if ext_factor else 1)

    def angle(token: int, pair: int) -> float:
        return float(POSITIONS[token]) * of_pair(pair, n_dims, ext_factor)

    expected = turned(x, angle, n_dims, neox, factor)
    np.testing.assert_allclose(
        computed("ROPE", x, POSITIONS, shape=x.shape, params=params), expected, atol=2e-5
    )
    back = turned(x, lambda t, p: -angle(t, p), n_dims, neox, factor)
    found = computed("ROPE_BACK", x, POSITIONS, shape=x.shape, params=params)
    np.testing.assert_allclose(found, back, atol=2e-5)


def test_factors_divide_the_angles_and_the_first_dimensions_may_stay() -> None:
    x, factors = some(1, 3, 2, 32), np.abs(some(16)) + 1
    found = computed(
        "ROPE", x, POSITIONS, factors, shape=x.shape, params=rope_params(NEOX, 32), weights=[2]
    )
    expected = turned(
        x, lambda t, p: POSITIONS[t] * of_pair(p, 32, 0.0) / factors[p], 32, True, 0.75
    )
    np.testing.assert_allclose(found, expected, atol=2e-5)
    found = computed("ROPE", x, POSITIONS, shape=x.shape, params=rope_params(NORMAL, 16, skipped=8))
    expected = turned(x, lambda t, p: POSITIONS[t] * of_pair(p, 16, 0.0), 16, False, 0.75, 8)
    np.testing.assert_allclose(found, expected, atol=2e-5)
    assert (found[..., :8] == x[..., :8]).all()
    assert (found[..., 24:] == x[..., 24:]).all()


def test_sections_of_pairs_have_positions_of_their_own() -> None:
    x = some(1, 3, 2, 24)
    positions = np.array([[3, 4, 5], [1, 0, 2], [6, 7, 8], [9, 9, 9]], np.int32)
    sections = (4, 3, 2, 1)

    def section(pair: int) -> int:
        at = pair % 10
        return 0 if at < 4 else 1 if at < 7 else 2 if at < 9 else 3

    def interleaved(pair: int) -> int:
        at = pair % 10
        if at % 3 == 1 and at < 3 * 3:
            return 1
        if at % 3 == 2 and at < 3 * 2:
            return 2
        return 0 if at % 3 == 0 and at < 3 * 4 else 3

    for mode, of in ((MROPE, section), (IMROPE, interleaved)):
        found = computed(
            "ROPE", x, positions.ravel(), shape=x.shape,
            params=rope_params(mode, 24, sections=sections),
        )  # fmt: skip

        def angle(token: int, pair: int, of: Any = of) -> float:
            return float(positions[of(pair), token]) * of_pair(pair, 24, 0.0)

        np.testing.assert_allclose(found, turned(x, angle, 24, True, 0.75), atol=2e-5)


def test_positions_in_images_have_no_operators() -> None:
    x = some(1, 3, 2, 32)
    graph = graph_of("ROPE", [x, POSITIONS], x.shape, rope_params(VISION, 16), "float32", (), None)
    assert export_graph(graph).missing == {"ROPE": 1}


# --- softmax and attention ---


def softmax(scores: Array, sinks: Array | None = None) -> Array:
    """`sinks` are scores without a value, one for each head."""
    e = np.exp(scores)
    whole = e.sum(-1, keepdims=True)
    if sinks is not None:
        whole = whole + np.exp(sinks).reshape(1, -1, 1, 1)
    return np.asarray(e / whole)


def slopes(heads: int, max_bias: float) -> Array:
    whole = 1 << (heads.bit_length() - 1)
    m0, m1 = 2 ** (-max_bias / whole), 2 ** (-max_bias / 2 / whole)
    of = [m0 ** (h + 1) if h < whole else m1 ** (2 * (h - whole) + 1) for h in range(heads)]
    return np.array(of).reshape(1, heads, 1, 1)


def test_a_softmax_of_scaled_rows() -> None:
    x = some(2, 6, 3, 5)
    close(computed("SOFT_MAX", x, shape=x.shape, params=words(0.5, 0.0)), softmax(0.5 * x))
    sinks = some(6)
    for mask in (some(1, 1, 3, 5), some(1, 1, 4, 5), some(2, 1, 3, 5), some(1, 3, 3, 5)):
        added = np.tile(mask[:, :, :3], (2 // mask.shape[0], 6 // mask.shape[1], 1, 1))
        found = computed("SOFT_MAX", x, mask, shape=x.shape, params=words(0.5, 0.0))
        close(found, softmax(0.5 * x + added))
        found = computed("SOFT_MAX", x, mask, sinks, shape=x.shape, params=words(0.5, 5.0))
        close(found, softmax(0.5 * x + slopes(6, 5.0) * added, sinks))


@pytest.mark.parametrize(("kv_heads", "width"), [(4, 8), (2, 8), (1, 6)])
@pytest.mark.parametrize("cap", [0.0, 5.0])
@pytest.mark.parametrize("more", ["", "mask", "mask and bias", "mask and sinks"])
def test_attention(kv_heads: int, width: int, cap: float, more: str) -> None:
    """Values may be shorter than keys; the result has heads before tokens."""
    q, k, v = some(2, 4, 3, 8), some(2, kv_heads, 5, 8), some(2, kv_heads, 5, width)
    mask, sinks = some(1, 1, 4, 5), some(4)
    max_bias = 8.0 if "bias" in more else 0.0
    others = [mask] * ("mask" in more) + [sinks] * ("sinks" in more)
    keys, values = (np.repeat(of.astype(np.float64), 4 // kv_heads, axis=1) for of in (k, v))
    scores = 0.3 * q @ keys.transpose(0, 1, 3, 2)
    if cap:
        scores = cap * np.tanh(scores / cap)
    if others:
        scores = scores + mask[:, :, :3] * (slopes(4, max_bias) if max_bias else 1)
    expected = softmax(scores, sinks if "sinks" in more else None) @ values
    expected = expected.transpose(0, 2, 1, 3)
    params = words(0.3, max_bias, cap)
    found = computed("FLASH_ATTN_EXT", q, k, v, *others, shape=expected.shape, params=params)
    assert found.shape == expected.shape
    close(found, expected)


def test_an_indexer_weighs_what_heads_score_above_zero() -> None:
    q, k, weights = some(2, 3, 4, 6), some(2, 5, 1, 6), some(2, 3, 4)
    mask = some(2, 1, 3, 5)
    scores = np.einsum("sthw,scw->sthc", q, k[:, :, 0])
    expected = (np.maximum(scores, 0) * weights[..., None]).sum(2)[:, None] + mask
    found = computed(
        "LIGHTNING_INDEXER", q, k, weights.reshape(2, 3, 1, 4), mask, shape=expected.shape
    )
    close(found, expected)


# --- what looks back through a state ---


def test_a_convolution_has_weights_for_each_channel() -> None:
    x, weight = some(1, 2, 3, 9), some(3, 4)
    expected = np.array(
        [[[x[0, s, :, t : t + 4][c] @ weight[c] for c in range(3)] for t in range(6)]
         for s in range(2)]
    )[None]  # fmt: skip
    close(computed("SSM_CONV", x, weight, shape=(1, 2, 6, 3), weights=[1]), expected)


@pytest.mark.parametrize("rates", [1, 5])
@pytest.mark.parametrize("groups", [1, 2, 4])
def test_a_scan_of_a_state(rates: int, groups: int) -> None:
    seqs, tokens, heads, dim, width = 2, 3, 4, 6, 5
    state, ids = some(3, heads, dim, width), np.array([2, 0], np.int32)
    x, dt, a = some(seqs, tokens, heads, dim), some(1, seqs, tokens, heads), -np.abs(some(4, rates))
    b, c = some(seqs, tokens, groups, width), some(seqs, tokens, groups, width)
    now, ys = state[ids].astype(np.float64), []
    for s in range(seqs):
        for t in range(tokens):
            for h in range(heads):
                step, group = math.log1p(math.exp(dt[0, s, t, h])), h // (heads // groups)
                now[s, h] *= np.exp(step * a[h])
                now[s, h] += np.outer(x[s, t, h] * step, b[s, t, group])
                ys.append(now[s, h] @ c[s, t, group])
    expected = np.concatenate([np.concatenate(ys), now.ravel()])
    sources = (state, x, dt, a.reshape(1, 1, heads, rates), b, c, ids)
    close(computed("SSM_SCAN", *sources, shape=(1, 1, 1, expected.size)), expected)
    # more than the last state
    more = graph_of("SSM_SCAN", sources, (1, 1, 1, expected.size + 1), [], "float32", (), None)
    assert export_graph(more).missing == {"SSM_SCAN": 1}


@pytest.mark.parametrize("gates", [1, 5])
@pytest.mark.parametrize("key_heads", [1, 2, 4])
def test_the_delta_rule(gates: int, key_heads: int) -> None:
    seqs, tokens, heads, width = 2, 3, 4, 5
    q, k = some(seqs, tokens, key_heads, width), some(seqs, tokens, key_heads, width)
    v, gate = some(seqs, tokens, heads, width), -np.abs(some(seqs, tokens, heads, gates))
    beta, state = np.abs(some(seqs, tokens, heads, 1)), some(seqs, heads, width, width)
    now, ys = state.astype(np.float64), []
    for s in range(seqs):
        for t in range(tokens):
            for h in range(heads):
                key, query = (of[s, t, h % key_heads].astype(np.float64) for of in (k, q))
                now[s, h] *= np.exp(gate[s, t, h])
                unknown = v[s, t, h] - now[s, h] @ key
                now[s, h] += np.outer(unknown * beta[s, t, h, 0], key)
                ys.append(now[s, h] @ query / math.sqrt(width))
    expected = np.concatenate([np.concatenate(ys), now.ravel()])
    sources = (q, k, v, gate, beta, state.reshape(seqs, heads, width, width))
    close(computed("GATED_DELTA_NET", *sources, shape=(1, 1, 1, expected.size)), expected)
    more = graph_of(
        "GATED_DELTA_NET", sources, (1, 1, 1, expected.size + 1), [], "float32", (), None
    )
    assert export_graph(more).missing == {"GATED_DELTA_NET": 1}
