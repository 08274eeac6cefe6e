"""The default number of threads of a compute."""

from __future__ import annotations

from llamacpp_instr.base.machine import usable_cores

MAX_THREADS = 512  # GGML_MAX_N_THREADS


def default_threads() -> int:
    """Number of physical cores that this process may use, because ggml's threads wait for each
    other."""
    return min(usable_cores(), MAX_THREADS)
