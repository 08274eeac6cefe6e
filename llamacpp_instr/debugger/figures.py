"""Figures, histograms, pictures and slices of a tensor's values.

Invariant: pure functions of numpy arrays, of any shape and number type. Figures are computed in
float64, of the finite values; the others are counted.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from llamacpp_instr.base.errors import UsageError
from llamacpp_instr.debugger.points import COUNTS, FIGURES
from llamacpp_instr.debugger.tensors import Array

Slice = tuple[int | slice, ...]
"""what indexes an array: a number or a range for each of its first dimensions"""


@dataclass(frozen=True)
class Figures:
    """Of an array; min to std are of its finite values, None if it has none."""

    n: int
    nan: int
    inf: int
    zero: int
    min: float | None
    max: float | None
    absmax: float | None
    mean: float | None
    std: float | None


@dataclass(frozen=True)
class Histogram:
    """How many finite values lie between each two of the edges; the last bin includes its upper."""

    edges: npt.NDArray[np.float64]
    """(bins + 1,)"""
    counts: npt.NDArray[np.int64]
    """(bins,)"""


@dataclass(frozen=True)
class HeatMap:
    """A picture of an array as a matrix: its last dimension is the columns, all others the rows."""

    cells: npt.NDArray[np.float64]
    """(rows, columns) the value furthest from zero in each cell, with its sign; NaN if one is"""
    row_edges: npt.NDArray[np.int64]
    """(rows + 1,) the rows of the matrix that each cell shows"""
    column_edges: npt.NDArray[np.int64]


def figures_of(values: Array) -> Figures:
    """The figures of an array, which may be empty."""
    numbers = values.astype(np.float64)
    finite = numbers[np.isfinite(numbers)]
    counts = {name: int(count(numbers)) for name, count in COUNTS.items()}
    known = {name: figure(finite) if finite.size else None for name, figure in FIGURES.items()}
    return Figures(n=int(values.size), **counts, **known)  # type: ignore[arg-type]


def histogram(values: Array, bins: int = 40) -> Histogram:
    """The finite values in `bins` intervals of equal width between the smallest and the largest."""
    numbers = values.astype(np.float64)
    finite = numbers[np.isfinite(numbers)]
    if not finite.size:
        return Histogram(np.zeros(bins + 1), np.zeros(bins, np.int64))
    finite = np.clip(finite, -1e307, 1e307)  # the width of the range must not overflow
    low, high = float(finite.min()), float(finite.max())
    narrowest = 2 * bins * float(np.spacing(max(abs(low), abs(high))))
    if high - low < narrowest:  # bins cannot be narrower than the distance of two numbers
        low, high = low - narrowest, high + narrowest
    counts, edges = np.histogram(finite, bins, (low, high))
    return Histogram(edges, counts.astype(np.int64))


def heat_map(values: Array, rows: int, columns: int) -> HeatMap:
    """A picture of at most `rows` by `columns` cells.

    A cell shows the value furthest from zero of those that it covers, with its sign, because a
    mean would hide the outliers that a reader looks for.
    """
    matrix = values.astype(np.float64).reshape(-1, values.shape[-1] if values.ndim else 1)
    down, across = (
        _edges(n, at_most) for n, at_most in zip(matrix.shape, (rows, columns), strict=True)
    )
    if not matrix.size:
        return HeatMap(np.empty((len(down) - 1, len(across) - 1)), down, across)

    def reduced(extreme: np.ufunc) -> Array:
        by_row = extreme.reduceat(matrix, down[:-1], axis=0)
        return np.asarray(extreme.reduceat(by_row, across[:-1], axis=1))

    high, low = reduced(np.maximum), reduced(np.minimum)
    return HeatMap(np.where(np.abs(high) >= np.abs(low), high, low), down, across)


def _edges(n: int, at_most: int) -> npt.NDArray[np.int64]:
    cells = min(n, max(1, at_most))
    return np.arange(cells + 1, dtype=np.int64) * n // max(1, cells)


_ITEM = re.compile(r"(?P<index>-?\d{1,18})|(?P<first>-?\d{1,18})?:(?P<end>-?\d{1,18})?")


def parse_slice(text: str, shape: tuple[int, ...]) -> Slice:
    """The index that a text like `[3, :8]` means for an array of this shape; an empty text is all
    of it. Negative numbers count from the end, as in Python.

    Raises `UsageError` for anything else, and for what lies outside the shape. Nothing is
    evaluated as code.
    """
    inner = text.strip()
    if inner.startswith("[") and inner.endswith("]"):
        inner = inner[1:-1].strip()
    items = [item.strip() for item in inner.split(",")] if inner else []
    if len(items) > len(shape):
        raise UsageError(f"slice {text!r}: the shape is {shape}, of {len(shape)} dimensions")
    return tuple(_item(item, n, text) for item, n in zip(items, shape, strict=False))


def _item(item: str, n: int, text: str) -> int | slice:
    match = _ITEM.fullmatch(item)
    if not match:
        raise UsageError(f"slice {text!r}: {item!r} is neither a number nor a range like 2:5")
    if match["index"]:
        index = int(match["index"])
        if not -n <= index < n:
            raise UsageError(f"slice {text!r}: {index} is outside a dimension of {n}")
        return index
    first, end = (int(match[key]) if match[key] else None for key in ("first", "end"))
    found = slice(first, end)
    if not range(n)[found]:
        raise UsageError(f"slice {text!r}: {item!r} selects nothing of a dimension of {n}")
    return found
