"""What is scheduled, and on what: tasks, and the engines of a machine that may not exist.

Both can be written by hand in TOML files, a [[task]] or an [[engine]] for each.

Invariants: every source of a task has a smaller number, so a graph of tasks has no cycle. Copies of
tasks that are in flight together have the labels and times of the original; only `copy` tells them
apart. An `Engines` has at least one engine, names are unique, and every number is in its range, so
no later step has to check them.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from graphlib import CycleError, TopologicalSorter
from heapq import heappop, heappush
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
import numpy as np
from numpy.typing import NDArray

from llamacpp_instr.base.errors import UsageError
from llamacpp_instr.base.terminal import printable

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
    """ggml's op; a part has its own word: `MAXIMUM`, `EXPONENTIALS`, `NORMALIZATION`"""
    kind: Kind
    layer: int
    """-1 outside all layers"""
    block: str
    device: str = ""
    """the only device that runs it; empty: any engine that is not a device"""


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

    def label_of(self, task: int) -> Label:
        return self.labels[int(self.label[task])]


def several_tokens(tasks: Tasks, n: int) -> Tasks:
    """The tasks `n` times, one token after the other: the first tasks of a token wait for all the
    last tasks of the previous one. The time of sampling between two tokens is not included."""
    counts = np.diff(tasks.first)
    is_root = counts == 0
    is_end = np.ones(len(tasks), np.bool_)
    is_end[tasks.sources] = False
    ends = np.flatnonzero(is_end)
    counts[is_root] = len(ends)
    of_root = np.repeat(is_root, counts)
    sources = np.empty(len(of_root), np.int64)
    sources[~of_root] = tasks.sources
    # `together` adds the number of tasks before this copy; the last of them are the previous copy
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
    begins = np.cumsum([0, *map(len, parts)])
    edges = np.cumsum([0, *(len(part.sources) for part in parts)])
    firsts = [part.first[:-1] + at for part, at in zip(parts, edges, strict=False)]
    sources = [part.sources + at for part, at in zip(parts, begins, strict=False)]
    copies = np.concatenate([part.copy for part in parts])
    return Tasks(
        labels=labels,
        label=np.concatenate(numbers).astype(np.int32),
        ns=np.concatenate([part.ns for part in parts]),
        bytes=np.concatenate([part.bytes for part in parts]),
        load=np.concatenate([part.load for part in parts]),
        copy=copies.astype(np.int32),
        first=np.concatenate([*firsts, edges[-1:]]),
        sources=np.concatenate(sources),
    )


MAX_ENGINES = 4096
MAX_HANDOVER_NS = 10**12
MAX_MEMORY = 2**60
_SPEEDS = (1e-6, 1e6)
_BANDWIDTHS = (1e3, 1e18)


