"""The memory of a model and a context, by kind and buffer, and of this machine.

Invariant: measured and predicted memory come from the same events of the recorder, so that they can
be subtracted from each other.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal

from llamacpp_instr.log.schema import BufferUse, Context, DeviceMemory, Tensor
from llamacpp_instr.model.file import ModelFile, layer_of

Kind = Literal["weights", "cache", "compute"]

PLAIN, MAPPED, REPACKED = "CPU", "CPU_Mapped", "CPU_REPACK"
"""ggml's names of the buffers for plain memory, for mapped files, and for weights whose rows are
interleaved for the CPU's kernels"""


def is_plain(buffer: str) -> bool:
    """Whether it is plain memory, which a device may have pinned: llama.cpp puts no mapped weights
    there (`llama_model_loader::create_tensor`)."""
    return buffer == PLAIN or buffer.endswith("_Host")


@dataclass(frozen=True)
class MemoryUse:
    """Bytes of one kind in one buffer."""

    kind: Kind
    """cache: the KV cache, or the state of a recurrent model; compute: buffers of the graph"""
    buffer: str
    """ggml's name of the buffer type: `CPU`, `CPU_Mapped`, `CPU_REPACK`"""
    n_bytes: int
    device: str = ""
    """whose memory it is; empty: the machine's"""


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
    """whether the cache for sliding windows covers the whole context; no event records it"""
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
    devices: list[DeviceMemory] = field(default_factory=list)
    """that the context may use; their free memory is without the context if it was measured, and
    includes what it would take if it was predicted"""

    @property
    def n_bytes(self) -> int:
        return sum(use.n_bytes for use in self.uses)

    def of_kind(self, kind: Kind) -> int:
        """Bytes of one kind in all buffers."""
        return sum(use.n_bytes for use in self.uses if use.kind == kind)

    def of(self, kind: Kind, buffer: str) -> int:
        """Bytes of one kind in one buffer."""
        return sum(u.n_bytes for u in self.uses if (u.kind, u.buffer) == (kind, buffer))

    def on(self, device: str) -> int:
        """Bytes of all kinds on a device."""
        return sum(use.n_bytes for use in self.uses if use.device == device)

    @property
    def gpu_layers(self) -> int:
        """How many layers have a weight on a device, counting the output as one more."""
        moved = {use.buffer for use in self.uses if use.device}
        return len({layer_of(of.name) for of in self.placements if of.buffer in moved})

    def layers_of_machine(self) -> dict[int, int]:
        """By layer: the bytes that a device would need for the part of it in the machine's memory:
        its weights and, unless a part is on a device, an equal share of the cache."""
        moved = {use.buffer for use in self.uses if use.device}
        on_devices = {layer_of(of.name) for of in self.placements if of.buffer in moved}
        every = {layer_of(of.name) for of in self.placements} - {-1}
        share = self.of_kind("cache") // max(len(every), 1)
        found = {layer: share * (layer not in on_devices) for layer in sorted(every)}
        for of in self.placements:
            if of.buffer not in moved and (layer := layer_of(of.name)) >= 0:
                found[layer] += of.n_bytes
        return {layer: n_bytes for layer, n_bytes in found.items() if n_bytes}

    def too_large(self) -> list[tuple[DeviceMemory, int]]:
        """The devices with less free memory than a predicted context needs, and what it needs."""
        needs = ((device, self.on(device.device)) for device in self.devices)
        return [(device, needed) for device, needed in needs if needed > device.free]

    def buffers_of(self) -> dict[str, list[str]]:
        """The buffers of each weight, by name."""
        found: dict[str, dict[str, None]] = {}
        for placement in self.placements:
            found.setdefault(placement.name, {})[placement.buffer] = None
        return {name: list(buffers) for name, buffers in found.items()}

    def with_mapped_weights(self, n_bytes: int) -> MemoryBreakdown:
        """A copy with `n_bytes` of mapped files in place of the weights in plain memory."""
        uses = [use for use in self.uses if use.kind != "weights" or not is_plain(use.buffer)]
        uses = _in_order([*uses, MemoryUse("weights", MAPPED, n_bytes)])
        moved = [replace(p, buffer=MAPPED) if is_plain(p.buffer) else p for p in self.placements]
        settings = replace(self.settings, mmap=True)
        return replace(self, settings=settings, uses=uses, placements=moved)

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
    context: Context,
    buffers: Sequence[BufferUse],
    tensors: Iterable[Tensor],
    devices: Sequence[DeviceMemory] = (),
) -> MemoryBreakdown:
    """The breakdown from a context's events and the tensors of its model. Assumes that `swa_full`
    is false, as in `instr run`."""
    placements = [Placement(t.name, t.buffer, t.bytes) for t in tensors]
    mmap = any(use.buffer == MAPPED and use.model for use in buffers)
    of_context: dict[str, Any] = {
        f.name: getattr(context, f.name, False) for f in fields(ContextSettings)
    }
    settings = ContextSettings(**of_context | {"swa_full": False, "mmap": mmap})
    uses = [MemoryUse("weights", use.buffer, use.model, use.device) for use in buffers]
    uses += [MemoryUse("cache", use.buffer, use.context, use.device) for use in buffers]
    uses += [MemoryUse("compute", use.buffer, use.compute, use.device) for use in buffers]
    return MemoryBreakdown(settings, _in_order(uses), placements, list(devices))


def mapped_bytes(model: ModelFile, in_place: Collection[str]) -> int:
    """Bytes that are mapped for these weights: in each file, from the first to the last of them."""
    ranges: dict[tuple[Path, bool], tuple[int, int]] = {}
    for weight in model.weights:
        if weight.name in in_place:
            on_demand = weight.n_bytes > _ON_DEMAND_BYTES
            key = weight.path, on_demand and (model.architecture, weight.name) in _ON_DEMAND
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


def _in_order(uses: list[MemoryUse]) -> list[MemoryUse]:
    kinds: tuple[Kind, ...] = ("weights", "cache", "compute")
    nonempty = [use for use in uses if use.n_bytes]
    return sorted(nonempty, key=lambda use: (kinds.index(use.kind), use.buffer))
