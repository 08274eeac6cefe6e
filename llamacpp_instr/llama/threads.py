"""How many CPUs there are, and the default number of threads of a compute."""

from __future__ import annotations

import os
from pathlib import Path

MAX_THREADS = 512  # GGML_MAX_N_THREADS


def usable_cpus() -> int:
    """Number of CPUs that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def default_threads() -> int:
    """Number of physical cores that this process may use, because ggml's threads wait for each
    other.

    Respects a container's limit.
    """
    try:
        usable = os.sched_getaffinity(0)
    except AttributeError:  # not on this operating system
        return min(os.cpu_count() or 1, MAX_THREADS)
    cores = set()
    for cpu in usable:
        siblings = Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list")
        try:
            cores.add(siblings.read_text())
        except OSError:
            cores.add(str(cpu))
    limit = cpu_limit()
    return min(len(cores), MAX_THREADS if limit is None else max(int(limit), 1), MAX_THREADS)


def cpu_limit() -> float | None:
    """CPUs that the container may use at once, None without such a limit:
    https://docs.kernel.org/admin-guide/cgroup-v2.html#cpu
    """
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        return int(quota) / int(period)
    except (OSError, ValueError):  # no such file, or "max": no limit
        return None
