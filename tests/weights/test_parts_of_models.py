"""Tensors that can be opened, compared and exported, piece by piece, from files made by hand."""

from __future__ import annotations

import io
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from llamacpp_instr.base.errors import UsageError
from llamacpp_instr.lab.weights import measure
from llamacpp_instr.lab.weights.blocks import (
    check_openable,
    find_reference,
    find_weight,
    load_block,
    place,
)
from llamacpp_instr.lab.weights.export import raw_shape, write_npz, write_safetensors
from llamacpp_instr.lab.weights.figures import CHUNK, PieceStats, join_stats
from llamacpp_instr.lab.weights.measure import PIECE, Job, WeightReader, compute_weight_errors, work
from llamacpp_instr.lab.weights.statistics import _Cells, compute_block_stats
from llamacpp_instr.model.file import ModelFile, Weight, load_model_file
from llamacpp_instr.model.types import BY_NAME
from tests.kit.block_models import random_rows, write_blocks


def model_of(path: Path, **tensors: tuple[str, np.ndarray]) -> ModelFile:
    return load_model_file(write_blocks(path, tensors))


def q8_0(rows: int = 2, per_row: int = 2) -> tuple[str, np.ndarray]:
    return "Q8_0", random_rows("Q8_0", rows, per_row)


# --- what can be opened ---


def test_what_cannot_be_opened_says_why_and_what_can(tmp_path: Path) -> None:
    model = model_of(
        tmp_path / "m.gguf", attn_q=("F32", np.ones((2, 4), np.float32)),
        attn_k=("IQ2_XS", random_rows("IQ2_XS", 1, 1)), attn_v=q8_0(), ffn_up=q8_0(),
    )  # fmt: skip
    check_openable(model, model.by_name["ffn_up"])
    with pytest.raises(
        UsageError, match=r"'attn_q' is F32, which has no blocks \(try 'attn_v'\); types"
    ):
        check_openable(model, model.by_name["attn_q"])
    with pytest.raises(
        UsageError, match=r"'attn_k' is IQ2_XS, whose blocks cannot be opened \(try"
    ):
        check_openable(model, model.by_name["attn_k"])
    plain = model_of(tmp_path / "p.gguf", w=("F32", np.ones((2, 4), np.float32)))
    with pytest.raises(UsageError, match=r"\(quantize it first\)"):
        check_openable(plain, plain.by_name["w"])
    with pytest.raises(UsageError, match="tensor 'none' has no elements"):
        check_openable(model, Weight("none", BY_NAME["Q8_0"], (32, 0), Path("m"), 0))


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("ffn", "did you mean 'ffn_up', 'ffn_down'?"),
        ("*attn*", "did you mean 'attn_q'?"),
        ("atn_q", "did you mean 'attn_q'?"),
        ("zzz", "it has 3 tensors"),
        ("**", "it has 3 tensors"),
    ],
)
def test_a_name_that_no_tensor_has(name: str, hint: str, tmp_path: Path) -> None:
    one = ("F32", np.ones((1, 4), np.float32))
    model = model_of(tmp_path / "m.gguf", ffn_up=one, ffn_down=one, attn_q=one)
    assert find_weight(model, "ffn_up") is model.by_name["ffn_up"]
    with pytest.raises(UsageError) as error:
        find_weight(model, name)
    assert str(error.value) == f"{model.path} has no tensor {name!r} ({hint})"


@pytest.mark.parametrize("shape", [(2, 32), (2, 96), (1, 64), (3, 64)])
def test_a_reference_has_the_shape_of_the_tensor(shape: tuple[int, int], tmp_path: Path) -> None:
    model = model_of(tmp_path / "m.gguf", w=q8_0())
    other = model_of(tmp_path / "r.gguf", w=("F32", np.ones(shape, np.float32)))
    with pytest.raises(UsageError, match=rf"'w' is {shape[1]} x {shape[0]}, not 64 x 2 as in"):
        find_reference(other, model.by_name["w"])


