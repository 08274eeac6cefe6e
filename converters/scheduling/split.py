"""Tasks from timed kernels: whole, or divided into heads, rows or tiles, with their dependencies.

Invariants: the parts of a kernel cover its result once; a kernel whose op cannot be divided stays
whole. The times of the parts add up to the kernel's, unless the parts were measured themselves;
then each keeps its own time. A part waits for every part that it may need, and for no others where
the op and the views between them show it (`Axes`).
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise, product
from math import isqrt, prod
from typing import Literal

import numpy as np

from llamacpp_instr.base.errors import UsageError
from llamacpp_instr.base.terminal import counted
from llamacpp_instr.converters.scheduling.tasks import Engines, Label, Tasks
from llamacpp_instr.converters.scheduling.timed_graph import (
    PRODUCTS,
    Axes,
    Need,
    Slice,
    TimedGraph,
    kind_of,
    leaf_below,
)
from llamacpp_instr.log.graph.ops import tensor
from llamacpp_instr.prediction.probe.file import (
    ATTENTION_PARTS,
    SCALED_NORM_PARTS,
    SOFT_MAX_PARTS,
    AttentionShape,
    KernelShape,
    Part,
    PartTimes,
    ScaledNormShape,
)

Division = dict[int, list[int]]
"""axis -> where its slices begin, and its length; empty for a whole kernel"""

ONE_THREAD = frozenset({"REPEAT", "SUM_ROWS", "SUM", "MEAN", "ARGMAX", "CUMSUM"})
"""ops that ggml computes on one thread: `params->ith != 0` in ggml/src/ggml-cpu/ops.cpp"""
SECOND_AXIS = frozenset({"NORM", "RMS_NORM", "L2_NORM", "SOFT_MAX", "CPY", "CONT", "DUP"})
"""ops whose rows ggml counts along axis 1 alone, so one thread computes a norm of one token"""

MOST_HEADS = 1024


def n_parts(division: Division) -> int:
    return prod(len(bounds) - 1 for bounds in division.values())


def by_heads(timed: TimedGraph, axes: Axes) -> dict[int, Division]:
    """One part for each head, of kernels that attend, and of those that make or read the queries,
    keys and values of single heads. Keys and values have one part for each of their own heads."""
    slices: dict[int, Slice] = {}
    readers: dict[int, list[int]] = {}
    for kernel in range(len(timed.inside)):
        for need in axes.needs(kernel, None):
            readers.setdefault(need.kernel, []).append(kernel)
    todo = []
    for kernel, inside in enumerate(timed.inside):
        axis = _head_axis(timed, axes, inside[-1])
        if axis is not None:
            slices[kernel] = Slice(axis, axes.shape(inside[-1])[axis])
            todo.append(kernel)
    while todo:
        kernel = todo.pop()
        found = [(need.kernel, need.slice) for need in axes.needs(kernel, slices[kernel])]
        for reader in readers.get(kernel, ()):
            for axis, length in enumerate(axes.result(reader)):
                of = Slice(axis, slices[kernel].n)
                if length % of.n == 0 and axes.divisible(reader, axis):
                    # if slice i of the reader needs slice i of what it reads
                    needs = [(need.kernel, need.slice) for need in axes.needs(reader, of)]
                    if (kernel, slices[kernel]) in needs:
                        found.append((reader, of))
        for other, slice_ in found:
            known = slice_ is None or slice_.n < 2 or other in slices
            if not known and slice_ and axes.divisible(other, slice_.axis):
                slices[other] = slice_
                todo.append(other)
    return {kernel: {of.axis: _even(axes, kernel, of.axis, of.n)} for kernel, of in slices.items()}


def by_rows(timed: TimedGraph, axes: Axes, engines_of: Callable[[int], int]) -> dict[int, Division]:
    """Divides rows as ggml divides them among threads; `engines_of` says into how many parts."""
    divisions = {}
    for kernel in range(len(timed.inside)):
        axis = _thread_axis(timed, axes, kernel, engines_of(kernel))
        if axis is not None and axes.divisible(kernel, axis):
            divisions[kernel] = {axis: _even(axes, kernel, axis, engines_of(kernel))}
    return divisions


def by_tiles(
    timed: TimedGraph, axes: Axes, engines_of: Callable[[int], int]
) -> dict[int, Division]:
    """Divides products of matrices into tiles of rows by tokens, as square as their number allows;
    other kernels as `by_rows` does."""
    divisions = by_rows(timed, axes, engines_of)
    for kernel, inside in enumerate(timed.inside):
        n, ne = engines_of(kernel), axes.result(kernel)
        if timed.nodes.op[inside[-1]] in PRODUCTS and n > 1:
            tokens = next(axis for axis in (2, 1) if ne[axis] > 1 or axis == 1)
            across = max(i for i in range(1, isqrt(n) + 1) if n % i == 0)
            across = min(across, ne[tokens])
            tiled = {0: _even(axes, kernel, 0, n // across)}
            tiled |= {tokens: _even(axes, kernel, tokens, across)} if across > 1 else {}
            divisions[kernel] = {axis: at for axis, at in tiled.items() if len(at) > 2}
    return divisions


def _head_axis(timed: TimedGraph, axes: Axes, node: int) -> int | None:
    """The axis of the heads if a node attends: flash attention, or a product whose first factor is
    not a weight."""
    op, sources = timed.nodes.op[node], timed.nodes.src[node]
    if op == "FLASH_ATTN_EXT" and len(sources) > 2:
        axis = 1
    elif op == "MUL_MAT" and sources and not _is_weight(timed, sources[0]):
        axis = 2
    else:
        return None
    return axis if 1 < axes.shape(node)[axis] <= MOST_HEADS else None


def _is_weight(timed: TimedGraph, source: int) -> bool:
    leaf = leaf_below(timed.nodes, source)
    return leaf < 0 and timed.graph.leaf(leaf).tensor >= 0


def _thread_axis(timed: TimedGraph, axes: Axes, kernel: int, n: int) -> int | None:
    """The axis along which ggml divides a kernel among `n` threads, or None for one thread."""
    node = timed.inside[kernel][0]
    op, ne = timed.nodes.op[node], axes.result(kernel)
    if op in ONE_THREAD or n < 2:
        return None
    if op in PRODUCTS:
        rows = ne[1] * ne[2] * ne[3]
        # ggml_compute_forward_mul_mat; the experts' product always by rows of the weight
        axis = 0 if ne[0] > rows or op == "MUL_MAT_ID" else max((1, 2, 3), key=lambda a: ne[a])
    elif op == "FLASH_ATTN_EXT":
        axis = 1 if ne[1] > 1 else 2
    elif op == "CONCAT":
        axis = 2
    elif op in SECOND_AXIS:
        axis = 1
        if op in ("CPY", "CONT", "DUP"):
            source = axes.shape(timed.nodes.src[node][0]) if timed.nodes.src[node] else ne
            if source != ne and source[1] > 1:
                axis = 0 if ne[0] != source[0] else 1
    else:
        # rows of all axes together: the outermost that is long enough, else the longest
        axis = max((3, 2, 1), key=lambda a: (min(ne[a], n), a))
    return axis if ne[axis] > 1 else None


def _even(axes: Axes, kernel: int, axis: int, n: int) -> list[int]:
    length = axes.result(kernel)[axis]
    n = max(1, min(n, length))
    return [i * length // n for i in range(n + 1)]


Split = Literal["none", "heads", "rows", "tiles"]
MOST_EDGES = 20_000_000


@dataclass(frozen=True)
class Divided:
    """Tasks, and the kernel that each one is, or is a part of."""

    tasks: Tasks
    kernel: list[int]
    notes: list[str]


def divide(
    timed: TimedGraph,
    split: Split,
    engines: Engines,
    part_times: Mapping[int, PartTimes] | None = None,
) -> Divided:
    """The chosen kernels as tasks. Rows and tiles make as many parts as engines can run the op;
    heads make one part for each head. `part_times` has the measured times of the stages of a flash
    attention, a soft-max or a fused norm, by kernel: each part of it becomes a chain of these.
    Edges to kernels that are not chosen vanish. Raises UsageError for too many parts that depend on
    each other."""
    axes = Axes(timed)

    def engines_of(kernel: int) -> int:
        op = timed.nodes.op[timed.inside[kernel][0]]
        label = Label("", "", op, kind_of(op), -1, "", timed.device(kernel))
        return sum(kind.count for kind in engines.kinds if kind.can_run(label))

    divisions: dict[int, Division] = {}
    if split == "heads":
        divisions = by_heads(timed, axes)
    elif split != "none":
        divisions = (by_rows if split == "rows" else by_tiles)(timed, axes, engines_of)
    builder = _Builder(timed, axes, split, divisions, part_times or {})
    for kernel in timed.chosen:
        builder.add(kernel)
    return Divided(builder.tasks(), builder.kernel, builder.notes())


class _Builder:
    def __init__(
        self,
        timed: TimedGraph,
        axes: Axes,
        split: Split,
        divisions: Mapping[int, Division],
        part_times: Mapping[int, PartTimes],
    ) -> None:
        self._timed, self._axes, self._split = timed, axes, split
        self._divisions, self._part_times = divisions, part_times
        self._first_task: dict[int, int] = {}
        self.heads = max((n_parts(d) for d in divisions.values()), default=0)
        self.kernel: list[int] = []
        self._labels: list[Label] = []
        self._ns, self._bytes, self._load = array("q"), array("q"), array("q")
        self._first, self._sources = array("q", [0]), array("q")

    def division(self, kernel: int) -> Division:
        found = self._divisions.get(kernel, {})
        # a part takes at least a nanosecond, and the parts no longer than the whole
        return found if n_parts(found) <= self._timed.ns[kernel] else {}

    def stages(self, kernel: int) -> tuple[Part, ...]:
        """The chain that each part of a kernel becomes; empty if a part is one task."""
        return _parts_of(self._timed, kernel) if kernel in self._part_times else ()

    def add(self, kernel: int) -> None:
        """Adds the tasks of a kernel, whose sources were added before."""
        timed, division = self._timed, self.division(kernel)
        self._first_task[kernel] = len(self.kernel)
        stages = self.stages(kernel)
        n = n_parts(division)
        # the elements of each part, up to a factor
        shares = [prod(end - begin for begin, end in of.values()) for of in _parts(division)]
        times = [self._part_times[kernel].get(stage, 1.0) for stage in stages]
        ns = [_spread(round(time), shares) for time in times or [float(timed.ns[kernel])]]
        load = [_load_of_part(timed, kernel, division, part) for part in _parts(division)]
        rest = _spread(int(timed.bytes[kernel] - timed.load[kernel]), shares, at_least=0)
        needs = self._needs(kernel, division)
        for part in range(n):
            for stage in range(max(1, len(stages))):
                self._labels.append(self._label(kernel, part, n, stages[stage] if stages else None))
                self.kernel.append(kernel)
                self._ns.append(ns[stage][part])
                loaded, moved = _of_stage(load[part], rest[part], stages, stage)
                self._load.append(loaded)
                self._bytes.append(loaded + moved)
                sources = {len(self.kernel) - 2} if stage else set()
                for need, ranges in needs:
                    if _stage_of(need, stages) == stage:
                        sources.update(self._exits(need.kernel, ranges[part]))
                self._sources.extend(sorted(sources))
                self._first.append(len(self._sources))
                if len(self._sources) > MOST_EDGES:
                    raise UsageError(
                        f"--split {self._split}: more than {MOST_EDGES:,} dependencies between"
                        " parts; choose fewer engines, or a layer with --layers"
                    )

    def _needs(
        self, kernel: int, division: Division
    ) -> list[tuple[Need, list[dict[int, tuple[int, int]]]]]:
        """Each earlier kernel that is needed, with, for every part, the slices of its axes."""
        axes_of_parts = list(division)
        found = [
            list(self._axes.needs(kernel, Slice(axis, len(division[axis]) - 1)))
            for axis in axes_of_parts
        ] or [list(self._axes.needs(kernel, None))]
        result = []
        for of_axes in zip(*found, strict=True):
            need = of_axes[0]
            if need.kernel not in self._first_task:
                continue
            theirs = self.division(need.kernel)
            shared = [
                (axis, division[axis][-1], one.slice.axis)
                for axis, one in zip(axes_of_parts, of_axes, strict=False)
                if one.slice is not None and one.slice.axis in theirs
            ]
            known = [
                {its: _overlap(*part[axis], length, theirs[its]) for axis, length, its in shared}
                for part in _parts(division)
            ]
            result.append((need, known))
        return result

    def _exits(self, kernel: int, ranges: Mapping[int, tuple[int, int]]) -> Iterator[int]:
        """The last tasks of those parts of a kernel whose slices are in `ranges`."""
        division = self.division(kernel)
        n_stages = max(1, len(self.stages(kernel)))
        first = self._first_task[kernel]
        choices = [range(*ranges.get(axis, (0, len(at) - 1))) for axis, at in division.items()]
        sizes = [len(at) - 1 for at in division.values()]
        for chosen in product(*choices):
            number = 0
            for i, size in zip(chosen, sizes, strict=True):
                number = number * size + i
            yield first + number * n_stages + n_stages - 1

    def _label(self, kernel: int, part: int, n: int, stage: Part | None) -> Label:
        op, name = self._timed.timeline.ops[kernel], self._timed.names[kernel]
        if n > 1:
            head = "head" if n == self.heads else "KV head"
            name += f" {head if self._split == 'heads' else 'part'} {part}"
        if stage is None:
            first = self._timed.nodes.op[self._timed.inside[kernel][0]]
            device = self._timed.device(kernel)
            return Label(name, op.title, first, kind_of(first), op.layer, op.block, device)
        kind = kind_of("MUL_MAT" if stage in ("DOT_PRODUCTS", "WEIGHTED_SUM") else stage)
        title = f"{stage} {op.role}".rstrip()
        return Label(f"{name} {stage.lower()}", title, stage, kind, op.layer, op.block)

    def tasks(self) -> Tasks:
        n = len(self.kernel)
        columns = (self._ns, self._bytes, self._load, self._first, self._sources)
        ns, moved, load, first, sources = (np.array(column, np.int64) for column in columns)
        number, copy = np.arange(n, dtype=np.int32), np.zeros(n, np.int32)
        return Tasks(self._labels, number, ns, moved, load, copy, first, sources)

    def notes(self) -> list[str]:
        timed, notes = self._timed, []
        if self._split != "none":
            whole = (k for k in timed.chosen if n_parts(self.division(k)) == 1)
            ops = sorted({timed.nodes.op[timed.inside[k][0]] for k in whole})
            notes.append(
                f"--split {self._split} made {counted(len(self.kernel), 'task')}"
                f" of {counted(len(timed.chosen), 'kernel')}."
                + (f" Not divided: {', '.join(ops)}." if ops else "")
            )
        for op in ("FLASH_ATTN_EXT", "SOFT_MAX", "RMS_NORM"):
            kernels = [k for k in self._part_times if timed.nodes.op[timed.inside[k][0]] == op]
            if kernels:
                parts = sum(sum(self._part_times[k].values()) for k in kernels)
                recorded = float(timed.ns[kernels].sum())
                notes.append(
                    f"The parts of {op} were timed on this machine, each with a ggml kernel of its"
                    f" shape, the fastest of several runs: together {parts / 1000:.1f} µs; {op}"
                    f" took {recorded / 1000:.1f} µs in the log."
                )
        return notes


def _parts_of(timed: TimedGraph, kernel: int) -> tuple[Part, ...]:
    """The parts of a kernel, in their order; most kernels have none."""
    if len(timed.inside[kernel]) > 1:
        ops = tuple(timed.nodes.op[node] for node in timed.inside[kernel])
        return SCALED_NORM_PARTS if ops == SCALED_NORM_PARTS else ()
    node = timed.inside[kernel][0]
    op, sources = timed.nodes.op[node], timed.nodes.src[node]
    if op == "FLASH_ATTN_EXT" and len(sources) > 2:
        return ATTENTION_PARTS
    # not the soft-max of the experts' scores
    of_attention = timed.timeline.ops[kernel].block == "attention" and bool(sources)
    return SOFT_MAX_PARTS if op == "SOFT_MAX" and of_attention else ()


def _stage_of(need: Need, stages: tuple[Part, ...]) -> int:
    """The weighted sum reads the values, the last part reads what another node of a fused kernel
    reads, and the first part reads all else."""
    values = stages == ATTENTION_PARTS and need.source == 2
    return len(stages) - 1 if values or need.source == 9 else 0


def _of_stage(load: int, rest: int, stages: tuple[Part, ...], stage: int) -> tuple[int, int]:
    """The load and the other bytes of one part of a chain: keys are the first half and values the
    last, and the parts between them move nothing. The last part of a norm reads its weight."""
    if not stages:
        return load, rest
    if stages == SCALED_NORM_PARTS:
        return (0, rest // 2) if stage == 0 else (load, rest - rest // 2)
    if stages == SOFT_MAX_PARTS:
        return (load, rest) if stage == 0 else (0, 0)
    ends = {0: (load // 2, rest // 2), len(stages) - 1: (load - load // 2, rest - rest // 2)}
    return ends.get(stage, (0, 0))


def _parts(division: Division) -> Iterator[dict[int, tuple[int, int]]]:
    """Where each part begins and ends along each axis."""
    pieces = [list(pairwise(at)) for at in division.values()]
    for chosen in product(*pieces):
        yield dict(zip(division, chosen, strict=True))


def _spread(total: int, shares: list[int], at_least: int = 1) -> list[int]:
    """`total` divided in proportion; the parts add up to it, unless it is less than one each."""
    ends = np.cumsum(shares, dtype=np.int64)
    whole = int(ends[-1])
    cuts = [total * int(end) // whole for end in ends]
    return [max(at_least, b - a) for a, b in zip([0, *cuts], cuts, strict=False)]


def _load_of_part(
    timed: TimedGraph, kernel: int, division: Division, part: Mapping[int, tuple[int, int]]
) -> int:
    """The weights that a part reads: every tile of the same rows reads the same weights."""
    op = timed.nodes.op[timed.inside[kernel][-1]]
    total = int(timed.load[kernel])
    for axis, (begin, end) in part.items():
        tokens = {"MUL_MAT": 1, "MUL_MAT_ID": 2}.get(op)
        if axis != tokens:
            length = division[axis][-1]
            total = total * end // length - total * begin // length
    return total


def _overlap(begin: int, end: int, length: int, bounds: list[int]) -> tuple[int, int]:
    """The slices of an axis that hold a share of it: from the first to one past the last."""
    theirs = bounds[-1]
    first = max(i for i, at in enumerate(bounds[:-1]) if at * length <= begin * theirs)
    last = min(i for i, at in enumerate(bounds) if at * length >= end * theirs)
    return first, last


def part_shapes(timed: TimedGraph) -> dict[int, KernelShape]:
    """The shape of each chosen kernel that is an attention, its soft-max, or a fused norm, so that
    its parts can be timed. An attention has the cells that the recorded kernel read, not the window
    of the cache that it was given."""
    axes, nodes = Axes(timed), timed.nodes
    found: dict[int, KernelShape] = {}
    for kernel in timed.chosen:
        if not _parts_of(timed, kernel):
            continue
        node = timed.inside[kernel][0]
        if nodes.op[node] == "RMS_NORM":
            elements, *rows = axes.shape(node)
            found[kernel] = ScaledNormShape(elements, prod(rows))
        elif nodes.op[node] == "SOFT_MAX":
            cells, tokens, heads, _ = axes.shape(node)
            found[kernel] = AttentionShape(tokens, heads, 1, cells, 1, 1, "f32", "f32", fused=False)
        else:
            query, key, value = (axes.shape(source) for source in nodes.src[node][:3])
            type_k, type_v = (tensor(timed.graph, source).type for source in nodes.src[node][1:3])
            found[kernel] = AttentionShape(
                tokens=query[1], heads=query[2] * query[3], kv_heads=max(1, key[2] * key[3]),
                cells=max(1, timed.cells.get(kernel, key[1])), key=key[0], value=value[0],
                type_k=type_k, type_v=type_v, fused=True,
            )  # fmt: skip
    return found
