"""The name of this machine's processor.

On Arm, Linux reports two numbers for each core: its maker and its part. `PARTS` has the names;
`tools.generate` makes the recorder's table from it, so that a log has the same names.
"""

from __future__ import annotations

import re
from pathlib import Path

from llamacpp_instr.base.machine import IS_MAC, sysctl

MAKERS: dict[int, str] = {
    0x41: "Arm", 0x42: "Broadcom", 0x43: "Cavium", 0x46: "Fujitsu", 0x48: "HiSilicon",
    0x4E: "NVIDIA", 0x50: "Applied Micro", 0x51: "Qualcomm", 0x53: "Samsung", 0x56: "Marvell",
    0x61: "Apple", 0x69: "Intel", 0x6D: "Microsoft", 0x70: "Phytium", 0xC0: "Ampere",
}  # fmt: skip
"""by `CPU implementer`"""

PARTS: dict[int, dict[int, str]] = {
    0x41: {
        0xD02: "Cortex-A34", 0xD03: "Cortex-A53", 0xD04: "Cortex-A35", 0xD05: "Cortex-A55",
        0xD06: "Cortex-A65", 0xD07: "Cortex-A57", 0xD08: "Cortex-A72", 0xD09: "Cortex-A73",
        0xD0A: "Cortex-A75", 0xD0B: "Cortex-A76", 0xD0C: "Neoverse-N1", 0xD0D: "Cortex-A77",
        0xD0E: "Cortex-A76AE", 0xD40: "Neoverse-V1", 0xD41: "Cortex-A78", 0xD42: "Cortex-A78AE",
        0xD43: "Cortex-A65AE", 0xD44: "Cortex-X1", 0xD46: "Cortex-A510", 0xD47: "Cortex-A710",
        0xD48: "Cortex-X2", 0xD49: "Neoverse-N2", 0xD4A: "Neoverse-E1", 0xD4B: "Cortex-A78C",
        0xD4C: "Cortex-X1C", 0xD4D: "Cortex-A715", 0xD4E: "Cortex-X3", 0xD4F: "Neoverse-V2",
        0xD80: "Cortex-A520", 0xD81: "Cortex-A720", 0xD82: "Cortex-X4", 0xD83: "Neoverse-V3AE",
        0xD84: "Neoverse-V3", 0xD85: "Cortex-X925", 0xD87: "Cortex-A725", 0xD88: "Cortex-A520AE",
        0xD89: "Cortex-A720AE", 0xD8E: "Neoverse-N3",
    },
    0x43: {0x0A1: "ThunderX", 0x0AF: "ThunderX2"},
    0x46: {0x001: "A64FX"},
    0x48: {0xD01: "Kunpeng-920"},
    0x4E: {0x003: "Denver 2", 0x004: "Carmel"},
    0x51: {
        0x001: "Oryon", 0x802: "Kryo 3xx Gold", 0x803: "Kryo 3xx Silver", 0x804: "Kryo 4xx Gold",
        0x805: "Kryo 4xx Silver", 0xC00: "Falkor",
    },
    0x61: {
        0x022: "M1 Icestorm", 0x023: "M1 Firestorm", 0x024: "M1 Pro Icestorm",
        0x025: "M1 Pro Firestorm", 0x028: "M1 Max Icestorm", 0x029: "M1 Max Firestorm",
        0x032: "M2 Blizzard", 0x033: "M2 Avalanche", 0x034: "M2 Pro Blizzard",
        0x035: "M2 Pro Avalanche", 0x038: "M2 Max Blizzard", 0x039: "M2 Max Avalanche",
    },
    0x6D: {0xD49: "Cobalt 100"},
    0xC0: {0xAC3: "Ampere-1", 0xAC4: "Ampere-1a"},
}  # fmt: skip
"""by `CPU implementer`, then `CPU part`, as in the documentation of these cores"""


def cpu_name() -> str:
    """This machine's processor, as `host.cpu` in a log; empty if the system does not report it."""
    if IS_MAC:
        return sysctl().get("machdep.cpu.brand_string", "")
    try:
        return name_of(Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace"))
    except OSError:
        return ""


def name_of(cpuinfo: str) -> str:
    """The processor in the text of /proc/cpuinfo; empty without one. If cores differ, all kinds are
    named, in the order in which they first appear: `Cortex-A55 + Cortex-A76`."""
    found = re.findall(r"^(model name|CPU implementer|CPU part)\s*: (.+)$", cpuinfo, re.MULTILINE)
    model, maker, names = "", 0, dict[str, None]()
    for key, value in found:
        if key == "model name":
            model = model or value
        elif key == "CPU implementer":
            maker = int(value, 16)
        else:
            names[core_name(maker, int(value, 16))] = None
    return " + ".join(names) or model


def core_name(maker: int, part: int) -> str:
    """The name of a core, preceded by its maker's; Arm's own cores are known without it."""
    made_by = MAKERS.get(maker, f"{maker:#04x}")
    name = PARTS.get(maker, {}).get(part)
    if name is None:
        return f"{made_by} {part:#05x}"
    return name if maker == 0x41 or name.startswith(made_by) else f"{made_by} {name}"
