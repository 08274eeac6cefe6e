"""The file of a probe: JSON, in the user's cache unless it is named; and shapes that are timed."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal, TypeVar

import msgspec
from msgspec import Meta, Struct
from msgspec.structs import replace

from llamacpp_instr.base.errors import UsageError
from llamacpp_instr.base.system import cache_dir

Part = Literal[
    "DOT_PRODUCTS", "MAXIMUM", "EXPONENTIALS", "NORMALIZATION", "WEIGHTED_SUM", "RMS_NORM", "MUL"
]
SOFT_MAX_PARTS: tuple[Part, ...] = ("MAXIMUM", "EXPONENTIALS", "NORMALIZATION")
ATTENTION_PARTS: tuple[Part, ...] = ("DOT_PRODUCTS", *SOFT_MAX_PARTS, "WEIGHTED_SUM")
SCALED_NORM_PARTS: tuple[Part, ...] = ("RMS_NORM", "MUL")
"""the ops of the only kernel that ggml's CPU backend fuses"""


@dataclass(frozen=True)
class AttentionShape:
    """One attention of all heads."""

    tokens: int
    heads: int
    kv_heads: int
    cells: int
    """of the cache that are attended to"""
    key: int
    """length of a key"""
    value: int
    """length of a value"""
    type_k: str
    type_v: str
    """of the cache, in ggml's words"""
    fused: bool
    """flash attention; else only the passes of its soft-max are timed, which SOFT_MAX runs"""


@dataclass(frozen=True)
class ScaledNormShape:
    """RMS_NORM and the MUL by its weight, which ggml fuses."""

    elements: int
    """of a row"""
    rows: int


KernelShape = AttentionShape | ScaledNormShape
PartTimes = dict[Part, float]
"""ns of each part, of all heads or rows together, on one thread"""

Positive = Annotated[float, Meta(gt=0, lt=1e18)]
Cost = Annotated[float, Meta(ge=0, lt=1e18)]
Count = Annotated[int, Meta(ge=1, lt=2**53)]
Spread = Annotated[float, Meta(ge=0, le=10)]
MOST_BYTES = 1 << 20


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
    ns_per_dot: Cost = 0.0
    """of each result: a short row costs more than its multiplications"""
    ns_per_input: Cost = 0.0
    """of each activation, which is converted before it is multiplied: to Q8_K for K-quants, F16 and
    so on"""


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
    """of the result; for attention, of every head"""
    ns_per_unit: Cost
    """a unit is a byte that is read or written; for attention, a cell of a row's window"""
    ns_per_flop: Cost
    """of attention, and of products without a weight"""
    spread: Spread
    cold_ns: Cost = 0.0
    """added while one token is decoded in the largest working set of `streams`"""
    cold_ns_per_byte: Cost = 0.0
    """the same, for each byte"""


class Overhead(Struct, forbid_unknown_fields=True):
    """What belongs to no single type or op."""

    threads: Count
    product_ns: Cost
    """of each matrix product"""
    blend: Annotated[float, Meta(ge=1, le=16)]
    """how computing and reading overlap: (compute^blend + read^blend)^(1/blend); 1 not at all"""
    step_ns: Cost
    """of a decode, outside its kernels"""
    watts: Positive | None = None
    """of the processors while they compute; absent if the system does not report it"""
    spread: Spread = 0.0
    """what all kernels of a step share: standard deviation of measured over predicted steps of
    models that the fit had not seen, beyond that of their kernels, as a part"""
    cold_step_ns: Cost = 0.0
    """added to a decode outside its kernels, in the largest working set of `streams`"""
    ns_per_input: Cost = 0.0
    """added to that of each product; earlier files have it only here"""
    start_ns_per_byte: Cost = 0.0
    """added to read an embedding from the start of a file, which lies in small pieces of memory"""


class KernelModel(Struct, forbid_unknown_fields=True):
    """What a kernel costs on a machine: the part of the file that `instr predict` reads. Every rate
    is measured, fitted to the kernels of recorded decodes, and can be edited by hand: a machine
    with twice the bandwidth has twice the `bytes_per_second` of every entry of `streams`.
    """

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


class Bandwidth(Struct, forbid_unknown_fields=True):
    """How fast threads copy memory: bytes read and written."""

    threads: Count
    bytes: Count
    """that are read or written again and again"""
    bytes_per_second: Positive


class Kernel(Struct, forbid_unknown_fields=True):
    """How fast ggml multiplies a weight that stays in the caches."""

    type: str
    """of the weight, in capitals"""
    tokens: Count
    threads: Count
    flops_per_second: Positive


class Barrier(Struct, forbid_unknown_fields=True):
    """What an op with nothing to compute costs: threads wait for each other after every op."""

    threads: Count
    ns: Positive


class DeviceLimits(Struct, forbid_unknown_fields=True):
    """What was measured on a device. It has no threads: every entry counts as one thread's."""

    device: str
    """ggml's name"""
    description: str
    bandwidth: Annotated[list[Bandwidth], Meta(min_length=1, max_length=1000)]
    kernels: Annotated[list[Kernel], Meta(min_length=1, max_length=10_000)]
    barriers: Annotated[list[Barrier], Meta(max_length=1000)]


