"""Dependencies of parts, against element by element bookkeeping with numpy.

Each element of a result has a number. Reading a source through its views gives the numbers in the
source's shape, and each op says, element by element, which of them a part of its result reads. A
part must wait for the parts that hold these elements, and, with few exceptions, for no others.
"""

from __future__ import annotations

from functools import cache
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from llamacpp_instr.converters.scheduling.sources import recorded_graph
from llamacpp_instr.converters.scheduling.split import (
    Division,
    Split,
    by_heads,
    by_rows,
    by_tiles,
    divide,
)
from llamacpp_instr.converters.scheduling.tasks import equal_engines
from llamacpp_instr.converters.scheduling.timed_graph import Axes, TimedGraph
from llamacpp_instr.log.session import load_session
from tests.conftest import Instr
from tests.kit.native_kit import DEMO, ROOT

FLASH = ROOT / "tests" / "fixtures" / "demo-verbose.log"
Numbers = NDArray[np.int64]
Mask = NDArray[np.bool_]
SAME = {"ADD", "MUL", "GLU", "SCALE", "UNARY"}
ROWS = {"RMS_NORM", "ROPE", "SOFT_MAX"}


class Truth:
    """Arrays have their axes in numpy's order: the last is the length of a row."""

    def __init__(self, timed: TimedGraph) -> None:
        self.timed, self.nodes, self.graph = timed, timed.nodes, timed.graph

    def shape(self, of: int) -> tuple[int, ...]:
        ne = self.nodes.ne[of] if of >= 0 else self.graph.leafs[-1 - of].ne
        return tuple(reversed([*ne, 1, 1, 1, 1][:4]))

    def read(self, source: int) -> tuple[int, Numbers]:
        """The node or leaf that a source is a view of, and its elements in the source's shape."""
        shape = self.shape(source)
        if source < 0 or self.nodes.exec[source]:
            return source, np.arange(np.prod(shape)).reshape(shape)
        below, numbers = self.read(self.nodes.src[source][0])
        op = self.nodes.op[source]
        if op == "PERMUTE":
            order = [0] * 4
            for axis, becomes in enumerate(self.nodes.params[source][:4]):
                order[3 - becomes] = 3 - axis
            return below, np.transpose(numbers, order)
        if op == "TRANSPOSE":
            return below, np.swapaxes(numbers, 2, 3)
        if numbers.size != np.prod(shape):  # the first cells of a cache
            assert below < 0
            if shape[3] * shape[2] == numbers.shape[3]:
                return below, numbers[:, :, : shape[1]].reshape(shape)
            # values without flash attention: by heads, the cells of an element follow each other
            # (llama_kv_cache::get_v)
            by_element = numbers.reshape(shape[2], shape[1], -1).swapaxes(0, 1)
            return below, by_element[:, :, : shape[3]].reshape(shape)
        return below, numbers.reshape(shape)

    def reads(self, node: int, k: int, result: Mask) -> Mask:
        """The elements of source `k`, in its shape, that these elements of the result need."""
        op, shape = self.nodes.op[node], self.shape(self.nodes.src[node][k])
        if op in ROWS:
            return np.broadcast_to(result.any(3, keepdims=True), shape) if k == 0 else all_of(shape)
        if op == "MUL_MAT":
            mask = result.any(2) if k == 0 else result.any(3)
            if k == 0:  # several heads read the same keys
                groups = result.shape[1] // shape[1]
                mask = mask.reshape(mask.shape[0], shape[1], groups, -1).any(2)
            return np.broadcast_to(mask[..., None], shape)
        if op == "FLASH_ATTN_EXT":
            if k == 0:
                return np.broadcast_to(result.any(3).swapaxes(1, 2)[..., None], shape)
            heads = result.any((1, 3)).reshape(result.shape[0], shape[1], -1).any(2)
            return np.broadcast_to(heads[:, :, None, None], shape)
        if (op == "SET_ROWS" and k == 0) or (op in SAME and shape == result.shape):
            return result
        if op == "CONT":
            return result.reshape(shape)
        return all_of(shape)

    def needed(self, kernel: int, result: Mask) -> dict[int, Mask]:
        """By earlier node (or leaf), the elements that a part of a kernel needs."""
        inside = self.timed.inside[kernel]
        masks, found = {inside[-1]: result}, {}
        for node in reversed(inside):
            for k, source in enumerate(self.nodes.src[node]):
                if self.nodes.op[node] == "SET_ROWS" and k == 2:
                    continue
                below, numbers = self.read(source)
                mask = np.zeros(self.shape(below), np.bool_)
                mask.reshape(-1)[numbers[self.reads(node, k, masks[node])]] = True
                of = masks if below in inside else found
                of[below] = of[below] | mask if below in of else mask
        return found


