"""Tiles equal what is computed from the whole matrix."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llamacpp_instr.lab.view import tensors
from llamacpp_instr.lab.view.tensors import (
    MEASURES,
    SIDE,
    Cells,
    Matrix,
    Measure,
    Tensors,
    color_limits,
    compute_base,
    compute_tile,
)
from llamacpp_instr.lab.weights.measure import WeightReader
from llamacpp_instr.model.file import load_model_file

RANDOM = np.random.default_rng(5)
PATIENCE_S = 300


def matrix_of(values: np.ndarray, reads: list[int] | None = None) -> Matrix:
    def read(row: int, end: int, column: int, column_end: int) -> np.ndarray:
        if reads is not None:
            reads.append((end - row) * (column_end - column))
        return values[row:end, column:column_end]

    return Matrix(*values.shape, read)


def cell(values: np.ndarray, measure: Measure) -> float:
    x = values.astype(np.float64)
    if measure == "rms":
        return float(np.sqrt(np.mean(x**2)))
    if np.isnan(x).any():
        return float("nan")
    largest = x.ravel()[np.abs(x).argmax()]
    # of two of the same size the positive one
    return float(abs(largest) if (x == abs(largest)).any() else largest)


def base_of(matrix: Matrix, measure: Measure) -> Callable[[], Cells]:
    return lambda: compute_base(matrix, measure, 2)


@pytest.fixture
def coarse(monkeypatch: pytest.MonkeyPatch) -> None:
    """Even small matrices have levels finer than their base, and several strips."""
    monkeypatch.setattr(tensors, "BASE_CELLS", 1000)
    monkeypatch.setattr(tensors, "STRIP", 3000)


@pytest.mark.parametrize("measure", MEASURES)
@pytest.mark.parametrize("shape", [(300, 700), (1, 5000), (2049, 3), (257, 513), (256, 256)])
@pytest.mark.usefixtures("coarse")
def test_every_cell_of_every_level(shape: tuple[int, int], measure: Measure) -> None:
    values = RANDOM.standard_t(3, shape).astype(np.float32)
    matrix = matrix_of(values)
    assert max(matrix.shape(matrix.top)) <= SIDE
    for level in range(matrix.top + 1):
        rows, columns = matrix.shape(level)
        size = 1 << level
        for row in range(-(-rows // SIDE)):
            for column in range(-(-columns // SIDE)):
                assert matrix.has(level, row, column)
                tile = compute_tile(matrix, measure, base_of(matrix, measure), level, row, column)
                assert tile.dtype == np.float32
                assert tile.shape == (
                    min(SIDE, rows - row * SIDE),
                    min(SIDE, columns - column * SIDE),
                )
                for r, c in {
                    (0, 0),
                    (tile.shape[0] - 1, tile.shape[1] - 1),
                    (0, tile.shape[1] // 2),
                }:
                    top, left = (row * SIDE + r) * size, (column * SIDE + c) * size
                    part = values[top : top + size, left : left + size]
                    wanted = part[0, 0] if not level else cell(part, measure)
                    assert tile[r, c] == pytest.approx(wanted, rel=1e-6)
        assert not matrix.has(level, -(-rows // SIDE), 0)
        assert not matrix.has(level, 0, -1)
    assert not matrix.has(matrix.top + 1, 0, 0)
    assert not matrix.has(-1, 0, 0)


@pytest.mark.usefixtures("coarse")
@settings(max_examples=30)
@given(
    st.integers(1, 90), st.integers(1, 90), st.integers(0, 3), st.sampled_from(MEASURES),
    st.integers(0, 2**32 - 1),
)  # fmt: skip
def test_a_whole_level_by_hand(
    rows: int, columns: int, level: int, measure: Measure, seed: int
) -> None:
    random = np.random.default_rng(seed)
    values = random.integers(-3, 4, (rows, columns)).astype(np.float32)
    values[random.random(values.shape) < 0.02] = np.nan
    size = 1 << level
    cells = tensors._join(values, size, measure)
    for r in range(0, rows, size):
        for c in range(0, columns, size):
            part = values[r : r + size, c : c + size]
            got = cells[r // size, c // size]
            if measure == "rms":
                got = np.sqrt(got / part.size)
            assert got == pytest.approx(cell(part, measure), nan_ok=True)


@pytest.mark.usefixtures("coarse")
def test_a_tile_reads_its_own_weights_only() -> None:
    reads: list[int] = []
    matrix = matrix_of(np.ones((2000, 3000), np.float32), reads)
    assert matrix.base > 2
    compute_tile(matrix, "largest", base_of(matrix, "largest"), 1, 1, 2)
    assert reads == [512 * 512]
    reads.clear()
    compute_base(matrix, "largest", 2)
    assert sum(reads) == 2000 * 3000
    assert max(reads) <= 256 * 256, "in strips"


def test_colours_end_where_nearly_all_cells_are_smaller() -> None:
    values = RANDOM.normal(size=(300, 700)).astype(np.float32)
    values[7, 7] = 1000
    matrix = matrix_of(values)
    limits = color_limits(matrix, base_of(matrix, "rms"), "rms")
    assert len(limits) == matrix.top + 1
    assert limits[0] == pytest.approx(np.percentile(np.abs(values), 99.9), rel=0.1)
    assert limits[1] < limits[0] < 10
    for strange in (np.zeros((3, 4), np.float32), np.full((3, 4), np.nan, np.float32)):
        matrix = matrix_of(strange)
        assert color_limits(matrix, base_of(matrix, "largest"), "largest") == [1.0]


@pytest.fixture
def demo(demo_model: Path) -> Tensors:
    model = load_model_file(demo_model)
    return Tensors((model, WeightReader(model)))


def test_those_who_ask_at_once_share_the_base(
    demo: Tensors, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, go, made = threading.Event(), threading.Event(), list[int]()

    def compute(matrix: Matrix, measure: Measure, threads: int) -> Cells:
        made.append(1)
        begun.set()
        assert go.wait(PATIENCE_S)
        return compute_base(matrix, measure, threads)

    monkeypatch.setattr(tensors, "compute_base", compute)
    _, base = demo._cells(0, 0, "rms")
    with ThreadPoolExecutor(3) as pool:
        asked = [pool.submit(base)]
        assert begun.wait(PATIENCE_S)
        asked += [pool.submit(base) for _ in range(2)]
        go.set()
        assert len({id(of.result()) for of in asked}) == 1
    assert made == [1]


def test_what_was_asked_for_last_is_kept_and_errors_are_not(
    demo: Tensors, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = []

    def compute(matrix: Matrix, measure: Measure, threads: int) -> Cells:
        made.append(matrix.shape(0))
        if len(made) == 1:
            raise ValueError("once")
        return compute_base(matrix, measure, threads)

    monkeypatch.setattr(tensors, "compute_base", compute)
    bases = [demo._cells(number, 0, "rms")[1] for number in range(tensors.BASES + 1)]
    with pytest.raises(ValueError, match="once"):
        bases[0]()
    first = bases[0]()
    for base in bases[:-1]:
        base()
    assert bases[0]() is first
    assert len(made) == tensors.BASES + 1
    bases[-1]()
    assert bases[0]() is first
    bases[1]()
    assert len(made) == tensors.BASES + 3
    assert demo.tile(0, 0, "rms", 0, 0, 0) is demo.tile(0, 0, "rms", 0, 0, 0)
