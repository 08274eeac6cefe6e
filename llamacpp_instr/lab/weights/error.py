"""Measures the error of a tensor against a reference.

Invariant: elements that are not finite on either side are counted, and excluded from everything
else. Sums are float64, over pieces of float32 that fit into the processor's cache.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from llamacpp_instr.model.types import GgmlType

Floats = npt.NDArray[np.float32]

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
    reference_bytes: int
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


@dataclass(frozen=True)
class PieceError:
    """The errors of consecutive elements of a tensor."""

    sums: Sums
    max_error: float
    worst_block: int
    worst_block_rmse: float
    non_finite: int
    sample: Floats
    """|x-y| of every `sample_stride`-th element"""


class ErrorSum:
    """Accumulates the errors of consecutive elements. `first` is the index of the first one, a
    multiple of every type's block. Every `stride`-th element is kept for the percentiles."""

    def __init__(self, block: int, stride: int, first: int = 0) -> None:
        self._block, self._stride, self._first = block, stride, first
        self._numbers = np.empty((2, CHUNK), np.float32)
        self.x, self.y = self._numbers
        """buffers for the next elements of the reference and of the candidate"""
        self._errors = np.empty(CHUNK, np.float32)
        self._ones = np.ones(block, np.float32)
        self._done = self._non_finite = 0
        self._sums = Sums()
        self._max_error = 0.0
        self._worst = (-1.0, 0)
        self._sample: list[Floats] = []

    def add(self, n: int) -> None:
        """Add the first `n` elements of `x` and `y`. Only the last call may have fewer than all."""
        # pads to whole matrices with zeros, which add nothing to a sum
        size = -(-n // _MATRIX) * _MATRIX
        numbers, errors = self._numbers[:, :size], self._errors[:size]
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
                self._add_carefully(n)
                return
        # sqrt(x*x) is |x| exactly
        self._max_error = max(self._max_error, float(np.sqrt(errors.max())))
        mean_squares = blocks / np.float32(self._block)
        if rest := n % self._block:
            mean_squares[-1] = blocks[-1] / np.float32(rest)
        self._add(n, Sums(n, x2, y2, e2), mean_squares, sample)

    def _sampled(self, n: int) -> slice:
        return slice(-(self._first + self._done) % self._stride, n, self._stride)

    def _add_carefully(self, n: int) -> None:
        """Like `add`, in float64, for numbers whose squares overflow float32 or are not finite."""
        x, y = self.x[:n], self.y[:n]
        finite = np.isfinite(x) & np.isfinite(y)
        wide_x = np.where(finite, x, 0).astype(np.float64)
        wide_y = np.where(finite, y, 0).astype(np.float64)
        errors = np.abs(wide_x - wide_y)
        starts = np.arange(0, n, self._block)
        counts = np.add.reduceat(finite, starts, dtype=np.int64)
        blocks = np.add.reduceat(errors**2, starts)
        n_finite = int(counts.sum())
        self._non_finite += n - n_finite
        self._max_error = max(self._max_error, float(errors.max()))
        x2, y2, e2 = float(wide_x @ wide_x), float(wide_y @ wide_y), float(blocks.sum())
        # the difference of two finite floats may overflow
        largest = np.finfo(np.float32).max
        at = self._sampled(n)
        sample = np.minimum(errors[at][finite[at]], largest).astype(np.float32)
        self._add(n, Sums(n_finite, x2, y2, e2), blocks / np.maximum(counts, 1), sample)

    def _add(
        self, n: int, sums: Sums, mean_squares: npt.NDArray[np.floating], sample: Floats
    ) -> None:
        worst = int(mean_squares.argmax())
        if mean_squares[worst] > self._worst[0]:
            number = (self._first + self._done) // self._block + worst
            self._worst = (float(mean_squares[worst]), number)
        self._sums += sums
        self._sample.append(sample)
        self._done += n

    def finish(self) -> PieceError:
        """The errors of everything added."""
        mean_square, block = self._worst
        return PieceError(
            self._sums,
            self._max_error,
            block,
            math.sqrt(max(mean_square, 0.0)),
            self._non_finite,
            np.concatenate(self._sample) if self._sample else np.empty(0, np.float32),
        )


def join_pieces(known: WeightError, pieces: Sequence[PieceError]) -> WeightError:
    """`known` with the numbers of all pieces, in order; they are NaN if nothing was compared."""
    sums = functools.reduce(Sums.__add__, (piece.sums for piece in pieces), Sums())
    known = replace(known, sums=sums, non_finite=sum(piece.non_finite for piece in pieces))
    if not sums.n:
        return known
    worst = max(pieces, key=lambda piece: piece.worst_block_rmse)
    p50, p90, p99, p999 = compute_percentiles(np.concatenate([of.sample for of in pieces]))
    return replace(
        known,
        max_error=max(piece.max_error for piece in pieces),
        worst_block=worst.worst_block,
        worst_block_rmse=worst.worst_block_rmse,
        p50=p50,
        p90=p90,
        p99=p99,
        p999=p999,
    )


def block_of(type_: GgmlType) -> int:
    """Elements of a block for `worst_block`: the type's block, or `UNQUANTIZED_BLOCK`."""
    return type_.block if type_.is_quantized else UNQUANTIZED_BLOCK


def compute_percentiles(values: Floats) -> tuple[float, ...]:
    """The 50th, 90th, 99th and 99.9th percentile; NaN for an empty array."""
    if not values.size:
        return (math.nan,) * len(_PERCENTILES)
    return tuple(np.percentile(values.astype(np.float64), _PERCENTILES).tolist())


def sample_stride(n_elements: int, row: int) -> int:
    """Every how many elements one is sampled for the percentiles: 1 up to `SAMPLE` elements.

    The stride is coprime to the row length, so that every column is sampled. With m samples, the
    rank of percentile p has the standard error √(p(1-p)/m). For example, a tensor of 4096 by 4096
    has 258,112 samples, and its p99.9 lies between p99.87 and p99.93 (five standard errors).
    """
    stride = -(-n_elements // SAMPLE)
    while stride > 1 and math.gcd(stride, row) > 1:
        stride += 1
    return max(stride, 1)


def _fits(total: float, values: npt.NDArray[np.generic]) -> bool:
    """Whether float32 was accurate enough for `total`, a sum of squares of `values`."""
    return _TINY < total < math.inf or (total < _TINY and not values.any())