@cache
def recorded(log: Path, phase: str) -> TimedGraph:
    return recorded_graph(load_session(log), phase).timed


def all_of(shape: tuple[int, ...]) -> Mask:
    return np.ones(shape, np.bool_)


def parts_of(division: Division, shape: tuple[int, ...]) -> list[Mask]:
    """The elements of each part."""
    masks = [np.ones(shape, np.bool_)]
    for axis, bounds in division.items():
        index = np.arange(shape[3 - axis]).reshape([-1 if i == 3 - axis else 1 for i in range(4)])
        cut = [(begin <= index) & (index < end) for begin, end in pairwise(bounds)]
        masks = [mask & one for mask in masks for one in cut]
    return masks


def check(log: Path, phase: str, split: Split, engines: int) -> tuple[int, set[str]]:
    """How often a part waits for only some parts of a source, and the titles of the parts that wait
    for more than they need."""
    timed = recorded(log, phase)
    axes, truth = Axes(timed), Truth(timed)
    if split == "heads":
        divisions = by_heads(timed, axes)
    else:
        divisions = (by_rows if split == "rows" else by_tiles)(timed, axes, lambda _: engines)
    divided = divide(timed, split, equal_engines(engines))
    tasks, counts = divided.tasks, np.bincount(divided.kernel)
    first = np.concatenate([[0], np.cumsum(counts)])
    masks = {}
    for kernel, n in enumerate(counts):
        shape = tuple(reversed(axes.result(kernel)))
        masks[kernel] = parts_of(divisions.get(kernel, {}) if n > 1 else {}, shape)
        assert len(masks[kernel]) == n
    written = cache_writers(truth)
    fewer, more = 0, set()
    for kernel in range(len(counts)):
        for part, result in enumerate(masks[kernel]):
            task = first[kernel] + part
            got = set(tasks.sources[tasks.first[task] : tasks.first[task + 1]].tolist())
            needed = set()
            for of, elements in truth.needed(kernel, result).items():
                for producer, mask in producers(truth, written, of, elements, kernel):
                    parts = {first[producer] + i for i, one in enumerate(masks[producer])
                             if (one & mask).any()}  # fmt: skip
                    fewer += len(parts) < counts[producer]
                    needed |= parts
            assert got >= needed, tasks.labels[task].name
            if got > needed:
                more.add(tasks.labels[task].title)
    return fewer, more


def cache_writers(truth: Truth) -> dict[int, int]:
    """The kernel that writes each cache, by its leaf."""
    found = {}
    for kernel, inside in enumerate(truth.timed.inside):
        if truth.nodes.op[inside[-1]] == "SET_ROWS":
            found[truth.read(truth.nodes.src[inside[-1]][2])[0]] = kernel
    return found


def producers(
    truth: Truth, written: dict[int, int], of: int, elements: Mask, reader: int
) -> list[tuple[int, Mask]]:
    """The kernel whose result these elements are, if any: in a cache, they may be any token's."""
    if of >= 0:
        return [(truth.timed.kernel_of[of], elements)]
    kernel = written.get(of, reader)
    if kernel >= reader:
        return []
    node = truth.timed.inside[kernel][-1]
    rows = truth.shape(truth.nodes.src[node][0])
    row = elements.shape[3]
    if rows[3] == row:
        return [(kernel, np.broadcast_to(elements.any((0, 1, 2)), rows))]
    # each element of a row has cells of its own
    of_row = elements.reshape(row, -1).any(1)
    return [(kernel, np.tile(of_row, rows[2] // row).reshape(rows))]


@pytest.mark.parametrize("phase", ["prefill", "decode"])
@pytest.mark.parametrize("engines", [2, 3])
@pytest.mark.parametrize("split", ["heads", "rows", "tiles"])
def test_a_part_waits_for_what_it_reads(split: Split, engines: int, phase: str) -> None:
    fewer, more = check(FLASH, phase, split, engines)
    assert fewer > 10
    assert more == set()


@pytest.mark.native
@pytest.mark.parametrize("split", ["heads", "rows", "tiles"])
def test_without_flash_attention(split: Split, instr: Instr, tmp_path: Path) -> None:
    log = tmp_path / "a.log"
    words = ("-p", "Once upon a time", "-n", 4, "--threads", 1, "--flash-attn", "off")
    assert instr("run", DEMO, *words, "--log", log).returncode == 0
    fewer, more = check(log, "decode", split, 3)
    assert fewer > 10
    # a part of the values of every head, which the cache has one after the other
    assert more == (set() if split == "heads" else {"MUL_MAT kqv"})
