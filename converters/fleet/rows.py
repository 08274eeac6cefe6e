"""One log as rows of the data set, from its events in order.

Invariant: memory does not grow with the log. `steps` and `requests` come in pieces of PIECE rows;
`ops` has one row for each op and bucket of durations. A step counts unless it failed or was part of
a warm-up run, as in `instr stats`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from operator import setitem
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np

from llamacpp_instr.converters.exports.names import name_of
from llamacpp_instr.converters.fleet.dataset import N_BUCKETS, Int64, bucket_of
from llamacpp_instr.log.graph.kernels import plan_kernels
from llamacpp_instr.log.reader import EventReader
from llamacpp_instr.log.requests import Request, RequestFinder
from llamacpp_instr.log.resolve import KnownStep, Resolver, Takers
from llamacpp_instr.log.schema import Context, Mark, Ops, StepBegin, StepEnd, Sync, Token
from llamacpp_instr.log.session import LatestSteps
from llamacpp_instr.log.steps import WARM_UP

PIECE = 1 << 13
"""rows of a table that are in memory at once"""
BATCH = 256
"""computes of one plan whose durations are counted at once"""
PLANS = 1024
"""after so many, those that the log cannot name any more are forgotten"""

Row = dict[str, Any]
Write = Callable[[str, list[Row]], object]


@dataclass
class _Kept:
    """What is kept with a step: also the kernels of its computes on thread 0."""

    warm_up: bool
    ops: list[tuple[int, Int64, list[int]]] = field(default_factory=list)
    """plan, number of each kernel's name, durations"""


