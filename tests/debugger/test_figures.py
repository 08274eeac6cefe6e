"""Figures, histograms, pictures and slices say what is in an array, whatever is in it."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from llamacpp_instr.base.errors import UsageError
from llamacpp_instr.debugger.tensors import figures_of, heat_map, histogram, parse_slice

FLOATS = arrays.arrays(
    np.float32, arrays.array_shapes(max_dims=4, max_side=9), elements=st.floats(width=32)
)


def test_figures_are_of_the_finite_values_and_count_the_others() -> None:
    found = figures_of(np.array([[1, -3, 0], [np.nan, np.inf, -np.inf]], np.float32))
    assert [found[name] for name in ("n", "nan", "inf", "zero")] == [6, 1, 2, 1]
    assert [found[name] for name in ("min", "max", "absmax")] == [-3, 1, 3]
    assert found["mean"] == pytest.approx(-2 / 3)
    assert found["std"] == pytest.approx(np.std([1.0, -3.0, 0.0]))


def test_without_a_finite_value_there_is_no_mean() -> None:
    found = figures_of(np.array([np.nan], np.float32))
    assert [found[name] for name in ("n", "nan", "mean", "min")] == [1, 1, None, None]


def test_a_mean_does_not_overflow_the_type_of_the_values() -> None:
    assert figures_of(np.full(3, 3e38, np.float32))["mean"] == pytest.approx(3e38, rel=1e-6)


@settings(max_examples=50)
@given(FLOATS)
def test_a_histogram_counts_every_finite_value_once(values: np.ndarray) -> None:
    counts, edges = histogram(values, 7)
    assert counts.sum() == np.isfinite(values).sum()
    assert len(edges) == 8
    assert (np.diff(edges) >= 0).all()


def test_a_histogram_of_doubles_near_the_limit_does_not_overflow() -> None:
    assert histogram(np.array([-1.7e308, 1.7e308]), 4)[0].tolist() == [1, 0, 0, 1]


@settings(max_examples=50)
@given(FLOATS, st.integers(1, 12), st.integers(1, 12))
def test_a_cell_of_a_heat_map_is_the_value_furthest_from_zero(
    values: np.ndarray, rows: int, columns: int
) -> None:
    cells, row_edges, column_edges = heat_map(values, rows, columns)
    matrix = values.reshape(-1, values.shape[-1])
    assert cells.shape == (min(rows, matrix.shape[0]), min(columns, matrix.shape[1]))
    assert (row_edges[-1], column_edges[-1]) == matrix.shape
    for (i, j), cell in np.ndenumerate(cells):
        covered = matrix[
            row_edges[i] : row_edges[i + 1],
            column_edges[j] : column_edges[j + 1],
        ]
        assert covered.size
        if np.isnan(covered).any():
            assert math.isnan(cell)
        else:
            assert cell in covered
            assert abs(cell) == np.abs(covered).max()


def test_a_small_array_is_its_own_heat_map() -> None:
    values = np.arange(-3, 3, dtype=np.float32).reshape(2, 3)
    assert heat_map(values, 100, 100)[0].tolist() == values.tolist()


@pytest.mark.parametrize(
    ("text", "index"),
    [
        ("", ()),
        ("[]", ()),
        ("3", (3,)),
        ("[3, :8]", (3, slice(None, 8))),
        ("-1", (-1,)),
        ("[:, 2:5]", (slice(None), slice(2, 5))),
        ("[-2:]", (slice(-2, None),)),
    ],
)
def test_a_slice_is_read_as_python_reads_it(text: str, index: tuple[object, ...]) -> None:
    assert parse_slice(text, (4, 8)) == index


@given(st.text(max_size=12) | st.text("[]0123456789-:, ", max_size=12))
def test_any_text_is_a_slice_or_one_line(text: str) -> None:
    values = np.zeros((4, 8))
    refused = ""
    try:
        assert values[parse_slice(text, values.shape)].size
    except UsageError as error:
        refused = str(error)
    assert "\n" not in refused


@pytest.mark.parametrize(
    "text",
    ["9", "[0, 8]", "[0, 0, 0]", "[4:]", "[3:2]", "[a]", "[1,]", "[::2]", "__import__", "--1"],
)
def test_a_slice_that_does_not_fit_is_one_line(text: str) -> None:
    with pytest.raises(UsageError) as error:
        parse_slice(text, (4, 8))
    assert "\n" not in str(error.value)
    assert text in str(error.value)
