"""Random tasks and engines, what makes a schedule valid, and the shortest schedule by trying all.

Written from the rules in converters/scheduling/schedule.py, without the code of any policy.
"""

from __future__ import annotations

import math
from fractions import Fraction
from itertools import pairwise

import numpy as np
from hypothesis import strategies as st

from llamacpp_instr.converters.scheduling.schedule import Schedule
from llamacpp_instr.converters.scheduling.tasks import (
    KINDS,
    EngineKind,
    Engines,
    Label,
    Tasks,
    equal_engines,
)

OPS = {"matrix": ("MUL_MAT", "FLASH_ATTN_EXT"), "vector": ("ADD", "SOFT_MAX"), "memory": ("CPY",)}
BLOCKS = ("attention", "feed-forward", "kv")


def make_tasks(rows: list[tuple[str, int, list[int]]], **columns: list[int]) -> Tasks:
    """Tasks of (op, ns, sources), each with a label of its own; other columns are 0."""
    kinds = {op: kind for kind in KINDS for op in OPS[kind]}
    labels = [
        Label(f"t{i}", f"{op} t", op, kinds[op], i % 3, "kv" if op == "CPY" else BLOCKS[i % 2])
        for i, (op, _, _) in enumerate(rows)
    ]
    counts = [len(sources) for _, _, sources in rows]
    n = len(rows)

    def column(name: str) -> np.ndarray:
        return np.array(columns.get(name, [0] * n), np.int64)

    return Tasks(
        labels,
        np.arange(n, dtype=np.int32),
        np.array([ns for _, ns, _ in rows], np.int64),
        column("bytes"),
        column("load"),
        column("copy").astype(np.int32),
        np.concatenate(([0], np.cumsum(counts))).astype(np.int64),
        np.array([s for _, _, sources in rows for s in sources], np.int64),
    )


def sources_of(tasks: Tasks, task: int) -> list[int]:
    """The tasks that a task waits for."""
    found: list[int] = tasks.sources[tasks.first[task] : tasks.first[task + 1]].tolist()
    return found


def edges(tasks: Tasks) -> set[tuple[int, int]]:
    """Each task with each that waits for it."""
    return {(source, i) for i in range(len(tasks)) for source in sources_of(tasks, i)}


def fed_core(runs: frozenset[str] | None = frozenset({"matrix"}), dmas: int = 1) -> Engines:
    """A core with room for two loads of 100 bytes, which come at one byte per ns."""
    kinds = (
        EngineKind("core", 1, runs, {}, None, 200),
        EngineKind("dma", dmas, frozenset({"memory"}), {}, 1e9),
    )
    return Engines(kinds, transfers=True)


@st.composite
def graphs(draw: st.DrawFn, most: int = 30, longest: int = 50) -> Tasks:
    """Tasks with up to three sources among the earlier ones; every engine of `machines` can use the
    first one."""
    rows, load, moved = [], [], []
    for i in range(draw(st.integers(1, most))):
        op = draw(st.sampled_from([op for ops in OPS.values() for op in ops])) if i else "MUL_MAT"
        sources = draw(st.lists(st.integers(0, i - 1), max_size=3, unique=True)) if i else []
        rows.append((op, draw(st.integers(1, longest)), sources))
        load.append(draw(st.sampled_from([0, 0, 10, 64, 300])) if i else 10)
        moved.append(load[-1] + draw(st.integers(0, 100)))
    return make_tasks(rows, load=load, bytes=moved)


@st.composite
def machines(draw: st.DrawFn, most: int = 3) -> Engines:
    """Engines that run all of OPS between them: equal ones, kinds with speeds, transfers."""
    handover = draw(st.sampled_from([0, 0, 7]))
    how = draw(st.sampled_from(["equal", "kinds", "fed"]))
    count = st.integers(1, most)
    if how == "equal":
        return Engines(equal_engines(draw(count)).kinds, handover)
    speed = st.sampled_from([{}, {"MUL_MAT": 2.0, "*": 0.5}, {"matrix": 3.0, "vector": 1.5}])
    bandwidth = st.sampled_from([None, 2e9])
    if how == "kinds":
        return Engines(
            (
                EngineKind("any", draw(count), None, draw(speed), draw(bandwidth)),
                EngineKind("matrix", draw(count), frozenset({"MUL_MAT"}), draw(speed)),
            )[:: draw(st.sampled_from([1, -1]))],
            handover,
        )
    return Engines(
        (
            EngineKind("core", draw(count), None, draw(speed), draw(bandwidth), 128),
            EngineKind("dma", draw(st.integers(1, 2)), frozenset({"memory"}), {}, 5e9),
        ),
        handover,
        transfers=True,
    )


