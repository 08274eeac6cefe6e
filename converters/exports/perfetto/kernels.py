"""The slices of layers and ops: templates, and the computes that wait to be filled into them.

Invariant: the number of waiting computes and of kept templates is bounded for every log.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from hashlib import sha256
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from llamacpp_instr.converters.exports.perfetto.packets import Packets
from llamacpp_instr.converters.exports.perfetto.template import (
    ComputeTemplate,
    Times,
    layers_template,
    runs_template,
    thread_template,
)
from llamacpp_instr.log.graph.kernels import KernelWork
from llamacpp_instr.log.graph.timeline import PlanTimeline, Selection, plan_timeline
from llamacpp_instr.log.schema import Graph, Layers, Ops, Plan
from llamacpp_instr.log.session import interval_columns

Int64 = NDArray[np.int64]

BATCH = 4096
"""kernels of one plan and thread that are filled in at once"""
TEMPLATES = 64
"""templates that are kept; once the graph has changed, older ones are no longer used"""


@dataclass
class _Batch:
    template: ComputeTemplate
    n_kernels: int
    timeline: PlanTimeline | None
    """its id is a part of the key: kept, so that no other object gets that id"""
    n: int = 0
    t: list[int] = field(default_factory=list)
    columns: list[tuple[Int64 | None, Int64, Int64 | None]] = field(default_factory=list)
    """gap, dur, wait"""
    tail: list[int] = field(default_factory=list)
    work: list[tuple[Int64, Int64]] = field(default_factory=list)
    """FLOPs and bytes of each compute, or once, if all have the same; none if nothing shows it"""


class KernelSlices:
    """Writes the slices of `layers` and `ops` events, which must fit their plans."""

    def __init__(
        self,
        packets: Packets,
        write: Callable[[bytes | NDArray[np.uint8]], object],
        selection: Selection,
        flows: Callable[[int], int] | None,
    ) -> None:
        """`flows(n)` reserves n numbers for flows and returns the first. None draws no flows."""
        self._packets = packets
        self._write = write
        self._selection = selection
        self._flows = flows
        self._batches: OrderedDict[object, _Batch] = OrderedDict()
        self._timelines: OrderedDict[int, PlanTimeline] = OrderedDict()
        self._alike: OrderedDict[bytes, PlanTimeline] = OrderedDict()
        """by the digest of what it is made of: each run of a prompt builds the same graphs again"""
        self.layers_seen: set[int] = set()
        self.ops_seen: set[str] = set()
        self.matched = False
        """whether the selection contained any op, or any layer of a log without ops"""

    def add_layers(self, event: Layers, track: int) -> None:
        """Adds the layers of a compute whose ops are not recorded."""
        key = ("layers", track, tuple(event.layer))
        self.layers_seen.update(event.layer)
        if self._selection.ops is not None:
            return
        self.matched |= any(map(self._selection.has_layer, event.layer))
        batch = self._batch(
            key,
            len(event.layer),
            lambda: runs_template(self._packets, event.layer, self._selection, track),
        )
        self._add(batch, event, None, 0)

    def add_ops(
        self, event: Ops, timeline: PlanTimeline, track: int, work: KernelWork | None
    ) -> None:
        """Adds the ops of a compute: with their `work` on the layers' track, else on a thread's
        own."""
        gaps, waits, main = event.gap is not None, event.wait is not None, work is not None
        bounds = work.bound.tobytes() if work and timeline.kernels.attention else b""
        key = (id(timeline), track, main, gaps, waits, bounds)

        def make() -> ComputeTemplate:
            packets, selection = self._packets, self._selection
            if work:
                bound = work.bound.tolist()
                return layers_template(
                    packets, timeline, selection, track, bool(self._flows), bound
                )
            return thread_template(packets, timeline, selection, track, gaps, waits)

        batch = self._batch(key, len(event.dur), make, timeline)
        if work and (timeline.kernels.attention or not batch.work):
            batch.work.append((work.flops, work.bytes))
        self._add(batch, event, event.wait, event.tail)

    def timeline(self, graph: Graph, plan: Plan) -> PlanTimeline:
        """The slices of a plan; computed once and kept while the plan is in use. Plans that differ
        only in their ids have the same."""
        known = self._timelines.get(plan.plan)
        if known is None:
            made_of = graph.splits, graph.buffers, graph.leafs, graph.nodes, plan.node, plan.n
            content = sha256(msgspec.msgpack.encode(made_of)).digest()
            known = self._alike.get(content)
            if known is None:
                known = plan_timeline(graph, plan)
                _keep(self._alike, content, known)
                self.layers_seen.update(op.layer for op in known.ops)
                self.ops_seen.update(op.name for op in known.ops)
                self.matched |= any(map(self._selection.has_op, known.ops))
            _keep(self._timelines, plan.plan, known)
        return known

    def flush(self) -> None:
        """Writes all waiting computes."""
        for batch in self._batches.values():
            self._fill(batch)

    def _batch(
        self,
        key: object,
        n_kernels: int,
        make: Callable[[], ComputeTemplate],
        timeline: PlanTimeline | None = None,
    ) -> _Batch:
        batch = self._batches.get(key)
        if batch is None:
            batch = self._batches[key] = _Batch(make(), n_kernels, timeline)
            if len(self._batches) > TEMPLATES:
                self._fill(self._batches.popitem(last=False)[1])
        return batch

    def _add(self, batch: _Batch, event: Ops | Layers, wait: list[int] | None, tail: int) -> None:
        gap, dur = interval_columns(event)
        if not batch.template.size:
            return
        batch.columns.append((gap, dur, None if wait is None else np.array(wait, np.int64)))
        batch.t.append(event.t)
        batch.tail.append(tail)
        batch.n += 1
        if batch.n * batch.n_kernels >= BATCH:
            self._fill(batch)

    def _fill(self, batch: _Batch) -> None:
        if not batch.n:
            return
        dur = np.array([dur for _, dur, _ in batch.columns])
        step = dur.copy()
        for i, (gap, _, _) in enumerate(batch.columns):
            if gap is not None:
                step[i] += gap
        wait = [wait for _, _, wait in batch.columns if wait is not None]
        end = np.cumsum(step, axis=1)
        end += np.array(batch.t)[:, None]
        done = end[:, -1] + np.array(batch.tail)
        work = np.array(batch.work or np.zeros((1, 2, batch.n_kernels), np.int64))
        times = Times(
            end - dur, end, np.array(wait) if wait else None, done, work[:, 0], work[:, 1]
        )
        first = self._flows(batch.template.n_flows * batch.n) if self._flows else 0
        self._write(batch.template.fill(times, first))
        batch.n = 0
        batch.columns, batch.t, batch.tail, batch.work = [], [], [], []


def _keep(kept: OrderedDict[Any, PlanTimeline], key: object, timeline: PlanTimeline) -> None:
    kept[key] = timeline
    if len(kept) > TEMPLATES:
        kept.popitem(last=False)
