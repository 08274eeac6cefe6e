"""What is scheduled: tasks with durations, in an order in which each comes after its sources.

Invariant: every source of a task has a smaller number, so a graph of tasks has no cycle. Copies of
tasks that are in flight together have the labels and times of the original; only `copy` tells them
apart.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
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


def several_tokens(tasks: Tasks, n: int) -> Tasks:
    """The tasks `n` times, one token after the other: what begins a token waits for all that ends
    the one before it. The time of sampling between two tokens is not there."""
    counts = np.diff(tasks.first)
    is_root = counts == 0
    is_end = np.ones(len(tasks), np.bool_)
    is_end[tasks.sources] = False
    ends = np.flatnonzero(is_end)
    counts[is_root] = len(ends)
    of_root = np.repeat(is_root, counts)
    sources = np.empty(len(of_root), np.int64)
    sources[~of_root] = tasks.sources
    # `together` adds the number of tasks before this copy; the last of them are the copy before
    sources[of_root] = np.tile(ends, int(is_root.sum())) - len(tasks)
    after = replace(tasks, first=np.concatenate([[0], np.cumsum(counts)]), sources=sources)
    later = [replace(after, copy=tasks.copy + i) for i in range(1, n)]
    return together([tasks, *later])


def several_sequences(tasks: Tasks, n: int) -> Tasks:
    """The tasks `n` times, independent of each other."""
    step = int(tasks.copy.max(initial=0)) + 1
    return together([replace(tasks, copy=tasks.copy + i * step) for i in range(n)])


def beside(tasks: Tasks, other: Tasks, name: str) -> Tasks:
    """Both, independent of each other. The labels of `other` begin with `name`."""
    labels = [replace(label, name=f"{name} {label.name}") for label in other.labels]
    step = int(tasks.copy.max(initial=0)) + 1
    moved = replace(other, labels=labels, copy=other.copy + step)
    return together([tasks, moved])


def together(parts: Sequence[Tasks]) -> Tasks:
    """One after the other; parts that share a list of labels still do."""
    labels = list(parts[0].labels)
    offsets = {id(parts[0].labels): 0}
    numbers: list[Int64] = []
    for part in parts:
        if id(part.labels) not in offsets:
            offsets[id(part.labels)] = len(labels)
            labels.extend(part.labels)
        numbers.append(part.label.astype(np.int64) + offsets[id(part.labels)])
    begins = np.cumsum([0, *(len(part) for part in parts)])
    edges = np.cumsum([0, *(len(part.sources) for part in parts)])
    firsts = [part.first[:-1] + at for part, at in zip(parts, edges, strict=False)]
    sources = [part.sources + at for part, at in zip(parts, begins, strict=False)]
    return Tasks(
        labels,
        np.concatenate(numbers).astype(np.int32),
        np.concatenate([part.ns for part in parts]),
        np.concatenate([part.bytes for part in parts]),
        np.concatenate([part.load for part in parts]),
        np.concatenate([part.copy for part in parts]).astype(np.int32),
        np.concatenate([*firsts, edges[-1:]]),
        np.concatenate(sources),
    )
