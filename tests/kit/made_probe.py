"""A probe that no machine was measured for."""

from __future__ import annotations

from msgspec.structs import replace

from llamacpp_instr.prediction.probe.file import Bandwidth, Barrier, Kernel, Probe

MIB = 1 << 20


def probe_of(cpu: str = "", cores: int = 4) -> Probe:
    """A machine with round figures; an empty `cpu` fits every log."""
    return Probe(
        probe=1,
        time="2026-01-01T00:00:00+00:00",
        cpu=cpu,
        cores=cores,
        load=0.0,
        llama_cpp="1",
        bandwidth=[Bandwidth(1, MIB, 9e10), Bandwidth(2, MIB, 15e10), Bandwidth(2, 64 * MIB, 2e10)],
        kernels=[Kernel("F16", 1, 1, 5e10), Kernel("F16", 1, 2, 1e11), Kernel("F16", 8, 2, 3e11)],
        barriers=[Barrier(2, 250.0)],
    )


def probe_of_caches(cpu: str) -> Probe:
    """A machine as fast as the caches of an AMD EPYC were for one thread. It does not depend on
    what else runs, as a measured one would."""
    return replace(probe_of(cpu), bandwidth=[Bandwidth(1, MIB, 2e11)])
