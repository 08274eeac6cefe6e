"""The slices of steps, phases and tokens, and the counters: a few packets an event.

Invariant: a slice is written when both its ends are known, and never reaches beyond what it is in.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar

from converters.perfetto.packets import (
    INSTANT,
    Packets,
    Value,
    closing,
    event,
    flow_from,
    flow_to,
    sample,
)
from converters.perfetto.tracks import Tracks
from converters.timeline import PlanTimeline
from llamacpp_instr.schema import (
    Compute,
    Kv,
    Mark,
    Memory,
    Model,
    Split,
    Splits,
    StepBegin,
    StepEnd,
    Sync,
    Token,
)

KEPT = 4096
"""steps and computes that later events may name"""
T = TypeVar("T")


def remember(known: dict[int, T], key: int, value: T) -> None:
    """Keeps a value, and of many the latest."""
    known[key] = value
    if len(known) > KEPT:
        del known[next(iter(known))]


@dataclass
class OpenStep:
    """A step that has not ended."""

    begin: StepBegin
    flows: list[int] = field(default_factory=list)
    """of the tokens that it takes"""
    first: int | None = None
    """when its first ubatch began, apply included"""
    last: int = 0
    """when its last compute ended"""


class StepSlices:
    """Draws what is not layers and ops."""

    def __init__(self, packets: Packets, tracks: Tracks, write: Callable[[bytes], object]) -> None:
        self._packets = packets
        self._tracks = tracks
        self._write = write
        self.ended: dict[int, tuple[int, int]] = {}
        """begin and end of the latest steps"""
        self._lanes: dict[int, tuple[int, int]] = {}
        """open marks: lane and begin"""

    def slice(
        self,
        track: int,
        name: str,
        begin: int,
        end: int,
        category: str,
        args: dict[str, Value],
        extra: bytes = b"",
    ) -> None:
        """One slice; `extra` are further fields."""
        body = self._packets.opening(track, name, category) + self._packets.args(args) + extra
        self._write(event(begin, body) + event(max(begin, end), closing(track)))

    def instant(self, track: int, name: str, t: int, category: str, args: dict[str, Value]) -> None:
        """One instant."""
        body = self._packets.named(track, name, category, INSTANT) + self._packets.args(args)
        self._write(event(t, body))

    # --- facts ---

    def model(self, model: Model, track: int) -> None:
        args: dict[str, Value] = {
            "model": model.name or model.path.rsplit("/", 1)[-1],
            "arch": model.arch,
            "ftype": model.ftype,
            "params": model.params,
            "bytes": model.bytes,
            "tensors": model.n_tensors,
            **{name: value for name, value in model.hparams.items() if name not in _SHOWN},
        }
        self.slice(track, "load", model.t, model.t + model.dur, "model", args)

    def memory(self, memory: Memory, home: int) -> None:
        for use in memory.buffers:
            for kind in ("model", "context", "compute"):
                counter = self._tracks.child(home, f"{use.buffer} {kind}", "bytes", below="memory")
                self._write(sample(memory.t, counter, getattr(use, kind)))
        if memory.rss:
            counter = self._tracks.child(home, "resident memory", "bytes", below="memory")
            self._write(sample(memory.t, counter, memory.rss))

    def kv(self, kv: Kv, home: int) -> None:
        of = f" of cache {kv.cache}" if kv.cache else ""
        for what, unit, value in (("cells", "count", kv.used), ("bytes", "bytes", kv.bytes)):
            counter = self._tracks.child(home, f"KV {what}{of}", unit, below="KV")
            self._write(sample(kv.t, counter, value))
        if kv.op != "apply":
            names = ("seq", "seq_dst", "p0", "p1", "arg")
            args = {name: v for name in names if (v := getattr(kv, name)) is not None}
            self.instant(home, f"KV {kv.op}", kv.t, "kv", args)

    def mark(self, mark: Mark) -> bool:
        """Draws a mark; False when it ends and was never begun."""
        home = self._tracks.home
        args: dict[str, Value] = {"mark": mark.mark, "thread": mark.thread}
        if mark.phase == "instant":
            self.instant(self._tracks.child(home, "marks"), mark.name, mark.t, "mark", args)
        elif mark.phase == "begin":
            # those that are open at once each have a lane, so that none has to nest in another
            used = {lane for lane, _ in self._lanes.values()}
            lane = next(i for i in range(len(used) + 1) if i not in used)
            self._lanes[mark.mark] = lane, mark.t
            track = self._tracks.child(home, "marks", lane=lane)
            body = self._packets.named(track, mark.name, "mark") + self._packets.args(args)
            self._write(event(mark.t, body))
        else:
            if mark.mark not in self._lanes:
                return False
            self._end_mark(mark.mark, mark.t)
        return True

    def end_marks(self, t: int) -> None:
        """Ends those that the log left open."""
        for mark in list(self._lanes):
            self._end_mark(mark, t)

    def _end_mark(self, mark: int, t: int) -> None:
        lane, begin = self._lanes.pop(mark)
        track = self._tracks.child(self._tracks.home, "marks", lane=lane)
        self._write(event(max(begin, t), closing(track)))

    # --- steps ---

    def step(self, step: OpenStep, end: StepEnd | None, t: int, home: int) -> None:
        """A step; `end` is None when the log ended before it did."""
        begin = step.begin
        args: dict[str, Value] = {
            "step": begin.step,
            "tokens": begin.n_tokens,
            "outputs": begin.n_outputs,
            "sequences": begin.n_seqs,
            "thread": begin.thread,
        }
        if begin.pos >= 0:
            last = begin.pos + begin.n_tokens - 1
            several = begin.n_seqs <= 1 and last > begin.pos
            args["positions"] = f"{begin.pos} to {last}" if several else str(begin.pos)
        if end is None:
            args["ended"] = "not before the log did"
        else:
            args |= {
                "status": end.status,
                "ubatches": end.n_ubatch,
                "graphs_reused": end.n_reused,
                "recorder_ns": end.recorder,
            }
        name = "encode" if begin.kind == "encode" else begin.phase
        flows = b"".join(map(flow_to, step.flows))
        self.slice(home, name, begin.t, t, "step", args, flows)
        remember(self.ended, begin.step, (begin.t, t))
        if end is None:
            return
        phases = self._tracks.child(home, "phases")
        if end.prepare:
            # an end at the next slice's begin, but later in the file, would end that one
            until = min(begin.t + end.prepare, t if step.first is None else step.first - 1)
            self.slice(phases, "prepare", begin.t, until, "phase", {})
        if end.readback:
            # the log has the sum over the ubatches; it is drawn after the last of them
            since = max(step.last, begin.t)
            shown = min(since + end.readback, max(t, since))
            self.slice(phases, "readback", since, shown, "phase", {})
        counters: tuple[tuple[str, str, float], ...] = (
            ("minor page faults", "count", end.minflt),
            ("major page faults", "count", end.majflt),
        )
        for what, unit, value in counters:
            counter = self._tracks.child(home, what, unit, below="page faults")
            self._write(sample(begin.t, counter, value))
        if t > begin.t and begin.n_tokens:
            counter = self._tracks.child(home, "tokens/s", "tokens/s")
            self._write(sample(begin.t, counter, begin.n_tokens * 1e9 / (t - begin.t)))

    def compute(self, compute: Compute, step: OpenStep | None, home: int) -> None:
        start = compute.t + compute.start
        phases = self._tracks.child(home, "phases")
        now = compute.t
        for what in ("apply", "build", "alloc", "inputs"):
            dur = getattr(compute, what)
            if dur:
                end = min(now + dur, start)
                self.slice(phases, what, now, end, "phase", {})
                now = end
        args: dict[str, Value] = {
            name: getattr(compute, name)
            for name in ("compute", "graph", "source", "n_tokens", "n_threads", "status")
        }
        args["reused"] = compute.reused
        self.slice(phases, "compute", start, start + compute.dur, "phase", args)
        if step is not None:
            if step.first is None and compute.source != "memory_update":  # part of preparing
                step.first = compute.t
            step.last = start + compute.dur

    def rates(self, timeline: PlanTimeline, compute: Compute, home: int) -> None:
        """What a compute achieved: all of its ops' work in all of its time."""
        if compute.dur <= 0:
            return
        start = compute.t + compute.start
        for name, work in (("GB/s", timeline.bytes), ("GFLOP/s", timeline.flops)):
            counter = self._tracks.child(home, f"achieved {name}", name)
            self._write(sample(start, counter, work / compute.dur))

    def splits(self, event: Splits, splits: list[Split], home: int) -> None:
        track = self._tracks.child(home, "splits")
        now = event.t
        for i, dur in enumerate(event.dur):
            begin = now + (event.gap[i] if event.gap else 0)
            now = begin + dur
            submitted = bool(event.asynchronous[i])
            split = splits[event.split[i]]
            args: dict[str, Value] = {
                "split": event.split[i],
                "nodes": f"{split.start} to {split.end - 1}",
                "ends_with": "submission" if submitted else "computation",
            }
            name = f"submit to {split.backend}" if submitted else split.backend
            self.slice(track, name, begin, now, "split", args)

    def sync(self, sync: Sync, home: int) -> None:
        track = self._tracks.child(home, "device waits")
        self.slice(track, "synchronize", sync.t, sync.t + sync.dur, "wait", {})

    def token(self, token: Token, home: int, flow: int | None) -> None:
        args: dict[str, Value] = {"text": token.text, "id": token.id, "index": token.index}
        args |= {"p": token.p} if token.p is not None else {}
        args |= {"hex": token.hex} if token.hex is not None else {}
        if token.step >= 0:
            args["step"] = token.step
        track = self._tracks.child(home, "sampler")
        told = self._packets.args(args)
        extra = told if flow is None else told + flow_from(flow)
        self.slice(track, "sample", token.t, token.t + token.dur, "sampler", {}, extra)
        if token.step in self.ended:
            # on the step that it came out of, as long as this is
            begin, end = self.ended[token.step]
            text = json.dumps(token.text, ensure_ascii=False)
            body = self._packets.named(home, text, "token") + told
            self._write(event(begin, body) + event(end, closing(home)))


_SHOWN = frozenset({"model", "arch", "ftype", "params", "bytes", "tensors"})
