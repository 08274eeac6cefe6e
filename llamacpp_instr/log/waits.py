"""When the result of a step was there: asynchronous backends return from a step before that."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from llamacpp_instr.log.columns import Table
from llamacpp_instr.log.schema import CONTEXTS_KEPT, Sync

Int64 = NDArray[np.int64]

WAITED = 20_000
"""ns; a shorter wait found the result there, so it does not show when it came"""


def with_result_times(steps: Table, syncs: Table) -> Table:
    """The steps with `end`, when the result was there, and `returned`, when the call returned (ns).

    They differ only if llama.cpp waited for a device after the call: then the step ends with that
    wait (`sync`). A wait belongs to the step of its context that began last before it.
    """
    end: Int64 = steps["end"].copy()
    waits = syncs.rows(syncs["dur"] >= WAITED) if len(syncs) else syncs
    for ctx in np.unique(waits["ctx"]) if len(waits) else ():
        mine = np.flatnonzero(steps["ctx"] == ctx)
        mine = mine[np.argsort(steps["begin"][mine], kind="stable")]
        of_ctx = waits.rows(waits["ctx"] == ctx)
        at = np.searchsorted(steps["begin"][mine], of_ctx["t"], side="right") - 1
        known = at >= 0
        np.maximum.at(end, mine[at[known]], (of_ctx["t"] + of_ctx["dur"])[known])
    return Table(steps.columns | {"end": end, "returned": steps["end"]})


Step = TypeVar("Step")


class LatestSteps(Generic[Step]):
    """For readers that stream: keeps the step of each context that ended last, because a wait for
    its result may follow. `settled` gets each step with the time when its result was there."""

    def __init__(self, settled: Callable[[Step, int], object]) -> None:
        self._settled = settled
        self._latest: dict[int, tuple[Step, int]] = {}

    def add(self, ctx: int, step: Step, t: int) -> None:
        """A step has ended."""
        self.settle(ctx)
        self._latest[ctx] = step, t
        if len(self._latest) > CONTEXTS_KEPT:
            self.settle(next(iter(self._latest)))

    def wait(self, sync: Sync) -> None:
        """A wait has ended."""
        if sync.ctx in self._latest and sync.dur >= WAITED:
            step, t = self._latest[sync.ctx]
            self._latest[sync.ctx] = step, max(t, sync.t + sync.dur)

    def settle(self, ctx: int) -> None:
        """No wait for the latest step of a context follows: another begins, or its token is
        there."""
        if ctx in self._latest:
            self._settled(*self._latest.pop(ctx))

    def settle_all(self) -> None:
        """No wait follows."""
        for ctx in list(self._latest):
            self.settle(ctx)
