"""What is scheduled: tasks with durations, in an order in which each comes after its sources.

Invariant: every source of a task has a smaller number, so a graph of tasks has no cycle.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

Int32 = NDArray[np.int32]
Int64 = NDArray[np.int64]

Kind = Literal["matrix", "vector", "memory"]
"""the engine that a task is made for: products of matrices, everything else that computes, and what
only moves data"""
KINDS: tuple[Kind, ...] = ("matrix", "vector", "memory")


@dataclass(frozen=True)
class Label:
    """What tasks are called; the same task of several tokens or sequences has the same label."""

    name: str
    """unique in a graph: the tensor's, with the part if it was split: `Qcur-0`, `kq-0 head 3`"""
    title: str
    """the same in every layer: `MUL_MAT ffn_down`"""
    op: str
    """ggml's op; of a part its own word: `MAXIMUM`, `EXPONENTIALS`, `NORMALIZATION`"""
    kind: Kind
    layer: int
    """-1 outside all layers"""
    block: str


@dataclass(frozen=True)
class Tasks:
    """Columns of equal length, `sources` excepted."""

    labels: list[Label]
    label: Int32
    """index into `labels`"""
    ns: Int64
    """on one engine as fast as the recording's; at least 1"""
    bytes: Int64
    """read and written"""
    load: Int64
    """of `bytes`, weights and cached keys and values: a transfer can bring them beforehand"""
    copy: Int32
    """0, or which token or sequence in flight it belongs to"""
    first: Int64
    """one longer than the tasks: the sources of task i are sources[first[i]:first[i + 1]]"""
    sources: Int64
    """numbers of tasks that must have ended, smaller than the task's"""

    def __len__(self) -> int:
        return len(self.ns)
