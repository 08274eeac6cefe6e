"""The memory of a model and a context, by kind and buffer: measured or predicted.

Invariant: both come from the same events of the recorder, so that they can be subtracted from each
other.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from llamacpp_instr.log.schema import BufferUse, Context, Tensor
from llamacpp_instr.model.file import ModelFile, Weight

Kind = Literal["weights", "cache", "compute"]

PLAIN, MAPPED, REPACKED = "CPU", "CPU_Mapped", "CPU_REPACK"
"""ggml's names of the buffers for plain memory, for mapped files, and for weights whose rows are
interleaved for the CPU's kernels"""


@dataclass(frozen=True)
class MemoryUse:
    """Bytes of one kind in one buffer."""

    kind: Kind
    """cache: the KV cache, or the state of a recurrent model; compute: buffers of the graph"""
    buffer: str
    """ggml's name of the buffer type: `CPU`, `CPU_Mapped`, `CPU_REPACK`"""
    n_bytes: int


@dataclass(frozen=True)
class ContextSettings:
    """The settings that determine memory, after llama.cpp chose its defaults."""

    n_ctx: int
    n_batch: int
    n_ubatch: int
    n_seq_max: int
    type_k: str
    """ggml's name: `f16`"""
    type_v: str
    flash_attn: bool
    embeddings: bool
    kv_unified: bool
    swa_full: bool
    """whether the cache for sliding windows has the whole context; no event records it"""
    mmap: bool
    """whether the file is mapped, not read"""


@dataclass(frozen=True)
class Placement:
    """A weight in a buffer. A weight with two uses may be in two buffers."""

    name: str
    buffer: str
    n_bytes: int
    """as stored in the file"""


@dataclass(frozen=True)
class MemoryBreakdown:
    """llama.cpp's memory breakdown of one context."""

    settings: ContextSettings
    uses: list[MemoryUse]
    """without those of 0 bytes; in the order of `Kind`, then by buffer"""
    placements: list[Placement]
    """of the model's weights"""

    @property
    def n_bytes(self) -> int:
        return sum(use.n_bytes for use in self.uses)

    def of_kind(self, kind: Kind) -> int:
        """Bytes of one kind in all buffers."""
        return sum(use.n_bytes for use in self.uses if use.kind == kind)

    def of(self, kind: Kind, buffer: str) -> int:
        """Bytes of one kind in one buffer."""
        return sum(u.n_bytes for u in self.uses if (u.kind, u.buffer) == (kind, buffer))

    def buffers_of(self) -> dict[str, list[str]]:
        """The buffers of each weight, by name."""
        found: dict[str, list[str]] = {}
        for placement in self.placements:
            buffers = found.setdefault(placement.name, [])
            if placement.buffer not in buffers:
                buffers.append(placement.buffer)
        return found

    def with_mapped_weights(self, n_bytes: int) -> MemoryBreakdown:
        """A copy with `n_bytes` of mapped files in place of the weights in plain memory."""
        uses = [use for use in self.uses if (use.kind, use.buffer) != ("weights", PLAIN)]
        placements = [
            replace(placement, buffer=MAPPED) if placement.buffer == PLAIN else placement
            for placement in self.placements
        ]
        settings = replace(self.settings, mmap=True)
        uses = _in_order([*uses, MemoryUse("weights", MAPPED, n_bytes)])
        return MemoryBreakdown(settings, uses, placements)

    def with_room_for(self, other: MemoryBreakdown) -> MemoryBreakdown:
        """A copy whose compute buffers are at least as large as those of `other`."""
        uses = [
            replace(use, n_bytes=max(use.n_bytes, other.of("compute", use.buffer)))
            if use.kind == "compute"
            else use
            for use in self.uses
        ]
        return replace(self, uses=uses)


def read_breakdown(
    context: Context, buffers: Sequence[BufferUse], tensors: Iterable[Tensor]
) -> MemoryBreakdown:
    """The breakdown from a context's events; `tensors` are those of its model.

    Assumes that `swa_full` is false, as in `instr run`.
    """
    placements = [Placement(t.name, t.buffer, t.bytes) for t in tensors]
    settings = ContextSettings(
        n_ctx=context.n_ctx,
        n_batch=context.n_batch,
        n_ubatch=context.n_ubatch,
        n_seq_max=context.n_seq_max,
        type_k=context.type_k,
        type_v=context.type_v,
        flash_attn=context.flash_attn,
        embeddings=context.embeddings,
        kv_unified=context.kv_unified,
        swa_full=False,
        mmap=any(use.buffer == MAPPED and use.model for use in buffers),
    )
    return MemoryBreakdown(settings, _uses(buffers), placements)


def mapped_bytes(model: ModelFile, in_place: Collection[str]) -> int:
    """Bytes of the files that are mapped for these weights: in each file the range from the first
    to the last of them."""
    ranges: dict[tuple[Path, bool], tuple[int, int]] = {}
    for weight in model.weights:
        if weight.name in in_place:
            key = weight.path, _is_on_demand(model, weight)
            begin, end = ranges.get(key, (weight.offset, 0))
            end = max(end, weight.offset + weight.n_bytes)
            ranges[key] = min(begin, weight.offset), end
    return sum(end - begin for begin, end in ranges.values())


# Tensors that llama.cpp maps separately if they have more bytes than this, to read their rows on
# demand (TENSOR_READ_LAZY, LLAMA_LAZY_MODE_AUTO)
_ON_DEMAND = {
    ("gemma4", "per_layer_token_embd.weight"),
    ("qwen4exp", "per_layer_token_embd.weight"),
}
_ON_DEMAND_BYTES = 4 << 30


def _is_on_demand(model: ModelFile, weight: Weight) -> bool:
    return (model.architecture, weight.name) in _ON_DEMAND and weight.n_bytes > _ON_DEMAND_BYTES


def _uses(buffers: Sequence[BufferUse]) -> list[MemoryUse]:
    return _in_order(
        [MemoryUse("weights", use.buffer, use.model) for use in buffers]
        + [MemoryUse("cache", use.buffer, use.context) for use in buffers]
        + [MemoryUse("compute", use.buffer, use.compute) for use in buffers]
    )


def _in_order(uses: list[MemoryUse]) -> list[MemoryUse]:
    kinds: tuple[Kind, ...] = ("weights", "cache", "compute")
    nonempty = [use for use in uses if use.n_bytes]
    return sorted(nonempty, key=lambda use: (kinds.index(use.kind), use.buffer))