class EngineKind(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Engines that are all alike."""

    name: str
    count: int = 1
    runs: frozenset[str] | None = None
    """ops and kinds of tasks, such as MUL_MAT and matrix, and devices, such as CUDA0; None:
    everything but what ran on a device"""
    speed: dict[str, float] = {}
    """times as fast as the recording, by op, by kind, or for all others by `*`; else 1"""
    bandwidth: float | None = None
    """bytes per second of one engine: a task takes at least bytes / bandwidth"""
    local_memory: int | None = None
    """bytes: two buffers of half of it hold what transfers bring"""
    layers: str | None = None
    """`A` or `A-B`: of the tasks in layers, it runs only those in these; None: those in all"""

    @property
    def transfers(self) -> bool:
        """Whether it is a DMA engine: dedicated to tasks that only move data."""
        return self.runs == frozenset({"memory"})

    def can_run(self, label: Label) -> bool:
        layers = None if self.layers is None else layer_range(self.layers) or range(0)
        if layers is not None and label.layer >= 0 and label.layer not in layers:
            return False
        if label.device:
            return self.runs is not None and label.device in self.runs
        return self.runs is None or label.op in self.runs or label.kind in self.runs

    def speed_of(self, label: Label) -> float:
        """Times as fast as the recording: of the op, else of the kind, else of `*`, else 1."""
        return next(
            (self.speed[key] for key in (label.op, label.kind, "*") if key in self.speed), 1.0
        )


@cache
def layer_range(text: str) -> range | None:
    """The layers of `A` or `A-B`, both inclusive; None if it is neither or has no layer."""
    match = re.fullmatch(r"(\d{1,9})(?:-(\d{1,9}))?", text)
    return range(int(match[1]), int(match[2] or match[1]) + 1) or None if match else None


@dataclass(frozen=True)
class Engines:
    """Engines are numbered over the kinds, in their order."""

    kinds: tuple[EngineKind, ...]
    handover_ns: int = 0
    """a task begins at least this long after the end of a source that ran on another engine"""
    transfers: bool = False
    """DMA engines bring loads to the engines that have local memory"""

    def count(self) -> int:
        return sum(kind.count for kind in self.kinds)

    def name(self, engine: int) -> str:
        """The kind's name and the number among its kind: `matrix 0`."""
        for kind in self.kinds:
            if engine < kind.count:
                return f"{kind.name} {engine}"
            engine -= kind.count
        raise IndexError(engine)

    def kind_numbers(self) -> list[int]:
        """For each engine, the number of its kind."""
        return [number for number, kind in enumerate(self.kinds) for _ in range(kind.count)]


def equal_engines(n: int) -> Engines:
    """`n` engines as fast as the recording's, which run everything. Raises UsageError."""
    if not 1 <= n <= MAX_ENGINES:
        raise UsageError(f"engines: expected 1 to {MAX_ENGINES}, got {n}")
    return Engines((EngineKind("engine", n),))


def with_devices(engines: Engines, tasks: Tasks) -> Engines:
    """The engines, and one for each device whose tasks none of them runs."""
    named = {name for kind in engines.kinds for name in kind.runs or ()}
    devices = dict.fromkeys(label.device for label in tasks.labels)
    more = [
        EngineKind(name, runs=frozenset({name})) for name in devices if name and name not in named
    ]
    return replace(engines, kinds=(*engines.kinds, *more)) if more else engines


def parse_engines(text: str) -> Engines:
    """A number of equal engines, or the path of a TOML file. Raises UsageError."""
    if text.isdecimal():
        return equal_engines(int(text) if len(text) < 10 else 10**9)
    if not text or not Path(text).exists():
        raise UsageError(
            f"engines: expected a number or a TOML file, and there is no file {printable(text)!r}"
        )
    return read_engines(text)


class _EngineFile(msgspec.Struct, forbid_unknown_fields=True):
    engine: list[EngineKind] = []
    handover_ns: int = 0
    transfers: bool = False


def read_engines(path: str | Path) -> Engines:
    """The engines of a TOML file. Raises UsageError, which names the file and the wrong key."""
    file: _EngineFile = read_toml(path, _EngineFile)
    for problem in _wrong_engines(file):
        raise UsageError(f"{path}: {problem}")
    return Engines(tuple(file.engine), file.handover_ns, file.transfers)


def read_toml(path: str | Path, kind: type[Any]) -> Any:
    """The content of a TOML file as a `kind`. Raises UsageError, which names the file and what is
    wrong."""
    try:
        return msgspec.toml.decode(Path(path).read_bytes(), type=kind)
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}") from None
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise UsageError(f"{path}: {printable(str(error))}") from None