class Probe(Struct, forbid_unknown_fields=True):
    """What was measured on one machine."""

    probe: Literal[1, 2]
    """version of the format; 1 has no `kernel_model`"""
    time: str
    """ISO 8601, UTC"""
    cpu: str
    cores: Count
    load: float
    """of the machine at the start, over one minute; measure again if it was busy"""
    llama_cpp: str
    bandwidth: Annotated[list[Bandwidth], Meta(min_length=1, max_length=1000)]
    kernels: Annotated[list[Kernel], Meta(min_length=1, max_length=10_000)]
    barriers: Annotated[list[Barrier], Meta(max_length=1000)]
    kernel_model: KernelModel | None = None
    """for `instr predict`"""
    left_out: Annotated[int, Meta(ge=0)] = 0
    """figures that were implausible, however often they were measured"""
    devices: Annotated[list[DeviceLimits], Meta(max_length=1000)] = []
    features: Annotated[list[str], Meta(max_length=1000)] = []
    """instruction sets that ggml used, such as `AVX2`, `DOTPROD`, `SVE_CNT=32`; they choose the
    types that it interleaves. Empty in files of earlier versions"""

    def of_device(self, name: str) -> Probe | None:
        """The limits of a device in place of the CPU's, for one thread; None if it was not
        measured."""
        for of in self.devices:
            if of.device == name:
                more = {part: getattr(of, part) for part in ("bandwidth", "kernels", "barriers")}
                return replace(self, load=0.0, left_out=0, **more)
        return None

    def with_device(self, limits: DeviceLimits) -> Probe:
        """A copy with these limits in place of what was measured of the device before."""
        others = [of for of in self.devices if of.device != limits.device]
        return replace(self, devices=[*others, limits])

    def bandwidth_of(self, threads: int, working_set: float) -> Bandwidth:
        """The one measured with this many threads, or the next lower number, on the smallest amount
        of memory that contains `working_set` bytes, or the largest."""
        entries = sorted(_for_threads(self.bandwidth, threads), key=lambda entry: entry.bytes)
        return next((entry for entry in entries if entry.bytes >= working_set), entries[-1])

    def kernel_of(self, type_: str, tokens: int, threads: int) -> Kernel | None:
        """The one measured for this type with this many tokens, or the next lower number, else the
        next higher; None if the type was not measured."""
        entries = [entry for entry in self.kernels if entry.type == type_.upper()]
        if not entries:
            return None
        entries = sorted(_for_threads(entries, threads), key=lambda entry: entry.tokens)
        few = [entry for entry in entries if entry.tokens <= tokens]
        return few[-1] if few else entries[0]

    def fastest_kernel(self, threads: int) -> Kernel:
        """The one with the most FLOP/s."""
        entries = _for_threads(self.kernels, threads)
        return max(entries, key=lambda entry: entry.flops_per_second)


Entry = TypeVar("Entry", Bandwidth, Kernel)


def _for_threads(entries: list[Entry], threads: int) -> list[Entry]:
    counts = {entry.threads for entry in entries}
    chosen = max((n for n in counts if n <= threads), default=min(counts))
    return [entry for entry in entries if entry.threads == chosen]


def check_machine(path: str, cpu: str, probe: Probe) -> None:
    """Raises UsageError if the log at `path` is of a processor `cpu` that is not the probe's."""
    if cpu and probe.cpu and cpu != probe.cpu:
        raise UsageError(
            f"{path}: recorded on {cpu}, but the probe is of {probe.cpu};"
            " run `instr probe` on that machine, and use its file"
        )


def default_path() -> Path:
    """Where `instr probe` writes, and `instr roofline` looks."""
    return cache_dir() / "probe.json"


def read_probe(path: str | Path | None = None) -> Probe:
    """The probe in `path`, by default in the user's cache. Raises UsageError if there is none."""
    found = Path(path) if path is not None else default_path()
    try:
        with found.open("rb") as file:
            data = file.read(MOST_BYTES + 1)
    except FileNotFoundError:
        if path is not None:
            raise UsageError(f"{found}: no such file") from None
        raise UsageError(
            "this machine has not been measured; run `instr probe` when it is idle, or name its"
            " file"
        ) from None
    except OSError as error:
        raise UsageError(f"{found}: {error.strerror}") from None
    if len(data) > MOST_BYTES:
        raise UsageError(f"{found}: not a file of `instr probe`: too large")
    try:
        return msgspec.json.decode(data, type=Probe)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise UsageError(f"{found}: not a file of `instr probe`: {error}") from None


def known_probe() -> Probe | None:
    """The probe in the user's cache; None if there is none. Raises UsageError if it is damaged."""
    return read_probe() if default_path().is_file() else None


def probe_json(probe: Probe) -> bytes:
    """The file of a probe, indented."""
    return msgspec.json.format(msgspec.json.encode(probe)) + b"\n"
