"""The perplexity of models, and the divergence of their probabilities from those of a reference.

Invariant: only a few bytes per scored token and model are kept, never logits. All figures follow
llama-perplexity's formulas, but its logits are rounded to 16 bits and these are not. For each
token: the negative log likelihood, the KL divergence in nats, and Δp, the change of its
probability.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from llamacpp_instr.base.errors import InstrError

Floats: TypeAlias = NDArray[np.float32]
Doubles: TypeAlias = NDArray[np.float64]
Integers: TypeAlias = NDArray[np.intp]

SHARES = (0.0, 0.001, 0.01, 0.05, 0.1, 0.25, 0.5, 0.75, 0.9, 0.95, 0.99, 0.999, 1.0)
"""quantiles of the tokens in `Divergence`: 0 is the smallest value, 1 the largest"""

FEW_TOKENS = 100
"""number of scored tokens below which percentiles mean nothing (llama-perplexity prints none)"""

# values of a block of rows: all its arrays together fit into the processor's cache
_BLOCK = 2**17
_FEW_FOR_ERRORS = 10
_PROMPT, _FOLLOWING = 512, 16
"""the most tokens of the prompt of a round, and after it"""


@dataclass(frozen=True)
class Estimate:
    """A mean over the tokens, or a figure computed from means, with its standard error."""

    value: float
    error: float

    @property
    def half_interval(self) -> float:
        """Half of its 95 % interval."""
        return 1.96 * self.error


@dataclass(frozen=True)
class Divergence:
    """The divergence of a candidate from its reference."""

    perplexity: Estimate
    ratio: Estimate
    """perplexity of the candidate / perplexity of the reference"""
    difference: Estimate
    """of the perplexities"""
    correlation: float
    """of the ln of the perplexities; NaN if one of them does not vary"""
    kl: Estimate
    """in nats"""
    kl_percentiles: tuple[float, ...]
    """at `SHARES`"""
    delta_p: Estimate
    """change of the probability of the text's next token, from -1 to 1"""
    delta_p_percentiles: tuple[float, ...]
    """at `SHARES`"""
    delta_p_rms: Estimate
    same_top: Estimate
    """share of the tokens for which both models have the same most probable next token"""


class CacheTypes(NamedTuple):
    """The storage types of a cache."""

    k: str = "f16"
    v: str = "f16"

    @property
    def name(self) -> str:
        return self.k if self.k == self.v else f"K {self.k}, V {self.v}"


@dataclass(frozen=True)
class CacheCost:
    """The memory of a cache, and the times in its context, ns."""

    types: CacheTypes
    n_bytes: int
    rounds: Sequence[tuple[int, int]]
    """of a prompt, and of the tokens that follow it (`round_of`)"""


class Round(NamedTuple):
    """What is timed at the end of a context, in tokens."""

    depth: int
    """before the prompt"""
    prompt: int
    following: int
    """one by one"""


