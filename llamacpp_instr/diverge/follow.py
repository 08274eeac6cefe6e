"""Keeps the values of A's nodes during one compute, and compares those of B in the next.

Invariant: at any time the values of at most one compute of A are in memory, and those of one node
of B.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np

from llamacpp_instr.base.errors import InstrError, UsageError
from llamacpp_instr.base.terminal import counted
from llamacpp_instr.debugger.ggml import tensor_at
from llamacpp_instr.debugger.graph import LiveGraph, Node, Ubatch
from llamacpp_instr.debugger.stop import Stop
from llamacpp_instr.diverge.error import Array, Key, TensorError
from llamacpp_instr.lab.quality.divergence import kl_divergences

_CACHE = b"cache_"
_AT_WORK = 4
"""copies of one tensor that a comparison makes"""


@dataclass(frozen=True)
class SharedWeight:
    """A weight in the memory of both models, which the same node reads."""

    name: str
    """in A"""
    a: int
    """the address of its tensor in A"""
    b: int


class Comparison:
    """A follower of a `Debugger`. Set `of_b` before each compute; each of A is followed by one of
    the same tokens of B."""

    def __init__(self, names: Sequence[str], max_bytes: int) -> None:
        """`names` are those of both models, `max_bytes` bounds the values in memory."""
        self.names, self.max_bytes = names, max_bytes
        self.of_b = False
        self.errors: dict[Key, TensorError] = {}
        """in the order in which they are computed"""
        self.kl: list[Array] = []
        """(tokens,) of each compute: the KL divergence of the next token, NaN if it has none"""
        self.not_shared: tuple[set[str], set[str]] = set(), set()
        """names of nodes of only A, only B"""
        self.weights: list[SharedWeight] = []
        self.n_bytes = 0
        """what the latest compute of A needed, for all its tokens"""
        self._kept: dict[Key, Array] = {}
        self._keys: dict[int, Key] = {}
        self._last = -1
        self._ends: set[int] = set()
        self._weights: dict[tuple[Key, int], tuple[str, int]] = {}

    def wants(self, graph: LiveGraph, ubatch: Ubatch) -> Collection[int]:
        """All nodes that run, without those that only write into a cache. Raises `UsageError` if
        their values do not fit into memory."""
        seen: dict[str, int] = {}
        every: dict[int, Key] = {}
        for node in graph.nodes:
            place = seen[node.name] = seen.get(node.name, -1) + 1
            every[node.index] = Key(node.name, place)
        self._share_weights(graph, every)
        chosen = [node for node in graph.nodes if node.runs and not _writes_cache(node)]
        self._keys = {node.index: every[node.index] for node in chosen}
        self._last = chosen[-1].index if chosen else -1
        self._ends = set({node.layer: node.index for node in chosen if node.layer >= 0}.values())
        if not self.of_b:
            self._kept.clear()
            sizes = [4 * int(np.prod(node.shape)) for node in chosen]
            self.n_bytes = sum(sizes) + _AT_WORK * max(sizes, default=0)
            if self.n_bytes > self.max_bytes:
                mib, n = -(-self.n_bytes // 2**20), ubatch.n_tokens
                raise UsageError(
                    f"the values of {counted(n, 'token')} take {mib:,} MiB; give --memory"
                    f" {mib} or more"
                )
        for node in chosen:
            key = every[node.index]
            if key not in self.errors and not self.of_b:
                sources, weights = _read(node, graph, every)
                self.errors[key] = TensorError(
                    key, node.op, node.layer, node.block, sources, weights
                )
        return self._keys

    def passed(self, stop: Stop) -> None:
        """Keeps the value of A, or compares that of B with it."""
        key = self._keys[stop.node.index]
        values = stop.values()
        if not self.of_b:
            self._kept[key] = values
            return
        kept = self._kept.pop(key, None)
        if kept is None or kept.shape != values.shape:
            self.not_shared[1].add(key.name)
            return
        rows = _by_token(kept, stop)
        if stop.node.index == self._last and rows is not None:
            self.kl.append(self._divergence(rows, values.reshape(rows.shape)))
        if rows is not None:
            kept, values = rows, values.reshape(rows.shape)
        keeps_rows = stop.node.index in self._ends
        self.errors[key].add(kept, values, rows is not None, keeps_rows)

    def end(self) -> None:
        """Both computes are over: names what only A has."""
        self.not_shared[0].update(key.name for key in self._kept)
        for key in self._kept:
            self.errors.pop(key, None)
        self._kept.clear()

    def _divergence(self, a: Array, b: Array) -> Array:
        try:
            return kl_divergences(self.names, a, b)
        except InstrError:  # one has logits that are not numbers
            return np.full(len(a), np.nan)

    def _share_weights(self, graph: LiveGraph, keys: dict[int, Key]) -> None:
        if self.weights:
            return
        read = {
            (keys[node.index], slot): (source.name, source.address)
            for node in graph.nodes
            for slot, source in enumerate(node.sources)
            if source.kind == "weight"
        }
        if not self.of_b:
            self._weights = read
            return
        both = {
            SharedWeight(name, address, read[at][1]): None
            for at, (name, address) in self._weights.items()
            if at in read
        }
        self.weights = list(both)


def _writes_cache(node: Node) -> bool:
    """What it writes was computed, and compared, before."""
    view = tensor_at(node.address).view_src
    return bool(view) and bytes(tensor_at(view).name).startswith(_CACHE)


def _by_token(values: Array, stop: Stop) -> Array | None:
    """(tokens, width) if that is what a tensor has."""
    if values.dtype.kind in "iu" or stop.node.op == "SOFT_MAX":
        return None
    if values.ndim == 1 and stop.n_tokens == 1:
        return values[None, :]
    return values if values.ndim == 2 and len(values) == stop.n_tokens else None


def _read(
    node: Node, graph: LiveGraph, keys: dict[int, Key]
) -> tuple[tuple[Key, ...], tuple[str, ...]]:
    """The nodes and weights that a node reads, through views."""
    nodes: dict[Key, None] = {}
    weights: dict[str, None] = {}
    waiting = list(node.sources)
    while waiting:
        source = waiting.pop(0)
        if source.kind == "weight":
            weights[source.name] = None
        elif source.node >= 0:
            of = graph.nodes[source.node]
            if of.runs:
                nodes[keys[of.index]] = None
            else:
                waiting += of.sources
    return tuple(nodes), tuple(weights)
