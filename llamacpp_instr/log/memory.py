"""What the contexts of a session hold, in the machine's memory and on devices.

Invariant: contexts of one model share its weights, which count once.
"""

from __future__ import annotations

from collections import Counter

from llamacpp_instr.log import schema


class MemoryInUse:
    """Follows the `memory` events of a session."""

    def __init__(self) -> None:
        self.held: Counter[tuple[str, str]] = Counter()
        """by all contexts, in bytes, by buffer and kind (`weights`, `KV cache`, `compute`)"""
        self.devices: dict[str, schema.DeviceMemory] = {}
        """what the driver of each device reported last"""
        self.device_of: dict[str, str] = {}
        """by buffer; empty for the machine's memory"""
        self._of_context: dict[int, Counter[tuple[str, str]]] = {}
        self._owner: dict[int, int] = {}
        """by model: the context whose weights count"""

    def take(self, memory: schema.Memory, model: int) -> Counter[tuple[str, str]]:
        """What has changed in `held`."""
        owner = self._owner.setdefault(model, memory.ctx)
        now: Counter[tuple[str, str]] = Counter()
        self.devices.update((of.device, of) for of in memory.devices)
        for use in memory.buffers:
            self.device_of[use.buffer] = use.device
            now[use.buffer, "weights"] += use.model if owner == memory.ctx else 0
            now[use.buffer, "KV cache"] += use.context
            now[use.buffer, "compute"] += use.compute
        changed = now.copy()
        changed.subtract(self._of_context.get(memory.ctx, Counter()))
        self._of_context[memory.ctx] = now
        self.held.update(changed)
        return Counter({key: n for key, n in changed.items() if n})

    @property
    def on_devices(self) -> dict[str, int]:
        """The bytes that all contexts hold on each device."""
        found = dict.fromkeys(self.devices, 0)
        for (buffer, _), n in self.held.items():
            if device := self.device_of[buffer]:
                found[device] = found.get(device, 0) + n
        return found
