"""The distribution of the weights of a tensor, the norms of its rows and columns, and which of them
are unusually large.

Invariant: elements that are not finite are counted, and excluded from everything else. Sums are
float64, over chunks that fit into the processor's cache.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from llamacpp_instr.lab.weights.blocks import Floats
from llamacpp_instr.model.file import Weight

Doubles: TypeAlias = "NDArray[np.float64]"

PERCENTS = (0.1, 1, 50, 99, 99.9)
BINS = 65
"""of a histogram; an odd number, so that zero is inside of a bin"""
WORST = 10
"""outlier channels that are kept of each side of a tensor"""
THRESHOLD = 3.5
_NORMAL = 0.6745
"""the median absolute deviation of a normal distribution, in standard deviations"""


@dataclass(frozen=True)
class Moments:
    """The number of elements, their mean, and sums of powers of the distances from it."""

    n: int = 0
    mean: float = 0.0
    m2: float = 0.0
    """Σ(x-mean)²"""
    m3: float = 0.0
    m4: float = 0.0

    def __add__(self, other: Moments) -> Moments:
        """Of both together: Pébay, "Formulas for robust, one-pass parallel computation of
        covariances and arbitrary-order statistical moments", SAND2008-6212, section 2.1."""
        if not self.n or not other.n:
            return self if self.n else other
        a, b, n = self.n, other.n, self.n + other.n
        d = other.mean - self.mean
        return Moments(
            n,
            self.mean + d * b / n,
            self.m2 + other.m2 + d**2 * a * b / n,
            self.m3 + other.m3 + d**3 * a * b * (a - b) / n**2
            + 3 * d * (a * other.m2 - b * self.m2) / n,
            self.m4 + other.m4 + d**4 * a * b * (a * a - a * b + b * b) / n**3
            + 6 * d**2 * (a * a * other.m2 + b * b * self.m2) / n**2
            + 4 * d * (a * other.m3 - b * self.m3) / n,
        )  # fmt: skip

    @property
    def std(self) -> float:
        """√(Σ(x-mean)²/n); NaN if n is 0."""
        return math.sqrt(self.m2 / self.n) if self.n else math.nan

    @property
    def norm(self) -> float:
        """√Σx², the Frobenius norm."""
        return math.sqrt(self.m2 + self.n * self.mean**2)

    @property
    def rms(self) -> float:
        """√(Σx²/n); NaN if n is 0."""
        return self.norm / math.sqrt(self.n) if self.n else math.nan

    @property
    def kurtosis(self) -> float:
        """The excess kurtosis n·Σ(x-mean)⁴/(Σ(x-mean)²)² - 3, which grows with the tails: 0 for a
        normal distribution, 3 for Laplace's; NaN if all elements are equal."""
        return self.n * self.m4 / self.m2**2 - 3 if self.m2 else math.nan


@dataclass(frozen=True)
class Channel:
    """A row or a column of a tensor that is an outlier."""

    index: int
    norm: float
    times_median: float
    score: float
    """0.6745·(norm - median)/MAD"""


@dataclass(frozen=True)
class Channels:
    """The Euclidean norms of all rows, or of all columns, of a tensor."""

    n: int
    median: float
    largest: float
    n_outliers: int
    """those with a score above `THRESHOLD`. The score is the modified z-score of Iglewicz and
    Hoaglin, "How to Detect and Handle Outliers" (1993), which recommend this threshold. There are
    none if more than half of the norms are equal, because the MAD is then 0"""
    worst: list[Channel]
    """at most `WORST` outliers, the largest first"""


@dataclass(frozen=True)
class Histogram:
    """How many of the elements that were sampled are in each of `BINS` bins of equal width between
    -`limit` and `limit`, the largest size of a sampled element."""

    limit: float
    counts: list[int]


@dataclass(frozen=True)
class WeightStats:
    """The figures of a tensor; NaN if it has no finite element."""

    weight: Weight
    moments: Moments
    n_zero: int
    non_finite: int
    """elements that are NaN or infinite; excluded"""
    largest: float
    """largest size |x|"""
    percentiles: tuple[float, ...]
    """of x at `PERCENTS`, interpolated as numpy does; exact up to `error.SAMPLE` elements, else of
    an evenly spaced sample, see `error.sample_stride`"""
    histogram: Histogram
    rows: Channels | None
    """in a product with an activation the outputs; None for a tensor with a single row"""
    columns: Channels | None
    """the inputs, over all matrices of the tensor"""


