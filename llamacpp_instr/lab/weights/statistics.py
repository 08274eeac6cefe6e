"""Statistics of the blocks of a tensor: codes, scales, and the errors against a reference.

Invariant: memory does not grow with the tensor. Only counts, the worst blocks and a grid of at most
`GRID` by `GRID` cells are kept.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from llamacpp_instr.base.terminal import OnProgress
from llamacpp_instr.lab.weights.blocks import (
    LAYOUTS,
    Blocks,
    CodeRange,
    load_values,
    place,
    read_blocks,
    sub_block_of,
)
from llamacpp_instr.model.file import Weight

GRID = 512
"""maximum of rows and columns of a grid"""
WORST = 10
"""number of worst blocks that are listed"""
# scales are counted by their upper bits: they come from at most 16 bits, so the rest is zero
_SHIFT = 13

Counts: TypeAlias = "NDArray[np.int64]"
Doubles: TypeAlias = "NDArray[np.float64]"


@dataclass(frozen=True, eq=False)
class CodeCounts:
    """How often each code occurs."""

    codes: CodeRange
    counts: Counts
    """from `codes.low` to `codes.high`"""

    @property
    def n(self) -> int:
        return int(self.counts.sum())

    @property
    def n_lowest(self) -> int:
        """Codes of the lowest level or below."""
        return int(self.counts[self._levels <= self.codes.ends[0]].sum())

    @property
    def n_highest(self) -> int:
        """Codes of the highest level or above."""
        return int(self.counts[self._levels >= self.codes.ends[1]].sum())

    @property
    def n_zero(self) -> int:
        """Codes of zero."""
        return int(self.counts[self._levels == 0].sum())

    @property
    def _levels(self) -> Doubles:
        return np.array(self.codes.levels, np.float64)


@dataclass(frozen=True)
class Distribution:
    """The distribution of the scales of blocks; those not finite are counted separately."""

    n: int
    least: float
    """`least`, `median` and `largest` are of the finite ones; NaN if there are none"""
    median: float
    """the lower one of the two in the middle"""
    largest: float
    n_zero: int
    n_denormal: int
    """denormal in the number format of the scale"""
    n_non_finite: int


@dataclass(frozen=True, eq=False)
class Grid:
    """Rows by sub-blocks of a tensor; a cell covers several of them in a large tensor."""

    cells: Doubles
    """(rows, columns)"""
    rows_per_cell: int
    sub_blocks_per_cell: int
    n_rows: int
    sub_blocks_per_row: int


@dataclass(frozen=True)
class BlockError:
    """The error of a block."""

    block: int
    row: int
    column: int
    """of its first element"""
    rmse: float
    max_error: float


@dataclass(frozen=True)
class Errors:
    """The error of a tensor, and its worst blocks."""

    rmse: float
    """NaN if nothing was compared"""
    non_finite: int
    """elements that are NaN or infinite on either side; excluded"""
    worst: list[BlockError]
    """the worst first"""


@dataclass(frozen=True, eq=False)
class BlockStats:
    """Statistics of the blocks of a tensor."""

    weight: Weight
    quants: CodeCounts
    d: Distribution | None
    dmin: Distribution | None
    scales: CodeCounts | None
    mins: CodeCounts | None
    scale_grid: Grid
    """the mean of |d x scale| in each cell"""
    error_grid: Grid | None
    """the largest RMSE of a sub-block in each cell"""
    errors: Errors | None

    @property
    def n_blocks(self) -> int:
        return self.weight.n_elements // self.weight.type.block


def compute_block_stats(
    weight: Weight, reference: Weight | None = None, on_progress: OnProgress = lambda *_: None
) -> BlockStats:
    """Statistics of all blocks of a tensor that passed `blocks.check_openable`.

    With a `reference` from `blocks.find_reference`, also its errors. Progress is in bytes. Raises
    `UsageError` if a file is truncated meanwhile.
    """
    type_, layout = weight.type, LAYOUTS[weight.type.name]
    ranges = {name: of for name in ("quants", "scales", "mins") if (of := getattr(layout, name))}
    by_byte = {name: np.zeros(256, np.int64) for name in ranges}
    by_bits = {name: np.zeros(1 << (32 - _SHIFT), np.int64) for name in ("d", "dmin")}
    steps = _Cells(weight)
    errors = _Errors(weight, reference) if reference is not None else None
    # counts NaN scales, without a warning
    with np.errstate(invalid="ignore", over="ignore"):
        for begin, blocks in read_blocks(weight):
            for name, counts in by_byte.items():
                codes = getattr(blocks.parts, name).view(np.uint8).ravel()
                counts += np.bincount(codes, minlength=256)
            for name, counts in by_bits.items():
                if (numbers := getattr(blocks.parts, name)) is not None:
                    seen, n_seen = np.unique(numbers.view(np.uint32) >> _SHIFT, return_counts=True)
                    counts[seen] += n_seen
            steps.add_for_mean(begin, np.abs(blocks.steps()).astype(np.float64))
            if errors is not None:
                errors.add(begin, blocks)
            on_progress((begin + len(blocks.parts.quants)) * type_.block_bytes, weight.n_bytes)
    counted = {
        name: CodeCounts(codes, by_byte[name][np.arange(codes.low, codes.high + 1) & 0xFF])
        for name, codes in ranges.items()
    }
    return BlockStats(
        weight=weight,
        quants=counted["quants"],
        d=_distribution(by_bits["d"], layout.least_normal),
        dmin=_distribution(by_bits["dmin"], layout.least_normal),
        scales=counted.get("scales"),
        mins=counted.get("mins"),
        scale_grid=steps.grid(steps.numbers / steps.filled),
        error_grid=errors.cells.grid(errors.cells.numbers) if errors is not None else None,
        errors=errors.errors() if errors is not None else None,
    )


def _distribution(by_bits: Counts, least_normal: float) -> Distribution | None:
    """The distribution of float32 that are counted by their upper bits; None if there are none."""
    seen = np.flatnonzero(by_bits)
    if not len(seen):
        return None
    with np.errstate(invalid="ignore"):
        numbers = (seen.astype(np.uint32) << _SHIFT).view(np.float32).astype(np.float64)
    counts = by_bits[seen]
    finite = np.isfinite(numbers)
    order = np.argsort(numbers[finite])
    spread, up_to = numbers[finite][order], counts[finite][order].cumsum()
    least = median = largest = math.nan
    if len(spread):
        middle = spread[np.searchsorted(up_to, (up_to[-1] + 1) // 2)]
        least, median, largest = float(spread[0]), float(middle), float(spread[-1])
    size = np.abs(numbers)
    return Distribution(
        n=int(counts.sum()),
        least=least,
        median=median,
        largest=largest,
        n_zero=int(counts[size == 0].sum()),
        n_denormal=int(counts[(size > 0) & (size < least_normal)].sum()),
        n_non_finite=int(counts[~finite].sum()),
    )


class _Cells:
    """Accumulates a grid from blocks."""

    def __init__(self, weight: Weight) -> None:
        sub_block = sub_block_of(weight.type)
        self.blocks_per_row = weight.ne[0] // weight.type.block
        self.n_sub = weight.type.block // sub_block
        n_rows, subs_per_row = weight.n_rows, weight.ne[0] // sub_block
        rows_per_cell, subs_per_cell = -(-n_rows // GRID), -(-subs_per_row // GRID)
        cells = np.zeros((-(-n_rows // rows_per_cell), -(-subs_per_row // subs_per_cell)))
        self.empty = Grid(cells, rows_per_cell, subs_per_cell, n_rows, subs_per_row)
        self.numbers = np.zeros(cells.size)
        self.filled = np.zeros(cells.size, np.int64)

    def add_for_mean(self, begin: int, numbers: Doubles) -> None:
        """Numbers of sub-blocks, (n_blocks, n_sub); a cell shows their mean."""
        cells = self._cells(begin, len(numbers))
        self.numbers += np.bincount(cells, numbers.ravel(), len(self.numbers))
        self.filled += np.bincount(cells, minlength=len(self.numbers))

    def add_for_largest(self, begin: int, numbers: Doubles) -> None:
        """Like `add_for_mean`; a cell shows their largest."""
        np.maximum.at(self.numbers, self._cells(begin, len(numbers)), numbers.ravel())

    def grid(self, numbers: Doubles) -> Grid:
        return replace(self.empty, cells=numbers.reshape(self.empty.cells.shape))

    def _cells(self, begin: int, n_blocks: int) -> NDArray[np.intp]:
        """The cell of each sub-block of `n_blocks` blocks from `begin` on."""
        row, block = np.divmod(np.arange(begin, begin + n_blocks), self.blocks_per_row)
        sub = block[:, None] * self.n_sub + np.arange(self.n_sub)
        of_row = row // self.empty.rows_per_cell * self.empty.cells.shape[1]
        cells: NDArray[np.intp] = of_row[:, None] + sub // self.empty.sub_blocks_per_cell
        return cells.ravel()


class _Errors:
    """Sums errors and keeps the worst blocks."""

    def __init__(self, weight: Weight, reference: Weight) -> None:
        self.weight, self.reference = weight, reference
        self.squares, self.n = 0.0, 0
        self.cells = _Cells(weight)
        # by column: block, RMSE, largest error
        self.worst = np.zeros((0, 3))

    def add(self, begin: int, blocks: Blocks) -> None:
        values = blocks.values()
        n, block = values.shape
        reference = load_values(self.reference, begin * block, values.size)
        error = values.astype(np.float64) - reference.reshape(values.shape)
        finite = np.isfinite(error)
        error[~finite] = 0
        squares = np.square(error).reshape(n, blocks.n_sub, -1).sum(axis=2)
        counts = finite.reshape(*squares.shape, -1).sum(axis=2)
        self.squares += float(squares.sum())
        self.n += int(counts.sum())
        self.cells.add_for_largest(begin, np.sqrt(squares / np.maximum(counts, 1)))
        rmse = np.sqrt(squares.sum(axis=1) / np.maximum(counts.sum(axis=1), 1))
        largest = np.abs(error).max(axis=1)
        candidates = np.argsort(-rmse, kind="stable")[:WORST]
        found = np.stack([np.arange(begin, begin + n), rmse, largest], axis=1)
        both = np.concatenate([self.worst, found[candidates]])
        # the first of equal blocks comes first
        self.worst = both[np.argsort(-both[:, 1], kind="stable")[:WORST]]

    def errors(self) -> Errors:
        worst = [
            BlockError(int(block), *place(self.weight, int(block)), float(rmse), float(largest))
            for block, rmse, largest in self.worst
        ]
        rmse = math.sqrt(self.squares / self.n) if self.n else math.nan
        return Errors(rmse, self.weight.n_elements - self.n, worst)
