"""Checks one whole event by itself: order, sums, bounds.

Invariant: a function here sees a single event; `check` compares events with each other. Messages
do not begin with file and line, because the caller adds them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

from llamacpp_instr.base.terminal import counted
from llamacpp_instr.log import schema


def _gap(gap: list[int] | None) -> Iterator[str]:
    if gap and gap[0] != 0:
        yield f"`gap[0]` is {gap[0]}: the first interval begins at `t`"


def _session_end(event: schema.SessionEnd) -> Iterator[str]:
    if event.dropped:
        yield f"the log is not complete: {counted(event.dropped, 'event')} dropped"
    if event.dropped_ops:
        yield f"a thread's buffer was full: {counted(event.dropped_ops, 'op')} dropped"


def _graph(event: schema.Graph) -> Iterator[str]:
    if event.n_exec > event.n_nodes:
        yield f"`n_exec` is {event.n_exec}, more than `n_nodes` ({event.n_nodes})"
    nodes = event.nodes
    if nodes is None:
        return
    for i, (buffer, ne) in enumerate(zip(nodes.buffer, nodes.ne, strict=True)):
        if not -1 <= buffer < len(event.buffers):
            yield f"node {i} is in buffer {buffer}, the graph has {len(event.buffers)}"
        if not ne:
            yield f"node {i} has shape []"
    if sum(nodes.exec) != event.n_exec:
        yield f"`n_exec` is {event.n_exec}, column `exec` has {sum(nodes.exec)}"


def _step_end(event: schema.StepEnd) -> Iterator[str]:
    if event.n_reused > event.n_ubatch:
        yield f"`n_reused` is {event.n_reused}, more than `n_ubatch` ({event.n_ubatch})"


def _compute(event: schema.Compute) -> Iterator[str]:
    stages = event.apply + event.build + event.alloc + event.inputs
    if stages > event.start:
        yield f"its stages take {stages} ns, the compute starts at {event.start}"


def _layers(event: schema.Layers) -> Iterator[str]:
    yield from _gap(event.gap)
    for i, (one, next_one) in enumerate(zip(event.layer, event.layer[1:], strict=False)):
        if one == next_one:
            yield f"runs {i} and {i + 1} are of one layer ({one})"


def _ops(event: schema.Ops) -> Iterator[str]:
    yield from _gap(event.gap)
    for i, (wait, dur) in enumerate(zip(event.wait or (), event.dur, strict=False)):
        if wait > dur:
            yield f"`wait[{i}]` is {wait}, more than its `dur` ({dur})"


def _kv(event: schema.Kv) -> Iterator[str]:
    if event.used > event.size:
        yield f"{event.used} cells are used of {event.size}"
    for cell in event.cells or ():
        if cell >= event.size:
            yield f"cell {cell} of {event.size}"


def _token(event: schema.Token) -> Iterator[str]:
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


def _tensor_stats(event: schema.TensorStats) -> Iterator[str]:
    n = event.nan + event.inf + sum(event.hist)
    if n != event.n:
        yield f"`nan`, `inf` and `hist` count {n} elements, `n` is {event.n}"
    if event.zero > event.n:
        yield f"{counted(event.zero, 'zero')} in {counted(event.n, 'element')}"
    low, mean, high = event.min, event.mean, event.max
    if low is not None and high is not None and mean is not None:
        slack = 1e-6 * max(abs(low), abs(high))  # the mean is summed with rounding
        if not low - slack <= mean <= high + slack:
            yield f"the mean {mean} is not between {low} and {high}"
    if event.std is not None and (event.std < 0 or math.isnan(event.std)):
        yield f"the deviation is {event.std}"


Rules = dict[type[schema.Event], Callable[[Any], Iterator[str]]]
"""by event: what gives its errors, one message each"""
OF_ONE: Rules = {
    schema.SessionEnd: _session_end,
    schema.Graph: _graph,
    schema.StepEnd: _step_end,
    schema.Compute: _compute,
    schema.Layers: _layers,
    schema.Ops: _ops,
    schema.Splits: lambda event: _gap(event.gap),
    schema.Kv: _kv,
    schema.Token: _token,
    schema.TensorStats: _tensor_stats,
}