@pytest.mark.parametrize(
    ("type_", "data", "readable"),
    [
        ("F32", np.ones((1, 256), np.float32), True),
        ("Q4_K", random_rows("Q4_K", 1, 1), True),
        ("IQ2_XS", random_rows("IQ2_XS", 1, 1), False),
    ],
)
def test_a_reference_has_a_type_that_can_be_read(
    type_: str, data: np.ndarray, readable: bool, tmp_path: Path
) -> None:
    model = model_of(tmp_path / "m.gguf", w=q8_0(1, 8))
    other = model_of(tmp_path / "r.gguf", w=(type_, data))
    if readable:
        assert find_reference(other, model.by_name["w"]) is other.by_name["w"]
    else:
        with pytest.raises(UsageError, match="is IQ2_XS, which cannot be read as reference"):
            find_reference(other, model.by_name["w"])


def test_blocks_are_numbered_row_by_row(tmp_path: Path) -> None:
    model = model_of(tmp_path / "m.gguf", a=q8_0(1, 1), w=q8_0(3, 2))
    weight = model.by_name["w"]
    assert [place(weight, block) for block in range(6)] == [
        (0, 0), (0, 32), (1, 0), (1, 32), (2, 0), (2, 32)
    ]  # fmt: skip
    last = load_block(weight, 5)
    assert (last.place, last.offset, last.reference) == ((2, 32), weight.offset + 5 * 34, None)
    assert b"".join(last.raw.values()) == random_rows("Q8_0", 3, 2).tobytes()[5 * 34 :]
    for block in (-1, 6):
        with pytest.raises(UsageError, match=f"no block {block}; its blocks are numbered 0 to 5"):
            load_block(weight, block)


# --- progress ---


def test_progress_of_an_export_is_in_bytes_of_the_model(tmp_path: Path) -> None:
    model = model_of(
        tmp_path / "m.gguf", a=q8_0(4, 2), none=("F32", np.ones((2, 4), np.float32)), b=q8_0(1, 3)
    )
    sizes = [weight.n_bytes for weight in model.weights]
    assert sizes == [4 * 2 * 34, 32, 3 * 34]
    whole = [(sum(sizes[: i + 1]), sum(sizes)) for i in range(3)]
    reader = WeightReader(model)
    calls: list[tuple[int, int]] = []

    def on_progress(*of: int) -> None:
        calls.append(of)  # type: ignore[arg-type]

    for raw in (False, True):
        calls.clear()
        write_npz(io.BytesIO(), reader, model.weights, raw, on_progress)
        assert calls == whole
        write_npz(io.BytesIO(), reader, model.weights, raw)
        assert calls == whole
    calls.clear()
    out = tmp_path / "w.safetensors"
    out.touch(0o640)
    write_safetensors(out, reader, model.weights, False, on_progress)
    assert calls == whole
    assert out.stat().st_mode & 0o777 == 0o640


@pytest.mark.parametrize("threads", [1, 3])
def test_progress_of_jobs_follows_their_pieces(threads: int) -> None:
    """Ten bytes in three pieces, then five in one, and five in none."""
    jobs = [Job(10, [lambda: 1, lambda: 2, lambda: 3], sum), Job(5, [lambda: 7], max),
            Job(5, [], len)]  # fmt: skip
    calls: list[tuple[int, int]] = []
    assert list(work(jobs, threads, lambda *of: calls.append(of))) == [6, 7, 0]
    assert calls == [(3, 20), (6, 20), (10, 20), (15, 20)]
    assert list(work(jobs, threads)) == [6, 7, 0]
    assert list(work([], threads)) == []


def test_a_number_without_dimensions_is_one_row_of_one(tmp_path: Path) -> None:
    model = model_of(tmp_path / "m.gguf", a=("F32", np.array(2.5, np.float32)))
    (weight,) = model.weights
    reader = WeightReader(model)
    assert weight.ne in ((), (1,))
    of = Weight("a", weight.type, (), weight.path, weight.offset)
    for one in (weight, of):
        assert reader.read(one, 0, 1, 0, 1).tolist() == [[2.5]]
        assert reader.raw(one).tolist() == [[0, 0, 32, 64]]
        (stats,) = reader.measure([one])
        assert (stats.moments.n, stats.largest, stats.rows) == (1, 2.5, None)


