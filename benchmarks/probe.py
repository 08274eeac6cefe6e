"""`instr probe` against numpy: both copy the same amount of memory with one thread.

    python -m benchmarks.probe

Prints bytes per second and their ratio for each size; exits with status 1 if a ratio is outside of
RANGE. Run it on an idle machine.
"""

from __future__ import annotations

import sys
from functools import partial

import numpy as np

from llamacpp_instr.prediction.probe.measure import MIB, SECONDS, bandwidth, fastest_ns

SIZES = (16, 64, 256)
"""MiB; numpy's calls cost too much for less"""
RANGE = (0.67, 1.5)
"""of ggml divided by numpy"""


def main() -> int:
    within = True
    for measured in bandwidth(SIZES, [1]):
        one, other = np.ones((2, measured.bytes // 8), np.float32)
        theirs = measured.bytes / fastest_ns(partial(np.copyto, one, other), SECONDS) * 1e9
        ratio = measured.bytes_per_second / theirs
        within &= RANGE[0] <= ratio <= RANGE[1]
        print(
            f"{measured.bytes // MIB:4} MiB: ggml {measured.bytes_per_second / 1e9:6.1f} GB/s,"
            f" numpy {theirs / 1e9:6.1f} GB/s, ratio {ratio:.2f}"
        )
    return 0 if within else 1


if __name__ == "__main__":
    sys.exit(main())
