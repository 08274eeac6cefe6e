"""Perplexity of models and how far their next-token probabilities are from a reference's.

Invariant: what is kept is a few bytes a scored token and model, never logits; every figure is made
as llama-perplexity makes it, but from logits that were not rounded to 16 bits. Of each token: the
negative log likelihood, the KL divergence in nats, and Δp, the change of its own probability.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeAlias, TypeVar

from llamacpp_instr.errors import InstrError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Floats: TypeAlias = NDArray[np.float32]
    Doubles: TypeAlias = NDArray[np.float64]
    Integers: TypeAlias = NDArray[np.intp]

T = TypeVar("T", bound="np.generic")

SHARES = (0.0, 0.001, 0.01, 0.05, 0.1, 0.25, 0.5, 0.75, 0.9, 0.95, 0.99, 0.999, 1.0)
"""Shares of the tokens at which `Divergence` has percentiles: 0 is the smallest, 1 the largest."""

FEW_TOKENS = 100
"""Scored tokens below which percentiles mean nothing (llama-perplexity prints none)."""

# values of a block of rows: all arrays over it stay in the processor's cache
_BLOCK = 2**17
_FEW_FOR_ERRORS = 10


@dataclass(frozen=True)
class Estimate:
    """A mean over the tokens, or what follows from means, and its standard error."""

    value: float
    error: float


@dataclass(frozen=True)
class Divergence:
    """A candidate against its reference."""

    perplexity: Estimate
    log_ratio: Estimate
    """ln of candidate's perplexity / reference's"""
    ratio: Estimate
    difference: Estimate
    """of the perplexities"""
    correlation: float
    """of ln of the perplexities; NaN where one of them does not vary"""
    kl: Estimate
    """in nats"""
    kl_percentiles: tuple[float, ...]
    """at `SHARES`"""
    delta_p: Estimate
    """change of the probability of the text's own token, from -1 to 1"""
    delta_p_percentiles: tuple[float, ...]
    """at `SHARES`"""
    delta_p_rms: Estimate
    same_top: Estimate
    """share of the tokens for which both find the same next token the most probable"""


@dataclass(frozen=True)
class Outputs:
    """What a reference and its candidates made of one text."""

    perplexity: Estimate
    """the reference's"""
    divergences: list[Divergence]
    """of the candidates, in order"""
    n_scored: int
    """tokens that the figures are of: of each chunk the second half but its last"""
    n_chunks: int
    ctx: int
    """tokens of a chunk"""
    seed: int | None
    """of the text that the reference wrote itself; None where a text was given"""