def round_of(ctx: int) -> Round:
    """The round that fills a context of `ctx` tokens."""
    following = min(_FOLLOWING, ctx // 2)
    prompt = min(_PROMPT, ctx - following)
    return Round(ctx - following - prompt, prompt, following)


@dataclass(frozen=True)
class AtPositions:
    """The figures of the predictions from `first` to `last` tokens of context."""

    first: int
    last: int
    n_scored: int
    perplexity: Estimate
    """the reference's"""
    divergences: list[Divergence]


@dataclass(frozen=True)
class Outputs:
    """The figures of a reference and its candidates over one text."""

    perplexity: Estimate
    """the reference's"""
    divergences: list[Divergence]
    """of the candidates, in order"""
    n_scored: int
    """tokens that are scored: the second half of each chunk except its last token"""
    n_chunks: int
    ctx: int
    """tokens of a chunk"""
    seed: int | None
    """of the text that the reference wrote; None if a text was given"""
    kl: Sequence[Floats] = ()
    """(tokens,) in nats, of each candidate"""
    caches: Sequence[CacheCost] = ()
    """of the reference and its candidates, if types of the cache are compared"""
    by_position: Sequence[AtPositions] = ()
    """of ranges of positions, which cover the chunk, if types of the cache are compared"""


class Scores:
    """The scores of every token for a reference and its candidates. `names` are the models' names
    for error messages, the reference first."""

    def __init__(self, names: Sequence[str]) -> None:
        self.names = names
        self._nll: list[Floats] = []
        self._candidates: list[list[tuple[NDArray[Any], ...]]] = [[] for _ in names[1:]]
        """of each: negative log likelihoods, KL divergences, whether the top token is the same"""

    def add(self, logits: Sequence[Floats], next_tokens: Integers) -> None:
        """Add some positions of a text: for each model, in the order of `names`, an array
        (positions, vocabulary) of its logits; and (positions,) the tokens that follow in the text.

        A logit of -inf is allowed: the token is impossible. Raises InstrError for NaN, +inf, or a
        row without any possible token.
        """
        for rows in _slices(logits[0]):
            blocks = (_Block(*it) for it in zip(self.names, (x[rows] for x in logits), strict=True))
            reference = next(blocks)
            self._nll.append(reference.nll(next_tokens[rows]))
            for kept, candidate in zip(self._candidates, blocks, strict=True):
                same_top = reference.top == candidate.top
                nll = candidate.nll(next_tokens[rows])
                kept.append((nll, reference.kl_divergence(candidate), same_top))

    def within(self, period: int, positions: slice) -> Scores:
        """The scores at some positions of every chunk, which has `period` scored ones."""
        chosen = Scores(self.names)

        def cut(values: Sequence[NDArray[Any]]) -> NDArray[Any]:
            return np.concatenate(values).reshape(-1, period)[:, positions].ravel()

        chosen._nll = [cut(self._nll)]
        chosen._candidates = [
            [tuple(cut(of) for of in zip(*kept, strict=True))] for kept in self._candidates
        ]
        return chosen

    @property
    def n_tokens(self) -> int:
        """Number of tokens scored so far."""
        return sum(map(len, self._nll))

    def perplexity(self) -> Estimate:
        """The perplexity of the reference."""
        return _exp(_mean(np.concatenate(self._nll)))

    def kl(self) -> list[Floats]:
        """(tokens,) the KL divergence of each candidate, in nats."""
        return [np.concatenate([of[1] for of in kept]) for kept in self._candidates]

    def divergences(self) -> list[Divergence]:
        """The divergence of each candidate, in order."""
        reference = np.concatenate(self._nll)
        return [
            compute_divergence(reference, *(np.concatenate(of) for of in zip(*kept, strict=True)))
            for kept in self._candidates
        ]


def compute_divergence(
    reference_nll: Floats, nll: Floats, kl: Floats, same_top: NDArray[np.bool_]
) -> Divergence:
    """The figures of a candidate from one value per scored token in each array.

    Formulas of errors: https://github.com/ggml-org/llama.cpp/blob/master/tools/perplexity/README.md
    """
    ours, base = _mean(nll), _mean(reference_nll)
    covariance = _covariance(nll, reference_nll)
    log_ratio = Estimate(ours.value - base.value, _error_of_difference(ours, base, covariance))
    perplexity, reference = _exp(ours), _exp(base)
    scale = perplexity.value * reference.value
    spread = ours.error * base.error
    delta_p = np.exp(-nll) - np.exp(-reference_nll)
    mean_square = _mean(np.square(delta_p, dtype=np.float64))
    rms = math.sqrt(mean_square.value)
    share = float(same_top.mean())
    return Divergence(
        perplexity=perplexity,
        ratio=_exp(log_ratio),
        difference=Estimate(
            perplexity.value - reference.value,
            _error_of_difference(perplexity, reference, scale * covariance),
        ),
        correlation=covariance / spread if spread else math.nan,
        kl=_mean(kl),
        kl_percentiles=_percentiles(kl),
        delta_p=_mean(delta_p),
        delta_p_percentiles=_percentiles(delta_p),
        delta_p_rms=Estimate(rms, 0.5 / rms * mean_square.error if rms else 0.0),
        same_top=Estimate(share, math.sqrt(share * (1 - share) / max(len(same_top) - 1, 1))),
    )


def kl_divergences(names: Sequence[str], reference: Floats, candidate: Floats) -> Floats:
    """(positions,) the KL divergence in nats of each position, from two arrays (positions,
    vocabulary) of logits. `names` are those of both models, for the `InstrError` that is raised for
    logits that are NaN or infinite."""
    return np.concatenate(
        [
            _Block(names[0], reference[rows]).kl_divergence(_Block(names[1], candidate[rows]))
            for rows in _slices(reference)
        ]
    )


def _slices(logits: Floats) -> Iterator[slice]:
    """The rows of each block."""
    step = max(1, _BLOCK // logits.shape[1])
    for start in range(0, len(logits), step):
        yield slice(start, start + step)


class _Block:
    """Rows of one model's logits, as the intermediate arrays of their softmax."""

    def __init__(self, name: str, logits: Floats) -> None:
        self.top: Integers = logits.argmax(axis=1)
        largest = np.take_along_axis(logits, self.top[:, None], axis=1)
        # max() returns NaN if there is one
        if not np.isfinite(largest).all():
            raise InstrError(
                f"{name}: the model computes logits that are NaN or infinite, so its text cannot "
                "be scored (`instr run --stats` finds the tensor where that begins)"
            )
        with np.errstate(over="ignore"):
            self.shifted = logits - largest
        self.weights = np.exp(self.shifted)
        self.total = self.weights.sum(axis=1)
        self.log_total: Doubles = np.log(self.total, dtype=np.float64)

    def nll(self, tokens: Integers) -> Floats:
        """The negative log likelihood of `tokens`, one for each row."""
        own = np.take_along_axis(self.shifted, tokens[:, None], axis=1)[:, 0]
        return (self.log_total - own).astype(np.float32)

    def kl_divergence(self, other: _Block) -> Floats:
        """For each row: sum of p ln(p / q), where p is of this model and q of the other."""
        with np.errstate(invalid="ignore"):
            distance = self.shifted - other.shifted
        kl = self._expected(distance)
        if not np.isfinite(kl).all():
            # tokens with p = 0 add nothing, whatever q is
            kl = self._expected(np.where(self.weights > 0, distance, np.float32(0)))
        return (kl - self.log_total + other.log_total).astype(np.float32)

    def _expected(self, values: Floats) -> Floats:
        # ij,ij->i without an array of the products
        return np.asarray(np.einsum("ij,ij->i", self.weights, values) / self.total)


def _mean(values: Floats | Doubles) -> Estimate:
    n = len(values)
    mean = float(values.mean(dtype=np.float64))
    variance = float(np.square(values, dtype=np.float64).mean()) - mean * mean
    error = math.sqrt(variance / (n - 1)) if variance > 0 and n > _FEW_FOR_ERRORS else 0.0
    return Estimate(mean, error)


def _covariance(a: Floats, b: Floats) -> float:
    """Covariance of the means of two values of the same tokens."""
    if len(a) < _FEW_FOR_ERRORS:
        return 0.0
    mean = float(np.multiply(a, b, dtype=np.float64).mean())
    product = float(a.mean(dtype=np.float64)) * float(b.mean(dtype=np.float64))
    return (mean - product) / (len(a) - 1)


def _exp(log: Estimate) -> Estimate:
    value = math.exp(log.value) if log.value < 700 else math.inf
    return Estimate(value, value * log.error)


def _error_of_difference(a: Estimate, b: Estimate, covariance: float) -> float:
    # rounding may make the difference of two equal values negative
    return math.sqrt(max(a.error * a.error + b.error * b.error - 2 * covariance, 0.0))


def _percentiles(values: Floats) -> tuple[float, ...]:
    with np.errstate(invalid="ignore"):  # both values may be infinite
        return tuple(float(value) for value in np.quantile(values, SHARES))
