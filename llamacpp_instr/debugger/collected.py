"""The logits of a run, one row for each token that was sampled from them."""

from __future__ import annotations

from collections.abc import Collection

import numpy as np
import numpy.typing as npt

from llamacpp_instr.debugger.graph import LiveGraph, Ubatch
from llamacpp_instr.debugger.stop import Stop


class CollectedLogits:
    """Keeps the last row of what each compute gives; a witness of a `Debugger`."""

    def __init__(self) -> None:
        self.rows: list[npt.NDArray[np.float32]] = []
        """(vocabulary,) each"""

    def wants(self, graph: LiveGraph, _ubatch: Ubatch) -> Collection[int]:
        """The last op."""
        return [max((node.index for node in graph.nodes if node.runs), default=-1)]

    def passed(self, stop: Stop) -> None:
        """Computes of a prompt's first parts give no logits."""
        values = stop.values()
        if values.size:
            self.rows.append(np.atleast_2d(values)[-1].copy())
