"""What the machine tells. The texts are those of real Macs; nothing here ran on one."""

from __future__ import annotations

import platform
import sys

import pytest

from llamacpp_instr.base import machine

M1_PRO = """\
hw.ncpu: 10
hw.activecpu: 10
hw.perflevel0.physicalcpu: 8
hw.perflevel0.physicalcpu_max: 8
hw.perflevel0.logicalcpu: 8
hw.perflevel1.physicalcpu: 2
hw.perflevel1.logicalcpu: 2
hw.physicalcpu: 10
hw.logicalcpu: 10
machdep.cpu.cores_per_package: 10
machdep.cpu.brand_string: Apple M1 Pro
"""
INTEL = """\
hw.ncpu: 4
hw.physicalcpu: 2
hw.logicalcpu: 4
machdep.cpu.vendor: GenuineIntel
machdep.cpu.brand_string: Intel(R) Core(TM) i5-5250U CPU @ 1.60GHz
machdep.cpu.leaf7_feature_bits: 35399595 0
machdep.cpu.features: FPU VME SSE4.1 SSE4.2 x2APIC AVX1.0 RDRAND F16C
machdep.cpu.leaf7_features: RDWRFSGS TSC_THREAD_OFFSET BMI1 AVX2 SMEP BMI2
"""


VM_STAT = """\
Mach Virtual Memory Statistics: (page size of 16384 bytes)
Pages free:                                    36722.
Pages active:                                 400000.
Pages inactive:                               370704.
Pages speculative:                             27978.
Pages throttled:                                   0.
Pages wired down:                             600000.
"Translation faults":                     1246341712.
Pages occupied by compressor:                 500000.
"""


def test_a_macs_memory_is_free_where_nothing_was_used_for_long() -> None:
    assert machine.parse_vm_stat(VM_STAT) == (36722 + 370704 + 27978) * 16384
    intel = VM_STAT.replace("16384", "4096")
    assert machine.parse_vm_stat(intel) == (36722 + 370704 + 27978) * 4096
    assert machine.parse_vm_stat("") == 0


@pytest.mark.parametrize(("text", "cores"), [(M1_PRO, 8), (INTEL, 2), ("", 0)])
def test_threads_are_for_a_macs_fast_cores(text: str, cores: int) -> None:
    assert machine.performance_cores(machine.parse_sysctl(text)) == cores


def test_a_macs_cpu_is_known_by_its_name_and_features(monkeypatch: pytest.MonkeyPatch) -> None:
    """A name tells all of a CPU by Apple. What an Intel can do may also depend on the system."""
    for text, identity in (
        (M1_PRO, ["Apple M1 Pro"]),
        (
            INTEL,
            [
                "Intel(R) Core(TM) i5-5250U CPU @ 1.60GHz",
                "FPU VME SSE4.1 SSE4.2 x2APIC AVX1.0 RDRAND F16C",
                "RDWRFSGS TSC_THREAD_OFFSET BMI1 AVX2 SMEP BMI2",
            ],
        ),
    ):
        monkeypatch.setattr(machine, "sysctl", lambda text=text: machine.parse_sysctl(text))
        assert machine.cpu_identity() == [platform.machine(), *identity]


def test_what_is_untested_is_said_where_the_tests_do_not_run() -> None:
    tested = (sys.platform, platform.machine()) == ("linux", "x86_64")
    assert (machine.untested() == "") == tested


def test_a_cpu_keeps_its_identity() -> None:
    assert len(machine.cpu_identity()) > 1
    assert machine.cpu_identity() == machine.cpu_identity()


def test_memory_cores_and_cpus_of_this_machine() -> None:
    memory = machine.machine_memory()
    assert memory is not None
    assert memory > 1 << 28
    assert 0 < machine.free_memory() <= memory
    assert 1 <= machine.usable_cores() <= machine.usable_cpus()
