"""What the page asks about the tensors of a model, and of the one that it was quantized from.

Invariant: memory is bounded: tiles are computed on request, and the cache forgets. Figures are
measured once, in the background, in the order of the file.
"""

from __future__ import annotations

import math
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Sequence
from concurrent.futures import Future
from typing import Any, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from llamacpp_instr.base.errors import UsageError
from llamacpp_instr.lab.view.tiles import (
    Cells,
    Floats,
    Matrix,
    Measure,
    color_limits,
    compute_base,
    compute_tile,
)
from llamacpp_instr.lab.weights.distribution import PERCENTS, Channels, WeightStats
from llamacpp_instr.lab.weights.layout import LAYOUTS
from llamacpp_instr.model.file import ModelFile, Weight

Array: TypeAlias = "NDArray[Any]"


class Cache:
    """The arrays that were asked for last. Those who ask for one at the same time share its
    computation."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._lock = threading.Lock()
        self._kept: OrderedDict[Hashable, Future[Array]] = OrderedDict()
        self.n_bytes = 0

    def get(self, key: Hashable, compute: Callable[[], Array]) -> Array:
        """The array of `key`; `compute` makes it unless it is kept. An error is not kept."""
        with self._lock:
            found = self._kept.get(key)
            if found is None:
                own = self._kept[key] = Future()
            else:
                self._kept.move_to_end(key)
        if found is not None:
            return found.result()
        try:
            array = compute()
        except BaseException as error:
            with self._lock:
                del self._kept[key]
            own.set_exception(error)
            raise
        own.set_result(array)
        with self._lock:
            self.n_bytes += array.nbytes
            done = [key for key, of in self._kept.items() if of.done() and of is not own]
            for key in done:
                if self.n_bytes <= self._max_bytes:
                    break
                self.n_bytes -= self._kept.pop(key).result().nbytes
        return array


MAX_BYTES = 1 << 27
"""of the arrays that are kept"""


class Reader(Protocol):
    """Reads and measures tensors: `weights.measure.WeightReader`."""

    def check(self, weight: Weight) -> None: ...
    def read(self, weight: Weight, row: int, end: int, column: int, column_end: int) -> Floats: ...
    def measure(
        self, weights: Sequence[Weight], threads: int | None = None
    ) -> Iterator[WeightStats]: ...


Source: TypeAlias = "tuple[ModelFile, Reader]"


class Tensors:
    """The tensors of a model, numbered in the order of its file. A tensor has up to three matrices:
    its own (0), that of the original (1), and the difference, own minus original (2)."""

    def __init__(self, model: Source, original: Source | None = None, threads: int = 1) -> None:
        self._sources = [model] if original is None else [model, original]
        self._weights = model[0].weights
        self._threads = threads
        self._cache = Cache(MAX_BYTES)
        self._figures: list[dict[str, Any]] = []
        self._starting = threading.Lock()
        self._stopped = threading.Event()
        self._troubles = [_trouble(weight, model[1]) for weight in self._weights]
        self._measuring = threading.Thread(target=self._measure, name="measure", daemon=True)

    def start(self) -> None:
        """Begin to measure, in the background, unless it has begun."""
        with self._starting:
            if self._measuring.ident is None:
                self._measuring.start()

    def stop(self) -> None:
        """End it, after the tensor that is being measured."""
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
        """The figures that were measured since there were `begin`, each with its tensor's number;
        `over` if there will be no more."""
        over = not self._measuring.is_alive()
        return {"over": over, "figures": self._figures[begin:]}

    def details(self, number: int) -> dict[str, Any] | None:
        """The matrices of a tensor, their blocks and levels; None if there is no such tensor."""
        if not 0 <= number < len(self._weights):
            return None
        weight = self._weights[number]
        troubles = [self._troubles[number]]
        sources = [(weight, self._sources[0])]
        if len(self._sources) > 1:
            other, trouble = self._other(weight)
            troubles.append(trouble)
            if other is not None and not trouble:
                sources.append((other, self._sources[1]))
        matrix = self._matrix(number, 0)
        return {
            "rows": weight.n_rows,
            "columns": weight.ne[0] if weight.ne else 1,
            "matrix": weight.ne[1] if len(weight.ne) > 1 else 1,
            "top": matrix.top if matrix else 0,
            "troubles": [trouble for trouble in troubles if trouble],
            "matrices": [
                {"model": source[0].path.name, "type": of.type.name, "block": of.type.block,
                 "sub_block": _sub_block(of)}
                for of, source in sources
            ],
        }  # fmt: skip

    def tile(
        self, number: int, which: int, measure: Measure, level: int, row: int, column: int
    ) -> Floats | None:
        """(rows, columns) the cells of a tile; None if there is no such one. Raises `UsageError` if
        a file became shorter."""
        matrix = self._matrix(number, which)
        if matrix is None or not matrix.has(level, row, column):
            return None
        return self._cache.get(
            ("tile", number, which, measure, level, row, column),
            lambda: compute_tile(
                matrix, measure, lambda: self._base(number, which, measure), level, row, column
            ),
        )

    def limits(self, number: int, which: int, measure: Measure) -> list[float] | None:
        """The sizes at which colours end, by level; None if there is no such matrix."""
        matrix = self._matrix(number, which)
        if matrix is None:
            return None
        found = self._cache.get(
            ("limits", number, which, measure),
            lambda: np.array(
                color_limits(matrix, measure, lambda: self._base(number, which, measure))
            ),
        )
        return list(map(float, found))

    def vector(self, number: int, which: int) -> tuple[Floats, int] | None:
        """The elements of a tensor with a single row, and 1; of a very long one the largest of so
        many neighbours, and how many. None if there is no such tensor."""
        matrix = self._matrix(number, which)
        if matrix is None or matrix.n_rows != 1:
            return None
        if not matrix.base:
            return matrix.read(0, 1, 0, matrix.n_columns)[0], 1
        return self._base(number, which, "largest")[0].astype(np.float32), 1 << matrix.base

    def _base(self, number: int, which: int, measure: Measure) -> Cells:
        matrix = self._matrix(number, which)
        assert matrix is not None
        return self._cache.get(
            ("base", number, which, measure), lambda: compute_base(matrix, measure, self._threads)
        )

    def _matrix(self, number: int, which: int) -> Matrix | None:
        if not 0 <= number < len(self._weights) or not 0 <= which < 3:
            return None
        weight = self._weights[number]
        if self._troubles[number] or not weight.n_elements:
            return None
        columns = weight.ne[0] if weight.ne else 1
        reader = self._sources[0][1]
        if which == 0:
            return Matrix(weight.n_rows, columns, lambda *at: reader.read(weight, *at))
        if len(self._sources) == 1:
            return None
        found, trouble = self._other(weight)
        if found is None or trouble:
            return None
        other, theirs = found, self._sources[1][1]
        if which == 1:
            return Matrix(weight.n_rows, columns, lambda *at: theirs.read(other, *at))

        def difference(*at: int) -> Floats:
            with np.errstate(invalid="ignore", over="ignore"):
                return reader.read(weight, *at) - theirs.read(other, *at)

        return Matrix(weight.n_rows, columns, difference)

    def _other(self, weight: Weight) -> tuple[Weight | None, str]:
        """The tensor of the original, and why it cannot be shown."""
        model, reader = self._sources[1]
        other = model.by_name.get(weight.name)
        if other is None:
            return None, f"{model.path.name} has no tensor of this name"
        if other.ne != weight.ne:
            return None, f"in {model.path.name} it has another shape: {list(other.ne)}"
        return other, _trouble(other, reader)

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
        **{name: value if math.isfinite(value) else None for name, value in numbers.items()},
        "non_finite": stats.non_finite,
        "percentiles": {
            f"p{percent:g}": value if math.isfinite(value) else None
            for percent, value in zip(PERCENTS, stats.percentiles, strict=True)
        },
        "histogram": {"limit": stats.histogram.limit, "counts": stats.histogram.counts},
        "row_norms": _channels(stats.rows),
        "column_norms": _channels(stats.columns),
    }


def _channels(channels: Channels | None) -> dict[str, Any] | None:
    if channels is None:
        return None
    return {
        "n": channels.n, "median": channels.median, "largest": channels.largest,
        "n_outliers": channels.n_outliers,
        "worst": [
            {"index": c.index, "norm": c.norm, "times_median": c.times_median, "score": c.score}
            for c in channels.worst
        ],
    }  # fmt: skip


def _sub_block(weight: Weight) -> int:
    """Elements that share a scale."""
    layout = LAYOUTS.get(weight.type.name)
    return (layout.sub_block if layout else 0) or weight.type.block


def _trouble(weight: Weight, reader: Reader) -> str:
    """Why a tensor cannot be shown; empty if it can."""
    try:
        reader.check(weight)
    except UsageError as error:
        return str(error)
    return ""
