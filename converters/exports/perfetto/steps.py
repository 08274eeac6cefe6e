"""The slices of steps, phases and tokens, and the counters: a few packets for each event.

What comes in every step has a form; other packets are built one by one. Invariant: a slice is
written when both its ends are known, never reaches beyond the slice that it is in, and comes after
what lies before it on its track.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from functools import lru_cache
from typing import Any

from llamacpp_instr.converters.exports.perfetto.packets import (
    BEGIN,
    INSTANT,
    Packets,
    Value,
    closing,
    event_packet,
    sample,
    valid,
)
from llamacpp_instr.converters.exports.perfetto.step_packets import Blank, Form, Forms
from llamacpp_instr.converters.exports.perfetto.tracks import Tracks
from llamacpp_instr.converters.exports.steps import KEPT, OpenStep, compute_phases
from llamacpp_instr.log.graph.timeline import Lanes
from llamacpp_instr.log.schema import (
    Compute,
    Kv,
    Machine,
    Mark,
    Memory,
    Model,
    Split,
    Splits,
    StepBegin,
    StepEnd,
    Sync,
    TensorStats,
    Token,
)
from llamacpp_instr.log.steps import taken_share

VALUES = 1000
"""tensors whose values are drawn as counters; a pattern may match all of a model"""


class StepSlices:
    """Draws everything except layers and ops."""

    def __init__(self, packets: Packets, tracks: Tracks, write: Callable[[bytes], object]) -> None:
        self._packets = packets
        self._tracks = tracks
        self._write = write
        self._forms = Forms()
        self._lanes = Lanes()
        self._tensors: dict[tuple[int, str], int] = {}
        """that have counters"""

    def slice(
        self,
        track: int,
        name: str,
        begin: int,
        end: int,
        category: str,
        args: Mapping[str, Value],
        flows: Iterable[int] = (),
        seldom: bool = False,
    ) -> None:
        """One slice, from which `flows` lead; `seldom` if few have the name."""
        event = self._packets.event(BEGIN, track, name, category, args, seldom=seldom)
        event.flow_ids.extend(flows)
        self._write(event_packet(begin, event) + event_packet(max(begin, end), closing(track)))

    def instant(self, track: int, name: str, t: int, category: str, args: dict[str, Value]) -> None:
        """One instant."""
        event = self._packets.event(INSTANT, track, name, category, args, seldom=True)
        self._write(event_packet(t, event))

    def _draw(self, make: Callable[..., Form], shape: tuple[object, ...], *values: Any) -> None:
        self._write(self._forms.fill(make, shape, *values))

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

    def memory(self, memory: Memory) -> None:
        """Draws what the buffers of a context hold."""
        home = self._tracks.context(memory.ctx)
        for use in memory.buffers:
            for kind in ("model", "context", "compute"):
                counter = self._tracks.child(home, f"{use.buffer} {kind}", "bytes", below="memory")
                self._write(sample(memory.t, counter, getattr(use, kind)))
        if memory.rss:
            counter = self._tracks.child(home, "resident memory", "bytes", below="memory")
            self._write(sample(memory.t, counter, memory.rss))

    def machine(self, machine: Machine, cpus: int) -> None:
        """Draws what the machine did in the interval, and zero from its end on."""
        share = taken_share(machine, cpus)
        taken = None if share is None else 100 * share
        for name, unit, value in (("waiting for a CPU", "%", taken), ("load", "", machine.load)):
            if value is not None:
                track = self._tracks.child(self._tracks.home, name, unit, below="machine")
                begin = max(machine.t - machine.dur, 0)
                self._write(sample(begin, track, value) + sample(machine.t, track, 0))

    def kv(self, kv: Kv) -> None:
        """Draws the use of a cache, and its change."""
        home = self._tracks.context(kv.ctx)
        self._draw(self._kv_form, (home, kv.cache), kv.t, kv.used, kv.bytes)
        if kv.op != "apply":
            names = ("seq", "seq_dst", "p0", "p1", "arg")
            args = {name: v for name in names if (v := getattr(kv, name)) is not None}
            self.instant(home, f"KV {kv.op}", kv.t, "kv", args)

    def _kv_form(self, home: int, cache: int) -> Form:
        form = Form(self._packets)
        t, used, size = form.numbers(3)
        of = f" of cache {cache}" if cache else ""
        for what, unit, value in (("cells", "cells", used), ("bytes", "bytes", size)):
            form.sample(t, self._tracks.child(home, f"KV {what}{of}", unit, below="KV"), value)
        return form

    def values(self, stats: TensorStats, home: int) -> None:
        """Draws the values of a tensor as counters, of at most VALUES tensors."""
        name = stats.name or f"node {stats.node}"
        self._tensors.setdefault((home, name), len(self._tensors))
        if self._tensors[home, name] >= VALUES:
            del self._tensors[home, name]
            return
        for what in ("min", "max", "mean", "std"):
            value = getattr(stats, what)
            if value is not None:
                counter = self._tracks.child(
                    home, f"{name} {what}", "value", below="tensor statistics"
                )
                self._write(sample(stats.t, counter, value))

    def mark(self, mark: Mark) -> None:
        """Draws a mark."""
        home = self._tracks.home
        args: dict[str, Value] = {"mark": mark.mark, "thread": mark.thread}
        if mark.phase == "instant":
            self.instant(self._tracks.child(home, "marks"), mark.name, mark.t, "mark", args)
        elif mark.phase == "begin":
            # overlapping marks are on different lanes, so they need not nest
            lane = self._lanes.begin(mark.mark, mark.t)
            track = self._tracks.child(home, "marks", lane=lane)
            event = self._packets.event(BEGIN, track, mark.name, "mark", args, seldom=True)
            self._write(event_packet(mark.t, event))
        else:
            self._end_mark(mark.mark, mark.t)

    def end_marks(self, t: int) -> None:
        """Ends the marks that are still open at the end of the log."""
        for mark in list(self._lanes.open):
            self._end_mark(mark, t)

    def _end_mark(self, mark: int, t: int) -> None:
        lane, begin = self._lanes.end(mark, t)
        track = self._tracks.child(self._tracks.home, "marks", lane=lane)
        self._write(event_packet(max(begin, t), closing(track)))

    # --- steps ---

    def step(self, step: OpenStep, end: StepEnd | None, t: int) -> None:
        """Draws a step; `end` is None if the log ended before the step."""
        begin = step.known.event
        values = [begin.t, t, begin.step, begin.n_tokens, begin.n_outputs, begin.n_seqs]
        values.append(begin.thread)
        if end is not None:
            values += end.status, end.n_ubatch, end.n_reused, end.recorder, end.minflt, end.majflt
        took = t - begin.t
        rate = [begin.n_tokens * 1e9 / took] if end is not None and took and begin.n_tokens else []
        positions = _positions(begin)
        home = self._tracks.context(begin.ctx)
        shape = (home, step.known.phase, end is not None, bool(rate), bool(positions))
        self._draw(self._step_form, shape, step.flows, *values, *rate, *positions)

    def _step_form(
        self, home: int, name: str, ended: bool, has_rate: bool, has_positions: bool
    ) -> Form:
        form = Form(self._packets)
        flows = form.flows()
        begin, until = form.numbers(2)
        names = ["step", "tokens", "outputs", "sequences", "thread"]
        args: dict[str, Value | Blank] = dict(zip(names, form.numbers(5), strict=True))
        result: dict[str, Value | Blank] = {"ended": "not before the log did"}
        counters: list[tuple[str, str, Blank, str]] = []
        if ended:
            names = ["status", "ubatches", "graphs_reused", "recorder_ns"]
            result = dict(zip(names, form.numbers(4), strict=True))
            minor, major = form.numbers(2)
            counters = [
                ("minor page faults", "faults", minor, "page faults"),
                ("major page faults", "faults", major, "page faults"),
            ]
        if has_rate:
            counters.append(("tokens/s", "tokens/s", form.double(), ""))
        if has_positions:
            args["positions"] = form.text()
        form.slice(home, name, "step", begin, until, args | result, terminating_flow_ids=flows)
        for what, unit, value, below in counters:
            track = self._tracks.child(home, what, unit, below=below)
            form.sample(begin, track, value)
            form.zero(until, track)
        return form

    def phase(self, ctx: int, name: str, begin: int, end: int, args: dict[str, int]) -> None:
        """Draws a phase before or after the computes of a step."""
        shape = (self._tracks.context(ctx), "phases", name, "phase", tuple(args))
        self._draw(self._named_form, shape, begin, end, *args.values())

    def sync(self, sync: Sync) -> None:
        """Draws the wait for a device."""
        shape = (self._tracks.context(sync.ctx), "device waits", "synchronize", "wait", ())
        self._draw(self._named_form, shape, sync.t, sync.t + sync.dur)

    def _named_form(
        self, home: int, track: str, name: str, category: str, args: tuple[str, ...]
    ) -> Form:
        form = Form(self._packets)
        begin, end, *values = form.numbers(2 + len(args))
        numbers = dict(zip(args, values, strict=True))
        form.slice(self._tracks.child(home, track), name, category, begin, end, numbers)
        return form

    def compute(self, compute: Compute) -> None:
        """Draws a compute with its phases."""
        names, begins, ends = zip(*compute_phases(compute), strict=True)
        home = self._tracks.context(compute.ctx)
        self._draw(
            self._compute_form, (home, names, compute.source, compute.reused),
            *begins, *ends, compute.compute, compute.graph, compute.n_tokens, compute.n_threads,
            compute.status,
        )  # fmt: skip

    def _compute_form(self, home: int, names: tuple[str, ...], source: str, reused: bool) -> Form:
        form = Form(self._packets)
        phases = self._tracks.child(home, "phases")
        begins, ends = form.numbers(len(names)), form.numbers(len(names))
        number, graph, n_tokens, n_threads, status = form.numbers(5)
        args: dict[str, Value | Blank] = {"compute": number, "graph": graph, "source": source}
        args |= {"n_tokens": n_tokens, "n_threads": n_threads, "status": status, "reused": reused}
        for name, begin, end in zip(names, begins, ends, strict=True):
            form.slice(phases, name, "phase", begin, end, args if name == "compute" else {})
        return form

    def rates(self, rates: list[tuple[str, float]], compute: Compute) -> None:
        """Draws the rates of a compute, by unit."""
        units, values = zip(*rates, strict=True)
        start = compute.t + compute.start
        shape = (self._tracks.context(compute.ctx), units)
        self._draw(self._rates_form, shape, start, start + compute.dur, *values)

    def _rates_form(self, home: int, units: tuple[str, ...]) -> Form:
        form = Form(self._packets)
        start, end = form.numbers(2)
        for unit in units:
            track = self._tracks.child(home, f"achieved {unit}", unit)
            form.sample(start, track, form.double())
            form.zero(end, track)
        return form

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

    def token(self, token: Token, of_step: tuple[int, int] | None, flow: int | None) -> None:
        """Draws a token on the sampler's track, and on the step that computed its logits.
        `of_step` has the start and the end of that step."""
        step, p, hexadecimal = token.step, token.p, token.hex
        home = self._tracks.context(token.ctx)
        text = valid(token.text)
        values: list[Value] = [token.t, token.t + token.dur, token.id, token.index]
        if step >= 0:
            values.append(step)
        if of_step is not None:
            values += of_step
        values += [value for value in (p, hexadecimal) if value is not None]
        shape = home, step >= 0, of_step is not None, p is not None, hexadecimal is not None
        flows = [] if flow is None else [flow]
        self._draw(self._token_form, shape, flows, text, _quoted(text), *values)

    def _token_form(
        self, home: int, has_step: bool, on_step: bool, has_p: bool, has_hex: bool
    ) -> Form:
        form = Form(self._packets)
        flows, text, quoted = form.flows(), form.text(), form.text()
        begin, end, number, index = form.numbers(4)
        step = form.numbers(has_step)
        ends = form.numbers(2 * on_step)
        args: dict[str, Value | Blank] = {"text": text, "id": number, "index": index}
        args |= {"p": form.double()} if has_p else {}
        args |= {"hex": form.text()} if has_hex else {}
        args |= {"step": step[0]} if step else {}
        sampler = self._tracks.child(home, "sampler")
        form.slice(sampler, "sample", "sampler", begin, end, args, flow_ids=flows)
        if ends:
            form.slice(home, quoted, "token", ends[0], ends[1], args)
        return form


def _positions(begin: StepBegin) -> list[str]:
    """The positions of a step in words; empty if llama.cpp chose them."""
    if begin.pos < 0:
        return []
    last = begin.pos + begin.n_tokens - 1
    several = begin.n_seqs <= 1 and last > begin.pos
    return [f"{begin.pos} to {last}" if several else str(begin.pos)]


@lru_cache(KEPT)
def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


_SHOWN = frozenset({"model", "arch", "ftype", "params", "bytes", "tensors"})
