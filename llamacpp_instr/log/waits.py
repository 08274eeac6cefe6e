"""When the result of a step was there: asynchronous backends return from a step before that."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from llamacpp_instr.log.columns import Table

Int64 = NDArray[np.int64]

WAITED = 20_000
"""ns; a shorter wait found the result there, so it does not tell when it came"""


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
