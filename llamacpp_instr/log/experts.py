"""The experts that the computes of a session used, as columns: a few bytes for each expert."""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llamacpp_instr.log.schema import Experts


@dataclass(frozen=True)
class ExpertUses:
    """A row for each node and compute for which the log has experts."""

    compute: NDArray[Any]
    node: NDArray[Any]
    n: NDArray[Any]
    """how many experts each row has"""
    expert: NDArray[Any]
    """of all rows, one after the other"""
    uses: NDArray[Any]
    """for each of these: how many tokens used it"""


class ExpertsCollector:
    """Collects the events of a log as `ExpertUses`."""

    def __init__(self) -> None:
        kinds = {"compute": "i", "node": "q", "n": "i", "expert": "H", "uses": "i"}
        self._columns: dict[str, array[int]] = {name: array(kind) for name, kind in kinds.items()}

    def add(self, event: Experts) -> None:
        """A whole event (`resolve`)."""
        columns = self._columns
        for node, expert, uses in event.choices():
            row = ([event.compute], [node], [len(expert)], expert, uses)
            for column, values in zip(columns.values(), row, strict=True):
                column.fromlist(values)

    def uses(self) -> ExpertUses:
        """What was collected. Add nothing afterwards."""
        columns = {name: np.frombuffer(of, of.typecode) for name, of in self._columns.items()}
        return ExpertUses(**columns)