class PieceStats:
    """The figures of consecutive elements of a tensor, from `first` on. They are whole rows of
    `row` elements, or any number if `row` is 0: then norms of rows and columns are not computed."""

    def __init__(self, first: int, stride: int, row: int) -> None:
        self._at, self._stride, self._row = first, stride, row
        self.moments = Moments()
        self.n_zero = self.non_finite = 0
        self.largest = 0.0
        self.sample: list[Floats] = []
        """every `stride`-th element, if it is finite"""
        self.rows: list[Doubles] = []
        """Σx² of each row"""
        self.columns = np.zeros(row)
        """Σx² of each column, in these rows"""

    def add(self, values: Floats) -> None:
        """Add the next elements."""
        x = values.astype(np.float64)
        with np.errstate(invalid="ignore"):
            mean = x.mean()
        sampled = values[-self._at % self._stride :: self._stride]
        self._at += len(values)
        finite = x
        if not math.isfinite(mean):
            known = np.isfinite(x)
            finite, x = x[known], np.where(known, x, 0)
            sampled = sampled[np.isfinite(sampled)]
            self.non_finite += len(x) - len(finite)
            mean = finite.mean() if len(finite) else 0.0
        self.n_zero += len(finite) - int(np.count_nonzero(finite))
        if len(finite):
            self.largest = max(self.largest, float(finite.max()), -float(finite.min()))
            self.moments += _moments(finite, float(mean))
        self.sample.append(sampled.copy())
        if self._row:
            squares = np.square(x, out=x).reshape(-1, self._row)
            self.rows.append(squares.sum(axis=1))
            self.columns += squares.sum(axis=0)


def _moments(x: Doubles, mean: float) -> Moments:
    d = x - mean
    squares = d * d
    m3 = float(np.einsum("i,i->", squares, d))
    m4 = float(np.einsum("i,i->", squares, squares))
    return Moments(len(x), mean, float(squares.sum()), m3, m4)


def join_stats(weight: Weight, pieces: Sequence[PieceStats]) -> WeightStats:
    """A tensor's figures from its pieces, in order."""
    moments = functools.reduce(Moments.__add__, (piece.moments for piece in pieces), Moments())
    sample = np.concatenate([np.empty(0, np.float32), *(of for p in pieces for of in p.sample)])
    rows = np.concatenate([np.empty(0), *(of for piece in pieces for of in piece.rows)])
    columns = np.sum([piece.columns for piece in pieces], axis=0)
    known = bool(len(sample))
    percentiles = np.percentile(sample.astype(np.float64), PERCENTS) if known else [math.nan] * 5
    return WeightStats(
        weight=weight,
        moments=moments,
        n_zero=sum(piece.n_zero for piece in pieces),
        non_finite=sum(piece.non_finite for piece in pieces),
        largest=max((piece.largest for piece in pieces), default=0.0) if moments.n else math.nan,
        percentiles=tuple(map(float, percentiles)),
        histogram=_histogram(sample),
        rows=_channels(rows) if len(rows) else None,
        columns=_channels(columns) if len(rows) else None,
    )


def _histogram(sample: Floats) -> Histogram:
    limit = float(np.abs(sample).max()) if len(sample) else 0.0
    # a range of zero width has no bins
    counts, _ = np.histogram(sample.astype(np.float64), BINS, (-(limit or 1.0), limit or 1.0))
    return Histogram(limit, counts.tolist())


def _channels(squares: Doubles) -> Channels:
    norms = np.sqrt(squares)
    median = float(np.median(norms))
    deviation = float(np.median(np.abs(norms - median)))
    scores = _NORMAL * (norms - median) / deviation if deviation else np.zeros(len(norms))
    order = np.argsort(-scores, kind="stable")[:WORST]
    worst = [
        Channel(int(i), float(norms[i]), float(norms[i]) / median, float(scores[i]))
        for i in order
        if scores[i] > THRESHOLD
    ]
    n_outliers = int((scores > THRESHOLD).sum())
    return Channels(len(norms), median, float(norms.max()), n_outliers, worst)
