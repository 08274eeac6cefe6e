"""What contexts hold in memory, each model's weights once."""

from __future__ import annotations

from collections import Counter

from llamacpp_instr.schema import Memory


class HeldMemory:
    """Follows the `memory` events of a session."""

    def __init__(self) -> None:
        self._of_context: dict[int, Counter[tuple[str, str]]] = {}
        self._owner: dict[int, int] = {}
        """by model: the context whose weights count"""

    def take(self, memory: Memory, model: int) -> Counter[tuple[str, str]]:
        """What has changed, in bytes, by buffer and kind (`weights`, `KV cache`, `compute`)."""
        owner = self._owner.setdefault(model, memory.ctx)
        now: Counter[tuple[str, str]] = Counter()
        for use in memory.buffers:
            now[use.buffer, "weights"] += use.model if owner == memory.ctx else 0
            now[use.buffer, "KV cache"] += use.context
            now[use.buffer, "compute"] += use.compute
        changed = now.copy()
        changed.subtract(self._of_context.get(memory.ctx, Counter()))
        self._of_context[memory.ctx] = now
        return Counter({key: n for key, n in changed.items() if n})

    def total(self) -> Counter[tuple[str, str]]:
        """What all contexts hold, by buffer and kind."""
        total: Counter[tuple[str, str]] = Counter()
        for of in self._of_context.values():
            total.update(of)
        return total
