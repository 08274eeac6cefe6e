"""Checks one event by itself, beyond the schema: equal columns, order, sums.

Invariant: a function here sees a single event; `check` compares events with each other. Messages
do not begin with file and line, because the caller adds them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from llamacpp_instr.schema import (
    Compute,
    Event,
    Graph,
    Kv,
    Layers,
    Nodes,
    Ops,
    Plan,
    SessionEnd,
    Split,
    Splits,
    StepEnd,
    TensorStats,
    Token,
)


def event_findings(event: Event) -> Iterator[str]:
    """The errors of `event` itself, one message each."""
    rule = _RULES.get(type(event))
    return rule(event) if rule else iter(())


def _equal_lengths(columns: dict[str, Sequence[object] | int | None]) -> Iterator[str]:
    """A column may be given as its length."""
    lengths = {
        name: column if isinstance(column, int) else len(column)
        for name, column in columns.items()
        if column is not None
    }
    expected_name, expected = next(iter(lengths.items()))
    for name, length in lengths.items():
        if length != expected:
            yield f"column `{name}` has {length} entries, `{expected_name}` has {expected}"


def _gap(gap: list[int] | None) -> Iterator[str]:
    if gap and gap[0] != 0:
        yield f"`gap[0]` is {gap[0]}: the first interval begins at `t`"


def _session_end(event: SessionEnd) -> Iterator[str]:
    if event.dropped:
        yield f"{event.dropped} events were dropped: the log is not complete"
    if event.dropped_ops:
        yield f"{event.dropped_ops} ops were dropped: a thread's buffer was full"


def _graph(event: Graph) -> Iterator[str]:
    yield from _splits_of_graph(event.splits, event.n_nodes)
    if event.n_exec > event.n_nodes:
        yield f"`n_exec` is {event.n_exec}, more than `n_nodes` ({event.n_nodes})"
    if event.nodes is None:
        return
    columns = {name: getattr(event.nodes, name) for name in Nodes.__struct_fields__}
    wrong = [*_equal_lengths({"n_nodes": max(event.n_nodes, 0), **columns})]
    yield from wrong
    if wrong:
        return
    yield from _nodes(event.nodes, len(event.leafs), len(event.buffers))
    n_exec = sum(event.nodes.exec)
    if n_exec != event.n_exec:
        yield f"`n_exec` is {event.n_exec}, column `exec` has {n_exec}"


def _nodes(nodes: Nodes, n_leafs: int, n_buffers: int) -> Iterator[str]:
    n_nodes = len(nodes.name)
    for i in range(n_nodes):
        for source in nodes.src[i]:
            if source >= n_nodes or -1 - source >= n_leafs:
                what = f"node {source}" if source >= 0 else f"leaf {-1 - source}"
                yield f"node {i} reads {what}, the graph has {n_nodes} nodes, {n_leafs} leafs"
        if not -1 <= nodes.buffer[i] < n_buffers:
            yield f"node {i} is in buffer {nodes.buffer[i]}, the graph has {n_buffers}"
        if not nodes.ne[i]:
            yield f"node {i} has shape []"


def _splits_of_graph(splits: list[Split], n_nodes: int) -> Iterator[str]:
    at = 0
    for i, split in enumerate(splits):
        if split.start != at or split.end < split.start:
            yield f"split {i} is {split.start}..{split.end}, the one before it ends at {at}"
        at = split.end
    if splits and at != n_nodes:
        yield f"the splits end at node {at}, the graph at {n_nodes}"


def _plan(event: Plan) -> Iterator[str]:
    yield from _equal_lengths({"node": event.node, "n": event.n})
    free = 0
    for node, n in zip(event.node, event.n or [1] * len(event.node), strict=False):
        if node < free:
            yield f"node {node} is repeated or out of order"
            return
        free = node + n


def _step_end(event: StepEnd) -> Iterator[str]:
    if event.n_reused > event.n_ubatch:
        yield f"`n_reused` is {event.n_reused}, more than `n_ubatch` ({event.n_ubatch})"


def _compute(event: Compute) -> Iterator[str]:
    stages = event.apply + event.build + event.alloc + event.inputs
    if stages > event.start:
        yield f"its stages take {stages} ns, the compute starts at {event.start}"


def _layers(event: Layers) -> Iterator[str]:
    yield from _equal_lengths({"dur": event.dur, "gap": event.gap, "layer": event.layer})
    yield from _gap(event.gap)
    for i, (one, next_one) in enumerate(zip(event.layer, event.layer[1:], strict=False)):
        if one == next_one:
            yield f"runs {i} and {i + 1} are of one layer ({one})"


def _ops(event: Ops) -> Iterator[str]:
    yield from _equal_lengths({"dur": event.dur, "gap": event.gap, "wait": event.wait})
    yield from _gap(event.gap)
    for i, (wait, dur) in enumerate(zip(event.wait or (), event.dur, strict=False)):
        if wait > dur:
            yield f"`wait[{i}]` is {wait}, more than its `dur` ({dur})"


def _splits(event: Splits) -> Iterator[str]:
    columns = {"split": event.split, "gap": event.gap, "asynchronous": event.asynchronous}
    yield from _equal_lengths({"dur": event.dur, **columns})
    yield from _gap(event.gap)


def _kv(event: Kv) -> Iterator[str]:
    if event.used > event.size:
        yield f"{event.used} cells are used of {event.size}"
    for cell in event.cells or ():
        if cell >= event.size:
            yield f"cell {cell} of {event.size}"


def _token(event: Token) -> Iterator[str]:
    if event.p is not None and not 0 <= event.p <= 1:
        yield f"probability {event.p}"
    if event.hex is not None:
        try:
            text = bytes.fromhex(event.hex).decode(errors="replace")
        except ValueError:
            yield "`hex` is not a hexadecimal number"
        else:
            # decoders differ in how many replacement characters they write for wrong bytes
            if text.replace("\ufffd", "") != event.text.replace("\ufffd", ""):
                yield "`hex` and `text` are not the same bytes"


def _tensor_stats(event: TensorStats) -> Iterator[str]:
    n = event.nan + event.inf + sum(event.hist)
    if n != event.n:
        yield f"`nan`, `inf` and `hist` count {n} elements, `n` is {event.n}"
    if event.zero > event.n:
        yield f"{event.zero} zeros in {event.n} elements"
    low, mean, high = event.min, event.mean, event.max
    if low is not None and high is not None and mean is not None:
        slack = 1e-6 * max(abs(low), abs(high))  # the mean is summed with rounding
        if not low - slack <= mean <= high + slack:
            yield f"the mean {mean} is not between {low} and {high}"
    if event.std is not None and (event.std < 0 or math.isnan(event.std)):
        yield f"the deviation is {event.std}"


_RULES: dict[type[Event], Callable[[Any], Iterator[str]]] = {
    SessionEnd: _session_end,
    Graph: _graph,
    Plan: _plan,
    StepEnd: _step_end,
    Compute: _compute,
    Layers: _layers,
    Ops: _ops,
    Splits: _splits,
    Kv: _kv,
    Token: _token,
    TensorStats: _tensor_stats,
}
