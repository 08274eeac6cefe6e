"""Statistics of a tensor's blocks: by hand, and against gguf-py on real tensors."""

from __future__ import annotations

import math
import tracemalloc
import warnings
from pathlib import Path

import gguf
import numpy as np
import pytest
from numpy.typing import NDArray

from llamacpp_instr.base.errors import UsageError
from llamacpp_instr.lab.weights import blocks
from llamacpp_instr.lab.weights.blocks import LAYOUTS, find_reference, load_block, load_values
from llamacpp_instr.lab.weights.measure import compute_weight_errors
from llamacpp_instr.lab.weights.statistics import GRID, BlockStats, compute_block_stats
from llamacpp_instr.model.file import load_model_file
from llamacpp_instr.model.types import BY_NAME
from tests.kit.block_models import half, random_rows, rows_of, write_blocks
from tests.kit.quantized_kit import quantized_demo
from tests.kit.sparse_models import write_with_more_rows

NAME = "blk.0.ffn_down.weight"
FILE_TYPES = ["Q4_0", "Q8_0", "Q2_K", "Q4_K_M", "Q5_K_M", "Q6_K", "IQ4_XS"]


def stats_of(path: Path, name: str = "t", reference: Path | None = None) -> BlockStats:
    weight = load_model_file(path).by_name[name]
    if reference is None:
        return compute_block_stats(weight)
    return compute_block_stats(weight, find_reference(load_model_file(reference), weight))


def stats_of_blocks(folder: Path, type_name: str, blocks: list[bytes], per_row: int) -> BlockStats:
    """The statistics of a tensor of these blocks."""
    data = rows_of(blocks, per_row)
    return stats_of(write_blocks(folder / "m.gguf", {"t": (type_name, data)}))


def write_zeros(folder: Path, *shape: int) -> Path:
    """A reference of zeros."""
    return write_blocks(folder / "exact.gguf", {"t": ("F32", np.zeros(shape, np.float32))})


def gguf_py_values(path: Path) -> NDArray[np.float64]:
    """The numbers of the tensor `NAME`."""
    (tensor,) = (t for t in gguf.GGUFReader(path).tensors if t.name == NAME)
    return gguf.quants.dequantize(tensor.data, tensor.tensor_type).astype(np.float64)


@pytest.fixture(params=FILE_TYPES)
def quantized(request: pytest.FixtureRequest) -> Path:
    return quantized_demo(request.param)


def test_a_histogram_counted_by_hand(tmp_path: Path) -> None:
    # a byte contains two codes
    blocks = [half(1) + bytes([0x00] * 16), half(1) + bytes([0xF7] * 10 + [0x88] * 6)]
    quants = stats_of_blocks(tmp_path, "Q4_0", blocks, 1).quants
    assert quants.counts.tolist() == [32, 0, 0, 0, 0, 0, 0, 10, 12, 0, 0, 0, 0, 0, 0, 10]
    assert (quants.n, quants.n_lowest, quants.n_highest, quants.n_zero) == (64, 32, 10, 12)


def test_saturation_of_q8_0_counts_the_code_that_only_others_write(tmp_path: Path) -> None:
    codes = np.array([-128, -127, -126, 126, 127, 127] + [0] * 26, np.int8).tobytes()
    quants = stats_of_blocks(tmp_path, "Q8_0", [half(1) + codes], 1).quants
    assert (quants.n_lowest, quants.n_highest, quants.n_zero) == (2, 2, 26)


def test_ends_of_4_bit_floats_are_those_of_the_levels_not_of_the_codes(tmp_path: Path) -> None:
    # 7 is 12 and 15 is -12, 0 and 8 are both zero
    codes = bytes([0x77, 0x7F, 0xFF, 0x80]) + bytes([0x11] * 12)
    quants = stats_of_blocks(tmp_path, "MXFP4", [bytes([127]) + codes], 1).quants
    assert (quants.n_lowest, quants.n_highest, quants.n_zero) == (3, 3, 2)


