"""The file of a probe: JSON, in the user's cache unless it is named."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal, TypeVar

import msgspec
from msgspec import Meta, Struct

from llamacpp_instr.build.cache import cache_dir
from llamacpp_instr.errors import UsageError
from llamacpp_instr.probe.kernel_model import KernelModel

Positive = Annotated[float, Meta(gt=0, lt=1e18)]
Count = Annotated[int, Meta(ge=1, lt=2**53)]
MOST_BYTES = 1 << 20


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
    """What an op costs that has nothing to compute: threads wait for each other after every op."""

    threads: Count
    ns: Positive


class Probe(Struct, forbid_unknown_fields=True):
    """What was measured on one machine."""

    probe: Literal[1, 2]
    """version of the format; 1 has no `kernel_model`"""
    time: str
    """ISO 8601, UTC"""
    cpu: str
    cores: Count
    load: float
    """of the machine when it began, over one minute; measure again if it was busy"""
    llama_cpp: str
    bandwidth: Annotated[list[Bandwidth], Meta(min_length=1, max_length=1000)]
    kernels: Annotated[list[Kernel], Meta(min_length=1, max_length=10_000)]
    barriers: Annotated[list[Barrier], Meta(max_length=1000)]
    kernel_model: KernelModel | None = None
    """for `instr predict`"""
    left_out: Annotated[int, Meta(ge=0)] = 0
    """figures that were implausible, however often they were measured"""

    def bandwidth_of(self, threads: int, working_set: float) -> Bandwidth:
        """The one measured with as many threads, or the next fewer, on the smallest amount of
        memory that contains `working_set` bytes, or the largest."""
        entries = _for_threads(self.bandwidth, threads)
        large = [entry for entry in entries if entry.bytes >= working_set]
        if large:
            return min(large, key=lambda entry: entry.bytes)
        return max(entries, key=lambda entry: entry.bytes)

    def kernel_of(self, type_: str, tokens: int, threads: int) -> Kernel | None:
        """The one measured for this type with as many tokens, or the next fewer, else the next
        more; None if the type was not measured."""
        entries = [entry for entry in self.kernels if entry.type == type_.upper()]
        if not entries:
            return None
        entries = _for_threads(entries, threads)
        few = [entry for entry in entries if entry.tokens <= tokens]
        if few:
            return max(few, key=lambda entry: entry.tokens)
        return min(entries, key=lambda entry: entry.tokens)

    def fastest_kernel(self, threads: int) -> Kernel:
        """The one with the most FLOP/s."""
        entries = _for_threads(self.kernels, threads)
        return max(entries, key=lambda entry: entry.flops_per_second)


Entry = TypeVar("Entry", Bandwidth, Kernel)


def _for_threads(entries: list[Entry], threads: int) -> list[Entry]:
    counts = {entry.threads for entry in entries}
    chosen = max((n for n in counts if n <= threads), default=min(counts))
    return [entry for entry in entries if entry.threads == chosen]


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
            "this machine was not measured; run `instr probe` when it is idle, or name a --probe"
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
