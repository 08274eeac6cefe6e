"""Perplexity and divergence of logits, computed by hand."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from llamacpp_instr.base.errors import InstrError
from llamacpp_instr.lab.quality.divergence import SHARES, Divergence, Scores, compute_divergence

LOGITS = arrays(
    np.float32, (7, 11), elements=st.floats(-50, 50, width=32), fill=st.floats(-50, 50, width=32)
)


def logits_of(*rows: list[float]) -> Any:
    """Logits whose softmax gives these probabilities; 0 becomes -inf."""
    with np.errstate(divide="ignore"):
        return np.log(np.array(rows, np.float32))


def diverge(reference: Any, candidate: Any, tokens: list[int]) -> Divergence:
    scores = Scores(["reference", "candidate"])
    scores.add([reference, candidate], np.array(tokens, np.intp))
    (divergence,) = scores.divergences()
    return divergence


def test_perplexity_is_the_inverse_of_the_geometric_mean_of_the_probabilities() -> None:
    scores = Scores(["model"])
    scores.add([logits_of([0.5, 0.25, 0.25], [0.25, 0.25, 0.5])], np.array([0, 1]))
    assert scores.perplexity().value == pytest.approx(math.sqrt(2 * 4))


def test_the_error_is_that_of_the_mean_times_the_perplexity() -> None:
    nll = np.array([1, 2, 3, 4, 5, 6] * 2, np.float32)
    estimate = compute_divergence(nll, nll, np.zeros_like(nll), nll == nll).perplexity
    assert estimate.value == pytest.approx(math.exp(3.5))
    assert estimate.error == pytest.approx(math.exp(3.5) * nll.std() / math.sqrt(11))


def test_a_divergence_worked_out_by_hand() -> None:
    # 0.5 ln(0.5/0.25) + 0.25 ln(0.25/0.5) + 0.25 ln(0.25/0.25) = 0.25 ln 2
    its = diverge(logits_of([0.5, 0.25, 0.25]), logits_of([0.25, 0.5, 0.25]), [0])
    assert its.kl.value == pytest.approx(0.25 * math.log(2))
    assert its.delta_p.value == pytest.approx(-0.25)
    assert its.delta_p_rms.value == pytest.approx(0.25)
    assert its.same_top.value == 0
    assert its.ratio.value == pytest.approx(2)
    assert its.difference.value == pytest.approx(2)


def test_percentiles_go_from_the_smallest_to_the_largest() -> None:
    """A percentile is the value below which that share of the tokens lies, interpolated."""
    kept = [0.9 - 0.008 * i for i in range(101)]
    reference = logits_of(*[[0.9, 0.1]] * 101)
    its = diverge(reference, logits_of(*[[p, 1 - p] for p in kept]), [0] * 101)
    for share, value in zip(SHARES, its.delta_p_percentiles, strict=True):
        assert value == pytest.approx(-0.8 * (1 - share), abs=1e-6)
    assert its.kl_percentiles[0] == pytest.approx(0, abs=1e-6)
    assert its.kl_percentiles[-1] == pytest.approx(
        0.9 * math.log(0.9 / 0.1) + 0.1 * math.log(0.1 / 0.9), abs=1e-5
    )


def test_what_goes_up_and_down_together_is_correlated() -> None:
    easy, hard = [0.9, 0.1], [0.2, 0.8]
    reference = logits_of(*[easy, hard] * 20)
    its = diverge(reference, logits_of(*[[0.8, 0.2], [0.3, 0.7]] * 20), [0] * 40)
    assert its.correlation == pytest.approx(1, abs=1e-5)
    its = diverge(reference, logits_of(*[hard, easy] * 20), [0] * 40)
    assert its.correlation == pytest.approx(-1, abs=1e-5)
    its = diverge(reference, logits_of(*[easy] * 40), [0] * 40)
    assert math.isnan(its.correlation), "it does not vary"


@settings(max_examples=25)
@given(LOGITS)
def test_a_model_does_not_diverge_from_itself(logits: Any) -> None:
    its = diverge(logits, logits.copy(), [3] * 7)
    assert its.kl.value == 0
    assert its.kl_percentiles == (0,) * len(SHARES)
    assert its.delta_p_rms.value == 0
    assert its.same_top.value == 1
    assert its.ratio.value == 1
    assert its.ratio.error == pytest.approx(0, abs=1e-6)


@settings(max_examples=40)
@given(LOGITS, LOGITS)
def test_divergences_are_those_of_the_definition(reference: Any, candidate: Any) -> None:
    p, q = (np.exp(x.astype(np.float64)) for x in (reference, candidate))
    p /= p.sum(axis=1, keepdims=True)
    q /= q.sum(axis=1, keepdims=True)
    expected = (p * np.log(p / q)).sum(axis=1)
    its = diverge(reference, candidate, [3] * 7)
    assert its.kl_percentiles[0] > -1e-5
    assert its.kl.value == pytest.approx(expected.mean(), rel=1e-5, abs=1e-5)
    assert its.kl_percentiles[-1] == pytest.approx(expected.max(), rel=1e-5, abs=1e-5)
    assert its.delta_p.value == pytest.approx((q - p)[:, 3].mean(), abs=1e-5)


@settings(max_examples=25)
@given(LOGITS, LOGITS, st.floats(-1000, 1000))
def test_a_constant_added_to_all_logits_changes_nothing(one: Any, other: Any, by: float) -> None:
    # as far as float32 is accurate
    before = diverge(one, other, [0] * 7)
    after = diverge(one, other + np.float32(by), [0] * 7)
    assert after.kl.value == pytest.approx(before.kl.value, rel=1e-3, abs=1e-3)
    assert after.delta_p.value == pytest.approx(before.delta_p.value, abs=1e-3)


def test_rows_beyond_one_block_are_all_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    random = np.random.default_rng(1)
    one, other = (random.normal(0, 3, (100, 17)).astype(np.float32) for _ in range(2))
    tokens = list(random.integers(0, 17, 100))
    whole = diverge(one, other, tokens)
    monkeypatch.setattr("llamacpp_instr.lab.quality.divergence._BLOCK", 17 * 7)
    assert diverge(one, other, tokens) == whole
    scores = Scores(["reference", "candidate"])
    for i in range(0, 100, 9):
        scores.add([one[i : i + 9], other[i : i + 9]], np.array(tokens[i : i + 9]))
    assert scores.divergences() == [whole]


def test_what_both_consider_impossible_counts_nothing() -> None:
    its = diverge(logits_of([0.5, 0.5, 0]), logits_of([0.25, 0.75, 0]), [0])
    assert its.kl.value == pytest.approx(0.5 * math.log(2) + 0.5 * math.log(0.5 / 0.75))
    its = diverge(logits_of([0.5, 0.5, 0]), logits_of([0.25, 0.25, 0.5]), [0])
    assert its.kl.value == pytest.approx(math.log(2))


def test_what_only_the_candidate_considers_impossible_is_infinitely_far() -> None:
    its = diverge(logits_of([0.5, 0.25, 0.25]), logits_of([0.5, 0.5, 0]), [0])
    assert its.kl.value == math.inf


def test_logits_as_large_as_floats_get() -> None:
    huge = np.array([[3e38, -3e38, 0]], np.float32)
    its = diverge(huge, huge.copy(), [0])
    assert its.kl.value == 0
    assert its.perplexity.value == 1


@pytest.mark.parametrize("row", [[math.nan, 0.0], [math.inf, 0.0], [-math.inf, -math.inf]])
def test_logits_that_are_no_numbers_are_named(row: list[float]) -> None:
    good, bad = np.zeros((3, 2), np.float32), np.zeros((3, 2), np.float32)
    bad[1] = row
    with pytest.raises(InstrError, match=r"candidate: .* NaN or infinite"):
        diverge(good, bad, [0] * 3)
    with pytest.raises(InstrError, match=r"reference: "):
        diverge(bad, good, [0] * 3)
