"""A machine with round figures, and its file, for `instr predict`."""

from __future__ import annotations

import platform

from msgspec.structs import replace

from llamacpp_instr.prediction.probe.file import (
    KernelModel,
    OtherCost,
    Overhead,
    Probe,
    ProductCost,
    Stream,
)
from tests.kit.made_probe import probe_of

TYPES = ("F32", "F16", "Q8_0", "Q4_K")
MB = 10**6


def made_machine(threads: tuple[int, ...] = (1, 2), watts: float | None = None) -> Probe:
    """Two threads are twice as fast; a product of 64 tokens costs half as much for each."""
    products = [
        ProductCost(type_, False, False, tokens, n, rate / n, 1.0, 0.05)
        for n in threads
        for rate, type_ in zip((0.2, 0.1, 0.05, 0.025), TYPES, strict=True)
        for tokens, rate in ((1, rate), (64, rate / 2))
    ]
    streams = [
        Stream(n, size, rate * n) for n in threads for size, rate in ((MB, 1e11), (100 * MB, 1e10))
    ]
    others = [
        OtherCost(op, n, 100.0 * n, 0.0, 0.02, 0.0, 0.1)
        for n in threads
        for op in ("", ", one token", "ADD", "ADD, one token")
    ] + [OtherCost("FLASH_ATTN_EXT 64 short", n, 500.0, 10.0, 2.0, 0.01, 0.1) for n in threads]
    overheads = [Overhead(n, 500.0, 2.0, 20_000.0, watts, ns_per_input=0.1) for n in threads]
    model = KernelModel(platform.machine(), products, streams, others, overheads)
    return replace(probe_of("a made CPU"), probe=2, kernel_model=model)
