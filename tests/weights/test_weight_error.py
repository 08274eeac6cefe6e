"""The numerics of an error, against numpy in float64 and cases by hand."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from llamacpp_instr.lab.weights.figures import (
    CHUNK,
    SAMPLE,
    PieceError,
    Sums,
    WeightError,
    block_of,
    compute_percentiles,
    join_pieces,
    sample_stride,
)
from llamacpp_instr.lab.weights.measure import PIECE
from llamacpp_instr.model.types import TYPES

Floats = npt.NDArray[np.float32]


KNOWN = WeightError("w", -1, "w", TYPES[0], TYPES[0], 0, 0)


def measured(x: Floats, y: Floats, block: int = 32, pieces: int = 1) -> WeightError:
    """The error of a tensor, computed in `pieces` of whole chunks."""
    stride = sample_stride(x.size, x.size)
    parts = []
    piece = -(-x.size // pieces // CHUNK) * CHUNK
    for start in range(0, x.size, piece):
        errors, room = PieceError(block, stride, start), np.empty((3, CHUNK), np.float32)
        for at in range(start, min(start + piece, x.size), CHUNK):
            n = min(CHUNK, x.size - at)
            room[0, :n], room[1, :n] = x[at : at + n], y[at : at + n]
            errors.add(room, n)
        parts.append(errors)
    return join_pieces(KNOWN, parts)


def percentiles(of: WeightError) -> tuple[float, ...]:
    return of.p50, of.p90, of.p99, of.p999


def assert_right(found: WeightError, x: Floats, y: Floats, block: int) -> None:
    """Equal to float64's results, to five digits."""
    finite = np.isfinite(x) & np.isfinite(y)
    a, b = x.astype(np.float64), y.astype(np.float64)
    with np.errstate(invalid="ignore"):
        error = np.where(finite, a - b, 0)
    a, b = a[finite], b[finite]
    assert found.non_finite == x.size - a.size
    assert found.sums.n == a.size
    assert found.sums.x2 == pytest.approx(a @ a, rel=1e-5)
    assert found.sums.y2 == pytest.approx(b @ b, rel=1e-5)
    assert found.sums.e2 == pytest.approx(error @ error, rel=1e-5)
    assert found.max_error == pytest.approx(np.abs(error).max(), rel=2e-7)
    begins = range(0, x.size, block)
    in_block = np.add.reduceat(finite.astype(int), begins)
    means = np.add.reduceat(error**2, begins) / np.maximum(in_block, 1)
    assert found.worst_block_rmse == pytest.approx(math.sqrt(max(means)), rel=1e-5)
    assert means[found.worst_block] == pytest.approx(max(means), rel=1e-5)
    wanted = np.percentile(np.abs(error[finite]), [50, 90, 99, 99.9])
    assert percentiles(found) == pytest.approx(list(wanted), rel=1e-5)


def noise(n: int, scale: float = 1.0) -> tuple[Floats, Floats]:
    random = np.random.default_rng(n)
    x = (random.normal(0, scale, n)).astype(np.float32)
    return x, (x + random.normal(0, scale / 50, n)).astype(np.float32)


def test_by_hand() -> None:
    # errors 3, 4, 0, 0 | 0, 1; blocks of four
    x = np.array([3, 0, 5, 1, 2, 1], np.float32)
    y = np.array([0, 4, 5, 1, 2, 2], np.float32)
    found = measured(x, y, block=4)
    assert found.sums == Sums(6, 40, 50, 26)
    assert (found.max_error, found.worst_block) == (4, 0)
    assert found.sums.rmse == math.sqrt(26 / 6)
    assert found.worst_block_rmse == math.sqrt(25 / 4)
    assert found.sums.sqnr_db == pytest.approx(10 * math.log10(40 / 26))
    assert found.sums.cosine == pytest.approx((25 + 1 + 4 + 2) / math.sqrt(40 * 50))
    assert percentiles(found)[0] == 0.5


def test_the_rest_of_a_row_is_a_block_of_its_size() -> None:
    x = np.zeros(300, np.float32)
    y = np.concatenate([np.full(256, 1), np.full(44, 2)]).astype(np.float32)
    found = measured(x, y, block=256)
    assert (found.worst_block, found.worst_block_rmse) == (1, 2)