@dataclass
class Scores:
    """What every scored token says of a reference and of its candidates."""

    names: Sequence[str]
    """the reference's first; for what is wrong with their logits"""
    _nll: list[list[Floats]] = field(default_factory=list)
    _kl: list[list[Floats]] = field(default_factory=list)
    _same_top: list[list[NDArray[np.bool_]]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._nll = [[] for _ in self.names]
        self._kl = [[] for _ in self.names[1:]]
        self._same_top = [[] for _ in self.names[1:]]

    def add(self, logits: Sequence[Floats], next_tokens: Integers) -> None:
        """Take in some positions of a text: of each model, in the order of `names`, an array
        (positions, vocabulary) of its logits, and the tokens that come next in the text.

        A logit may be -inf: that token is impossible. Raises InstrError for NaN, +inf, or a row
        without any possible token.
        """
        n_vocab = logits[0].shape[1]
        step = max(1, _BLOCK // n_vocab)
        for start in range(0, len(next_tokens), step):
            rows = slice(start, start + step)
            blocks = (_Block(*it) for it in zip(self.names, (x[rows] for x in logits), strict=True))
            reference = next(blocks)
            self._nll[0].append(reference.nll(next_tokens[rows]))
            for i, candidate in enumerate(blocks):
                self._nll[i + 1].append(candidate.nll(next_tokens[rows]))
                self._kl[i].append(reference.kl_divergence(candidate))
                self._same_top[i].append(reference.top == candidate.top)

    @property
    def n_tokens(self) -> int:
        """Scored so far."""
        return sum(map(len, self._nll[0]))

    def perplexity(self) -> Estimate:
        """The reference's."""
        return compute_perplexity(_joined(self._nll[0]))

    def divergences(self) -> list[Divergence]:
        """Of each candidate, in order."""
        reference = _joined(self._nll[0])
        return [
            compute_divergence(reference, _joined(nll), _joined(kl), _joined(same))
            for nll, kl, same in zip(self._nll[1:], self._kl, self._same_top, strict=True)
        ]


def compute_perplexity(nll: Floats) -> Estimate:
    """The perplexity of tokens with these negative log likelihoods: exp of their mean."""
    return _exp(_mean(nll))


def compute_divergence(
    reference_nll: Floats, nll: Floats, kl: Floats, same_top: NDArray[np.bool_]
) -> Divergence:
    """What one value for each scored token comes to.

    Formulas of errors: https://github.com/ggml-org/llama.cpp/blob/master/tools/perplexity/README.md
    """
    import numpy as np

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
        log_ratio=log_ratio,
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


class _Block:
    """Rows of one model's logits on their way to probabilities."""

    def __init__(self, name: str, logits: Floats) -> None:
        import numpy as np

        self.top: Integers = logits.argmax(axis=1)
        largest = np.take_along_axis(logits, self.top[:, None], axis=1)
        # a NaN counts as the largest
        if not np.isfinite(largest).all():
            raise InstrError(
                f"{name}: the model computes logits that are not finite numbers; nothing can be "
                "said of its text (`instr run --stats` finds the tensor where that begins)"
            )
        with np.errstate(over="ignore"):
            self.shifted = logits - largest
        self.weights = np.exp(self.shifted)
        self.total = self.weights.sum(axis=1)
        self.log_total: Doubles = np.log(self.total, dtype=np.float64)

    def nll(self, tokens: Integers) -> Floats:
        """The negative log likelihood of a token in each row."""
        import numpy as np

        own = np.take_along_axis(self.shifted, tokens[:, None], axis=1)[:, 0]
        return (self.log_total - own).astype(np.float32)

    def kl_divergence(self, other: _Block) -> Floats:
        """Of each row: sum of p ln(p / q), p ours and q the other's."""
        import numpy as np

        with np.errstate(invalid="ignore"):
            distance = self.shifted - other.shifted
        kl = self._expected(distance)
        if not np.isfinite(kl).all():
            # what we hold for impossible does not count, whatever the other says
            kl = self._expected(np.where(self.weights > 0, distance, np.float32(0)))
        return (kl - self.log_total + other.log_total).astype(np.float32)

    def _expected(self, values: Floats) -> Floats:
        import numpy as np

        # ij,ij->i without an array of the products
        return np.asarray(np.einsum("ij,ij->i", self.weights, values) / self.total)


def _joined(parts: Sequence[NDArray[T]]) -> NDArray[T]:
    import numpy as np

    return np.concatenate(parts)


def _mean(values: Floats | Doubles) -> Estimate:
    import numpy as np

    n = len(values)
    mean = float(values.mean(dtype=np.float64))
    variance = float(np.square(values, dtype=np.float64).mean()) - mean * mean
    error = math.sqrt(variance / (n - 1)) if variance > 0 and n > _FEW_FOR_ERRORS else 0.0
    return Estimate(mean, error)


def _covariance(a: Floats, b: Floats) -> float:
    """Of the means of two values of the same tokens."""
    import numpy as np

    if len(a) < _FEW_FOR_ERRORS:
        return 0.0
    mean = float(np.multiply(a, b, dtype=np.float64).mean())
    product = float(a.mean(dtype=np.float64)) * float(b.mean(dtype=np.float64))
    return (mean - product) / (len(a) - 1)


def _exp(log: Estimate) -> Estimate:
    value = math.exp(log.value) if log.value < 700 else math.inf
    return Estimate(value, value * log.error)


def _error_of_difference(a: Estimate, b: Estimate, covariance: float) -> float:
    # rounding may make the difference of equals negative
    return math.sqrt(max(a.error * a.error + b.error * b.error - 2 * covariance, 0.0))


def _percentiles(values: Floats) -> tuple[float, ...]:
    import numpy as np

    with np.errstate(invalid="ignore"):  # between two infinite values
        return tuple(float(value) for value in np.quantile(values, SHARES))