def test_scales_that_are_zero_denormal_or_no_numbers_are_counted(tmp_path: Path) -> None:
    scales = [0.0, -0.0, 2**-24, -(2**-15), 2**-14, 3.0, -7.0, math.inf, -math.inf, math.nan]
    d = stats_of_blocks(tmp_path, "Q4_0", [half(d) + bytes(16) for d in scales], 2).d
    assert d is not None
    assert (d.n, d.n_zero, d.n_denormal, d.n_non_finite) == (10, 2, 2, 3)
    assert (d.least, d.median, d.largest) == (-7.0, 0.0, 3.0)


def test_sub_block_scales_by_hand(tmp_path: Path) -> None:
    # eight scales and eight minima of six bits: 63 63 0 5, then 0; minima 1 2 63 0, then 0
    packed = bytes([63, 63, 0, 5, 1, 2, 63, 0, 0, 0, 0, 0])
    stats = stats_of_blocks(tmp_path, "Q4_K", [half(2, 1) + packed + bytes(128)] * 3, 3)
    assert stats.scales is not None
    assert stats.mins is not None
    assert (stats.scales.n, stats.scales.n_highest, stats.scales.n_zero) == (24, 6, 15)
    assert (stats.mins.n, stats.mins.n_highest, stats.mins.n_zero) == (24, 3, 15)
    # one row of 24 sub-blocks
    assert stats.scale_grid.cells.tolist() == [[126.0, 126.0, 0.0, 10.0, 0.0, 0.0, 0.0, 0.0] * 3]


@pytest.mark.native
def test_errors_are_those_of_gguf_py(quantized: Path, demo_model: Path) -> None:
    stats = stats_of(quantized, NAME, demo_model)
    error = gguf_py_values(quantized) - gguf_py_values(demo_model)
    block = stats.weight.type.block
    by_block = np.sqrt(np.square(error.reshape(-1, block)).mean(axis=1))
    assert stats.errors is not None
    assert stats.errors.rmse == pytest.approx(np.sqrt(np.square(error).mean()), rel=1e-12)
    assert [worst.block for worst in stats.errors.worst] == np.argsort(-by_block)[:10].tolist()
    for worst in stats.errors.worst:
        assert worst.rmse == pytest.approx(by_block[worst.block], rel=1e-12)
        there = error[worst.row, worst.column : worst.column + block]
        assert worst.max_error == np.abs(there).max()
    layout = LAYOUTS[stats.weight.type.name]
    assert stats.error_grid is not None
    by_sub_block = np.square(error.reshape(256, -1, layout.sub_block or block)).mean(axis=2)
    np.testing.assert_allclose(stats.error_grid.cells, np.sqrt(by_sub_block), rtol=1e-12)


@pytest.mark.native
def test_a_tensor_against_itself_has_no_error(quantized: Path) -> None:
    stats = stats_of(quantized, NAME, quantized)
    assert stats.errors is not None
    assert stats.errors.rmse == 0
    assert [worst.block for worst in stats.errors.worst] == list(range(10)), "the first of equals"


