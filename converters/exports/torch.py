"""A log as a trace of PyTorch's profiler (Kineto's JSON) and as scalars for TensorBoard.

Invariant: times are microseconds since the session began, with all three decimals. The kernels of
device 0 are those of thread 0, which takes part in every kernel of the CPU, so those of a context
do not overlap. A device that computes behind it has a number of its own: its kernels were launched
when their split was submitted, and those of a stream do not overlap. What the kernels of a plan
have in common is encoded once.
"""

from __future__ import annotations

import gzip
import json
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any
from zlib import crc32

import numpy as np
import orjson
from numpy.typing import NDArray

from llamacpp_instr.base.errors import UsageError
from llamacpp_instr.converters.exports.traced import (
    TEMPLATES,
    WHOLE,
    DeviceRun,
    OpenStep,
    Options,
    TracedLog,
    TracedPlan,
)
from llamacpp_instr.log import schema
from llamacpp_instr.log.columns import kernel_times
from llamacpp_instr.log.graph.kernels import KernelWork
from llamacpp_instr.log.graph.ops import tensor
from llamacpp_instr.log.graph.timeline import PlanTimeline, remember
from llamacpp_instr.log.reader import EventReader

Int64 = NDArray[np.int64]
Times = tuple[Int64, Int64]
"""begin and duration in ns"""
TRACE, SCALARS = NAMES = ("llama.cpp.pt.trace.json.gz", "events.out.tfevents.0.llama.cpp")
"""the files; TensorBoard knows them by the middle of their names"""
SEPARATOR = b",\n"
LAUNCH = "cudaLaunchKernel"
"""the only name of a launch that the tools know"""
DEVICE = 0
_CPU, _DEVICE = 0, 1
"""PyTorch's numbers of device types"""
_FIRST_ID = 1 << 16
"""of kernels: trace analysis puts the numbers of events into a column as narrow as the ids"""


def write_torch(
    reader: EventReader,
    folder: Path,
    options: Options = WHOLE,
    take: Callable[[int], object] = int,
) -> int:
    """Writes both files into `folder`, for the selected steps; returns how many events were left
    out (lenient). Raises LogError, with the line, for an event that is not whole, unless
    `options.lenient`; UsageError if no step was selected. `take` is called with the numbers of
    bytes, before compression."""
    return _Writer(reader, folder, replace(options, threads=False), take).run()


