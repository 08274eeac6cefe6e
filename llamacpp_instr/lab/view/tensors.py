"""The server of the page that shows the tensors of a model, and of the one that it was quantized
from. Another page's server can also mount its routes.

A matrix is shown as tiles of several levels, like a map. A cell of level k covers 2^k by 2^k
weights; level 0 has the weights. A tile has `SIDE` by `SIDE` cells, fewer at the end of a row or
column. A cell shows one of `MEASURES` of its weights: the one with the largest absolute value, or
their root mean square. It is NaN if one of them is.

Invariant: memory is bounded. Levels from `base` on, which have at most `BASE_CELLS` cells, are
computed together in one pass; tiles of finer levels read their own weights; of both, the latest
that were asked for are kept. Figures are measured once, in the background, in the order of the
file. Everything lies under the random name of `serving`; requests only read.
"""

from __future__ import annotations

import itertools
import math
import threading
from collections.abc import Callable, Hashable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import lru_cache, partial
from typing import Any, Literal, TypeAlias, get_args

import numpy as np
from numpy.typing import NDArray
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import BaseRoute, Route

from llamacpp_instr.base.errors import UsageError
from llamacpp_instr.lab.weights.blocks import Floats, sub_block_of
from llamacpp_instr.lab.weights.figures import PERCENTS, WeightStats
from llamacpp_instr.lab.weights.measure import WeightReader
from llamacpp_instr.model.file import ModelFile, Weight
from llamacpp_instr.report.report import known
from llamacpp_instr.report.serving import LoopbackServer, page_routes

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
BASES, TILES = 8, 256
"""that are kept, the latest that were asked for: at most 64 MiB each"""

Source: TypeAlias = "tuple[ModelFile, WeightReader]"


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
        return next(n for n in itertools.count() if math.prod(self.shape(n)) <= BASE_CELLS)

    @property
    def top(self) -> int:
        """The level with a single tile."""
        return next(n for n in itertools.count() if max(self.shape(n)) <= SIDE)

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
        cells = _coarser(part, 1 << step, measure)
    else:
        ends = min(bottom << level, matrix.n_rows), min(right << level, matrix.n_columns)
        values = matrix.read(top << level, ends[0], left << level, ends[1])
        if not level:
            return np.ascontiguousarray(values)
        cells = _join(values, 1 << level, measure)
    with np.errstate(over="ignore"):
        return _shown(cells, matrix, level, measure, top, left).astype(np.float32, copy=False)