def assert_valid(made: Schedule) -> None:
    """Every rule of schedule.py, one task after the other."""
    tasks, engines = made.tasks, made.engines
    kind_of = [kind for kind in engines.kinds for _ in range(kind.count)]
    n = len(tasks)
    for column in (made.engine, made.begin, made.end, made.transfer_engine):
        assert len(column) == n
    busy: dict[int, list[tuple[int, int]]] = {}
    held: dict[int, list[tuple[int, int]]] = {}
    for i in range(n):
        label, kind = tasks.labels[tasks.label[i]], kind_of[made.engine[i]]
        begin, end = int(made.begin[i]), int(made.end[i])
        assert begin >= 0
        assert kind.runs is None or label.op in kind.runs or label.kind in kind.runs
        load, moved = int(tasks.load[i]), int(tasks.bytes[i])
        feeds = engines.transfers and kind.local_memory is not None and load > 0
        if engines.transfers and kind.local_memory is not None:
            moved -= load
        takes = _takes(int(tasks.ns[i]), _speed(kind, label), moved, kind.bandwidth)
        busy.setdefault(int(made.engine[i]), []).append((begin, end))
        sources = sources_of(tasks, i)
        for source in sources:
            apart = made.engine[source] != made.engine[i]
            assert begin >= made.end[source] + (engines.handover_ns if apart else 0)
        by = int(made.transfer_engine[i])
        assert (by >= 0) == feeds
        if not feeds:
            assert end - begin == takes, "work is conserved"
            continue
        bring, brought = int(made.transfer_begin[i]), int(made.transfer_end[i])
        dma = kind_of[by]
        assert dma.runs == {"memory"}
        assert dma.bandwidth is not None
        assert brought - bring == math.ceil(Fraction(load) * 10**9 / Fraction(dma.bandwidth))
        assert bring >= 0
        busy.setdefault(by, []).append((bring, brought))
        held.setdefault(int(made.engine[i]), []).append((bring, end))
        for source in sources:
            if tasks.labels[tasks.label[source]].block == "kv":
                apart = made.engine[source] != by
                assert bring >= made.end[source] + (engines.handover_ns if apart else 0)
        assert kind.local_memory is not None
        if load > kind.local_memory // 2:
            assert bring == begin
            assert end - begin == max(takes, brought - bring)
        else:
            assert brought <= begin
            assert end - begin == takes, "work is conserved"
    for spans in busy.values():
        spans.sort()
        assert all(a[1] <= b[0] for a, b in pairwise(spans))
    for spans in held.values():
        for at, _ in spans:
            assert sum(begin <= at < end for begin, end in spans) <= 2, "two buffers"


def _speed(kind: EngineKind, label: Label) -> float:
    for key in (label.op, label.kind, "*"):
        if key in kind.speed:
            return kind.speed[key]
    return 1.0


def _takes(ns: int, speed: float, moved: int, bandwidth: float | None) -> int:
    takes = math.ceil(Fraction(ns) / Fraction(speed))
    if bandwidth is not None:
        takes = max(takes, math.ceil(Fraction(moved) * 10**9 / Fraction(bandwidth)))
    return max(takes, 1)


def shortest_makespan(tasks: Tasks, engines: Engines) -> int:
    """The makespan of the shortest schedule, without transfers: tries every order and every engine.

    Some shortest schedule is found by appending the tasks in some order to engines, each as early
    as possible. Equal tries are cut off: those that cannot be shorter than the best so far.
    """
    kind_of = [kind for kind in engines.kinds for _ in range(kind.count)]
    n = len(tasks)
    sources = [sources_of(tasks, i) for i in range(n)]
    labels = [tasks.labels[tasks.label[i]] for i in range(n)]
    takes: list[dict[int, int]] = [
        {
            e: _takes(
                int(tasks.ns[i]), _speed(kind, labels[i]), int(tasks.bytes[i]), kind.bandwidth
            )
            for e, kind in enumerate(kind_of)
            if kind.runs is None or {labels[i].op, labels[i].kind} & kind.runs
        }
        for i in range(n)
    ]
    tail = [0] * n
    for i in reversed(range(n)):
        tail[i] += min(takes[i].values())
        for source in sources[i]:
            tail[source] = max(tail[source], tail[i])
    best = sum(max(t.values()) + engines.handover_ns for t in takes)
    seen: set[tuple[object, ...]] = set()

    def search(done: dict[int, tuple[int, int]], free: tuple[int, ...]) -> None:
        nonlocal best
        if len(done) == n:
            best = min(best, max(free))
            return
        state = (free, tuple(sorted(done.items())))
        if state in seen:
            return
        seen.add(state)
        for i in range(n):
            if i in done or any(s not in done for s in sources[i]):
                continue
            tried = set()
            for engine, ns in takes[i].items():
                fresh = free[engine] == 0
                if fresh and kind_of[engine].name in tried:
                    continue  # an engine like another empty one
                if fresh:
                    tried.add(kind_of[engine].name)
                begin = free[engine]
                for source in sources[i]:
                    on, end = done[source]
                    begin = max(begin, end + (engines.handover_ns if on != engine else 0))
                rest = tail[i] - min(takes[i].values())
                if begin + ns + rest >= best:
                    continue
                after = tuple(begin + ns if e == engine else f for e, f in enumerate(free))
                search({**done, i: (engine, begin + ns)}, after)

    search({}, (0,) * len(kind_of))
    return best
