"""Ratios of interleaved measurements: the median of the pairs, with a bootstrap interval."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

RESAMPLES = 4000


@dataclass(frozen=True)
class Ratio:
    """A median ratio and its 95 % interval (percentile bootstrap over the pairs)."""

    median: float
    low: float
    high: float
    pairs: int

    def __str__(self) -> str:
        return f"{self.median:.4f} [{self.low:.4f}, {self.high:.4f}] over {self.pairs} pairs"


def median_ratio(measured: Sequence[float], peer: Sequence[float]) -> Ratio:
    """The ratios `measured[i] / peer[i]`."""
    ratios = np.asarray(measured, dtype=float) / np.asarray(peer, dtype=float)
    rng = np.random.default_rng(0)
    medians = np.median(rng.choice(ratios, (RESAMPLES, len(ratios))), axis=1)
    low, high = np.quantile(medians, [0.025, 0.975])
    return Ratio(float(np.median(ratios)), float(low), float(high), len(ratios))