def test_the_shape_of_raw_bytes() -> None:
    for ne, shape in (((64, 3, 2), (6, 68)), ((64,), (1, 68))):
        assert raw_shape(Weight("w", BY_NAME["Q8_0"], ne, Path("m"), 0)) == shape
    assert raw_shape(Weight("w", BY_NAME["F32"], (), Path("m"), 0)) == (1, 4)


def test_progress_of_a_comparison_is_in_bytes_of_both_models(tmp_path: Path) -> None:
    ones = np.ones((2, 64), np.float32)
    reference = model_of(tmp_path / "r.gguf", a=("F32", ones), b=("F32", ones))
    candidate = model_of(tmp_path / "c.gguf", a=q8_0(), b=("F32", ones))
    calls: list[tuple[int, int]] = []
    found = compute_weight_errors(reference, candidate, 1, lambda *of: calls.append(of))
    first, second = 512 + 4 * 34, 512 + 512
    assert calls == [(first, first + second), (first + second, first + second)]
    assert [(of.n_bytes, of.layer) for of in found] == [(136, -1), (512, -1)]


def test_a_number_without_dimensions_is_compared(tmp_path: Path) -> None:
    numbers = (np.array(2.5, np.float32), np.array(2.0, np.float32))
    one, other = (
        model_of(tmp_path / f"{i}.gguf", a=("F32", number)) for i, number in enumerate(numbers)
    )
    (found,) = compute_weight_errors(one, other, 1)
    assert (found.n_elements, found.sums.e2, found.max_error) == (1, 0.25, 0.5)


# --- sums ---

ROW = [1.0, -2.0, math.nan, 0.0]


def stats_sum(first: int = 0, stride: int = 1, row: int = 4, *values: list[float]) -> Any:
    stats = PieceStats(first, stride, row)
    for of in values:
        stats.add(np.array(of, np.float32))
    return stats


def test_what_is_not_finite_is_nothing_in_the_norms_of_rows_and_columns() -> None:
    found = stats_sum(0, 1, 4, [*ROW, 3.0, math.inf, 1.0, 0.0], [0.0] * 4)
    assert np.concatenate(found.rows).tolist() == [5, 10, 0]
    assert found.columns.tolist() == [10, 4, 1, 0]
    assert (found.n_zero, found.non_finite, found.largest) == (2 + 4, 2, 3.0)
    assert np.concatenate(found.sample).tolist() == [1, -2, 0, 3, 1, 0, 0, 0, 0, 0]
    assert (found.moments.n, found.moments.mean) == (10, pytest.approx(0.3))


def test_without_rows_there_are_no_norms() -> None:
    found = stats_sum(0, 1, 0, [3.0, -4.0])
    assert (found.rows, found.columns.tolist(), found.largest) == ([], [], 4.0)
    nothing = stats_sum(0, 1, 0, [math.nan, math.inf])
    assert (nothing.moments.n, nothing.moments.mean, nothing.largest) == (0, 0.0, 0.0)
    assert (nothing.n_zero, nothing.non_finite, np.concatenate(nothing.sample).tolist()) == (
        0,
        2,
        [],
    )


@pytest.mark.parametrize(
    ("first", "sampled"), [(0, [0, 3, 6, 9]), (1, [2, 5, 8]), (2, [1, 4, 7]), (3, [0, 3, 6, 9])]
)
def test_every_third_element_of_a_tensor_is_sampled(first: int, sampled: list[int]) -> None:
    parts = [float(i) for i in range(4)], [float(i) for i in range(4, 10)]
    found = stats_sum(first, 3, 0, *parts)
    assert np.concatenate(found.sample).tolist() == sampled