@pytest.mark.parametrize("type_name", ["Q4_0", "Q3_K", "NVFP4", "MXFP4"])
def test_chunks_of_any_size_count_the_same(
    tmp_path: Path, type_name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_blocks(tmp_path / "m.gguf", {"t": (type_name, random_rows(type_name, 7, 5))})
    weight = load_model_file(path).by_name["t"]
    exact = write_zeros(tmp_path, *weight.ne[::-1])
    whole = stats_of(path, reference=exact)
    monkeypatch.setattr(blocks, "CHUNK", 512)
    calls: list[tuple[int, int]] = []
    chunked = compute_block_stats(
        weight, load_model_file(exact).by_name["t"], lambda *progress: calls.append(progress)
    )
    assert calls[-1] == (weight.n_bytes, weight.n_bytes)
    assert len(calls) > 2
    assert whole.quants.counts.tolist() == chunked.quants.counts.tolist()
    assert repr((whole.d, whole.dmin)) == repr((chunked.d, chunked.dmin))
    assert whole.errors is not None
    assert chunked.errors is not None
    # the values are random bytes: some are not finite
    assert repr(whole.errors.worst) == repr(chunked.errors.worst)
    for ours, theirs in ((whole.scale_grid, chunked.scale_grid),
                         (whole.error_grid, chunked.error_grid)):  # fmt: skip
        assert ours is not None
        assert theirs is not None
        np.testing.assert_array_equal(ours.cells, theirs.cells)


def test_elements_that_are_no_numbers_are_excluded_and_warn_of_nothing(tmp_path: Path) -> None:
    data = rows_of([half(d) + bytes(16) for d in (1.0, math.nan, math.inf, 2.0)], 2)
    path = write_blocks(tmp_path / "m.gguf", {"t": ("Q4_0", data)})
    values = np.zeros((2, 64), np.float32)
    values[0, 0], values[1, 63] = math.nan, -math.inf
    exact = write_blocks(tmp_path / "exact.gguf", {"t": ("F32", values)})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        stats = stats_of(path, reference=exact)
    assert stats.errors is not None
    # the codes are all -8: blocks 0 and 3 have 31 values of -8 and of -16 that count
    worst = [(of.block, of.rmse) for of in stats.errors.worst]
    assert worst == [(3, 16), (0, 8), (1, 0), (2, 0)]
    assert stats.errors.rmse == pytest.approx(math.sqrt((8**2 + 16**2) / 2))
    assert stats.errors.non_finite == 2 * 32 + 2
    # `instr quality` counts the same elements
    (theirs,) = compute_weight_errors(load_model_file(exact), load_model_file(path))
    assert (theirs.rmse, theirs.non_finite) == (stats.errors.rmse, stats.errors.non_finite)


def test_a_large_grid_is_the_mean_of_scales_and_the_largest_of_errors(tmp_path: Path) -> None:
    rows, columns = 2 * GRID + 3, 3
    d = np.arange(1, rows * columns + 1).astype("<f2")
    data = np.zeros((rows * columns, 34), np.uint8)
    data[:, :2] = d.view(np.uint8).reshape(-1, 2)
    data[:, 2] = 1  # the first quant
    path = write_blocks(tmp_path / "m.gguf", {"t": ("Q8_0", data.reshape(rows, -1))})
    stats = stats_of(path, reference=write_zeros(tmp_path, rows, columns * 32))
    by_row = d.astype(np.float64).reshape(rows, columns)
    grid = stats.scale_grid
    assert (grid.rows_per_cell, grid.sub_blocks_per_cell) == (3, 1)
    assert grid.cells.shape == (-(-rows // 3), columns)
    np.testing.assert_allclose(grid.cells[0], by_row[:3].mean(axis=0))
    np.testing.assert_allclose(grid.cells[-1], by_row[3 * (len(grid.cells) - 1) :].mean(axis=0))
    assert stats.error_grid is not None
    expected = by_row[:3].max(axis=0) / math.sqrt(32)
    np.testing.assert_allclose(stats.error_grid.cells[0], expected)


def test_a_wide_grid_joins_sub_blocks(tmp_path: Path) -> None:
    path = write_blocks(tmp_path / "m.gguf", {"t": ("Q4_K", random_rows("Q4_K", 1, 100))})
    grid = stats_of(path).scale_grid
    assert (grid.sub_blocks_per_row, grid.sub_blocks_per_cell) == (800, 2)
    assert grid.cells.shape == (1, 400)


@pytest.mark.parametrize("type_name", ["F32", "F16", "BF16", "F64", "Q8_0", "Q4_K"])
def test_values_from_anywhere_are_those_of_the_whole(tmp_path: Path, type_name: str) -> None:
    n = 3 * 512
    number = np.random.default_rng(2).normal(size=(3, 512)).astype(np.float32)
    plain = {"F32": np.float32, "F16": np.float16, "F64": np.float64}
    if type_name in plain:
        data: np.ndarray = number.astype(plain[type_name])
        exact = data.astype(np.float32).ravel()
    elif type_name == "BF16":
        data = gguf.quants.quantize(number, gguf.GGMLQuantizationType.BF16)
        exact = gguf.quants.dequantize(data, gguf.GGMLQuantizationType.BF16).ravel()
    else:
        data = random_rows(type_name, 3, 512 // BY_NAME[type_name].block)
        with np.errstate(all="ignore"):
            exact = gguf.quants.dequantize(
                data, gguf.GGMLQuantizationType(BY_NAME[type_name].number)
            ).ravel()
    path = write_blocks(tmp_path / "m.gguf", {"t": (type_name, data)})
    weight = load_model_file(path).by_name["t"]
    for begin, count in ((0, n), (0, 1), (n - 1, 1), (31, 34), (255, 258), (500, 600)):
        ours = load_values(weight, begin, count)
        np.testing.assert_array_equal(ours, exact[begin : begin + count])


@pytest.mark.native
def test_one_block_is_its_bytes(quantized: Path, demo_model: Path) -> None:
    weight = load_model_file(quantized).by_name[NAME]
    reference = find_reference(load_model_file(demo_model), weight)
    size, block = weight.type.block_bytes, weight.type.block
    one = load_block(weight, 5, reference)
    with quantized.open("rb") as file:
        file.seek(one.offset)
        assert file.read(size) == b"".join(one.raw.values())
    row, column = one.place
    assert row * 768 + column == 5 * block
    values, exact = (gguf_py_values(of)[row, column:][:block] for of in (quantized, demo_model))
    assert one.blocks.values()[0].tolist() == values.tolist()
    assert one.reference is not None
    assert one.reference.tolist() == exact.tolist()


def test_memory_does_not_grow_with_the_tensor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(blocks, "CHUNK", 1 << 16)
    peaks = []
    for rows in (512, 4096):
        data = np.tile(random_rows("Q8_0", 1, 32), (rows, 1))
        path = write_blocks(tmp_path / "m.gguf", {"t": ("Q8_0", data)})
        (weight,) = load_model_file(path).weights
        del data
        tracemalloc.start()
        compute_block_stats(weight, weight)
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert peaks[1] < peaks[0] * 1.2, peaks


def test_only_the_block_is_read_from_a_file_of_many_gigabytes(tmp_path: Path) -> None:
    zeros, stored = np.zeros((16, 34), np.uint8), random_rows("Q8_0", 2, 1)
    small = write_blocks(tmp_path / "m.gguf", {"big": ("Q8_0", zeros), "small": ("Q8_0", stored)})
    path = write_with_more_rows(small, tmp_path / "big.gguf", "big", 8 << 30)
    big, weight = load_model_file(path).weights
    tracemalloc.start()
    one, stats = load_block(weight, 1), compute_block_stats(weight)
    last = load_block(big, big.n_bytes // 34 - 1)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert b"".join(one.raw.values()) == stored[1].tobytes()
    assert stats.quants.n == 64
    assert last.raw["qs"] == bytes(32)
    assert peak < 32 << 20


def test_a_file_that_becomes_shorter_meanwhile_is_an_error(tmp_path: Path) -> None:
    path = write_blocks(tmp_path / "m.gguf", {"t": ("Q8_0", random_rows("Q8_0", 4, 4))})
    weight = load_model_file(path).by_name["t"]
    with path.open("r+b") as file:
        file.truncate(weight.offset + 40)
    with pytest.raises(UsageError, match="it was truncated"):
        compute_block_stats(weight)
