"""When kernels and layers ran: the columns of intervals that follow each other."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from llamacpp_instr.converters.exports.tables.cells import Int64, int64, joined, masked
from llamacpp_instr.log.session import Timed


def times_of(timed: Sequence[Timed]) -> dict[str, Int64]:
    """When each interval begins and how long it is, as the schema defines gap and dur."""
    lengths = int64([len(of.dur) for of in timed])
    dur = joined([of.dur for of in timed])
    gap = joined([np.zeros(len(of.dur), np.int64) if of.gap is None else of.gap for of in timed])
    passed = np.cumsum(dur + gap)
    before = np.concatenate([np.zeros(1, np.int64), passed])[np.cumsum(lengths) - lengths]
    end = passed + np.repeat(int64([of.t for of in timed]) - before, lengths)
    return {"begin": end - dur, "dur": dur}


def waits_of(timed: Sequence[Timed], n: int) -> Any:
    """The time inside barriers, (n,); missing where the log does not tell."""
    if all(of.wait is None for of in timed):
        return masked(np.zeros(n, np.int64), np.ones(n, np.bool_))
    missing = joined([np.full(len(of.dur), of.wait is None) for of in timed]).astype(np.bool_)
    waits = [np.zeros(len(of.dur), np.int64) if of.wait is None else of.wait for of in timed]
    return masked(joined(waits), missing)