class LogRows:
    """Takes the events of a log and hands rows to `write`, which gets the name of a table. `log`
    is the log's id in the data set."""

    def __init__(self, write: Write, log: str) -> None:
        self._write, self._log = write, log
        self.refs = Resolver()
        self._open: WeakKeyDictionary[KnownStep, _Kept] = WeakKeyDictionary()
        self._rows: dict[str, list[Row]] = defaultdict(list)
        self._names: dict[tuple[str, str], int] = {}
        self._plans: dict[int, Int64] = {}
        self._waiting: dict[tuple[int, str, int], tuple[Int64, list[list[int]]]] = {}
        """names and durations of computes of one plan that are not counted yet"""
        self._counts: dict[tuple[int, str], dict[int, Int64]] = defaultdict(
            lambda: defaultdict(lambda: np.zeros((2, N_BUCKETS), np.int64))
        )
        """of each op in one phase of a context: kernels and ns by bucket"""
        self._finder = RequestFinder(self._found)
        self._latest: LatestSteps[tuple[KnownStep, StepEnd]] = LatestSteps(self._settled)
        self.contexts: dict[int, Context] = {}
        self.n_steps = self.n_failed = self.n_warm_up = self.n_ops = self.n_requests = 0

    def read(self, reader: EventReader, lenient: bool) -> int:
        """Reads the whole log; returns how many damaged events were left out. Raises `LogError`
        like `Resolver.feed`."""
        takers: Takers = {
            Context: lambda context: setitem(self.contexts, context.ctx, context),
            StepBegin: self._step_begin,
            StepEnd: self._step_end,
            Sync: self._latest.wait,
            Ops: self._ops,
            Token: self._token,
            Mark: self._mark,
        }
        left_out = self.refs.feed(reader, takers, lenient)
        self._latest.settle_all()
        self._finder.finish()
        for key in list(self._waiting):
            self._count(key)
        self._rows["ops"] = list(self._op_rows())
        for name in self._rows:
            self._flush(name)
        return left_out

    # --- facts ---

    def _of_context(self, ctx: int, phase: str) -> Row:
        """What every row of a context has."""
        context = self.contexts[ctx]
        threads = context.n_threads if phase == "decode" else context.n_threads_batch
        return {
            "ctx": ctx,
            "model": name_of(self.refs.models[context.model].event),
            "threads": threads,
        }

    def _time(self, t: int) -> int:
        """µs since 1970, UTC."""
        return (self.refs.start.wall + t - self.refs.start.t) // 1000

    # --- steps and requests ---

    def _step_begin(self, step: StepBegin) -> None:
        self._latest.settle(step.ctx)
        warm_up = any(mark.name == WARM_UP for _, mark in self.refs.open_marks.values())
        assert self.refs.step is not None
        self._open[self.refs.step] = _Kept(warm_up)

    def _step_end(self, end: StepEnd) -> None:
        assert self.refs.step is not None
        known, ctx = self.refs.step, self.refs.step.event.ctx
        kept = self._open[known]
        if end.status == 0 and not kept.warm_up:
            for plan, names, durations in kept.ops:
                key = ctx, known.phase, plan
                _, waiting = self._waiting.setdefault(key, (names, []))
                waiting.append(durations)
                if len(waiting) >= BATCH:
                    self._count(key)
        self._latest.add(ctx, (known, end), end.t)

    def _settled(self, ended: tuple[KnownStep, StepEnd], t: int) -> None:
        known, end = ended
        step, phase = known.event, known.phase
        warm_up = self._open[known].warm_up
        counted = end.status == 0 and not warm_up
        self.n_steps += 1
        self.n_failed += end.status != 0
        self.n_warm_up += warm_up and end.status == 0
        if counted:
            self._finder.step(step.step, step.ctx, step.t, t, known.parts)
        self._add(
            "steps",
            {
                "log": self._log, **self._of_context(step.ctx, phase), "step": step.step,
                "phase": phase, "tokens": step.n_tokens, "outputs": step.n_outputs,
                "sequences": step.n_seqs, "position": step.pos, "time": self._time(step.t),
                "ns": t - step.t, "prepare_ns": end.prepare, "readback_ns": end.readback,
                "counted": counted,
            },
        )  # fmt: skip

    def _token(self, token: Token) -> None:
        self._latest.settle(token.ctx)
        self._finder.token(token.ctx, token.seq, token.step, token.t, token.dur)

    def _mark(self, mark: Mark) -> None:
        if mark.phase == "end" and mark.seq >= 0:
            begin = self.refs.mark
            self._finder.span(mark.seq, begin.t, mark.t, begin.name)

    def _found(self, request: Request) -> None:
        self.n_requests += 1
        between = request.between_tokens
        self._add(
            "requests",
            {
                "log": self._log, **self._of_context(request.ctx, "decode"),
                "sequence": request.seq, "name": request.name or None,
                "time": self._time(request.first), "ns": request.total,
                "queued_ns": request.queued, "first_token_ns": request.to_first_token,
                "between_tokens_ns": float(np.median(between)) if len(between) else None,
                "prompt": request.prompt, "reused": request.reused,
                "output": len(request.token_times),
            },
        )  # fmt: skip

    # --- kernels ---

    def _ops(self, event: Ops) -> None:
        if event.thread:
            return  # takes part in the same kernels
        self.n_ops += len(event.dur)
        names = self._names_of(event.plan)
        known = self.refs.open_steps.get(self.refs.compute.event.step)
        if known is not None:
            self._open[known].ops.append((event.plan, names, event.dur))

    def _names_of(self, plan: int) -> Int64:
        """The number of each kernel's name."""
        found = self._plans.get(plan)
        if found is None:
            known = self.refs.plans[plan]
            kernels = plan_kernels(known.graph.event, known.event)
            names = zip(kernels.label, kernels.block, strict=True)
            numbers = [self._names.setdefault(name, len(self._names)) for name in names]
            found = self._plans[plan] = np.array(numbers, np.int64)
            if len(self._plans) > PLANS:
                self._plans = {n: of for n, of in self._plans.items() if n in self.refs.plans}
                for key in list(self._waiting):
                    self._count(key)
        return found

    def _count(self, key: tuple[int, str, int]) -> None:
        ctx, phase, _ = key
        names, durations = self._waiting.pop(key)
        waiting = np.array(durations, np.int64)
        buckets = bucket_of(waiting)
        for name in np.unique(names).tolist():
            mine = names == name
            at, ns = buckets[:, mine].ravel(), waiting[:, mine].ravel()
            # in floats, a sum of ns is exact up to 2**53: 104 days in one batch
            counted = np.bincount(at, minlength=N_BUCKETS), np.bincount(at, ns, N_BUCKETS)
            self._counts[ctx, phase][name] += np.array(counted, np.int64)

    def _op_rows(self) -> Iterator[Row]:
        names = list(self._names)
        for (ctx, phase), of_phase in self._counts.items():
            where = {"log": self._log, **self._of_context(ctx, phase), "phase": phase}
            for number, (kernels, ns) in of_phase.items():
                op, block = names[number]
                for bucket in np.flatnonzero(kernels).tolist():
                    amounts = {"kernels": int(kernels[bucket]), "ns": int(ns[bucket])}
                    yield {**where, "op": op, "block": block, "bucket": bucket, **amounts}

    def _add(self, table: str, row: Row) -> None:
        rows = self._rows[table]
        rows.append(row)
        if len(rows) >= PIECE:
            self._flush(table)

    def _flush(self, table: str) -> None:
        rows, self._rows[table] = self._rows[table], []
        if rows:
            self._write(table, rows)
