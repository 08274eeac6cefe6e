"""The figures of a tensor: of its weights alone, and of their errors against a reference.

Invariant: elements that are not finite (for errors, on either side) are counted, and excluded from
everything else. Sums are float64, over chunks of float32 that fit into the processor's cache.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from operator import itemgetter
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from llamacpp_instr.lab.weights.blocks import Floats
from llamacpp_instr.model.file import Weight
from llamacpp_instr.model.types import GgmlType

Doubles: TypeAlias = "NDArray[np.float64]"

CHUNK = 1 << 17
"""elements processed at once: few enough to stay in the processor's cache with all intermediate
arrays, many enough that the cost of calling numpy does not matter"""

UNQUANTIZED_BLOCK = 256
"""elements of a block for a type without blocks: as many as a super-block of the K types"""

SAMPLE = 1 << 18
"""elements up to which percentiles are exact"""

# BLAS starts threads for longer vectors
_ROW, _MATRIX = 1 << 12, 1 << 13
# Squares below 1e-38 lose digits, which does not matter in a chunk with at least this sum
_TINY = 1e-25
_PERCENTILES = (50, 90, 99, 99.9)


@dataclass(frozen=True)
class Sums:
    """The sums that errors are computed from, over the elements that are finite on both sides."""

    n: int = 0
    x2: float = 0.0
    """Σx², x the reference"""
    y2: float = 0.0
    """Σy², y the candidate"""
    e2: float = 0.0
    """Σ(x-y)²"""

    def __add__(self, other: Sums) -> Sums:
        return Sums(self.n + other.n, self.x2 + other.x2, self.y2 + other.y2, self.e2 + other.e2)

    @property
    def rmse(self) -> float:
        """√(Σ(x-y)²/n); NaN if n is 0."""
        return math.sqrt(self.e2 / self.n) if self.n else math.nan

    @property
    def sqnr_db(self) -> float:
        """Signal to quantization noise in dB, 10·log10(Σx²/Σ(x-y)²): infinite if equal, minus
        infinity if only the reference is all zeros, NaN if n is 0."""
        if not self.n:
            return math.nan
        if not self.e2:
            return math.inf
        # two logarithms, because the quotient of the sums may overflow
        return 10 * (math.log10(self.x2) - math.log10(self.e2)) if self.x2 else -math.inf

    @property
    def cosine(self) -> float:
        """Σxy/(√Σx²·√Σy²): 1 if equal, 0 if only one side is all zeros, NaN if n is 0.

        Computed from its distance to 1, (Σ(x-y)² - (√Σx² - √Σy²)²) / (2·√Σx²·√Σy²), which stays
        accurate if both are nearly equal.
        """
        if not self.n:
            return math.nan
        if not self.e2:
            return 1.0
        x, y = math.sqrt(self.x2), math.sqrt(self.y2)
        if not x or not y:
            return 0.0
        distance = max(self.e2 - (x - y) ** 2, 0.0) / x / y / 2
        return max(1 - distance, -1.0)


@dataclass(frozen=True)
class WeightError:
    """The error of a tensor of the candidate against the reference."""

    name: str
    layer: int
    """-1 if it belongs to no layer"""
    role: str
    reference_type: GgmlType
    type: GgmlType
    """the candidate's"""
    n_elements: int
    n_bytes: int
    """of the candidate"""
    sums: Sums = Sums()
    max_error: float = math.nan
    """largest |x-y|"""
    p50: float = math.nan
    """percentile of |x-y|, interpolated as numpy does; exact up to `SAMPLE` elements, otherwise of
    an evenly spaced sample, see `sample_stride`"""
    p90: float = math.nan
    p99: float = math.nan
    p999: float = math.nan
    worst_block: int = 0
    """index in the tensor of the block with the largest RMSE, the first of equal ones. Blocks are
    the candidate's, or of `UNQUANTIZED_BLOCK` elements if its type has none"""
    worst_block_rmse: float = math.nan
    non_finite: int = 0
    """elements that are NaN or infinite on either side; excluded"""
    skipped: str = ""
    """why all numbers are NaN; empty if they were computed"""

    @property
    def rmse(self) -> float:
        return self.sums.rmse

    @property
    def sqnr_db(self) -> float:
        return self.sums.sqnr_db

    @property
    def cosine(self) -> float:
        return self.sums.cosine


