"""A matrix as tiles of several levels, like a map.

A cell of level k covers 2^k by 2^k weights; level 0 has the weights. A tile has `SIDE` by `SIDE`
cells, fewer at the end of a row or column. A cell shows one of `MEASURES` of its weights: the one
with the largest size, with its sign, or their root mean square. It is NaN if one of them is.

Invariant: memory does not grow with the matrix. Levels from `base` on, which have at most
`BASE_CELLS` cells, are computed together in one pass; tiles of finer levels read their own weights.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, get_args

import numpy as np
from numpy.typing import NDArray

Floats: TypeAlias = "NDArray[np.float32]"
Cells: TypeAlias = "NDArray[Any]"
"""the largest weights as float32, or sums of squares as float64"""
Measure = Literal["largest", "rms"]
MEASURES: tuple[Measure, ...] = get_args(Measure)

SIDE = 256
"""cells of a side of a tile: whole blocks of every type"""
BASE_CELLS = 1 << 20
STRIP = 1 << 22
"""weights that a thread reads at a time"""
SAMPLED = 64
"""rows from which the range of the weights is estimated"""
WITHIN = 99.9
"""percent of the cells of a level that have a colour of their own; others have the ends'"""


@dataclass(frozen=True)
class Matrix:
    """Rows of numbers that can be read in parts."""

    n_rows: int
    n_columns: int
    read: Callable[[int, int, int, int], Floats]
    """from row, to row, from column, to column -> (rows, columns)"""

    @property
    def base(self) -> int:
        """The finest level that is kept whole."""
        level = 0
        while math.prod(self.shape(level)) > BASE_CELLS:
            level += 1
        return level

    @property
    def top(self) -> int:
        """The level with a single tile."""
        level = 0
        while max(self.shape(level)) > SIDE:
            level += 1
        return level

    def shape(self, level: int) -> tuple[int, int]:
        """Cells of a level: (rows, columns)."""
        return (-(-self.n_rows >> level), -(-self.n_columns >> level))

    def has(self, level: int, row: int, column: int) -> bool:
        """Whether there is such a tile."""
        if not (0 <= level <= self.top and row >= 0 and column >= 0):
            return False
        rows, columns = self.shape(level)
        return row * SIDE < rows and column * SIDE < columns


def compute_base(matrix: Matrix, measure: Measure, threads: int) -> Cells:
    """The cells of level `matrix.base`: the largest, or for `rms` the sums of squares, from which
    coarser levels follow. Strips of rows are read by `threads` at once."""
    size = 1 << matrix.base
    strip = max(STRIP // max(matrix.n_columns, 1) // size, 1) * size

    def cells(row: int) -> Cells:
        end = min(row + strip, matrix.n_rows)
        # parts of rows, if even `size` of them are too many
        unit = max(SIDE, size)
        step = max(STRIP // (end - row) // unit, 1) * unit
        parts = [
            _join(matrix.read(row, end, at, min(at + step, matrix.n_columns)), size, measure)
            for at in range(0, matrix.n_columns, step)
        ]
        return np.concatenate(parts, axis=1)

    with ThreadPoolExecutor(threads) as pool:
        return np.concatenate(list(pool.map(cells, range(0, matrix.n_rows, strip))))


def compute_tile(
    matrix: Matrix, measure: Measure, base: Callable[[], Cells], level: int, row: int, column: int
) -> Floats:
    """(rows, columns) the cells of a tile that `matrix.has`; `base` returns what `compute_base`
    computed."""
    rows, columns = matrix.shape(level)
    top, left = row * SIDE, column * SIDE
    bottom, right = min(top + SIDE, rows), min(left + SIDE, columns)
    if level >= matrix.base and level:
        step = level - matrix.base
        part = base()[top << step : bottom << step, left << step : right << step]
        cells = _join_cells(part, 1 << step, measure)
    else:
        ends = min(bottom << level, matrix.n_rows), min(right << level, matrix.n_columns)
        values = matrix.read(top << level, ends[0], left << level, ends[1])
        if not level:
            return np.ascontiguousarray(values)
        cells = _join(values, 1 << level, measure)
    if measure == "rms":
        cells = np.sqrt(cells / _counts(matrix, level, top, bottom, left, right))
    with np.errstate(over="ignore"):
        return cells.astype(np.float32, copy=False)


def color_limits(matrix: Matrix, measure: Measure, base: Callable[[], Cells]) -> list[float]:
    """The size at which colours end, for each level: `WITHIN` percent of the cells are smaller.

    For level 0 it is estimated from `SAMPLED` rows; between it and `matrix.base` it is interpolated
    geometrically.
    """
    chosen = np.linspace(0, matrix.n_rows - 1, min(SAMPLED, matrix.n_rows)).astype(int)
    rows = [matrix.read(row, row + 1, 0, matrix.n_columns) for row in chosen]
    least = _limit(np.concatenate(rows)) if rows else 1.0
    limits = [least]
    for level in range(1, matrix.top + 1):
        if level < matrix.base:
            limits.append(0.0)
            continue
        cells = _join_cells(base(), 1 << (level - matrix.base), measure)
        if measure == "rms":
            shape = matrix.shape(level)
            cells = np.sqrt(cells / _counts(matrix, level, 0, shape[0], 0, shape[1]))
        limits.append(_limit(cells))
    at_base = min(matrix.base, matrix.top)
    for level in range(1, at_base):
        limits[level] = least * (limits[at_base] / least) ** (level / at_base)
    return limits


def _limit(cells: Cells) -> float:
    sizes = np.abs(cells[np.isfinite(cells)]).astype(np.float64)
    if not len(sizes):
        return 1.0
    return float(np.percentile(sizes, WITHIN)) or float(sizes.max()) or 1.0


def _join(values: Floats, size: int, measure: Measure) -> Cells:
    """Cells of `size` by `size` weights; the last ones may have fewer."""
    if measure == "rms":
        with np.errstate(over="ignore"):
            return _sums(np.square(values, dtype=np.float64), size)
    return _largest(values, size)


def _join_cells(cells: Cells, size: int, measure: Measure) -> Cells:
    """Coarser cells, from those that `_join` returned."""
    if size == 1:
        return cells
    return _sums(cells, size) if measure == "rms" else _largest(cells, size)


def _sums(values: Cells, size: int) -> Cells:
    return _reduced(values, size, np.add)


def _largest(values: Cells, size: int) -> Cells:
    high, low = _reduced(values, size, np.maximum), _reduced(values, size, np.minimum)
    return np.where(high >= -low, high, low)


def _reduced(values: Cells, size: int, ufunc: np.ufunc) -> Cells:
    """Cells of `size` by `size` values. Halving is much faster than `reduceat`."""
    for axis in (0, 1):
        for _ in range(size.bit_length() - 1):
            lines = np.moveaxis(values, axis, 0)
            pairs = lines[::2].copy(order="K")
            odd = lines[1::2]
            ufunc(pairs[: len(odd)], odd, out=pairs[: len(odd)])
            values = np.moveaxis(pairs, 0, axis)
    return values


def _counts(
    matrix: Matrix, level: int, top: int, bottom: int, left: int, right: int
) -> NDArray[np.int64]:
    """How many weights each of these cells covers."""
    size = 1 << level
    rows = np.minimum(size, matrix.n_rows - (np.arange(top, bottom) << level))
    columns = np.minimum(size, matrix.n_columns - (np.arange(left, right) << level))
    counts: NDArray[np.int64] = rows[:, None] * columns
    return counts
