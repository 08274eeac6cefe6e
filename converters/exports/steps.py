"""The steps of a session as every trace format shows them: until when, with which phases, whose
requests they served, and their layers where no ops were recorded.

Invariant: the phases of a step come in the order of time, none overlaps the next, and none reaches
beyond the step. What waits for its end is bounded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from llamacpp_instr.converters.exports.requests import RequestLanes, RequestSlice
from llamacpp_instr.log.graph.kernels import KernelWork, untimed_backends
from llamacpp_instr.log.graph.timeline import Selection, remember
from llamacpp_instr.log.requests import Request, RequestFinder
from llamacpp_instr.log.resolve import KnownCompute, KnownStep, Resolver
from llamacpp_instr.log.schema import (
    Compute,
    Layers,
    Mark,
    Ops,
    StepBegin,
    StepEnd,
    Sync,
    Token,
)
from llamacpp_instr.log.session import LatestSteps
from llamacpp_instr.log.steps import WARM_UP

KEPT = 4096
"""ended steps on which a token may still be drawn, and computes of a step that wait for its end"""


@dataclass
class OpenStep:
    """A step that has not ended."""

    known: KnownStep
    warm_up: bool
    flows: list[int] = field(default_factory=list)
    """of the tokens that it takes and of the requests that it serves, in a format that has flows"""
    computes: list[Compute] = field(default_factory=list)
    """that wait, because `prepare` comes before them and is known at the end"""
    first: int | None = None
    """when its first ubatch began, apply included"""
    last: int = 0
    """when its last compute ended"""


def compute_phases(compute: Compute) -> Iterator[tuple[str, int, int]]:
    """The phases of a compute: name, begin and end in ns. The last one is `compute` itself."""
    now, start = compute.t, compute.t + compute.start
    for name in ("apply", "build", "alloc", "inputs"):
        if dur := getattr(compute, name):
            end = min(now + dur, start)
            yield name, now, end
            now = end
    yield "compute", start, start + compute.dur


def achieved(work: KernelWork, compute: KnownCompute) -> list[tuple[str, float]]:
    """The rates of a compute, by unit: the `work` of all its ops over its time. None if it took no
    time, or if part of it ran where no kernel is timed."""
    dur = compute.event.dur
    if not dur or untimed_backends(compute.graph.event):
        return []
    return [("GB/s", int(work.bytes.sum()) / dur), ("GFLOP/s", int(work.flops.sum()) / dur)]


class TracedSteps:
    """Takes the events of steps and calls the functions of a format for what the selection has.

    They draw a step (`end` is None if the log ended before it; the requests that it served), a
    phase before or after its computes (context, name, begin, end, arguments), a compute with its
    phases (`compute_phases`), the layers of a compute without ops (context), and a request.
    """

    def __init__(
        self,
        refs: Resolver,
        selection: Selection,
        step: Callable[[OpenStep, StepEnd | None, int, Sequence[Request]], object],
        phase: Callable[[int, str, int, int, dict[str, int]], object],
        compute: Callable[[Compute], object],
        layers: Callable[[int, Layers], object],
        request: Callable[[RequestSlice], object],
    ) -> None:
        self._refs, self._selection = refs, selection
        self._draw_step, self._draw_phase, self._draw_compute = step, phase, compute
        self._draw_layers = layers
        self.whole = selection.steps is None
        """whether what belongs to no step is wanted"""
        self.spans: dict[int, tuple[int, int]] = {}
        """begin and end of the most recent steps"""
        lanes = RequestLanes()
        self._requests = RequestFinder(lambda found: request(lanes.slice(found)))
        self._latest: LatestSteps[tuple[OpenStep, StepEnd]] = LatestSteps(self._settled)
        self._layers: dict[int, tuple[Layers, Compute]] = {}
        """by context: the layers whose ops may still come"""
        self._computed = 0
        """when the latest compute ended"""

    def has(self, step: int) -> bool:
        """Whether what happened in a step, or in none (-1), is selected."""
        return self._selection.has_step(step) and (self.whole or step >= 0)

    # --- events ---

    def begin(self, step: StepBegin) -> OpenStep | None:
        """A step has begun; None if it is not selected."""
        self._latest.settle(step.ctx)
        known = self._refs.step
        if known is None or not self._selection.has_step(step.step):
            return None
        warm_up = any(mark.name == WARM_UP for _, mark in self._refs.open_marks.values())
        known.kept = opened = OpenStep(known, warm_up)
        return opened

    def end(self, end: StepEnd) -> None:
        """A step has ended; a wait for its result may follow."""
        known = self._refs.step
        if known is not None and known.kept is not None:
            self._flush_layers(known.event.ctx)
            self._latest.add(known.event.ctx, (known.kept, end), max(end.t, known.event.t))

    def compute(self, compute: Compute) -> None:
        """A compute has ended; if its step is open, it is drawn when that is drawn."""
        start = compute.t + compute.start
        self._computed = max(self._computed, start + compute.dur)
        self._flush_layers(compute.ctx)
        if not self._selection.has_step(compute.step):
            return
        known = self._refs.step
        step: OpenStep | None = known.kept if known is not None else None
        if step is None:
            self._draw_compute(compute)
            return
        if step.first is None and compute.source != "memory_update":  # part of preparing
            step.first = compute.t
        step.last = start + compute.dur
        step.computes.append(compute)
        if len(step.computes) > KEPT:
            self._draw_computes(step)

    def layers(self, layers: Layers) -> None:
        """The layers of a compute, which its ops may follow."""
        compute = self._refs.compute.event
        self._layers[compute.ctx] = layers, compute

    def ops(self, ops: Ops) -> bool:
        """The ops of a compute, which replace its layers; whether they are selected."""
        compute = self._refs.compute.event
        waiting, _ = self._layers.get(compute.ctx, (None, None))
        if ops.thread == 0 and waiting is not None and waiting.compute == ops.compute:
            del self._layers[compute.ctx]
        return self._selection.has_step(compute.step)

    def sync(self, sync: Sync) -> None:
        """A device was waited for."""
        self._latest.wait(sync)

    def token(self, token: Token) -> bool:
        """A token was sampled; whether it is selected."""
        self._latest.settle(token.ctx)
        if self.whole:
            self._requests.token(token.ctx, token.seq, token.step, token.t, token.dur)
        return self._selection.has_step(token.step)

    def mark(self, mark: Mark) -> None:
        """A mark, which may be that of a request."""
        if self.whole and mark.phase == "end":
            self._latest.settle_all()
            begin = self._refs.mark
            seq = mark.seq if mark.seq >= 0 else begin.seq
            if seq >= 0:
                self._requests.span(seq, begin.t, mark.t, begin.name)

    def finish(self) -> int:
        """The log has ended; returns when, in ns."""
        for ctx in list(self._layers):
            self._flush_layers(ctx)
        latest = max(self._refs.latest, self._computed)
        self._latest.settle_all()
        for known in self._refs.open_steps.values():
            if known.kept is not None:
                self._draw(known.kept, None, latest, ())
        self._requests.finish()
        return latest

    # --- drawing ---

    def _settled(self, ended: tuple[OpenStep, StepEnd], t: int) -> None:
        step, end = ended
        begin, served = step.known.event, list[Request]()
        if self.whole and end.status == 0 and not step.warm_up:
            served = self._requests.step(begin.step, begin.ctx, begin.t, t, step.known.parts)
        self._draw(step, end, t, served)

    def _draw(self, step: OpenStep, end: StepEnd | None, t: int, served: Sequence[Request]) -> None:
        begin, ctx = step.known.event.t, step.known.event.ctx
        remember(self.spans, step.known.event.step, (begin, t), KEPT)
        self._draw_step(step, end, t, served)
        if end is not None and end.prepare:
            until = min(begin + end.prepare, t if step.first is None else step.first)
            self._draw_phase(ctx, "prepare", begin, max(begin, until), {})
        self._draw_computes(step)
        if end is not None and end.readback:
            # the log has the sum over the ubatches, which is drawn after the last one
            since = max(step.last, begin)
            until = min(since + end.readback, max(t, since))
            several = {"sum_of_ubatches": end.n_ubatch} if end.n_ubatch > 1 else {}
            self._draw_phase(ctx, "readback", since, until, several)

    def _draw_computes(self, step: OpenStep) -> None:
        for compute in step.computes:
            self._draw_compute(compute)
        step.computes.clear()

    def _flush_layers(self, ctx: int) -> None:
        """Draws layers without ops as they are."""
        layers, compute = self._layers.pop(ctx, (None, None))
        if layers and compute and self._selection.has_step(compute.step):
            self._draw_layers(ctx, layers)