class PieceError:
    """The errors of consecutive elements of a tensor. `first` is the index of the first one, a
    multiple of every type's `block`. Every `stride`-th element is kept for the percentiles."""

    def __init__(self, block: int, stride: int, first: int = 0) -> None:
        self._block, self._stride, self._next = block, stride, first
        self._ones = np.ones(block, np.float32)
        self.sums = Sums()
        self.max_error = 0.0
        self.worst = (0.0, 0)
        """the largest mean square of a block, and that block"""
        self.non_finite = 0
        self.samples: list[Floats] = []
        """|x-y| of the sampled elements"""

    def add(self, room: Floats, n: int) -> None:
        """Add the next `n` elements: of the reference in the first, of the candidate in the second
        row of `room`, (3, CHUNK), which is overwritten. Only the last call may have fewer."""
        # pads to whole matrices with zeros, which add nothing to a sum
        size = -(-n // _MATRIX) * _MATRIX
        numbers, errors = room[:2, :size], room[2, :size]
        numbers[:, n:] = 0
        x, y = numbers
        # values that are not finite show up in the sums
        with np.errstate(all="ignore"):
            rows = np.matmul(numbers.reshape(2, -1, 1, _ROW), numbers.reshape(2, -1, _ROW, 1))
            x2, y2 = map(float, rows.sum(axis=(1, 2, 3), dtype=np.float64))
            np.subtract(x, y, out=errors)
            sample = np.abs(errors[self._sampled(n)])
            np.multiply(errors, errors, out=errors)
            matrices = errors.reshape(-1, _MATRIX // self._block, self._block)
            blocks = np.matmul(matrices, self._ones).ravel()[: -(-n // self._block)]
            e2 = float(blocks.sum(dtype=np.float64))
            if not _fits(x2, x) or not _fits(y2, y) or not _fits(e2, x != y if not e2 else errors):
                self._add_carefully(x[:n], y[:n])
                return
        # sqrt(x*x) is |x| exactly
        self.max_error = max(self.max_error, float(np.sqrt(errors.max())))
        mean_squares = blocks / np.float32(self._block)
        if rest := n % self._block:
            mean_squares[-1] = blocks[-1] / np.float32(rest)
        self._add(n, Sums(n, x2, y2, e2), mean_squares, sample)

    def _sampled(self, n: int) -> slice:
        return slice(-self._next % self._stride, n, self._stride)

    def _add_carefully(self, x: Floats, y: Floats) -> None:
        """Like `add`, in float64, for numbers whose squares overflow float32 or are not finite."""
        n = len(x)
        finite = np.isfinite(x) & np.isfinite(y)
        wide_x = np.where(finite, x, 0).astype(np.float64)
        wide_y = np.where(finite, y, 0).astype(np.float64)
        errors = np.abs(wide_x - wide_y)
        starts = np.arange(0, n, self._block)
        counts = np.add.reduceat(finite, starts, dtype=np.int64)
        blocks = np.add.reduceat(errors**2, starts)
        n_finite = int(counts.sum())
        self.non_finite += n - n_finite
        self.max_error = max(self.max_error, float(errors.max()))
        x2, y2, e2 = float(wide_x @ wide_x), float(wide_y @ wide_y), float(blocks.sum())
        # the difference of two finite floats may overflow
        largest = np.finfo(np.float32).max
        at = self._sampled(n)
        sample = np.minimum(errors[at][finite[at]], largest).astype(np.float32)
        self._add(n, Sums(n_finite, x2, y2, e2), blocks / np.maximum(counts, 1), sample)

    def _add(self, n: int, sums: Sums, mean_squares: NDArray[np.floating], sample: Floats) -> None:
        worst = int(mean_squares.argmax())
        if mean_squares[worst] > self.worst[0]:
            self.worst = (float(mean_squares[worst]), self._next // self._block + worst)
        self.sums += sums
        self.samples.append(sample)
        self._next += n


def join_pieces(known: WeightError, pieces: Sequence[PieceError]) -> WeightError:
    """`known` with the numbers of all pieces, in order; they are NaN if nothing was compared."""
    sums = sum((piece.sums for piece in pieces), Sums())
    known = replace(known, sums=sums, non_finite=sum(piece.non_finite for piece in pieces))
    if not sums.n:
        return known
    worst_rmse, worst_block = max(
        ((math.sqrt(piece.worst[0]), piece.worst[1]) for piece in pieces), key=itemgetter(0)
    )
    sample = np.concatenate([of for piece in pieces for of in piece.samples])
    p50, p90, p99, p999 = compute_percentiles(sample)
    return replace(
        known,
        max_error=max(piece.max_error for piece in pieces),
        worst_block=worst_block,
        worst_block_rmse=worst_rmse,
        p50=p50,
        p90=p90,
        p99=p99,
        p999=p999,
    )


def block_of(type_: GgmlType) -> int:
    """Elements of a block for `worst_block`: the type's block, or `UNQUANTIZED_BLOCK`."""
    return type_.block if type_.is_quantized else UNQUANTIZED_BLOCK


def compute_percentiles(
    values: Floats, percents: Sequence[float] = _PERCENTILES
) -> tuple[float, ...]:
    """The percentiles, interpolated as numpy does; NaN for an empty array."""
    if not values.size:
        return (math.nan,) * len(percents)
    return tuple(np.percentile(values.astype(np.float64), percents).tolist())


def sample_stride(n_elements: int, row: int) -> int:
    """The stride of the elements sampled for the percentiles: 1 up to `SAMPLE` elements.

    The stride is coprime to the row length, so that every column is sampled. With m samples, the
    rank of percentile p has the standard error √(p(1-p)/m). For example, a tensor of 4096 by 4096
    has 258,112 samples, and its p99.9 lies between p99.87 and p99.93 (five standard errors).
    """
    stride = -(-n_elements // SAMPLE)
    while stride > 1 and math.gcd(stride, row) > 1:
        stride += 1
    return max(stride, 1)


def _fits(total: float, values: NDArray[np.generic]) -> bool:
    """Whether float32 was accurate enough for `total`, a sum of squares of `values`."""
    return _TINY < total < math.inf or (total < _TINY and not values.any())


PERCENTS = (0.1, 1, 50, 99, 99.9)
BINS = 65
"""of a histogram; an odd number, so that zero is inside of a bin"""
WORST = 10
"""outlier channels that are kept for each side of a tensor"""
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
        """The moments of both: Pébay, "Formulas for robust, one-pass parallel computation of
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
    Hoaglin, "How to Detect and Handle Outliers" (1993), who recommend this threshold. There are
    none if more than half of the norms are equal, because the MAD is then 0"""
    worst: list[Channel]
    """at most `WORST` outliers, the largest first"""


@dataclass(frozen=True)
class Histogram:
    """How many of the elements that were sampled are in each of `BINS` bins of equal width between
    -`limit` and `limit`, the largest absolute value of a sampled element."""

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
    """largest |x|"""
    percentiles: tuple[float, ...]
    """of x at `PERCENTS`, interpolated as numpy does; exact up to `SAMPLE` elements, else of
    an evenly spaced sample, see `sample_stride`"""
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
    moments = sum((piece.moments for piece in pieces), Moments())
    sample = np.concatenate([np.empty(0, np.float32), *(of for p in pieces for of in p.sample)])
    rows = np.concatenate([np.empty(0), *(of for piece in pieces for of in piece.rows)])
    columns = np.sum([piece.columns for piece in pieces], axis=0)
    return WeightStats(
        weight=weight,
        moments=moments,
        n_zero=sum(piece.n_zero for piece in pieces),
        non_finite=sum(piece.non_finite for piece in pieces),
        largest=max((piece.largest for piece in pieces), default=0.0) if moments.n else math.nan,
        percentiles=compute_percentiles(sample, PERCENTS),
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
