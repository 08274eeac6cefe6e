"""When kernels and layers ran: the columns of intervals, in the order of the log."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llamacpp_instr.converters.exports.tables.cells import Int64, joined, masked
from llamacpp_instr.log.session import Timings


class Rows:
    """A row for each interval of `timings`."""

    def __init__(self, timings: Sequence[Timings]) -> None:
        self.timings = timings
        places = joined([np.repeat(of.place, of.dur.shape[1]) for of in timings])
        self.order = np.argsort(places, kind="stable")

    def __len__(self) -> int:
        return len(self.order)

    def column(self, matrices: Sequence[NDArray[Any]]) -> Int64:
        """A column from a matrix for each of the timings; one of rows or of columns is repeated."""
        pairs = zip(matrices, self.timings, strict=True)
        pieces = [np.broadcast_to(matrix, of.dur.shape).ravel() for matrix, of in pairs]
        return joined(pieces)[self.order]

    def of_computes(self, values: Sequence[NDArray[Any]]) -> Int64:
        """A column from a value for each compute."""
        return self.column([of[:, None] for of in values])

    def times(self) -> dict[str, Int64]:
        """When each interval begins and how long it is, as the schema defines gap and dur."""
        return {
            "begin": self.column([of.begin for of in self.timings]),
            "dur": self.column([of.dur for of in self.timings]),
        }

    def waits(self) -> Any:
        """The time inside barriers; missing where the log does not record it."""
        waits = self.column(
            [np.zeros(1, np.int64) if of.wait is None else of.wait for of in self.timings]
        )
        return masked(waits, self.column([np.array(of.wait is None) for of in self.timings]) > 0)
