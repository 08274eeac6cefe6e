"""Two continuations are compared token by token: where they part, and how far apart they were."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.special import log_softmax
from scipy.stats import entropy

from llamacpp_instr.base.errors import UsageError
from llamacpp_instr.run.debugging import Continuation, as_json, compare, divergence

RANDOM = np.random.default_rng(1)
LOGITS = RANDOM.normal(0, 3, (4, 20)).astype(np.float32)
TEXTS = {token: f"<{token}>" for token in range(20)}


def run(tokens: list[int], change: float = 0.0) -> Continuation:
    noise = np.random.default_rng(2).normal(0, change, (len(tokens), 20))
    return Continuation(tokens, (LOGITS[: len(tokens)] + noise).astype(np.float32))


def test_a_run_does_not_differ_from_itself() -> None:
    found = compare(run([1, 2, 3]), run([1, 2, 3]))
    assert as_json(found, TEXTS)["firstDifference"] is None
    assert [step.divergence for step in found] == [0, 0, 0]
    assert [step.largest for step in found] == [0, 0, 0]


def test_the_first_token_that_differs_is_named() -> None:
    found = compare(run([1, 2, 3]), run([1, 5, 3], 0.1))
    assert as_json(found, TEXTS)["firstDifference"] == 1


def test_logits_after_different_tokens_are_not_compared() -> None:
    first, second, third = compare(run([1, 2, 3]), run([1, 5, 3], 0.1))
    for step in (first, second):
        assert step.largest is not None
        assert 0 < step.largest < 1
    assert (third.before, third.after, third.largest, third.divergence) == (3, 3, None, None)


def test_a_run_that_ended_earlier_differs_where_it_ended() -> None:
    found = compare(run([1, 2, 3]), run([1, 2]))
    assert as_json(found, TEXTS)["firstDifference"] == 2
    last = found[2]
    assert (last.before, last.after, last.divergence) == (3, None, None)


def test_the_divergence_is_that_of_scipy() -> None:
    p, q = LOGITS[0], LOGITS[1]
    truth = entropy(np.exp(log_softmax(p.astype(float))), np.exp(log_softmax(q.astype(float))))
    assert divergence(p, q) == pytest.approx(truth, rel=1e-12)
    assert divergence(p, p) == 0


def test_a_token_that_is_impossible_adds_nothing() -> None:
    p = np.array([0, -np.inf, 1], np.float32)
    assert divergence(p, np.array([0, 3, 1], np.float32)) == pytest.approx(
        entropy([1 / (1 + np.e), 0, np.e / (1 + np.e)], np.exp(log_softmax([0.0, 3.0, 1.0])))
    )


def test_models_with_different_vocabularies_are_not_compared() -> None:
    other = Continuation([1], np.zeros((1, 7), np.float32))
    with pytest.raises(UsageError, match="different vocabularies"):
        compare(run([1]), other)
