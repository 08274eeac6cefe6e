"""Writes a log as a trace of PyTorch's profiler (Kineto's JSON) and as scalars for TensorBoard.

Invariant: times are microseconds since the session began, with all three decimals. The kernels are
those of thread 0, which takes part in every kernel, so kernels of a context do not overlap. What
the kernels of a plan have in common is encoded once.
"""

from __future__ import annotations

import gzip
import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any
from zlib import crc32

import orjson

from llamacpp_instr.base.errors import LogError, UsageError
from llamacpp_instr.converters.exports.torch.kernels import DEVICE, SEPARATOR, KernelText
from llamacpp_instr.log.graph.timeline import Selection
from llamacpp_instr.log.reader import EventReader
from llamacpp_instr.log.resolve import KnownStep, Resolver
from llamacpp_instr.log.schema import (
    Context,
    Event,
    Kv,
    Memory,
    Ops,
    SessionStart,
    StepBegin,
    StepEnd,
    Sync,
    Token,
)
from llamacpp_instr.log.session import LatestSteps, kernel_times

TRACE, SCALARS = NAMES = ("llama.cpp.pt.trace.json.gz", "events.out.tfevents.0.llama.cpp")
"""the files; TensorBoard knows them by the middle of their names"""
_CPU, _DEVICE = 0, 1
"""PyTorch's numbers of device types"""
_FIRST_ID = 1 << 16
"""of kernels: trace analysis puts the numbers of events into a column as narrow as the ids"""


def write_torch(
    reader: EventReader,
    folder: Path,
    lenient: bool = False,
    selection: Selection | None = None,
    take: Callable[[int], object] = int,
) -> int:
    """Writes both files into `folder`; how many events were left out (`lenient`). Raises LogError,
    with the line, for an event that is not whole (`log.resolve`), unless `lenient`; UsageError if
    no step was selected. `take` is called with the numbers of bytes, before compression."""
    return _Writer(folder, selection or Selection(), take).run(reader, lenient)


class _Writer:
    def __init__(self, folder: Path, selection: Selection, take: Callable[[int], object]) -> None:
        self._folder, self._selection, self._take = folder, selection, take
        self._refs = Resolver()
        """a plan keeps the text of its kernels"""
        self._latest: LatestSteps[tuple[KnownStep, StepEnd]] = LatestSteps(self._step)
        self._in_use = MemoryInUse()
        self._on_side: Counter[bool] = Counter()
        """bytes on the host (True) and on devices"""
        self._scalars: Scalars | None = None
        self._next_id = _FIRST_ID
        self._has_steps = False
        self._start = self._pid = self._step_number = 0
        self._takers: dict[type[Event], Callable[[Any], None]] = {
            SessionStart: self._begin,
            Context: self._context,
            Memory: self._memory,
            StepBegin: lambda step: self._latest.settle(step.ctx),
            StepEnd: self._step_end,
            Sync: self._latest.wait,
            Ops: self._ops,
            Kv: self._kv,
            Token: lambda token: self._latest.settle(token.ctx),
        }

    def run(self, reader: EventReader, lenient: bool) -> int:
        with gzip.GzipFile(self._folder / TRACE, "wb", 5, mtime=0) as file:
            self._file = file
            left_out = self._refs.feed(reader, self._takers, lenient)
            self._latest.settle_all()
            if self._scalars is None:
                raise LogError("no session", reader.path)
            if self._selection.steps is not None and not self._has_steps:
                raise UsageError(f"{reader.path}: no step was selected")
            file.write(b"\n]}\n")
        self._scalars.close()
        return left_out

    def _begin(self, start: SessionStart) -> None:
        if self._scalars is not None:
            return  # a later part
        self._start, self._pid = start.t, start.process.pid
        self._scalars = Scalars(self._folder / SCALARS, start.wall)
        cpu = start.host.cpu or "CPU"
        head = {
            "schemaVersion": 1,
            "deviceProperties": [{"id": DEVICE, "name": cpu, "totalGlobalMem": start.host.memory}],
            "distributedInfo": {"rank": 0, "world_size": 1},
            "displayTimeUnit": "ns",
            "baseTimeNanoseconds": start.wall,
            "recorded": start.time,
        }
        # with spaces: trace analysis looks for the rank with a regular expression
        self._write(json.dumps(head)[:-1].encode() + b',"traceEvents":[\n')
        self._write(orjson.dumps(_named("process_name", self._pid, "llama.cpp")))
        self._event(_named("process_labels", self._pid, "CPU", "labels"))
        self._event(_named("process_name", DEVICE, f"ggml's kernels on {cpu}"))
        self._event(_named("process_labels", DEVICE, f"GPU {DEVICE}", "labels"))

    def _context(self, context: Context) -> None:
        for pid in (self._pid, DEVICE):
            self._event(_named("thread_name", pid, f"context {context.ctx}", tid=context.ctx))

    def _write(self, data: bytes) -> None:
        self._take(len(data))
        self._file.write(data)

    def _event(self, event: dict[str, Any]) -> None:
        self._write(SEPARATOR + orjson.dumps(event))

    def _us(self, t: int) -> float:
        return max(0, t - self._start) / 1000

    def _slice(self, ctx: int, name: str, begin: int, end: int, args: dict[str, Any]) -> None:
        self._event(
            {"ph": "X", "cat": "user_annotation", "name": name, "pid": self._pid, "tid": ctx,
             "ts": self._us(begin), "dur": max(0, end - begin) / 1000, "args": args}
        )  # fmt: skip

    def _scalar(self, name: str, value: float, t: int) -> None:
        assert self._scalars is not None
        self._scalars.add(name, value, self._step_number, max(0, t - self._start))

    def _step_end(self, end: StepEnd) -> None:
        if self._refs.step:
            step = self._refs.step.event
            self._latest.add(step.ctx, (self._refs.step, end), max(end.t, step.t))

    def _step(self, ended: tuple[KnownStep, StepEnd], t: int) -> None:
        known, end = ended
        step, phase = known.event, known.phase
        if not self._selection.has_step(step.step):
            return
        self._step_number, self._has_steps = step.step, True
        args = {"tokens": step.n_tokens, "outputs": step.n_outputs, "status": end.status}
        self._slice(step.ctx, f"ProfilerStep#{step.step}", step.t, t, args)
        self._slice(step.ctx, phase, step.t, t, args)
        if t > step.t and end.status == 0:
            rate = step.n_tokens * 1e9 / (t - step.t)
            self._scalar(f"tokens per second/{phase}", rate, t)
            self._scalar(f"ms per step/{phase}", (t - step.t) / 1e6, t)

    def _ops(self, ops: Ops) -> None:
        if ops.thread:
            return
        compute, plan = self._refs.compute.event, self._refs.plan
        if not self._selection.has_step(compute.step):
            return
        if plan.kept is None:
            plan.kept = KernelText(plan.graph.event, plan.event, self._pid, compute.ctx)
        begin, end = kernel_times(ops)
        text: KernelText = plan.kept
        if text.n:
            self._write(SEPARATOR + text.fill(begin - self._start, end - begin, self._next_id))
            self._next_id += text.n

    def _memory(self, memory: Memory) -> None:
        model = self._refs.context.event.model
        changed = self._in_use.take(memory, model)
        total = self._in_use.total()
        for (buffer, kind), n in changed.items():
            host = buffer.startswith("CPU")
            self._on_side[host] += n
            allocated = self._on_side[host]
            self._event(
                {"ph": "i", "cat": "cpu_instant_event", "s": "t", "name": "[memory]",
                 "pid": self._pid, "tid": memory.ctx, "ts": self._us(memory.t),
                 "args": {"Total Allocated": allocated, "Total Reserved": allocated, "Bytes": n,
                          "Addr": crc32(f"{buffer} {kind}".encode()), "buffer": buffer,
                          "kind": kind, "Device Type": _CPU if host else _DEVICE,
                          "Device Id": -1 if host else DEVICE}}
            )  # fmt: skip
        kinds: dict[str, int] = {}
        for (_, kind), n in total.items():
            kinds[kind] = kinds.get(kind, 0) + n
        for kind, n in kinds.items():
            self._scalar(f"memory in bytes/{kind}", n, memory.t)
        if memory.rss:
            self._scalar("memory in bytes/resident", memory.rss, memory.t)

    def _kv(self, kv: Kv) -> None:
        name = f"cache {kv.cache} of context {kv.ctx}"
        self._scalar(f"KV cells/{name}", kv.used, kv.t)


