"""What a kernel costs on a machine: the part of a probe's file that `instr predict` reads.

Every rate is a measured one, fitted to the kernels of recorded decodes, and a person may edit it: a
machine with twice the bandwidth has twice the `bytes_per_second` of every entry of `streams`.
"""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta, Struct

Cost = Annotated[float, Meta(ge=0, lt=1e18)]
Positive = Annotated[float, Meta(gt=0, lt=1e18)]
Count = Annotated[int, Meta(ge=1, lt=2**53)]
Spread = Annotated[float, Meta(ge=0, le=10)]


class ProductCost(Struct, forbid_unknown_fields=True):
    """A matrix product whose weight is in a cache."""

    type: str
    """of the weight, in capitals"""
    repacked: bool
    """whether its rows are interleaved (ggml's buffer `CPU_REPACK`)"""
    experts: bool
    """MUL_MAT_ID; `tokens` are then those of one expert, on average"""
    tokens: Count
    threads: Count
    ns_per_mac: Positive
    """for each multiplication and addition"""
    of_stream: Positive
    """share of the bandwidth of `streams` that the kernel reaches; about 1"""
    spread: Spread
    """standard deviation of measured over predicted times that the fit had not seen, as a part"""


class Stream(Struct, forbid_unknown_fields=True):
    """How fast threads read weights."""

    threads: Count
    bytes: Count
    """of all weights that a decode reads"""
    bytes_per_second: Positive


class OtherCost(Struct, forbid_unknown_fields=True):
    """Any other op: fixed, and for what the busiest thread has to do."""

    op: str
    """`ADD`, `RMS_NORM+MUL`, `FLASH_ATTN_EXT 64 short`, `FLASH_ATTN_EXT 64 long tiled`,
    `FLASH_ATTN_EXT 64 long alone`; empty for ops that are not listed"""
    threads: Count
    ns: Cost
    ns_per_row: Cost
    """of the result; of attention, of every head"""
    ns_per_unit: Cost
    """a unit is a byte that is read or written; of attention, a cell of a row's window"""
    ns_per_flop: Cost
    """of attention, and of products without a weight"""
    spread: Spread


class Overhead(Struct, forbid_unknown_fields=True):
    """What belongs to no single type or op."""

    threads: Count
    product_ns: Cost
    """of each matrix product"""
    ns_per_input: Cost
    """for each activation, which is converted before it is multiplied"""
    blend: Annotated[float, Meta(ge=1, le=16)]
    """how computing and reading overlap: (compute^blend + read^blend)^(1/blend); 1 not at all"""
    step_ns: Cost
    """of a decode, outside its kernels"""
    watts: Positive | None = None
    """of the processors while they compute; absent if the system does not report it"""
    spread: Spread = 0.0
    """what all kernels of a step share: standard deviation of measured over predicted steps of
    models that the fit had not seen, beyond that of their kernels, as a part"""


class KernelModel(Struct, forbid_unknown_fields=True):
    """All of it."""

    architecture: str
    """`platform.machine()`: x86_64, aarch64"""
    products: Annotated[list[ProductCost], Meta(min_length=1, max_length=10_000)]
    streams: Annotated[list[Stream], Meta(min_length=1, max_length=1000)]
    others: Annotated[list[OtherCost], Meta(min_length=1, max_length=10_000)]
    overheads: Annotated[list[Overhead], Meta(min_length=1, max_length=1000)]

    @property
    def threads(self) -> list[int]:
        """The numbers of threads that were measured."""
        return sorted({of.threads for of in self.overheads})
