"""What a view of ggml selects, as steps that standard operators know.

A view names elements of a contiguous tensor by an offset and strides. Where each stride is a
multiple of the next, the base can be reshaped so that the view is a slice of each dimension. Any
other view is a list of positions.

Invariant: pure arithmetic, in elements; the steps select what numpy's `as_strided` selects.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Int64 = NDArray[np.int64]


@dataclass(frozen=True)
class Slices:
    """Reshape the base, slice each dimension, exchange dimensions, reshape."""

    reshape: tuple[int, ...]
    starts: tuple[int, ...]
    ends: tuple[int, ...]
    transpose: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def is_whole(self) -> bool:
        """Whether every element is selected."""
        return self.ends == self.reshape and not any(self.starts)

    @property
    def is_base(self) -> bool:
        """Whether every element is selected, in the base's order."""
        return self.is_whole and list(self.transpose) == sorted(self.transpose)


def places(offset: int, shape: Sequence[int], strides: Sequence[int]) -> Int64:
    """The position of each element of a view in its flat base, an array of the view's shape."""
    index = np.full(tuple(shape), offset, np.int64)
    for axis, (n, stride) in enumerate(zip(shape, strides, strict=True)):
        along = [1] * len(shape)
        along[axis] = n
        index += (np.arange(n, dtype=np.int64) * stride).reshape(along)
    return index


def find_slices(
    n_base: int, offset: int, shape: Sequence[int], strides: Sequence[int]
) -> Slices | None:
    """The steps from a contiguous base of `n_base` elements to a view of it, None if only a list of
    positions selects it; `shape` and `strides` are in numpy's order."""
    axes = [axis for axis, n in enumerate(shape) if n > 1]
    axes.sort(key=lambda axis: -strides[axis])
    steps = [strides[axis] for axis in axes]
    if any(step < 1 for step in steps) or 0 in shape:
        return None
    reshape, starts, ends = [], [], []
    whole, rest = n_base, offset
    for axis, step in zip(axes, steps, strict=True):
        if whole % step:
            return None
        start, rest = divmod(rest, step)
        reshape.append(whole // step)
        starts.append(start)
        ends.append(start + shape[axis])
        whole = step
    # what is left of the base below the smallest stride
    reshape.append(whole)
    starts.append(rest)
    ends.append(rest + 1)
    if any(end > n for end, n in zip(ends, reshape, strict=True)):
        return None
    order = [axes.index(axis) for axis in sorted(axes)]
    return Slices(tuple(reshape), tuple(starts), tuple(ends), (*order, len(axes)), tuple(shape))
