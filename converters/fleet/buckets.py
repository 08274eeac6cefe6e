"""Durations in buckets whose limits grow by a fixed ratio, so that many logs add up in few rows.

Every duration of a bucket is within RELATIVE_ERROR of its middle, so a percentile of counted
durations is, too (Masson, Rim and Lee, DDSketch, VLDB 2019).
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

Int64 = NDArray[np.int64]

RELATIVE_ERROR = 0.01
GROWTH = (1 + RELATIVE_ERROR) / (1 - RELATIVE_ERROR)
_LOG = math.log(GROWTH)
N_BUCKETS = 2 + math.ceil(math.log(2**63) / _LOG)


def bucket_of(ns: Int64) -> Int64:
    """The bucket of each duration, at least 0: bucket 0 is for durations below 1 ns, bucket i for
    those up to GROWTH to the power of i - 1."""
    found = np.ceil(np.log(np.maximum(ns, 1)) / _LOG).astype(np.int64) + 1
    found[ns < 1] = 0
    return found
