"""What a viewer is sent: a key frame with everything that is kept, then frames of what is new.

Invariant: a key frame, and the frames after it in order, give a viewer what a later key frame
gives it. Every viewer gets the same bytes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np

from llamacpp_instr.converters.live.figures import figures_of
from llamacpp_instr.converters.live.heat import Heat
from llamacpp_instr.converters.live.lanes import Lane, Shown
from llamacpp_instr.converters.live.state import LiveState, Second, StepRow
from llamacpp_instr.log.graph.ops import BLOCKS

MOST_STEPS = 200
"""in one frame: the latest; a page cannot draw more in a tenth of a second"""

Json = dict[str, Any]


class FrameMaker:
    """Makes the frames of a state. `n` counts them."""

    def __init__(self, state: LiveState) -> None:
        self.n = 0
        self._state = state
        self._step = self._message = 0
        """how many were sent"""
        self._second = -1
        """the latest that was sent"""
        self._lanes: dict[int, tuple[int, bool]] = {}
        """of each lane that was sent: its tokens, and whether it was over"""

    def next_frame(self, catching_up: bool) -> Json:
        """What is new since the last call."""
        state = self._state
        n_steps = min(state.n_steps - self._step, MOST_STEPS)
        frame = _figures(state, catching_up)
        frame["seconds"] = [_second(s) for s in _since(state, self._second)]
        frame["steps"] = [_step(row) for row in list(state.steps)[len(state.steps) - n_steps :]]
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
        frame["key"] = True
        frame["frame"] = self.n
        frame["seconds"] = [_second(second) for second in state.seconds]
        # what the next frame has would be twice in a viewer
        n_new = state.n_steps - self._step
        frame["steps"] = [_step(row) for row in list(state.steps)[: len(state.steps) - n_new]]
        frame["messages"] = [list(m) for m in state.messages if m[0] < self._message]
        frame["lanes"] = [_lane(lane, lane.tokens) for lane in state.lanes]
        return frame

    def _changed_lanes(self) -> Iterator[Json]:
        known: dict[int, tuple[int, bool]] = {}
        for lane in self._state.lanes:
            n_sent, over = self._lanes.get(lane.number, (-1, False))
            known[lane.number] = lane.n_tokens, lane.over
            if (n_sent, over) != known[lane.number]:
                yield _lane(lane, [token for token in lane.tokens if token.index >= n_sent])
        self._lanes = known


def _figures(state: LiveState, catching_up: bool) -> Json:
    """The figures that every frame contains."""
    return {
        **vars(figures_of(state)),
        "late": catching_up,
        "t": state.elapsed,
        "closed": state.end.reason if state.end else None,
        "n_steps": state.n_steps,
        "n_failed": state.n_failed,
        "n_tokens": state.n_tokens,
        "n_prompt": state.n_prompt,
        "n_requests": state.lanes.n_requests,
        "n_messages": state.n_messages,
        "busy": state.busy,
        "heat": {phase: _heat(heat) for phase, heat in state.heat.items() if heat.steps},
        "caches": [[*key, c.used, c.size, c.n_bytes, c.moves] for key, c in state.caches.items()],
        "memory": [
            [ctx, of.rss, [[b.buffer, b.model, b.context, b.compute] for b in of.buffers]]
            for ctx, of in state.memory.items()
        ],
        "threads": [[ctx, of.working, of.waiting] for ctx, of in state.threads.items()],
        "machine": _machine(state),
        "session": _session(state),
    }


def glance(state: LiveState, catching_up: bool, rows: int, columns: int) -> Json:
    """Of a key frame, what a terminal of that size can show: `rows` lanes, those of requests under
    way first, and of them, of the seconds and of the messages the latest."""
    frame = _figures(state, catching_up)
    under_way = set(frame["active"])
    lanes = sorted(state.lanes, key=lambda lane: (lane.number not in under_way, -lane.number))
    frame["seconds"] = [_second(second) for second in list(state.seconds)[-columns:]]
    frame["messages"] = [list(message) for message in list(state.messages)[-rows:]]
    frame["lanes"] = [_lane(lane, list(lane.tokens)[-columns:]) for lane in lanes[:rows]]
    return frame


def _since(state: LiveState, number: int) -> list[Second]:
    """The seconds from `number` on, which may have changed."""
    new = []
    for second in reversed(state.seconds):
        if second.number < number:
            break
        new.append(second)
    return new[::-1]


def _second(of: Second) -> list[int]:
    return [of.number, of.tokens, of.prompt, of.steps, of.busy, of.cells, of.rss, of.cpu, of.delay]


def _step(row: StepRow) -> list[Any]:
    return [row.step, row.ctx, row.phase, row.n_tokens, row.n_seqs, row.begin, row.dur]


def _heat(heat: Heat) -> Json:
    return {
        "blocks": list(BLOCKS),
        "steps": heat.steps,
        "last": heat.last.astype(np.int64).tolist(),
        "mean": heat.mean.astype(np.int64).tolist(),
    }


def _lane(lane: Lane, tokens: Iterable[Shown]) -> Json:
    request = lane.request
    times = request.token_times
    return {
        "lane": lane.number,
        "name": request.name,
        "ctx": request.ctx,
        "seq": request.seq,
        "first": request.first,
        "arrived": request.arrival >= 0,
        "begin": request.begin,
        "end": request.end,
        "reused": request.reused,
        "prompt": request.prompt,
        "to_first": request.to_first_token,
        "between": lane.between,
        "n_tokens": max(lane.n_tokens, len(times)),
        "over": lane.over,
        "tokens": [[of.index, of.text, of.t, of.p] for of in tokens],
    }


def _machine(state: LiveState) -> Json | None:
    machine = state.machine
    if machine is None or state.start is None:
        return None
    return {
        "cpus": state.start.host.cores,
        "load": machine.load,
        "dur": machine.dur,
        "cpu": machine.cpu,
        "delay": machine.delay,
        "busy": machine.busy,
    }


def _session(state: LiveState) -> Json | None:
    start = state.start
    if start is None:
        return None
    return {
        "id": start.id,
        "begin": start.t,
        "wall": start.wall,
        "level": start.level,
        "perturbed": start.perturbed,
        "cpu": start.host.cpu,
        "cores": start.host.cores,
        "pid": start.process.pid,
        "models": [[m.model, m.name or m.path, m.ftype, m.bytes] for m in state.models.values()],
        "contexts": [[c.ctx, c.model, c.n_ctx, c.n_threads] for c in state.contexts.values()],
    }


def step_details(state: LiveState, step: int) -> Json | None:
    """The kernels of a step in the order in which they ran; None if it is not kept."""
    row = next((row for row in state.steps if row.step == step), None)
    if row is None:
        return None
    kernels = [
        [label, layer, block, gap, dur]
        for of in row.computes
        for label, layer, block, gap, dur in zip(
            of.cells.label, of.cells.layer.tolist(), of.cells.block.tolist(),
            of.gap.tolist(), of.dur.tolist(), strict=True,
        )
    ]  # fmt: skip
    return {"step": _step(row), "blocks": list(BLOCKS), "kernels": kernels}
