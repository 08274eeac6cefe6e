"""A graph of tasks that was written by hand: a TOML file with a [[task]] for each.

Invariant: what is returned is in an order in which each task comes after its sources, and otherwise
in the file's order, which is the program's.
"""

from __future__ import annotations

from graphlib import CycleError, TopologicalSorter
from heapq import heappop, heappush
from pathlib import Path
from typing import Annotated

import msgspec
import numpy as np

from llamacpp_instr.base.errors import UsageError
from llamacpp_instr.base.terminal import printable
from llamacpp_instr.converters.scheduling.engines import read_toml
from llamacpp_instr.converters.scheduling.tasks import Kind, Label, Tasks

MOST_TASKS = 100_000
_Ns = Annotated[int, msgspec.Meta(ge=1, le=10**12)]
_Bytes = Annotated[int, msgspec.Meta(ge=0, le=10**15)]
_SHOWN = 8


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


class _File(msgspec.Struct, forbid_unknown_fields=True):
    task: list[_Task] = []


def read_hand_made(path: str | Path) -> Tasks:
    """The tasks of a TOML file. A [[task]] has a `name` and its `ns`; it may have `op`, `kind`
    (matrix, vector or memory), `after` (names of its sources), `bytes`, `load`, `layer` and
    `block`. Without `bytes` a task moves its load. They may be in any order.

    Raises UsageError, which names the file and what is wrong: a name that is unknown or there
    twice, the tasks of a cycle, a value of the wrong type.
    """
    given: list[_Task] = read_toml(path, _File).task
    if not given:
        raise UsageError(f"{path}: no tasks; add a [[task]] with a name and its ns")
    if len(given) > MOST_TASKS:
        raise UsageError(f"{path}: {len(given)} tasks; at most {MOST_TASKS} are possible")
    number: dict[str, int] = {}
    for i, task in enumerate(given):
        if number.setdefault(task.name, i) != i:
            raise UsageError(f"{path}: task {printable(task.name)} is there twice")
        if not task.name.strip() or not task.op.strip():
            raise UsageError(f"{path}: the name or op of task {i + 1} is empty")
        if 0 < task.bytes < task.load:
            raise UsageError(
                f"{path}: task {printable(task.name)} loads {task.load} bytes, but all that it"
                f" moves are {task.bytes} bytes"
            )
    for task in given:
        for name in task.after:
            if name not in number:
                raise UsageError(
                    f"{path}: task {printable(task.name)} is after {printable(name)},"
                    " but there is no such task"
                )
    sources = [sorted({number[name] for name in task.after}) for task in given]
    order = _in_order(path, given, sources)
    return _tasks([given[i] for i in order], order, sources)


def _in_order(path: str | Path, given: list[_Task], sources: list[list[int]]) -> list[int]:
    sorter = TopologicalSorter(dict(enumerate(sources)))
    try:
        sorter.prepare()
    except CycleError as error:
        # each of graphlib's cycle is before the next one
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


def _tasks(given: list[_Task], order: list[int], sources: list[list[int]]) -> Tasks:
    place = {number: i for i, number in enumerate(order)}
    after = [sorted(place[source] for source in sources[number]) for number in order]
    load = np.array([task.load for task in given], np.int64)
    return Tasks(
        labels=[
            Label(task.name, f"{task.op} {task.name}", task.op, task.kind, task.layer, task.block)
            for task in given
        ],
        label=np.arange(len(given), dtype=np.int32),
        ns=np.array([task.ns for task in given], np.int64),
        bytes=np.maximum(np.array([task.bytes for task in given], np.int64), load),
        load=load,
        copy=np.zeros(len(given), np.int32),
        first=np.concatenate(([0], np.cumsum([len(a) for a in after]))).astype(np.int64),
        sources=np.array([source for a in after for source in a], np.int64),
    )
