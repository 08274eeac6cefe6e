"""The figures that one looks at first, the same for the page, the terminal and Prometheus; and what
a viewer is sent: a key frame with everything that is kept, then frames of what is new.

Invariant: a key frame, and the frames after it in order, give a viewer what a later key frame
gives it. Every viewer gets the same bytes.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice, takewhile
from statistics import median
from typing import Any

import numpy as np

from llamacpp_instr.converters.live.lanes import Lane, Shown
from llamacpp_instr.converters.live.state import SECOND, LiveState, Second, StepRow, Threads
from llamacpp_instr.log.graph.ops import BLOCKS
from llamacpp_instr.log.requests import COPY_OPS, OPEN

RECENT = 100
"""how many of the latest requests the medians cover"""
IDLE = SECOND
"""without a token, after which a request may be over: the application need not mark its end"""
IDLE_TOKENS = 20
"""the same as a multiple of its time between tokens, if that is longer"""
MOST_STEPS = 200
"""in one frame: the latest; a page cannot draw more in a tenth of a second"""

Json = dict[str, Any]


@dataclass(frozen=True)
class Figures:
    """Times in ns; None where there is nothing yet."""

    rate: int
    """tokens sampled in the last whole second"""
    to_first: float | None
    """median from a request's arrival to its first token"""
    between: float | None
    """median over requests of the mean time from a token to the next"""
    active: list[int]
    """the lanes of the requests under way"""
    queued: int
    """requests that wait for a slot"""
    waits: int
    """how long the first of them has waited"""
    reused: float | None
    """share of the tokens of prompts that were found in the cache"""
    cells: tuple[int, int] | None
    """of all caches: used, and in total"""
    rss: int
    """bytes that the process has in memory, 0 if unknown"""
    working: float | None
    """share of the time of the latest compute's threads in which they worked"""
    computing: tuple[str, int, int] | None
    """the step under way that began first: its phase, its tokens, and how long it has taken"""


def figures_of(state: LiveState) -> Figures:
    """The figures as of now."""
    lanes = list(state.lanes)
    recent = lanes[-RECENT:]
    first = [t for lane in recent if (t := lane.request.to_first_token) is not None]
    between = [mean for lane in recent if (mean := lane.between) is not None]
    sizes = [(cache.used, cache.size) for cache in state.caches.values()]
    threads = list(state.threads.values())[-1] if state.threads else Threads()
    work, wait = sum(threads.working), sum(threads.waiting)
    last_second, latest = state.elapsed // SECOND - 1, islice(reversed(state.seconds), 2)
    step = min(state.under_way, key=lambda step: step.event.t, default=None)
    took = max(state.now - step.event.t, 0) if step else 0
    queue, prompts = state.queue, state.n_cached + state.n_prompt
    return Figures(
        rate=next((of.tokens for of in latest if of.number == last_second), 0),
        to_first=median(first) if first else None,
        between=median(between) if between else None,
        active=[lane.number for lane in lanes if is_active(lane, state.now)],
        queued=len(queue),
        waits=max(state.now - queue[0].t, 0) if queue else 0,
        reused=state.n_cached / prompts if prompts else None,
        cells=(sum(used for used, _ in sizes), sum(all_ for _, all_ in sizes)) if sizes else None,
        rss=state.rss,
        working=work / (work + wait) if work else None,
        computing=(step.phase, step.event.n_tokens, took) if step else None,
    )


def is_active(lane: Lane, now: int) -> bool:
    """Whether a request is under way, as far as the log shows."""
    return not lane.over and now - lane.request.end < _patience(lane)


def ended(state: LiveState) -> Iterator[Lane]:
    """The requests that have ended, as far as the log shows: all of them if nothing is computed."""
    latest = max((lane.request.end for lane in state.lanes), default=0)
    quiet = 0 if state.under_way else state.now - latest
    return (lane for lane in state.lanes if lane.over or quiet >= _patience(lane))


def _patience(lane: Lane) -> float:
    if lane.request.marked_end == OPEN:
        return math.inf
    return max(IDLE, IDLE_TOKENS * (lane.between or 0))


