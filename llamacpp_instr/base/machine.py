"""The machine as its operating system reports it: CPUs, memory, energy.

Invariant: no other module asks a system for these. The code for Linux is next to that for macOS; a
value that a system does not report is not an error. The code for macOS has never run.
"""

from __future__ import annotations

import functools
import os
import platform
import re
import sys
from contextlib import suppress
from pathlib import Path

from llamacpp_instr.base.processes import output_of

POWERCAP = Path("/sys/class/powercap")

IS_MAC = sys.platform == "darwin"
INSTALL_COMPILER = "macOS: xcode-select --install" if IS_MAC else "Debian, Ubuntu: apt install g++"


def untested() -> str:
    """What was never tested on a machine like this one; empty where the tests run."""
    if IS_MAC:
        return (
            "macOS: nothing has ever run here. The recorder was only compiled, without Metal and "
            "Accelerate, and the ops of Metal are not timed"
        )
    here = f"{platform.system()} on {platform.machine()}"
    how = "only emulated" if here == "Linux on aarch64" else "nothing has ever run here"
    return "" if here == "Linux on x86_64" else f"{here}: {how}"


def usable_cpus() -> int:
    """Number of CPUs that this process may use."""
    if sys.platform == "linux":
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def usable_cores() -> int:
    """Number of physical cores that this process may use. On a Mac, only performance cores: ggml's
    threads wait for each other, so a slow core holds up all of them. Respects a container's limit.
    """
    if IS_MAC:
        return performance_cores(sysctl()) or usable_cpus()
    if sys.platform != "linux":
        return usable_cpus()
    cores = set()
    for cpu in os.sched_getaffinity(0):
        siblings = Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list")
        try:
            cores.add(siblings.read_text())
        except OSError:
            cores.add(str(cpu))
    limit = cpu_limit()
    return len(cores) if limit is None else min(len(cores), max(int(limit), 1))


def cpu_limit() -> float | None:
    """CPUs that the container may use at once, None without such a limit:
    https://docs.kernel.org/admin-guide/cgroup-v2.html#cpu
    """
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        return int(quota) / int(period)
    except (OSError, ValueError):  # no such file, or "max": no limit
        return None


def cpu_identity() -> list[str]:
    """Model and features of this CPU, which `-march=native` depends on."""
    found = dict(sysctl())
    names = ["machdep.cpu.brand_string", "machdep.cpu.features", "machdep.cpu.leaf7_features"]
    if not found:
        try:
            for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
                key, _, value = line.partition(":")
                found.setdefault(key.strip(), value.strip())
        except OSError:
            return [platform.machine(), platform.processor()]
        names = ["model name", "flags", "CPU implementer", "CPU part", "Features"]
    return [platform.machine(), *(found[name] for name in names if name in found)]


def cpu_frequencies() -> dict[str, str]:
    """What Linux reports about the clocks of its CPUs, from the lowest to the highest."""
    facts = {}
    for what, name in (("governor", "scaling_governor"), ("frequency, kHz", "scaling_cur_freq")):
        paths = Path("/sys/devices/system/cpu").glob(f"cpu[0-9]*/cpufreq/{name}")
        with suppress(OSError):
            if found := sorted({path.read_text().strip() for path in paths}):
                facts[what] = " to ".join(dict.fromkeys((found[0], found[-1])))
    return facts


_LIMITS = (
    "/sys/fs/cgroup/memory.max",  # version 2
    "/sys/fs/cgroup/memory/memory.limit_in_bytes",  # version 1
)


def machine_memory() -> int | None:
    """Bytes of memory and swap, or the container's memory limit if that is less; None if the
    system does not report it. On a Mac, memory only, because its swap grows when it is needed.

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
    limits = [installed]
    for name in _LIMITS:
        with suppress(OSError, ValueError):  # no such group, or "max": no limit
            limits.append(int(Path(name).read_text()) or installed)
    return min(limits)


def _total(meminfo: str) -> int:
    """Bytes of memory and swap in Linux's /proc/meminfo."""
    lines = dict(line.split(":", 1) for line in meminfo.splitlines())
    # always in units of 1024 bytes, although it says kB
    return sum(int(lines[name].split()[0]) << 10 for name in ("MemTotal", "SwapTotal"))


def free_memory() -> int:
    """Bytes of free memory; on a Mac, which keeps little free, also what it would reclaim from
    files, and from programs that have not used it for long."""
    if IS_MAC:
        return parse_vm_stat(output_of("/usr/bin/vm_stat"))
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def read_joules(folder: Path = POWERCAP) -> dict[str, tuple[float, float]]:
    """The counter of each processor, and the value after which it wraps around, in joules; empty if
    the system has none, or none that this user may read: Linux's RAPL,
    https://docs.kernel.org/power/powercap/powercap.html"""
    found = {}
    for zone in sorted(folder.glob("intel-rapl:*")):
        if zone.name.count(":") > 1:  # a part of a processor, whose counter includes it
            continue
        try:
            counter = int((zone / "energy_uj").read_text()) / 1e6
            most = int((zone / "max_energy_range_uj").read_text()) / 1e6
        except (OSError, ValueError):
            continue
        found[zone.name] = counter, most
    return found


def drop_cached(path: Path) -> None:
    """Write a file to its disk and remove it from the page cache. Once read again, it is elsewhere
    in memory, probably in larger pages: a model of 270 MB was decoded at 20.9 GB/s after it was
    written, and at 27.4 after it was read again. Does nothing except on Linux."""
    if sys.platform != "linux":
        return
    with path.open("rb+") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


# --- macOS ---


@functools.cache
def sysctl() -> dict[str, str]:
    """What macOS reports about its hardware and CPU, by name; empty on another system."""
    if not IS_MAC:
        return {}
    return parse_sysctl(output_of("/usr/sbin/sysctl", "hw", "machdep.cpu"))


def parse_sysctl(text: str) -> dict[str, str]:
    """The names and values in the output of `sysctl`."""
    lines = (line.partition(": ") for line in text.splitlines())
    return {name: value.strip() for name, colon, value in lines if colon}


def performance_cores(found: dict[str, str]) -> int:
    """Physical cores of the fastest kind, as llama.cpp counts them (`cpu_get_num_physical_cores`);
    0 if `sysctl` does not report them."""
    for name in ("hw.perflevel0.physicalcpu", "hw.physicalcpu"):
        if found.get(name, "0") != "0":
            return int(found[name])
    return 0


def parse_vm_stat(text: str) -> int:
    """Bytes that are free or could be freed, from the output of `vm_stat`."""
    size = re.search(r"page size of (\d+) bytes", text)
    pages = re.findall(r"^Pages (?:free|inactive|speculative): +(\d+)\.", text, re.MULTILINE)
    return sum(map(int, pages)) * int(size[1]) if size else 0
