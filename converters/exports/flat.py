"""A log as lines again: selected events, or the flat form with one line for each op and layer.

Invariant: streaming; a flat line can be understood without any other line: references to graphs
and plans are resolved.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from itertools import accumulate
from typing import Any
from weakref import WeakKeyDictionary

import msgspec

from llamacpp_instr.base.errors import LogError, UsageError
from llamacpp_instr.log import schema
from llamacpp_instr.log.graph.kernels import Kernels, plan_kernels
from llamacpp_instr.log.known import KnownPlan
from llamacpp_instr.log.reader import EventReader
from llamacpp_instr.log.resolve import Resolver

FlatLine = dict[str, Any]
EVENT_NAMES = tuple(schema.event_name(event) for event in schema.EVENTS)


@dataclass(frozen=True)
class LineSelection:
    """Which lines to select; None or empty selects all."""

    events: Collection[str] = ()
    """names; `op` is one in the flat form"""
    steps: tuple[int, int] | None = None
    """the first and the last, both included; lines that belong to no step are then left out"""
    layers: tuple[int, int] | None = None
    """the same for layers; lines without a layer are then left out"""

    def has(self, name: str, step: int, layer: object) -> bool:
        return (
            (not self.events or name in self.events)
            and (self.steps is None or self.steps[0] <= step <= self.steps[1])
            and (
                self.layers is None
                or (isinstance(layer, int) and self.layers[0] <= layer <= self.layers[1])
            )
        )


def check_names(names: Iterable[str], known: Collection[str]) -> None:
    """Raises UsageError for a name that no line can have."""
    for name in names:
        if name not in known:
            raise UsageError(f"unknown event `{name}`; the events are {', '.join(known)}")


def select_lines(reader: EventReader, selection: LineSelection) -> Iterator[bytes]:
    """The selected events of a log as JSON lines, as the schema has them."""
    check_names(selection.events, EVENT_NAMES)
    refs = Resolver()
    for line, event in reader:
        refs.take(line, event)  # the line is printed as it is, even if it is not whole
        if selection.has(
            schema.event_name(event), refs.step_of(event), getattr(event, "layer", None)
        ):
            yield _line(event)


def expand_lines(
    reader: EventReader, selection: LineSelection, lenient: bool = False
) -> Iterator[bytes]:
    """The selected lines of a log's flat form.

    `ops` become one `op` for each kernel, with its phase, block, weight (name and type, if it reads
    one), bytes moved and FLOPs, which its threads share. `layers` become a `step_begin` and a
    `step_end` called `layer_N`, steps are called by their phase; graphs and plans are resolved into
    `op` lines and left out. Raises LogError with the line for an event that is not whole
    (`log.resolve`); `lenient` leaves such events out.
    """
    check_names(selection.events, [*(n for n in EVENT_NAMES if n not in _RESOLVED), "op"])
    refs = Resolver()
    for number, event in refs.follow(reader, lenient):
        step = refs.step_of(event)
        try:
            lines = list(_flat_lines(refs, event, step))
        except OverflowError:
            if not lenient:
                reason = f"{schema.event_name(event)}: impossible tensor sizes"
                raise LogError(reason, reader.path, number) from None
            refs.left_out += 1
            continue
        for line in lines:
            if selection.has(line["event"], step, line.get("layer")):
                yield _line(line)


_encode = msgspec.json.Encoder().encode
# characters that control a terminal and that JSON does not escape; in UTF-8
_STEERING = re.compile(
    b"\x7f|\xc2[\x80-\x9f]|\xd8\x9c|\xe2\x80[\x8e\x8f\xa8-\xae]|\xe2\x81[\xa6-\xa9]"
)


def _line(event: schema.Event | FlatLine) -> bytes:
    """A line of JSON that is safe to print: the same text, with more escapes such as `\\u009b`."""
    line = _encode(event)
    if _STEERING.search(line):
        line = _STEERING.sub(lambda found: b"\\u%04x" % ord(found[0].decode()), line)
    return line + b"\n"


_RESOLVED = ("graph", "plan", "layers", "ops")


def _flat_lines(refs: Resolver, event: schema.Event, step: int) -> Iterator[FlatLine]:
    """The flat lines of an event of a step, which `refs` has taken."""
    if isinstance(event, schema.Ops):
        yield from _op_lines(refs, event, step)
    elif isinstance(event, schema.Layers):
        for layer, begin, dur in zip(event.layer, *_spans(event), strict=True):
            if layer >= 0:
                where = {"step_name": f"layer_{layer}", "layer": layer, "step": step}
                yield {"event": "step_begin", "t": begin, **where}
                yield {"event": "step_end", "t": begin + dur, "dur": dur, **where}
    elif isinstance(event, schema.Experts):
        nodes = refs.compute.graph.event.whole
        for node, expert, uses in event.choices():
            where = {"name": nodes.name[node], "layer": nodes.layer[node], "step": step}
            yield {"event": "experts", "t": event.t, "expert": expert, "uses": uses, **where}
    elif isinstance(event, schema.StepBegin | schema.StepEnd):
        assert refs.step is not None
        yield {**msgspec.to_builtins(event), "step_name": refs.step.phase}
    elif not isinstance(event, schema.Graph | schema.Plan):
        yield msgspec.to_builtins(event)


def _op_lines(refs: Resolver, event: schema.Ops, step: int) -> Iterator[FlatLine]:
    """A line for each kernel; a plan keeps what its lines have in common."""
    plan = refs.plan
    if plan not in _KERNELS:
        _KERNELS[plan] = _kernels(plan)
    where: FlatLine = {"step": step}
    where |= {"device": event.device} if event.device else {"thread": event.thread}
    if (of := refs.compute.step) is not None:
        where["phase"] = of.phase
    lines, kernels = _KERNELS[plan]
    work = kernels.work(refs.compute.ubatch)
    amounts = zip(work.bytes.tolist(), work.flops.tolist(), work.bound.tolist(), strict=True)
    times = _spans(event)
    for line, begin, dur, (n_bytes, n_flops, bound) in zip(lines, *times, amounts, strict=True):
        moved = {"bytes": n_bytes, "flops": n_flops} | ({"work_bound": True} if bound else {})
        yield {"event": "op", "t": begin, "dur": dur, **line, **moved, **where}


_KERNELS: WeakKeyDictionary[KnownPlan, tuple[list[FlatLine], Kernels]] = WeakKeyDictionary()


def _kernels(plan: KnownPlan) -> tuple[list[FlatLine], Kernels]:
    """What the lines of each kernel have in common, and the kernels."""
    nodes, node = plan.graph.event.whole, plan.event.node
    kernels = plan_kernels(plan.graph.event, plan.event)
    weights = list(zip(kernels.weight, kernels.weight_type, strict=True))
    # named by its result, as in traces and tables
    lines: list[FlatLine] = [
        {
            "op": nodes.op[first],
            "name": nodes.name[inside[-1]],
            "layer": nodes.layer[first],
            "type": nodes.type[inside[-1]],
            "ne": nodes.ne[inside[-1]],
            "block": kernels.block[i],
            **({"weight": weights[i][0], "weight_type": weights[i][1]} if weights[i][0] else {}),
            **({"fused": [nodes.op[node] for node in inside]} if len(inside) > 1 else {}),
        }
        for i, (first, inside) in enumerate(zip(node, kernels.nodes, strict=True))
    ]
    return lines, kernels


def _spans(event: schema.Layers | schema.Ops) -> tuple[list[int], list[int]]:
    """When each interval begins, and how long it is."""
    gaps = event.gap or [0] * len(event.dur)
    ends = accumulate(gap + dur for gap, dur in zip(gaps, event.dur, strict=True))
    return [event.t + end - dur for end, dur in zip(ends, event.dur, strict=True)], event.dur