class FrameMaker:
    """Makes the frames of a state. `n` counts them."""

    def __init__(self, state: LiveState) -> None:
        self.n = 0
        self._state = state
        self._step = self._message = 0
        """how many were sent"""
        self._second = -1
        """the latest that was sent"""
        self._lanes: dict[int, tuple[int, ...]] = {}
        """of each lane that was sent: its tokens, their times, the tokens of its prompt, and
        whether it was over"""

    def next_frame(self, catching_up: bool) -> Json:
        """What is new since the last call."""
        state = self._state
        n_steps = min(state.n_steps - self._step, MOST_STEPS)
        frame = _figures(state, catching_up)
        # the latest that was sent may have changed
        new = takewhile(lambda s: s.number >= self._second, reversed(state.seconds))
        frame["seconds"] = list(map(_second, new))[::-1]
        frame["steps"] = list(map(_step, list(state.steps)[len(state.steps) - n_steps :]))
        frame["messages"] = [list(m) for m in state.messages if m[0] >= self._message]
        frame["lanes"] = list(self._changed_lanes())
        self._step, self._message = state.n_steps, state.n_messages
        if state.seconds:
            self._second = state.seconds[-1].number
        self.n += 1
        frame["frame"] = self.n
        return frame

    def key_frame(self, catching_up: bool) -> Json:
        """Everything up to the last frame. The next frame follows it."""
        state = self._state
        frame = _figures(state, catching_up)
        frame |= {"key": True, "frame": self.n}
        frame["seconds"] = list(map(_second, state.seconds))
        # a viewer would get what the next frame has twice
        n_new = state.n_steps - self._step
        frame["steps"] = list(map(_step, list(state.steps)[: len(state.steps) - n_new]))
        frame["messages"] = [list(m) for m in state.messages if m[0] < self._message]
        frame["lanes"] = [_lane(lane, lane.tokens) for lane in state.lanes]
        return frame

    def _changed_lanes(self) -> Iterator[Json]:
        known: dict[int, tuple[int, ...]] = {}
        for lane in self._state.lanes:
            sent, n_times = self._lanes.get(lane.number, (-1,)), len(lane.request.token_times)
            known[lane.number] = lane.n_tokens, n_times, lane.request.prompt, lane.over
            if sent != known[lane.number]:
                yield _lane(lane, [token for token in lane.tokens if token.index >= sent[0]])
        self._lanes = known


def _devices(state: LiveState) -> Iterator[list[Any]]:
    """Each device's name, the ns of its kernels, the bytes that contexts hold, and its total."""
    in_use = state.in_use
    held = in_use.on_devices
    for name in sorted({*state.devices, *in_use.devices}):
        has = in_use.devices.get(name)
        yield [name, state.devices[name], held.get(name, 0), has.total if has else 0]


def _figures(state: LiveState, catching_up: bool) -> Json:
    """The figures that every frame contains."""
    start, machine = state.start, state.machine
    of_machine = ("load", "dur", "cpu", "delay", "busy")
    return {
        **vars(figures_of(state)),
        "late": catching_up,
        "t": state.elapsed,
        "closed": state.end.reason if state.end else None,
        "n_steps": state.n_steps,
        "n_failed": state.n_failed,
        "n_tokens": state.n_tokens,
        "n_prompt": state.n_prompt,
        "n_requests": state.n_requests,
        "slots": _slots(state),
        "held": [state.held.get(slot, 0) for slot in range(len(_slots(state)))],
        "copies": _copies(state),
        "n_messages": state.n_messages,
        "busy": state.busy,
        "devices": list(_devices(state)),
        "heat": {
            phase: {
                "blocks": list(BLOCKS),
                "steps": heat.steps,
                "last": heat.last.astype(np.int64).tolist(),
                "mean": heat.mean.astype(np.int64).tolist(),
            }
            for phase, heat in state.heat.items()
            if heat.steps
        },
        "caches": [[*key, c.used, c.size, c.n_bytes, c.moves] for key, c in state.caches.items()],
        "memory": [
            [ctx, of.rss, [[b.buffer, b.model, b.context, b.compute] for b in of.buffers]]
            for ctx, of in state.memory.items()
        ],
        "threads": [[ctx, of.working, of.waiting] for ctx, of in state.threads.items()],
        "machine": start
        and machine
        and {"cpus": start.host.cores, **{key: getattr(machine, key) for key in of_machine}},
        "session": start
        and {
            "id": start.id,
            "begin": start.t,
            "wall": start.wall,
            "level": start.level,
            "perturbed": start.perturbed,
            "cpu": start.host.cpu,
            "cores": start.host.cores,
            "pid": start.process.pid,
            "models": [
                [m.model, m.name or m.path, m.ftype, m.bytes] for m in state.models.values()
            ],
            "contexts": [[c.ctx, c.model, c.n_ctx, c.n_threads] for c in state.contexts.values()],
        },
    }