def _named(name: str, pid: int, value: str, key: str = "name", tid: int = 0) -> dict[str, Any]:
    return {"ph": "M", "name": name, "pid": pid, "tid": tid, "args": {key: value}}


class Scalars:
    """An event file that is being written."""

    def __init__(self, path: Path, wall: int) -> None:
        """`wall` is the session's begin in ns since 1970."""
        from tensorboardX.proto.event_pb2 import Event
        from tensorboardX.proto.summary_pb2 import Summary
        from tensorboardX.record_writer import RecordWriter

        self._event, self._summary, self._wall = Event, Summary, wall
        self._file: Any = RecordWriter(str(path))
        self._write(Event(wall_time=wall / 1e9, file_version="brain.Event:2"))

    def add(self, name: str, value: float, step: int, t: int) -> None:
        """A value at `t` ns after the session's begin."""
        value_ = self._summary.Value(tag=name, simple_value=value)
        self._write(
            self._event(
                wall_time=(self._wall + t) / 1e9,
                step=step,
                summary=self._summary(value=[value_]),
            )
        )

    def close(self) -> None:
        self._file.close()

    def _write(self, event: Any) -> None:
        self._file.write(event.SerializeToString())


class MemoryInUse:
    """Follows the `memory` events of a session."""

    def __init__(self) -> None:
        self._of_context: dict[int, Counter[tuple[str, str]]] = {}
        self._owner: dict[int, int] = {}
        """by model: the context whose weights count"""

    def take(self, memory: Memory, model: int) -> Counter[tuple[str, str]]:
        """What has changed, in bytes, by buffer and kind (`weights`, `KV cache`, `compute`)."""
        owner = self._owner.setdefault(model, memory.ctx)
        now: Counter[tuple[str, str]] = Counter()
        for use in memory.buffers:
            now[use.buffer, "weights"] += use.model if owner == memory.ctx else 0
            now[use.buffer, "KV cache"] += use.context
            now[use.buffer, "compute"] += use.compute
        changed = now.copy()
        changed.subtract(self._of_context.get(memory.ctx, Counter()))
        self._of_context[memory.ctx] = now
        return Counter({key: n for key, n in changed.items() if n})

    def total(self) -> Counter[tuple[str, str]]:
        """What all contexts hold, by buffer and kind."""
        total: Counter[tuple[str, str]] = Counter()
        for of in self._of_context.values():
            total.update(of)
        return total