def color_limits(matrix: Matrix, base: Callable[[], Cells], measure: Measure) -> list[float]:
    """The absolute value at which colours end, for each level: `WITHIN` percent of cells are below.

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
        cells = _coarser(base(), 1 << (level - matrix.base), measure)
        limits.append(_limit(_shown(cells, matrix, level, measure)))
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
    with np.errstate(over="ignore"):
        cells = np.square(values, dtype=np.float64) if measure == "rms" else values
        return _coarser(cells, size, measure)


def _coarser(cells: Cells, size: int, measure: Measure) -> Cells:
    """Cells of `size` by `size` finer ones."""
    if size == 1:
        return cells
    if measure == "rms":
        return _reduced(cells, size, np.add)
    high, low = _reduced(cells, size, np.maximum), _reduced(cells, size, np.minimum)
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


def _shown(
    cells: Cells, matrix: Matrix, level: int, measure: Measure, top: int = 0, left: int = 0
) -> Cells:
    """What cells show; the first one is in row `top` and column `left` of its level."""
    if measure != "rms":
        return cells
    # how many weights each cell covers
    rows, columns = (
        np.minimum(1 << level, n - (np.arange(first, first + count) << level))
        for n, first, count in zip(
            (matrix.n_rows, matrix.n_columns), (top, left), cells.shape, strict=True
        )
    )
    shown: Cells = np.sqrt(cells / (rows[:, None] * columns))
    return shown


_MISSING = "there is no such tensor, matrix or tile"


class Tensors:
    """The tensors of a model, numbered in the order of its file. A tensor has up to three matrices:
    its own (0), that of the original (1), and the difference, own minus original (2).

    What does not exist raises `HTTPException`; a file that became shorter raises `UsageError`."""

    def __init__(self, model: Source, original: Source | None = None, threads: int = 1) -> None:
        self._sources = [model] if original is None else [model, original]
        self._weights = model[0].weights
        self._threads = threads
        self._base = lru_cache(BASES)(self._compute_base)
        self._computing: dict[Hashable, threading.Lock] = {}
        self.tile = lru_cache(TILES)(self._tile)
        self.limits = lru_cache(TILES)(self._limits)
        self._figures: list[dict[str, Any]] = []
        self._starting = threading.Lock()
        self._stopped = threading.Event()
        self._troubles = [_trouble(weight, model[1]) for weight in self._weights]
        self._measuring = threading.Thread(target=self._measure, name="measure", daemon=True)

    def start(self) -> None:
        """Start measuring in the background, unless it has started."""
        with self._starting:
            if self._measuring.ident is None:
                self._measuring.start()

    def stop(self) -> None:
        """Stop measuring, after the current tensor."""
        self._stopped.set()
        if self._measuring.ident is not None:
            self._measuring.join()

    def listing(self) -> dict[str, Any]:
        """The models and their tensors."""
        return {
            "models": [source[0].path.name for source in self._sources],
            "tensors": [
                {
                    "name": weight.name, "layer": weight.layer, "role": weight.role,
                    "type": weight.type.name, "ne": list(weight.ne), "bytes": weight.n_bytes,
                    "trouble": self._troubles[i],
                }
                for i, weight in enumerate(self._weights)
            ],
        }  # fmt: skip

    def figures(self, begin: int) -> dict[str, Any]:
        """The figures from number `begin` on, each with its tensor's number; `over` if there will
        be no more."""
        over = not self._measuring.is_alive()
        return {"over": over, "figures": self._figures[begin:]}

    def details(self, number: int) -> dict[str, Any]:
        """The matrices of a tensor, their blocks and levels."""
        shown, troubles = self._versions(number)
        weight = self._weights[number]
        visible = weight.n_elements and not self._troubles[number]
        return {
            "rows": weight.n_rows,
            "columns": weight.row_length,
            "matrix": weight.ne[1] if len(weight.ne) > 1 else 1,
            "top": self._matrix(number, 0).top if visible else 0,
            "troubles": troubles,
            "matrices": [
                {"model": source[0].path.name, "type": of.type.name, "block": of.type.block,
                 "sub_block": sub_block_of(of.type)}
                for of, source in zip(shown, self._sources, strict=False)
            ],
        }  # fmt: skip

    def _tile(
        self, number: int, which: int, measure: Measure, level: int, row: int, column: int
    ) -> Floats:
        """(rows, columns) the cells of a tile."""
        matrix, base = self._cells(number, which, measure)
        if not matrix.has(level, row, column):
            raise HTTPException(404, _MISSING)
        return compute_tile(matrix, measure, base, level, row, column)

    def _limits(self, number: int, which: int, measure: Measure) -> list[float]:
        """The absolute values at which colours end, by level."""
        return color_limits(*self._cells(number, which, measure), measure)

    def vector(self, number: int, which: int) -> tuple[Floats, int]:
        """The elements of a tensor with a single row, and 1; for a very long one, the largest of
        each group of neighbours, and the size of a group."""
        matrix, base = self._cells(number, which, "largest")
        if matrix.n_rows != 1:
            raise HTTPException(404, _MISSING)
        if not matrix.base:
            return matrix.read(0, 1, 0, matrix.n_columns)[0], 1
        return base()[0].astype(np.float32), 1 << matrix.base

    def _cells(
        self, number: int, which: int, measure: Measure
    ) -> tuple[Matrix, Callable[[], Cells]]:
        """A matrix, and the cells of its base: requests for them at the same time share a pass."""
        if measure not in MEASURES:
            raise HTTPException(404, _MISSING)
        at = number, which, measure

        def base() -> Cells:
            with self._computing.setdefault(at, threading.Lock()):
                return self._base(*at)

        return self._matrix(number, which), base

    def _compute_base(self, number: int, which: int, measure: Measure) -> Cells:
        return compute_base(self._matrix(number, which), measure, self._threads)

    def _matrix(self, number: int, which: int) -> Matrix:
        shown, _ = self._versions(number)
        weight = self._weights[number]
        if self._troubles[number] or not weight.n_elements or not 0 <= which <= 2 * len(shown) - 2:
            raise HTTPException(404, _MISSING)
        reads = [
            partial(source[1].read, of) for of, source in zip(shown, self._sources, strict=False)
        ]

        def difference(*at: int) -> Floats:
            with np.errstate(invalid="ignore", over="ignore"):
                return reads[0](*at) - reads[1](*at)

        read = difference if which == 2 else reads[which]
        return Matrix(weight.n_rows, weight.row_length, read)

    def _versions(self, number: int) -> tuple[list[Weight], list[str]]:
        """A tensor and, if it can be shown, that of the original; what is wrong with both."""
        if not 0 <= number < len(self._weights):
            raise HTTPException(404, _MISSING)
        weight, trouble = self._weights[number], self._troubles[number]
        shown, troubles = [weight], [trouble] if trouble else []
        for model, reader in self._sources[1:]:
            other = model.by_name.get(weight.name)
            if other is None:
                troubles.append(f"{model.path.name} has no tensor of this name")
            elif other.ne != weight.ne:
                troubles.append(f"in {model.path.name} it has another shape: {list(other.ne)}")
            elif trouble := _trouble(other, reader):
                troubles.append(trouble)
            else:
                shown.append(other)
        return shown, troubles

    def _measure(self) -> None:
        good = [i for i, trouble in enumerate(self._troubles) if not trouble]
        measured = self._sources[0][1].measure([self._weights[i] for i in good], self._threads)
        try:
            for i, stats in zip(good, measured, strict=True):
                self._figures.append({"tensor": i, **_figures(stats)})
                if self._stopped.is_set():
                    break
        except UsageError:
            pass  # the file was truncated; the tiles say so


def _figures(stats: WeightStats) -> dict[str, Any]:
    """The figures of a tensor for JSON, which has no NaN."""
    moments = stats.moments
    numbers = {
        "mean": moments.mean, "std": moments.std, "rms": moments.rms, "largest": stats.largest,
        "kurtosis": moments.kurtosis, "norm": moments.norm,
        "zeros": stats.n_zero / moments.n if moments.n else math.nan,
    }  # fmt: skip
    return {
        **{name: known(value) for name, value in numbers.items()},
        "non_finite": stats.non_finite,
        "percentiles": {
            f"p{p:g}": known(of) for p, of in zip(PERCENTS, stats.percentiles, strict=True)
        },
        "histogram": asdict(stats.histogram),
        "row_norms": asdict(stats.rows) if stats.rows else None,
        "column_norms": asdict(stats.columns) if stats.columns else None,
    }


def _trouble(weight: Weight, reader: WeightReader) -> str:
    """Why a tensor cannot be shown; empty if it can."""
    try:
        reader.check(weight)
    except UsageError as error:
        return str(error)
    return ""


def weight_routes(tensors: Tensors) -> list[BaseRoute]:
    """The files of the page, and what it asks for; another page calls `mount` of weights.js.
    Numbers are little-endian float32, in rows; their shape is in the header `X-Shape`."""

    def route(
        path: str, answer: Callable[..., Any], response: Callable[[Any], Response] = JSONResponse
    ) -> Route:
        """Its endpoint runs in a thread, because it computes; an error of a file is one line."""

        def answered(request: Request) -> Response:
            try:
                return response(answer(**request.path_params))
            except UsageError as error:
                return PlainTextResponse(str(error), 409)

        return Route(path, answered)

    def vector(found: tuple[Floats, int]) -> Response:
        return _floats(found[0], **{"X-Step": f"{found[1]}"})

    def figures(request: Request) -> Response:
        begin = request.query_params.get("begin", "0")
        return JSONResponse(tensors.figures(int(begin) if begin.isdecimal() else 0))

    matrix, at = "{number:int}/{which:int}", "{level:int}/{row:int}/{column:int}"
    return [
        *page_routes("llamacpp_instr.lab.view"),
        route("/tensors", tensors.listing),
        Route("/figures", figures),
        route("/tensor/{number:int}", tensors.details),
        route("/limits/{measure}/" + matrix, tensors.limits),
        route("/vector/" + matrix, tensors.vector, vector),
        route("/tile/{measure}/" + matrix + "/" + at, tensors.tile, _floats),
    ]


def _floats(values: Floats, **headers: str) -> Response:
    shape = ",".join(map(str, values.shape))
    return Response(
        values.astype("<f4").tobytes(), media_type="application/octet-stream",
        headers={"X-Shape": shape, **headers},
    )  # fmt: skip


class WeightsServer(LoopbackServer):
    """A server of tensors. Raises UsageError if the port is taken."""

    def __init__(self, tensors: Tensors, port: int = 0) -> None:
        super().__init__(port)
        self._tensors = tensors

    def run(self, started: Callable[[], None]) -> None:
        """Serve until Ctrl-C or SIGTERM; `started` is called once it answers."""
        self._tensors.start()
        try:
            self.serve(weight_routes(self._tensors), started)
        finally:
            self._tensors.stop()
