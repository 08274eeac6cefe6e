"""Keeps the values of A's nodes during one compute, and compares those of B in the next.

Invariant: at any time the values of at most one compute of A are in memory, and those of one node
of B. Of their errors only sums are kept, in float64.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from llamacpp_instr.base.errors import InstrError, UsageError
from llamacpp_instr.base.terminal import counted
from llamacpp_instr.debugger.graph import LiveGraph, Node, Ubatch
from llamacpp_instr.debugger.stop import Stop
from llamacpp_instr.debugger.tensors import tensor_at
from llamacpp_instr.lab.quality.divergence import kl_divergences
from llamacpp_instr.log.graph.ops import Block

Array = npt.NDArray[Any]


class Key(NamedTuple):
    """A node that runs, in both graphs: several have the same name, and `place` counts them."""

    name: str
    place: int


@dataclass
class TensorError:
    """Sums over all computes. `a` are the values of A, `d` those of B minus those of A."""

    key: Key
    op: str
    layer: int
    block: Block
    sources: tuple[Key, ...]
    """the nodes that it reads, through views"""
    weights: tuple[str, ...]
    """the weights that it reads, through views"""
    n: int = 0
    """elements"""
    squares: float = 0.0
    """of a"""
    error: float = 0.0
    """sum of the squares of d"""
    product: float = 0.0
    """sum of a d"""
    apart: int = 0
    """elements that are finite in one model only; of indices, those that differ"""
    is_index: bool = False
    channels: Array | None = None
    """(2, width) sums of the squares of d and of a by channel, of tensors with a row for each
    token"""
    parts: list[float] = field(default_factory=list)
    """the relative error of each compute alone"""
    rows: list[Array] = field(default_factory=list)
    """(2, tokens) of each compute: the same by token, of the last tensor of a layer"""

    @property
    def nmse(self) -> float:
        """The normalized mean squared error, as test-backend-ops has it. Of indices, the share that
        differs."""
        if self.is_index:
            return self.apart / self.n if self.n else 0.0
        return _nmse(self.error, self.squares, self.apart)

    @property
    def relative(self) -> float:
        """The norm of d in norms of a: the root of `nmse`."""
        return math.sqrt(self.nmse)

    @property
    def cosine(self) -> float | None:
        """Of the angle between both; None without a direction."""
        b = self.squares + 2 * self.product + self.error
        if self.is_index or self.apart or self.squares <= 0 or b <= 0:
            return None
        return min((self.squares + self.product) / math.sqrt(self.squares * b), 1.0)

    def add(self, a: Array, b: Array, has_tokens: bool, keeps_rows: bool) -> None:
        """Add values of one compute, of the same shape. `has_tokens` says that both are (tokens,
        width). Changes `b`."""
        self.n += a.size
        apart = self.apart
        if a.dtype.kind in "iu":
            self.is_index = True
            self.apart += int(np.count_nonzero(a != b))
            self.parts.append(math.sqrt((self.apart - apart) / a.size if a.size else 0.0))
            return
        with np.errstate(invalid="ignore", over="ignore"):
            d = np.subtract(b, a, out=b)
        if not (math.isfinite(_dot(a, a)) and math.isfinite(_dot(d, d))):
            a, d = self._without_infinite(a, d)
        if has_tokens:
            by_row = np.array([np.einsum("ij,ij->i", x, x) for x in (d, a)], np.float64)
            error, squares = by_row.sum(axis=1).tolist()
            by_channel = np.array([np.einsum("ij,ij->j", x, x) for x in (d, a)], np.float64)
            self.channels = by_channel if self.channels is None else self.channels + by_channel
            if keeps_rows:
                self.rows.append(by_row)
        else:
            error, squares = _dot(d, d), _dot(a, a)
        self.error += error
        self.squares += squares
        self.product += _dot(a, d)
        self.parts.append(math.sqrt(_nmse(error, squares, self.apart - apart)))

    def _without_infinite(self, a: Array, d: Array) -> tuple[Array, Array]:
        """Both without what is not a number: masks have the same infinities in both, which is no
        error; others count in `apart`."""
        known = np.isfinite(a) & np.isfinite(d)
        # d is NaN where both have the same infinity, or both have NaN
        same = ~np.isfinite(a) & np.isnan(d)
        self.apart += int(known.size - np.count_nonzero(known | same))
        return np.where(known, a, 0), np.where(known, d, 0)


def _nmse(error: float, squares: float, apart: int) -> float:
    if apart:
        return math.inf
    return error / squares if squares > 0 else math.inf if error else 0.0


def _dot(x: Array, y: Array) -> float:
    with np.errstate(invalid="ignore", over="ignore"):
        return float(np.dot(x.reshape(-1), y.reshape(-1)))


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
        if rows is not None:
            kept, values = rows, values.reshape(rows.shape)
        if stop.node.index == self._last and rows is not None:
            try:
                self.kl.append(kl_divergences(self.names, rows, values))
            except InstrError:  # one has logits that are not numbers
                self.kl.append(np.full(len(rows), np.nan))
        keeps_rows = stop.node.index in self._ends
        self.errors[key].add(kept, values, rows is not None, keeps_rows)

    def end(self) -> None:
        """Both computes are over: names what only A has."""
        self.not_shared[0].update(key.name for key in self._kept)
        for key in self._kept:
            self.errors.pop(key, None)
        self._kept.clear()

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
        both = [
            SharedWeight(name, address, read[at][1])
            for at, (name, address) in self._weights.items()
            if at in read
        ]
        self.weights = list(dict.fromkeys(both))


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
