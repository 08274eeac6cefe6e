"""The processor of a machine has the same name in a log as in reports of the machine itself."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from llamacpp_instr.base.cpus import MAKERS, PARTS, core_name, name_of
from tests.kit.programs import native_program


def _core(number: int, mips: str, maker: int, variant: int, part: int, revision: int) -> str:
    """As Linux on arm64 writes it."""
    return (
        f"processor\t: {number}\nBogoMIPS\t: {mips}\n"
        "Features\t: fp asimd evtstrm aes pmull sha1 sha2 crc32 cpuid\n"
        f"CPU implementer\t: {maker:#04x}\nCPU architecture: 8\nCPU variant\t: {variant:#x}\n"
        f"CPU part\t: {part:#05x}\nCPU revision\t: {revision}\n\n"
    )


PI_3_IN_32_BITS = """\
processor\t: 0
model name\t: ARMv7 Processor rev 4 (v7l)
BogoMIPS\t: 38.40
Features\t: half thumb fastmult vfp edsp neon vfpv3 tls vfpv4 idiva idivt vfpd32 lpae evtstrm crc32
CPU implementer\t: 0x41
CPU architecture: 7
CPU variant\t: 0x0
CPU part\t: 0xd03
CPU revision\t: 4

Hardware\t: BCM2835
Revision\t: a22082
Serial\t\t: 0000000000000000
Model\t\t: Raspberry Pi 3 Model B Rev 1.2
"""
EPYC = """\
processor\t: 0
vendor_id\t: AuthenticAMD
cpu family\t: 25
model\t\t: 17
model name\t: AMD EPYC 9R14
stepping\t: 1
"""
# the numbers of real machines
TEXTS = {
    "an EPYC": (EPYC * 2, "AMD EPYC 9R14"),
    "Raspberry Pi 5": (
        "".join(_core(i, "108.00", 0x41, 4, 0xD0B, 1) for i in range(4))
        + "Revision\t: d04170\nModel\t\t: Raspberry Pi 5 Model B Rev 1.0\n",
        "Cortex-A76",
    ),
    "Raspberry Pi 3, 32 bits": (PI_3_IN_32_BITS, "Cortex-A53"),
    "RK3588": (
        "".join(_core(i, "48.00", 0x41, 2, 0xD05, 0) for i in range(4))
        + "".join(_core(i, "48.00", 0x41, 4, 0xD0B, 0) for i in range(4, 8)),
        "Cortex-A55 + Cortex-A76",
    ),
    "Graviton 2": (_core(0, "243.75", 0x41, 3, 0xD0C, 1), "Neoverse-N1"),
    "Graviton 3": (_core(0, "2100.00", 0x41, 1, 0xD40, 1), "Neoverse-V1"),
    "Grace": (_core(71, "2000.00", 0x41, 0, 0xD4F, 0), "Neoverse-V2"),
    "AmpereOne": (_core(0, "2000.00", 0xC0, 0, 0xAC3, 0), "Ampere-1"),
    "Snapdragon X": (_core(0, "38.40", 0x51, 2, 0x001, 1), "Qualcomm Oryon"),
    "M1": (
        _core(0, "48.00", 0x61, 1, 0x022, 1) + _core(4, "48.00", 0x61, 1, 0x023, 1),
        "Apple M1 Icestorm + Apple M1 Firestorm",
    ),
    "a virtual machine on macOS": (_core(0, "48.00", 0x61, 0, 0x000, 0), "Apple 0x000"),
    "a newer core of Arm": (_core(0, "50.00", 0x41, 0, 0xDFF, 0), "Arm 0xdff"),
    "another maker": (_core(0, "50.00", 0x99, 0, 0x012, 0), "0x99 0x012"),
    "a kernel that hides it": ("processor\t: 0\nBogoMIPS\t: 48.00\n", ""),
    "nothing": ("", ""),
}


@pytest.mark.parametrize("name", TEXTS)
def test_a_processor_is_named_by_its_cores(name: str) -> None:
    cpuinfo, expected = TEXTS[name]
    assert name_of(cpuinfo) == expected


def test_names_are_unique() -> None:
    names = [core_name(maker, part) for maker, parts in PARTS.items() for part in parts]
    assert len(names) == len(set(names))
    assert PARTS.keys() <= MAKERS.keys()


@pytest.mark.native
def test_a_log_has_the_same_names(tmp_path: Path) -> None:
    program = native_program("cpu_name", tmp_path)
    every = [
        _core(0, "48.00", maker, 0, part, 0)
        for maker in [*MAKERS, 0x99] for part in [*PARTS.get(maker, {}), 0xDFF]
    ]  # fmt: skip
    for cpuinfo in (*(text for text, _ in TEXTS.values()), *every):
        done = subprocess.run([program], input=cpuinfo, capture_output=True, text=True, check=True)
        assert done.stdout == f"{name_of(cpuinfo)}\n"
