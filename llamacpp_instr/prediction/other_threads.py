"""The costs of kernels for a number of threads that was not measured.

Each cost follows a power of the number of threads: between two measured numbers the one that joins
them, beyond them the one of the nearest two, within what can be (`_GROWTH`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from math import hypot, log, log2
from typing import Any

from msgspec.structs import replace

from llamacpp_instr.prediction.probe.file import KernelModel

UNKNOWN = 0.5
"""spread of what was not measured, and is predicted from the like of it"""
_GROWTH: dict[str, tuple[float, float]] = {
    "ns_per_mac": (-1.0, 0.0), "of_stream": (0.0, 0.0), "bytes_per_second": (0.0, 1.0),
    "ns": (0.0, 1.0), "ns_per_row": (0.0, 1.0), "ns_per_unit": (0.0, 1.0),
    "ns_per_flop": (0.0, 1.0), "product_ns": (0.0, 1.0), "ns_per_input": (-1.0, 1.0),
    "blend": (0.0, 0.0), "step_ns": (0.0, 1.0), "watts": (0.0, 1.0),
}  # fmt: skip
"""the least and the largest power of each cost; with one measured number, the first holds"""


def with_threads(model: KernelModel, threads: int) -> KernelModel:
    """`model` itself if it has costs for `threads`, else only costs for them. The spread of a step
    grows by half for each doubling from the nearest number that was measured."""
    known = model.threads
    if threads in known:
        return model
    nearest = sorted(sorted(known, key=lambda n: abs(log(n / threads)))[:2])
    away = min(abs(log2(n / threads)) for n in known)

    def scaled(entries: Iterable[Any], same: Callable[[Any], object]) -> list[Any]:
        """Of the two nearest numbers, entries that are the `same` but for their threads."""
        pairs: dict[object, list[Any]] = {}
        for entry in sorted(entries, key=lambda of: of.threads):
            if entry.threads in nearest:
                pairs.setdefault(same(entry), []).append(entry)
        return [_scaled(entries, threads) for entries in pairs.values()]

    overheads = scaled(model.overheads, lambda _: None)
    return KernelModel(
        model.architecture,
        scaled(model.products, lambda of: (of.type, of.repacked, of.experts, of.tokens)),
        scaled(model.streams, lambda of: of.bytes),
        scaled(model.others, lambda of: of.op),
        [replace(of, spread=hypot(of.spread, UNKNOWN * away)) for of in overheads],
    )


def _scaled(entries: list[Any], threads: int) -> Any:
    """One or two entries, ascending by threads, as one for `threads`."""
    first, last = entries[0], entries[-1]
    base = min(entries, key=lambda of: abs(log(of.threads / threads)))
    changed: dict[str, Any] = {"threads": threads}
    for cost, (least, most) in _GROWTH.items():
        value = getattr(base, cost, None)
        if not value:
            continue
        power, before = least, getattr(first, cost)
        if first is not last and before:
            power = log(getattr(last, cost) / before) / log(last.threads / first.threads)
        outside = not first.threads < threads < last.threads
        if outside:
            power = min(max(power, least), most)
        changed[cost] = value * (threads / base.threads) ** power
    if hasattr(base, "spread"):
        changed["spread"] = max(of.spread for of in entries)
    return replace(base, **changed)
