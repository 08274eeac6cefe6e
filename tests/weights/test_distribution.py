"""The figures of tensors and the numbers that are read: numpy's, scipy's and gguf-py's."""

from __future__ import annotations

import math
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats as scipy_stats

from llamacpp_instr.base.errors import UsageError
from llamacpp_instr.lab.weights import measure
from llamacpp_instr.lab.weights.figures import CHUNK, PERCENTS, Moments, PieceStats, WeightStats
from llamacpp_instr.lab.weights.measure import WeightReader, choose_weights
from llamacpp_instr.model.file import load_model_file
from llamacpp_instr.model.types import GgmlType
from tests.kit.block_models import random_rows, write_blocks
from tests.kit.sparse_models import write_with_more_rows
from tests.weights.test_dequantize import BOTH, GGUF, same

RANDOM = np.random.default_rng(7)


def stats_of(path: Path, values: np.ndarray, threads: int | None = None) -> WeightStats:
    write_blocks(path, {"t": ("F32", values)})
    model = load_model_file(path)
    (stats,) = WeightReader(model).measure(model.weights, threads)
    return stats


def check(stats: WeightStats, x: np.ndarray) -> None:
    flat = x.astype(np.float64).ravel()
    moments = stats.moments
    assert moments.n == flat.size
    assert moments.mean == pytest.approx(flat.mean(), rel=1e-9, abs=1e-12)
    assert moments.std == pytest.approx(flat.std(), rel=1e-9)
    assert moments.rms == pytest.approx(math.sqrt(np.mean(flat**2)), rel=1e-9)
    assert moments.norm == pytest.approx(np.linalg.norm(flat), rel=1e-9)
    assert moments.kurtosis == pytest.approx(scipy_stats.kurtosis(flat), rel=1e-7, abs=1e-9)
    assert stats.n_zero == (flat == 0).sum()
    assert stats.largest == np.abs(flat).max()


@pytest.mark.parametrize("shape", [(37, 64), (1, 640), (5, 3, 32)])
def test_figures_are_those_of_numpy_and_scipy(shape: tuple[int, ...], tmp_path: Path) -> None:
    x = RANDOM.standard_t(4, shape).astype(np.float32) + np.float32(0.3)
    x.ravel()[::7] = 0
    stats = stats_of(tmp_path / "m.gguf", x)
    check(stats, x)
    assert stats.percentiles == pytest.approx(np.percentile(x.astype(float), PERCENTS).tolist())
    limit = stats.histogram.limit
    bins = len(stats.histogram.counts)
    assert limit == np.abs(x).max()
    assert stats.histogram.counts == np.histogram(x, bins, (-limit, limit))[0].tolist()
    if x.ndim == 2 and len(x) == 1:
        assert stats.rows is stats.columns is None
        return
    matrix = x.reshape(-1, shape[-1]).astype(float)
    for channels, axis in ((stats.rows, 1), (stats.columns, 0)):
        norms = np.linalg.norm(matrix, axis=axis)
        assert channels is not None
        assert (channels.n, channels.largest) == (len(norms), pytest.approx(norms.max()))
        assert channels.median == pytest.approx(np.median(norms))


