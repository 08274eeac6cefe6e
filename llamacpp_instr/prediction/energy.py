"""The energy that the processors took, where Linux reports it (RAPL).

https://docs.kernel.org/power/powercap/powercap.html
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

POWERCAP = Path("/sys/class/powercap")


def read_joules(folder: Path = POWERCAP) -> dict[str, tuple[float, float]]:
    """The counter of each processor, and the value after which it begins again, in joules; empty if
    the system has none, or none that this user may read."""
    found = {}
    for zone in sorted(folder.glob("intel-rapl:*")):
        if zone.name.count(":") > 1:  # a part of a processor, which is in its counter
            continue
        try:
            counter = int((zone / "energy_uj").read_text()) / 1e6
            most = int((zone / "max_energy_range_uj").read_text()) / 1e6
        except (OSError, ValueError):
            continue
        found[zone.name] = counter, most
    return found


def joules_between(
    before: Mapping[str, tuple[float, float]], after: Mapping[str, tuple[float, float]]
) -> float | None:
    """Energy between two readings, in joules; None if there was nothing to read."""
    same = before.keys() & after.keys()
    if not same:
        return None
    total = 0.0
    for name in same:
        used = after[name][0] - before[name][0]
        total += used if used >= 0 else used + after[name][1]  # the counter began again
    return total