def _slots(state: LiveState) -> list[int | None]:
    """The lane of the latest request of each slot; nothing if the log does not say."""
    known, context = state.lanes.slots, state.server
    if not known or context is None:
        return []
    n = max(context.n_seq_max, max(known) + 1)
    return [known[slot].number if slot in known else None for slot in range(n)]


def _copies(state: LiveState) -> Json | None:
    """A server's copies of prompts in RAM, and how often one moved; None if none moved."""
    of = state.copies
    if of is None:
        return None
    moves = {op: state.copy_moves[op] for op in COPY_OPS}
    return {"prompts": of.copies, "bytes": of.held, "limit": of.limit, **moves}


def glance(state: LiveState, catching_up: bool, rows: int, columns: int) -> Json:
    """The part of a key frame that a terminal of that size can show: `rows` lanes, with requests
    under way first, and the latest tokens, seconds and messages."""
    frame = _figures(state, catching_up)
    under_way = set(frame["active"])
    lanes = sorted(state.lanes, key=lambda lane: (lane.number not in under_way, -lane.number))
    frame["seconds"] = list(map(_second, list(state.seconds)[-columns:]))
    frame["messages"] = [list(message) for message in list(state.messages)[-rows:]]
    frame["lanes"] = [_lane(lane, list(lane.tokens)[-columns:]) for lane in lanes[:rows]]
    return frame


def _second(of: Second) -> list[int]:
    return [of.number, of.tokens, of.prompt, of.steps, of.busy, of.cells, of.rss, of.cpu, of.delay]


def _step(row: StepRow) -> list[Any]:
    return [row.step, row.ctx, row.phase, row.n_tokens, row.n_seqs, row.begin, row.dur]


def _lane(lane: Lane, tokens: Iterable[Shown]) -> Json:
    request = lane.request
    taken, served = request.taken, request.served
    same = ("name", "ctx", "seq", "first", "begin", "end", "reused", "prompt")
    return {
        "lane": lane.number,
        **{key: getattr(request, key) for key in same},
        "task": taken.task if taken else None,
        "size": taken.prompt if taken else None,
        "reason": served.end if served else None,
        "arrived": request.arrival >= 0,
        "to_first": request.to_first_token,
        "between": lane.between,
        "n_tokens": served.generated if served else max(lane.n_tokens, len(request.token_times)),
        "over": lane.over,
        "tokens": [[of.index, of.text, of.t, of.p] for of in tokens],
    }


def step_details(state: LiveState, step: int) -> Json | None:
    """The kernels of a step in the order in which they ran, those of devices last; None if it is
    not kept."""
    row = next((row for row in state.steps if row.step == step), None)
    if row is None:
        return None
    kernels = [
        [label, layer, block, gap, dur, of.device]
        for of in sorted(row.computes, key=lambda of: of.device)
        for label, layer, block, gap, dur in zip(
            of.cells.label, of.cells.layer.tolist(), of.cells.block.tolist(),
            of.gap.tolist(), of.dur.tolist(), strict=True,
        )
    ]  # fmt: skip
    return {"step": _step(row), "blocks": list(BLOCKS), "kernels": kernels}