def _wrong_engines(file: _EngineFile) -> Iterator[str]:
    """What is wrong; only the first can be trusted, because later checks rely on earlier ones."""
    if not file.engine:
        yield "no engines; add an [[engine]] with a name"
    if not 0 <= file.handover_ns <= MAX_HANDOVER_NS:
        yield f"handover_ns must be 0 to {MAX_HANDOVER_NS}, got {file.handover_ns}"
    names = set()
    for kind in file.engine:
        where = f"engine {printable(kind.name)}"
        if not kind.name.strip():
            yield "an engine's name is empty"
        if kind.name in names:
            yield f"{where} appears twice; use count for engines that are alike"
        names.add(kind.name)
        if kind.count < 1:
            yield f"{where}: count must be at least 1, got {kind.count}"
        if kind.layers is not None and layer_range(kind.layers) is None:
            yield f"{where}: layers must be like 7 or 0-7, got {printable(kind.layers)}"
        if kind.runs is not None and not kind.runs:
            yield f"{where}: runs is empty; leave it out for an engine that runs everything"
        for key in [*sorted(kind.runs or ()), *(key for key in kind.speed if key != "*")]:
            if key not in KINDS and not key[:1].isupper():
                yield (
                    f"{where}: {printable(key)!r} is neither a kind ({', '.join(KINDS)})"
                    " nor an op such as MUL_MAT"
                )
        ranges = [(f"speed of {printable(key)}", of, *_SPEEDS) for key, of in kind.speed.items()]
        if kind.bandwidth is not None:
            ranges.append(("bandwidth, in bytes per second,", kind.bandwidth, *_BANDWIDTHS))
        for what, value, low, high in ranges:
            if math.isnan(value) or not low <= value <= high:
                yield f"{where}: {what} must be {low:g} to {high:g}, got {value:g}"
        if kind.local_memory is not None and not 2 <= kind.local_memory <= MAX_MEMORY:
            yield f"{where}: local_memory must be 2 to {MAX_MEMORY} bytes, got {kind.local_memory}"
    if (n := sum(kind.count for kind in file.engine)) > MAX_ENGINES:
        yield f"{n} engines; at most {MAX_ENGINES} are possible"
    fed = [kind for kind in file.engine if kind.local_memory is not None]
    bring = [kind for kind in file.engine if kind.transfers]
    if not file.transfers:
        for kind in fed:
            yield (
                f"engine {printable(kind.name)} has local_memory; add transfers = true"
                " so that loads are brought into it"
            )
        return
    if not fed:
        yield "transfers = true, but no engine has local_memory"
    if not bring:
        yield 'transfers = true, but no engine has runs = ["memory"]'
    for kind in bring:
        if kind.bandwidth is None:
            yield f"engine {printable(kind.name)} brings loads, so it needs a bandwidth"
        if kind.local_memory is not None:
            yield f"engine {printable(kind.name)} brings loads; it has no local_memory"


def check_usable(tasks: Tasks, engines: Engines) -> None:
    """Raises UsageError for an engine that no task can use, and for a task that no engine runs."""
    labels = [tasks.labels[i] for i in np.unique(tasks.label).tolist()]
    for kind in engines.kinds:
        brings = engines.transfers and kind.transfers and bool((tasks.load > 0).any())
        own = [label for label in labels if kind.layers is None or label.layer >= 0]
        if not brings and not any(map(kind.can_run, own)):
            ops = sorted({f"{label.op} ({label.kind})" for label in labels})
            more = f" and {len(ops) - 8} more" if len(ops) > 8 else ""
            only = f" in layers {kind.layers}" if kind.layers is not None else ""
            raise UsageError(
                f"engine {kind.name}: it runs {', '.join(sorted(kind.runs or {'all'}))}{only}, but"
                f" there is no such task; the tasks are {printable(', '.join(ops[:8]))}{more}"
            )
    for label in labels:
        if not any(kind.can_run(label) for kind in engines.kinds):
            if any(msgspec.structs.replace(of, layers=None).can_run(label) for of in engines.kinds):
                raise UsageError(
                    f"no engine runs {printable(label.name)} of layer {label.layer}; add the layer"
                    " to what one of them runs"
                )
            raise UsageError(
                f"no engine runs {label.op} ({label.kind}), such as {printable(label.name)};"
                f' add "{label.op}" or "{label.kind}" to what one of them runs'
            )


MOST_TASKS = 100_000
"""of a file"""
_Ns = Annotated[int, msgspec.Meta(ge=1, le=10**12)]
_Bytes = Annotated[int, msgspec.Meta(ge=0, le=10**15)]
_SHOWN = 8
"""tasks of a cycle"""