@pytest.mark.parametrize("n", [1, 31, 32, 4096, 8193, CHUNK, CHUNK + 1, CHUNK + CHUNK // 2 + 77])
@pytest.mark.parametrize("block", [32, 256])
def test_any_length(n: int, block: int) -> None:
    x, y = noise(n)
    assert_right(measured(x, y, block), x, y, block)


@pytest.mark.parametrize("scale", [1e-38, 1e-30, 1e-20, 1e-10, 1e10, 1e20, 1e37])
def test_any_magnitude(scale: float) -> None:
    x, y = noise(CHUNK + 4096, scale)
    assert_right(measured(x, y), x, y, 32)


def test_tiny_errors_of_large_numbers() -> None:
    x = np.full(CHUNK, 1e-3, np.float32)
    y = x.copy()
    y[5] = np.nextafter(y[5], np.float32(1))
    assert_right(measured(x, y), x, y, 32)
    assert measured(x, y).sums.cosine == pytest.approx(1, abs=1e-12)


@settings(max_examples=40)
@given(
    values=st.integers(1, 400).flatmap(
        lambda n: arrays(np.float32, (2, n), elements=st.floats(width=32))
    ),
    block=st.sampled_from([32, 64, 256]),
)
@example(values=np.full((2, 3), np.nan, np.float32), block=32)
@example(values=np.array([[2e18], [0]], np.float32), block=64)  # 64 times its square overflows
def test_any_numbers_and_what_is_none(values: Floats, block: int) -> None:
    x, y = values
    found = measured(x, y, block)
    finite = np.isfinite(x) & np.isfinite(y)
    if finite.any():
        largest = np.abs(x[finite].astype(np.float64) - y[finite]).max()
        if largest < 1e38:
            assert_right(found, x, y, block)
        assert found.max_error == pytest.approx(largest, rel=2e-7)
    else:
        assert found.non_finite == x.size
        assert math.isnan(found.max_error)
        assert math.isnan(found.sums.rmse)
        assert math.isnan(found.sums.sqnr_db)
        assert math.isnan(found.sums.cosine)
        assert all(map(math.isnan, percentiles(found)))


def test_what_is_no_number_is_counted_and_left_out() -> None:
    x, y = noise(2 * CHUNK)
    y[100], y[CHUNK + 7], x[200] = np.nan, np.inf, -np.inf
    found = measured(x, y)
    assert found.non_finite == 3
    assert_right(found, x, y, 32)


def test_a_tensor_against_itself() -> None:
    x, _ = noise(CHUNK)
    found = measured(x, x.copy())
    assert (found.sums.rmse, found.max_error, found.worst_block_rmse) == (0, 0, 0)
    assert (found.sums.sqnr_db, found.sums.cosine) == (math.inf, 1)
    assert percentiles(found) == (0, 0, 0, 0)


def test_a_reference_of_zeros() -> None:
    zeros, ones = np.zeros(64, np.float32), np.ones(64, np.float32)
    assert measured(zeros, ones).sums.sqnr_db == -math.inf
    assert measured(zeros, ones).sums.cosine == 0
    assert measured(zeros, zeros).sums.sqnr_db == math.inf
    assert measured(ones, zeros).sums.sqnr_db == 0


def test_the_opposite_and_the_orthogonal() -> None:
    x = np.array([1, 0] * 16, np.float32)
    assert measured(x, -x).sums.cosine == pytest.approx(-1)
    assert measured(x, x[::-1].copy()).sums.cosine == pytest.approx(0, abs=1e-7)
    assert measured(x, 3 * x).sums.cosine == pytest.approx(1)


def test_runs_of_a_tensor_make_up_the_whole() -> None:
    x, y = noise(8 * CHUNK + 333)
    y[7 * CHUNK + 40] += 9
    whole, parts = measured(x, y), measured(x, y, pieces=4)
    assert parts.worst_block == whole.worst_block == (7 * CHUNK + 40) // 32
    assert parts.max_error == whole.max_error
    assert parts.sums.e2 == pytest.approx(whole.sums.e2)
    assert percentiles(parts) == percentiles(whole)


def test_no_runs_are_nothing() -> None:
    nothing = join_pieces(KNOWN, [])
    assert (nothing.sums, nothing.non_finite) == (Sums(), 0)
    assert math.isnan(nothing.max_error)


def test_percentiles_of_a_large_tensor_keep_their_ranks() -> None:
    row, rows = 4096, 600
    n = row * rows
    stride = sample_stride(n, row)
    assert n > SAMPLE
    random = np.random.default_rng(1)
    # some columns have larger errors: a stride that skipped them would not find them
    y = (random.normal(size=(rows, row)) * (1 + np.arange(row) % 16)).astype(np.float32).ravel()
    errors, room = PieceError(32, stride), np.empty((3, CHUNK), np.float32)
    for at in range(0, n, CHUNK):
        part = y[at : at + CHUNK]
        room[0], room[1, : part.size] = 0, part
        errors.add(room, part.size)
    sample = np.concatenate(errors.samples)
    assert sample.size == -(-n // stride)
    for p, found in zip((0.5, 0.9, 0.99, 0.999), compute_percentiles(sample), strict=True):
        rank = np.mean(np.abs(y) <= found)
        assert abs(rank - p) < 5 * math.sqrt(p * (1 - p) / sample.size)


@given(n=st.integers(1, 10**10), row=st.integers(1, 10**6))
def test_a_stride_meets_every_column(n: int, row: int) -> None:
    stride = sample_stride(n, row)
    assert math.gcd(stride, row) == 1
    assert n / stride <= SAMPLE
    assert stride == 1 or n > SAMPLE


def test_pieces_are_whole_chunks_and_chunks_whole_blocks_of_every_type() -> None:
    assert PIECE % CHUNK == 0
    assert all(CHUNK % block_of(type_) == 0 for type_ in TYPES.values())