def test_the_result_does_not_depend_on_threads_or_pieces(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # three pieces, the last one incomplete
    monkeypatch.setattr(measure, "PIECE", 2 * CHUNK)
    x = RANDOM.normal(size=(5 * CHUNK // 4096 - 20, 4096)).astype(np.float32)
    one = stats_of(tmp_path / "m.gguf", x, threads=1)
    many = stats_of(tmp_path / "m.gguf", x, threads=5)
    assert (one.moments, one.percentiles, one.rows, one.columns) == (
        many.moments, many.percentiles, many.rows, many.columns,
    )  # fmt: skip
    check(one, x)
    assert one.rows is not None
    assert one.rows.largest == pytest.approx(np.linalg.norm(x.astype(float), axis=1).max())
    # of a sample: five standard errors of the rank
    p999 = np.percentile(x, [99.87, 99.93])
    assert p999[0] < one.percentiles[-1] < p999[1]


@settings(max_examples=50)
@given(
    st.lists(st.floats(-1e3, 1e3, width=32), min_size=1, max_size=40),
    st.lists(st.floats(-1e3, 1e3, width=32), min_size=1, max_size=40),
)
def test_moments_of_parts_are_those_of_the_whole(a: list[float], b: list[float]) -> None:
    def moments(values: list[float]) -> Moments:
        x = np.array(values, np.float64)
        d = x - x.mean()
        return Moments(len(x), x.mean(), *(float((d**k).sum()) for k in (2, 3, 4)))

    joined, whole = moments(a) + moments(b), moments(a + b)
    size = max(map(abs, a + b))
    assert joined.n == whole.n
    for power, name in ((1, "mean"), (2, "m2"), (3, "m3"), (4, "m4")):
        slack = 1e-11 * len(a + b) * size**power + 1e-300
        assert getattr(joined, name) == pytest.approx(getattr(whole, name), rel=1e-9, abs=slack)


def test_numbers_that_are_not_finite_are_counted_and_excluded(tmp_path: Path) -> None:
    x = RANDOM.normal(size=(8, 32)).astype(np.float32)
    x[2, 3], x[5, 0], x[5, 1] = np.nan, np.inf, -np.inf
    stats = stats_of(tmp_path / "m.gguf", x)
    assert stats.non_finite == 3
    check(stats, x[np.isfinite(x)])
    assert stats.rows is not None
    assert stats.rows.largest == pytest.approx(
        np.linalg.norm(np.where(np.isfinite(x), x, 0), axis=1).max()
    )
    nothing = stats_of(tmp_path / "n.gguf", np.full((2, 4), np.nan, np.float32))
    assert nothing.moments.n == 0
    assert math.isnan(nothing.largest)


def test_outliers_are_those_of_the_rule(tmp_path: Path) -> None:
    # 41 rows of norms 80, 81, ... 120: the median is 100 and the median deviation 10. A row is an
    # outlier above 100 + 3.5 / 0.6745 · 10 = 151.9
    x = np.zeros((43, 16), np.float32)
    x[:41, 0] = range(80, 121)
    x[41:, 1] = (151, 160)
    rows = stats_of(tmp_path / "m.gguf", x).rows
    assert rows is not None
    norms = np.linalg.norm(x, axis=1)
    median = np.median(norms)
    scores = 0.6745 * (norms - median) / np.median(np.abs(norms - median))
    assert rows.n_outliers == (scores > 3.5).sum() == 1
    (worst,) = rows.worst
    assert (worst.index, worst.norm) == (42, 160)
    assert worst.times_median == pytest.approx(160 / median)
    assert worst.score == pytest.approx(scores[42])
    equal = stats_of(tmp_path / "n.gguf", np.ones((9, 4), np.float32)).rows
    assert equal is not None
    assert (equal.n_outliers, equal.worst) == (0, [])


@pytest.mark.native
@pytest.mark.parametrize("type_", BOTH, ids=str)
def test_any_part_of_a_tensor_has_the_numbers_of_gguf_py(type_: GgmlType, tmp_path: Path) -> None:
    stored = random_rows(type_.name, 9, 4 if type_.is_quantized else 64)
    path = write_blocks(tmp_path / "m.gguf", {"t": (type_.name, stored)})
    model = load_model_file(path)
    (weight,) = model.weights
    n = weight.ne[0]
    whole = GGUF.to_float(type_, stored.ravel(), 9 * n).reshape(9, n)
    reader = WeightReader(model)
    for row, end, column, column_end in [(0, 9, 0, n), (3, 4, n // 3, n - 1), (8, 9, n - 1, n)]:
        part = reader.read(weight, row, end, column, column_end)
        assert same(np.ascontiguousarray(part), whole[row:end, column:column_end].copy())
    assert same(np.concatenate(list(reader.pieces(weight))), whole.ravel())


def test_memory_does_not_grow_with_the_tensor(tmp_path: Path) -> None:
    """A hole of 32 million weights."""
    row = ("F16", np.zeros((1, 4096), np.float16))
    small = write_blocks(tmp_path / "small.gguf", {"zeros": row, "row": row})
    model = load_model_file(write_with_more_rows(small, tmp_path / "m.gguf", "zeros", 1 << 26))
    tracemalloc.start()
    try:
        stats, _ = WeightReader(model).measure(model.weights, threads=2)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert stats.n_zero == 1 << 25
    assert peak < 25e6


def test_a_file_that_became_shorter_is_named(tmp_path: Path) -> None:
    path = write_blocks(tmp_path / "m.gguf", {"t": ("F32", np.ones((64, 1024), np.float32))})
    model = load_model_file(path)
    reader = WeightReader(model)
    with path.open("r+b") as file:
        file.truncate(1000)
    with pytest.raises(UsageError, match=r"m\.gguf became shorter while it was read"):
        list(reader.measure(model.weights))
    with pytest.raises(UsageError, match="became shorter"):
        reader.read(model.weights[0], 5, 6, 0, 1)


def test_a_pattern_chooses_tensors_or_names_the_nearest() -> None:
    model = load_model_file("demo")
    names = [w.name for w in choose_weights(model, "blk.?.attn_[qk].weight").weights]
    assert names == [f"blk.{i}.attn_{x}.weight" for i in range(4) for x in "qk"]
    assert [w.name for w in choose_weights(model, "output.weight").weights] == ["output.weight"]
    with pytest.raises(
        UsageError, match=r"no tensor 'blk\.\*\.fnn_up\*' \(did you mean 'blk\.3\.ffn_up"
    ):
        choose_weights(model, "blk.*.fnn_up*")
    with pytest.raises(UsageError, match=r"no tensor '' \(it has 39 tensors\)"):
        choose_weights(model, "")


def test_a_sum_of_nothing_is_nothing() -> None:
    piece = PieceStats(0, 1, 4)
    assert (piece.moments, len(piece.rows), len(piece.sample)) == (Moments(), 0, 0)
