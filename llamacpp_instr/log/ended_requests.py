"""The requests of a log that is followed, each as soon as it has ended.

A request that left a server's queue ends with its mark. Any other ends when its mark ends and no
step of its sequence is under way; otherwise when the next one begins in its sequence, unless a mark
that may be its own is open; at the latest with the log.

Invariant: the requests are those of `find_requests`, and those of `left_requests` that the server
noted. Kept are only the requests that have not ended, and the steps of their contexts since the
first of them began.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable
from operator import itemgetter
from typing import TypeAlias

import numpy as np

from llamacpp_instr.log import schema
from llamacpp_instr.log.graph.timeline import remember
from llamacpp_instr.log.known import KnownStep
from llamacpp_instr.log.requests import (
    SPANS,
    Request,
    RequestFinder,
    Served,
    Taken,
    left_request,
    read_note,
)
from llamacpp_instr.log.resolve import Resolver, Takers
from llamacpp_instr.log.session import WARM_UP, Table
from llamacpp_instr.log.steps import LatestSteps

Ended: TypeAlias = Callable[[Request, Table], object]
"""gets a request, and the steps of its context, and of what drafts for that, while the request was
under way: `request.steps` are rows of them, which have step, ctx (the request's), begin, end,
n_tokens and n_seqs"""
_COLUMNS = ("step", "ctx", "begin", "end", "n_tokens", "n_seqs")
_NO_STEPS = Table({name: np.zeros(0, np.int64) for name in _COLUMNS})


class EndedRequests:
    """Takes the events of a log through `takers`, after `refs` did; calls `ended`."""

    def __init__(self, refs: Resolver, ended: Ended) -> None:
        self._refs, self._ended = refs, ended
        self._finder = RequestFinder(lambda request: self._over.append(request))
        self._latest: LatestSteps[KnownStep] = LatestSteps(self._settled)
        self._warm_up: set[int] = set()
        """steps of warm-up runs that have not ended"""
        self._steps: defaultdict[int, deque[tuple[int, ...]]] = defaultdict(deque)
        """of each context, the rows of the table"""
        self._open: dict[int, Request] = {}
        """by their identity; their `steps` are numbers of steps"""
        self._last: dict[tuple[int, int], Request] = {}
        """the latest of each context and sequence, of SPANS of them"""
        self._over: list[Request] = []
        self._followed: list[Request] = []
        """which end with this event: all that are over, and those followed by another request
        unless their mark may still come"""
        self._notes: dict[int, Served] = {}
        """by the mark, which ends next"""
        self._slots: dict[int, int] = {}
        """by the mark: the slot that took its request"""
        self._served: dict[tuple[int, int], Served] = {}
        """by arrival and sequence"""
        self.takers: Takers = {
            schema.StepBegin: self._step_begin,
            schema.StepEnd: self._step_end,
            schema.Sync: self._latest.wait,
            schema.Token: self._token,
            schema.Note: self._note,
            schema.Mark: self._mark,
        }

    def finish(self) -> None:
        """Nothing follows: all requests have ended."""
        self._latest.settle_all()
        self._finder.finish()
        self._end_all()

    def _step_begin(self, begin: schema.StepBegin) -> None:
        self._latest.settle(begin.ctx)
        self._end_all()
        if any(mark.name == WARM_UP for _, mark in self._refs.open_marks.values()):
            self._warm_up.add(begin.step)

    def _step_end(self, end: schema.StepEnd) -> None:
        known = self._refs.step
        if known is not None:
            if end.status == 0 and end.step not in self._warm_up:
                self._latest.add(known.event.ctx, known, max(end.t, known.event.t))
            self._warm_up.discard(end.step)

    def _settled(self, known: KnownStep, t: int) -> None:
        of, target = known.event, known.target
        ctx = of.ctx if target < 0 else target
        self._steps[ctx].append((of.step, ctx, of.t, t, of.n_tokens, of.n_seqs))
        for request in self._finder.step(of.step, of.ctx, of.t, t, known.parts, target):
            self._see(request).steps.append(of.step)
        self._prune(ctx)

    def _token(self, token: schema.Token) -> None:
        self._latest.settle(token.ctx)
        of = self._finder.token(token.ctx, token.seq, token.step, token.t, token.dur)
        if of is not None:
            self._see(of)
        self._end_all()

    def _note(self, note: schema.Note) -> None:
        of = read_note(note)
        if isinstance(of, Served):
            remember(self._notes, of.mark, of, SPANS)
        elif isinstance(of, Taken):
            remember(self._slots, of.mark, of.slot, SPANS)

    def _mark(self, end: schema.Mark) -> None:
        if end.phase != "end":
            return
        begin = self._refs.mark
        self._latest.settle_all()
        seq = max(end.seq, begin.seq, self._slots.pop(end.mark, -1))
        served = self._notes.pop(end.mark, None)
        if seq >= 0:
            if served is not None and served.slot >= 0:
                remember(self._served, (begin.t, seq), served, SPANS)
            self._finder.span(seq, begin.t, end.t, begin.name)
            of_mark = (r for r in self._open.values() if (r.seq, r.marked_end) == (seq, end.t))
            self._over += [request for request in of_mark if not self._is_served(request)]
        elif served is not None:
            self._ended(left_request(begin.t, end.t, served), _NO_STEPS)
        self._end_all()

    def _see(self, request: Request) -> Request:
        """The request, which is now open; it follows the previous one in its sequence."""
        key = request.ctx, request.seq
        before = self._last.get(key)
        if before is not request:
            self._open[id(request)] = request
            remember(self._last, key, request, SPANS)
            if before is not None:
                self._followed.append(before)
        return request

    def _is_served(self, request: Request) -> bool:
        """Whether a step of its sequence is under way, which may still count for a request."""
        return any(
            step.event.ctx == request.ctx and any(of.seq == request.seq for of in step.parts)
            for step in self._refs.open_steps.values()
        )

    def _may_be_marked(self, request: Request) -> bool:
        """Whether an open mark may be that of a request."""
        return request.arrival < 0 and any(
            mark.t <= request.begin and mark.seq in (-1, request.seq)
            for _, mark in self._refs.open_marks.values()
        )

    def _end_all(self) -> None:
        for request in (*(of for of in self._followed if not self._may_be_marked(of)), *self._over):
            self._end(request)
        self._followed.clear()
        self._over.clear()

    def _end(self, request: Request) -> None:
        if self._open.pop(id(request), None) is not None:
            request.served = self._served.get((request.arrival, request.seq))
            rows = [row for row in self._steps[request.ctx] if row[2] >= request.begin]
            rows.sort(key=itemgetter(2))  # a step that drafts may settle late
            place = {row[0]: i for i, row in enumerate(rows)}
            request.steps = sorted(place[step] for step in request.steps if step in place)
            columns = np.array(rows, np.int64).reshape(-1, len(_COLUMNS)).T
            self._ended(request, Table(dict(zip(_COLUMNS, columns, strict=True))))
            self._prune(request.ctx)

    def _prune(self, ctx: int) -> None:
        """Forget the steps of a context before its first open request began."""
        steps, begins = self._steps[ctx], [of.begin for of in self._open.values() if of.ctx == ctx]
        while steps and (not begins or steps[0][2] < min(begins)):
            steps.popleft()
        if not steps:
            del self._steps[ctx]