class _Task(msgspec.Struct, forbid_unknown_fields=True):
    name: str
    ns: _Ns
    op: str = "TASK"
    kind: Kind = "vector"
    after: list[str] = []
    bytes: _Bytes = 0
    load: _Bytes = 0
    layer: Annotated[int, msgspec.Meta(ge=-1, lt=2**31)] = -1
    block: str = "other"


class _TaskFile(msgspec.Struct, forbid_unknown_fields=True):
    task: list[_Task] = []


def read_hand_made(path: str | Path) -> Tasks:
    """The tasks of a TOML file. A [[task]] has a `name` and its `ns`; it may have `op`, `kind`
    (matrix, vector or memory), `after` (names of its sources), `bytes`, `load`, `layer` and
    `block`. Without `bytes` a task moves its load. They may be in any order. The result has each
    task after its sources, and otherwise the file's order, which is the program's. Raises
    UsageError, which names the file and what is wrong: a name that is unknown or used twice, the
    tasks of a cycle, a value of the wrong type."""
    given: list[_Task] = read_toml(path, _TaskFile).task
    number = {task.name: i for i, task in reversed(list(enumerate(given)))}
    for problem in _wrong_tasks(given, number):
        raise UsageError(f"{path}: {problem}")
    sources = [sorted({number[name] for name in task.after}) for task in given]
    order = _in_order(path, given, sources)
    place = {number: i for i, number in enumerate(order)}
    after = [sorted(place[source] for source in sources[number]) for number in order]
    chosen = [given[i] for i in order]
    load = np.array([task.load for task in chosen], np.int64)
    return Tasks(
        labels=[
            Label(task.name, f"{task.op} {task.name}", task.op, task.kind, task.layer, task.block)
            for task in chosen
        ],
        label=np.arange(len(chosen), dtype=np.int32),
        ns=np.array([task.ns for task in chosen], np.int64),
        bytes=np.maximum(np.array([task.bytes for task in chosen], np.int64), load),
        load=load,
        copy=np.zeros(len(chosen), np.int32),
        first=np.cumsum([0, *map(len, after)], dtype=np.int64),
        sources=np.array([source for of in after for source in of], np.int64),
    )


def _wrong_tasks(given: list[_Task], number: dict[str, int]) -> Iterator[str]:
    if not given:
        yield "no tasks; add a [[task]] with a name and its ns"
    if len(given) > MOST_TASKS:
        yield f"{len(given)} tasks; at most {MOST_TASKS} are possible"
    for i, task in enumerate(given):
        if number[task.name] != i:
            yield f"task {printable(task.name)} appears twice"
        if not task.name.strip() or not task.op.strip():
            yield f"the name or op of task {i + 1} is empty"
        if 0 < task.bytes < task.load:
            yield (
                f"task {printable(task.name)} loads {task.load} bytes, but it moves only"
                f" {task.bytes} bytes"
            )
    for task in given:
        for name in task.after:
            if name not in number:
                yield (
                    f"task {printable(task.name)} is after {printable(name)}, but there is no such"
                    " task"
                )


def _in_order(path: str | Path, given: list[_Task], sources: list[list[int]]) -> list[int]:
    sorter = TopologicalSorter(dict(enumerate(sources)))
    try:
        sorter.prepare()
    except CycleError as error:
        # in graphlib's cycle, each task is before the next one
        cycle = [printable(given[i].name) for i in error.args[1]]
        if len(cycle) > _SHOWN:
            cycle[_SHOWN - 1 : -1] = [f"… {len(cycle) - _SHOWN} more …"]
        raise UsageError(f"{path}: tasks wait for each other: {' before '.join(cycle)}") from None
    order: list[int] = []
    ready: list[int] = []
    while sorter.is_active():
        for i in sorter.get_ready():
            heappush(ready, i)
        order.append(heappop(ready))
        sorter.done(order[-1])
    return order