class _Writer(TracedLog):
    of_no_step = ()

    def __init__(
        self, reader: EventReader, folder: Path, options: Options, take: Callable[[int], object]
    ) -> None:
        super().__init__(reader, options)
        self._folder, self._take = folder, take
        self._on_side: Counter[int] = Counter()
        """bytes by number of a device, -1 for the host"""
        self._devices: dict[str, int] = {}
        """the numbers of those that compute behind thread 0"""
        self._streams: dict[tuple[str, int, int], int] = {}
        """by device, context and lane"""
        self._scalars: Scalars | None = None
        self._next_id = _FIRST_ID
        self._has_steps = False
        self._start = self._pid = self._step_number = 0

    def run(self) -> int:
        with gzip.GzipFile(self._folder / TRACE, "wb", 5, mtime=0) as file:
            self._file = file
            left_out = self.walk()
            if self.selection.steps is not None and not self._has_steps:
                raise UsageError(f"{self.reader.path}: no step was selected")
            properties = b",".join(map(orjson.dumps, self._properties()))
            self._write(b'\n],"deviceProperties":[' + properties)
            file.write(b"\n]}\n")
        assert self._scalars is not None
        self._scalars.close()
        return left_out

    def take_session_start(self, start: schema.SessionStart) -> None:
        if self._scalars is not None:
            return  # a later part
        self._start, self._pid = start.t, start.process.pid
        self._scalars = Scalars(self._folder / SCALARS, start.wall)
        cpu = start.host.cpu or "CPU"
        head = {
            "schemaVersion": 1,
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

    def _properties(self) -> Iterator[dict[str, Any]]:
        host = self.refs.start.host
        yield {"id": DEVICE, "name": host.cpu or "CPU", "totalGlobalMem": host.memory}
        for name, number in self._devices.items():
            described, has = self.refs.devices.get(name), self.memory.devices.get(name)
            about = f"{name}: {described.description}" if described else name
            # TensorBoard's plugin divides by it
            whole = {"totalGlobalMem": has.total} if has and has.total else {}
            yield {"id": number, "name": about, **whole}

    def _device(self, name: str) -> int:
        """The number of a device that computes behind thread 0."""
        if name not in self._devices:
            free = (n for n in count(DEVICE + 1) if n != self._pid)
            number = next(n for n in free if n not in self._devices.values())
            self._devices[name] = number
            self._event(_named("process_name", number, f"kernels on {name}"))
            self._event(_named("process_labels", number, f"GPU {number}", "labels"))
        return self._devices[name]

    def _stream(self, name: str, ctx: int, lane: int) -> int:
        key = name, ctx, lane
        if key not in self._streams:
            self._streams[key] = sum(device == name for device, _, _ in self._streams)
            title = f"context {ctx}" + f", queue {lane}" * bool(lane)
            self._event(_named("thread_name", self._device(name), title, tid=self._streams[key]))
        return self._streams[key]

    def take_context(self, context: schema.Context) -> None:
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

    def take_mark(self, mark: schema.Mark) -> None:
        """PyTorch's profiler knows neither marks nor requests."""

    def draw_step(self, step: OpenStep, end: schema.StepEnd | None, t: int) -> None:
        if end is None:
            return
        begin, phase = step.known.event, step.known.phase
        self._step_number, self._has_steps = begin.step, True
        args = {"tokens": begin.n_tokens, "outputs": begin.n_outputs, "status": end.status}
        self._slice(begin.ctx, f"ProfilerStep#{begin.step}", begin.t, t, args)
        self._slice(begin.ctx, phase, begin.t, t, args)
        if t > begin.t and end.status == 0:
            rate = begin.n_tokens * 1e9 / (t - begin.t)
            self._scalar(f"tokens per second/{phase}", rate, t)
            self._scalar(f"ms per step/{phase}", (t - begin.t) / 1e6, t)

    def draw_ops(
        self, ctx: int, ops: schema.Ops, plan: TracedPlan, work: KernelWork | None
    ) -> None:
        if work is None:
            return  # not thread 0
        text: KernelText | None = plan.templates.get(ctx)
        if text is None:
            known = self.refs.plan
            on = DEVICE, ctx
            text = KernelText(known.graph.event, known.event, plan.timeline, self._pid, ctx, on)
            remember(plan.templates, ctx, text, TEMPLATES)
        begin, end = kernel_times(ops)
        if text.n:
            times = begin - self._start, end - begin
            self._write(SEPARATOR + text.fill(times, times, self._next_id))
            self._next_id += text.n

    def draw_run(self, ctx: int, run: DeviceRun, plan: TracedPlan, work: KernelWork) -> None:  # noqa: ARG002
        on = self._device(run.ops.device), self._stream(run.ops.device, ctx, run.lane)
        text: KernelText | None = plan.templates.get((ctx, *on))
        if text is None:
            known = self.refs.plan
            text = KernelText(known.graph.event, known.event, plan.timeline, self._pid, ctx, on)
            remember(plan.templates, (ctx, *on), text, TEMPLATES)
        begin, end = kernel_times(run.ops)
        if text.n:
            launch = run.begin if run.submitted is None else run.submitted
            host = np.full_like(begin, launch - self._start), np.zeros_like(begin)
            self._write(
                SEPARATOR + text.fill(host, (begin - self._start, end - begin), self._next_id)
            )
            self._next_id += text.n

    def take_memory(self, memory: schema.Memory) -> None:
        changed = self.memory.take(memory, self.refs.context.event.model)
        for (buffer, kind), n in changed.items():
            of = self.memory.device_of[buffer]
            number = self._device(of) if of else -1 if schema.is_of_machine(buffer) else DEVICE
            self._on_side[number] += n
            allocated, host = self._on_side[number], number < 0
            self._event(
                {"ph": "i", "cat": "cpu_instant_event", "s": "t", "name": "[memory]",
                 "pid": self._pid, "tid": memory.ctx, "ts": self._us(memory.t),
                 "args": {"Total Allocated": allocated, "Total Reserved": allocated, "Bytes": n,
                          "Addr": crc32(f"{buffer} {kind}".encode()), "buffer": buffer,
                          "kind": kind, "Device Type": _CPU if host else _DEVICE,
                          "Device Id": number}}
            )  # fmt: skip
        kinds: Counter[str] = Counter()
        for (_, kind), n in self.memory.held.items():
            kinds[kind] += n
        for kind, n in kinds.items():
            self._scalar(f"memory in bytes/{kind}", n, memory.t)
        if memory.rss:
            self._scalar("memory in bytes/resident", memory.rss, memory.t)

    def take_kv(self, kv: schema.Kv) -> None:
        name = f"cache {kv.cache} of context {kv.ctx}"
        self._scalar(f"KV cells/{name}", kv.used, kv.t)


def _named(name: str, pid: int, value: str, key: str = "name", tid: int = 0) -> dict[str, Any]:
    return {"ph": "M", "name": name, "pid": pid, "tid": tid, "args": {key: value}}


class Scalars:
    """An event file that is being written."""

    def __init__(self, path: Path, wall: int) -> None:
        """`wall` is the session's start in ns since 1970."""
        from tensorboardX.proto.event_pb2 import Event
        from tensorboardX.proto.summary_pb2 import Summary
        from tensorboardX.record_writer import RecordWriter

        self._event, self._summary, self._wall = Event, Summary, wall
        self._file: Any = RecordWriter(str(path))
        self._write(Event(wall_time=wall / 1e9, file_version="brain.Event:2"))

    def add(self, name: str, value: float, step: int, t: int) -> None:
        """A value at `t` ns after the session's start."""
        summary = self._summary(value=[self._summary.Value(tag=name, simple_value=value)])
        self._write(self._event(wall_time=(self._wall + t) / 1e9, step=step, summary=summary))

    def close(self) -> None:
        self._file.close()

    def _write(self, event: Any) -> None:
        self._file.write(event.SerializeToString())


class KernelText:
    """The events of a plan's kernels, built once and filled in for each compute."""

    def __init__(
        self,
        graph: schema.Graph,
        plan: schema.Plan,
        timeline: PlanTimeline,
        pid: int,
        ctx: int,
        on_device: tuple[int, int],
    ) -> None:
        """`on_device` are the numbers of a device and of its stream."""
        nodes = graph.whole
        parts = []
        on = b'"pid":%d,"tid":%d' % (pid, ctx)
        stream = b'"pid":%d,"tid":%d' % on_device
        times = b',"ts":%d.%03d,"dur":%d.%03d'
        for i, (first, op) in enumerate(zip(plan.node, timeline.ops, strict=True)):
            sources = [tensor(graph, source) for source in nodes.src[first]]
            # PyTorch's shapes begin with the slowest dimension
            dims = [list(reversed(of.ne)) for of in sources]
            args: dict[str, Any] = {
                "Input Dims": dims,
                "Input type": [of.type for of in sources],
                "node": nodes.name[first],
                "layer": op.layer,
                "block": op.block,
            }
            label = timeline.kernels.label[i]
            name = _text(label)
            parts += [
                b'{"ph":"X","cat":"cpu_op","name":%s,' % name + on + times,
                b',"args":{"External id":%d,' + _text(args)[1:] + b"}",
                SEPARATOR,
                b'{"ph":"X","cat":"Runtime","name":"%s",' % LAUNCH.encode() + on,
                b',"ts":%d.%03d,"dur":0.000,"args":{"External id":%d,"correlation":%d}}',
                SEPARATOR,
                b'{"ph":"X","cat":"kernel","name":%s,' % name + stream + times,
                b',"args":{"External id":%%d,"correlation":%%d,"device":%d,' % on_device[0],
                b'"context":%d,"stream":%d}}' % (ctx, on_device[1]),
                SEPARATOR,
            ]
        self.n = len(timeline.ops)
        self._text = b"".join(parts[:-1])

    def fill(self, host: Times, device: Times, first_id: int) -> bytes:
        """The events of a compute, without a separator around them. Their ids start at
        `first_id`."""
        ids = np.arange(first_id, first_id + self.n)[:, None]
        launched, ran = (
            np.stack(np.divmod(np.column_stack(of), 1000), axis=2).reshape(-1, 4)
            for of in (host, device)
        )
        numbers = np.hstack((launched, ids, launched[:, :2], ids, ids, ran, ids, ids))
        return self._text % tuple(numbers.ravel().tolist())


def _text(value: Any) -> bytes:
    """JSON with its percent signs escaped for a template."""
    return orjson.dumps(value).replace(b"%", b"%%")
