"""The error of one tensor of B against the same tensor of A, over all tokens.

Invariant: only sums are kept, in float64; values are gone once they are added.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

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
        error, squares, apart = self.error, self.squares, self.apart
        self._add(a, b, has_tokens, keeps_rows)
        apart = self.apart - apart
        own = apart / a.size if self.is_index and a.size else 0.0
        if not self.is_index:
            own = _nmse(self.error - error, self.squares - squares, apart)
        self.parts.append(math.sqrt(own))

    def _add(self, a: Array, b: Array, has_tokens: bool, keeps_rows: bool) -> None:
        self.n += a.size
        if a.dtype.kind in "iu":
            self.is_index = True
            self.apart += int(np.count_nonzero(a != b))
            return
        with np.errstate(invalid="ignore", over="ignore"):
            d = np.subtract(b, a, out=b)
        if not (math.isfinite(_dot(a, a)) and math.isfinite(_dot(d, d))):
            a, d = self._without_infinite(a, d)
        if not has_tokens:
            self.squares += _dot(a, a)
            self.error += _dot(d, d)
            self.product += _dot(a, d)
            return
        by_row = np.array([np.einsum("ij,ij->i", x, x) for x in (d, a)], np.float64)
        self.error += float(by_row[0].sum())
        self.squares += float(by_row[1].sum())
        self.product += _dot(a, d)
        by_channel = np.array([np.einsum("ij,ij->j", x, x) for x in (d, a)], np.float64)
        self.channels = by_channel if self.channels is None else self.channels + by_channel
        if keeps_rows:
            self.rows.append(by_row)

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
