"""How much memory this machine has for a process."""

from __future__ import annotations

import os
from pathlib import Path

_LIMITS = (
    "/sys/fs/cgroup/memory.max",  # version 2
    "/sys/fs/cgroup/memory/memory.limit_in_bytes",  # version 1
)


def machine_memory() -> int | None:
    """Bytes of memory and swap, or the container's memory limit if that is less; None if the
    system does not report it.

    A container sees its limit at the root of the cgroup file system:
    https://docs.kernel.org/admin-guide/cgroup-v2.html#memory-interface-files
    """
    try:
        installed = _total(Path("/proc/meminfo").read_text())
    except OSError:  # not Linux
        try:
            return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        except (AttributeError, ValueError, OSError):
            return None
    return min([installed, *(limit for name in _LIMITS if (limit := _limit(Path(name))))])


def _total(meminfo: str) -> int:
    """Bytes of memory and swap in Linux's /proc/meminfo."""
    lines = dict(line.split(":", 1) for line in meminfo.splitlines())
    # always in units of 1024 bytes, although it says kB
    return sum(int(lines[name].split()[0]) << 10 for name in ("MemTotal", "SwapTotal"))


def _limit(path: Path) -> int | None:
    """The limit of a control group in bytes; None without a limit or such a group."""
    try:
        return int(path.read_text())
    except (OSError, ValueError):  # "max": no limit
        return None