def test_figures_of_pieces_are_joined() -> None:
    weight = Weight("w", BY_NAME["F32"], (4, 3), Path("m"), 0)
    parts = [stats_sum(0, 1, 4, ROW, [0.0] * 4), stats_sum(8, 1, 4, [-5.0, 0.0, 0.0, 7.0])]
    found = join_stats(weight, parts)
    assert (found.n_zero, found.non_finite, found.largest, found.moments.n) == (7, 1, 7.0, 11)
    assert found.rows is not None
    assert found.columns is not None
    assert (found.rows.n, found.rows.largest) == (3, pytest.approx(math.sqrt(74)))
    assert (found.columns.n, found.columns.largest) == (4, 7.0)
    assert found.columns.median == pytest.approx((2 + math.sqrt(26)) / 2)
    assert found.histogram.limit == 7.0
    assert sum(found.histogram.counts) == 11
    nothing = join_stats(weight, [stats_sum(0, 1, 0, [math.nan])])
    assert nothing.rows is nothing.columns is None
    assert all(map(math.isnan, (nothing.largest, *nothing.percentiles)))
    assert len(nothing.percentiles) == 5
    assert (nothing.histogram.limit, sum(nothing.histogram.counts)) == (0.0, 0)


def test_zeros_have_a_histogram() -> None:
    weight = Weight("w", BY_NAME["F32"], (4,), Path("m"), 0)
    found = join_stats(weight, [stats_sum(0, 1, 0, [0.0] * 4)]).histogram
    assert (found.limit, len(found.counts), found.counts[32]) == (0.0, 65, 4)


@pytest.mark.parametrize(
    ("ne", "pieces"),
    [
        ((PIECE + 5,), [(0, PIECE), (PIECE, PIECE + 5)]),
        ((PIECE,), [(0, PIECE)]),
        ((3 * CHUNK, 10), None),
        ((PIECE * 2, 2), [(0, 2 * PIECE), (2 * PIECE, 4 * PIECE)]),
        ((0, 4), []),
    ],
)
def test_pieces_of_a_tensor_with_rows_are_whole_rows(
    ne: tuple[int, ...], pieces: list[tuple[int, int]] | None
) -> None:
    found = measure._ranges(Weight("w", BY_NAME["F32"], ne, Path("m"), 0), whole_rows=True)
    if pieces is None:
        assert [begin for begin, _ in found] == [0, *(end for _, end in found[:-1])]
        assert all(begin % ne[0] == 0 for begin, _ in found)
        assert found[-1][1] == ne[0] * ne[1]
        assert found[0][1] == PIECE // ne[0] * ne[0]
    else:
        assert found == pieces


# --- statistics of blocks ---


@pytest.mark.parametrize(
    ("rows", "columns", "cell", "shape"),
    [(512, 512, (1, 1), (512, 512)), (513, 513, (2, 2), (257, 257)), (1024, 1, (2, 1), (512, 1)),
     (1025, 512, (3, 1), (342, 512)), (1, 1, (1, 1), (1, 1))],
)  # fmt: skip
def test_a_grid_has_at_most_512_cells_each_way(
    rows: int, columns: int, cell: tuple[int, int], shape: tuple[int, int]
) -> None:
    weight = Weight("w", BY_NAME["Q8_0"], (32 * columns, rows), Path("m"), 0)
    cells = _Cells(weight)
    grid = cells.empty
    assert (grid.rows_per_cell, grid.sub_blocks_per_cell) == cell
    assert grid.cells.shape == shape
    last = rows * columns - 1
    assert cells._cells(last, 1).tolist() == [shape[0] * shape[1] - 1]


def test_progress_of_block_statistics_is_in_bytes(tmp_path: Path) -> None:
    weight = model_of(tmp_path / "m.gguf", w=q8_0(3, 2)).by_name["w"]
    calls: list[tuple[int, int]] = []
    stats = compute_block_stats(weight, None, lambda *of: calls.append(of))
    assert calls == [(204, 204)]
    assert (stats.n_blocks, stats.errors, stats.error_grid, stats.scales) == (6, None, None, None)
    assert stats.dmin is None
    assert stats.quants.n == 192
