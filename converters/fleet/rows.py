"""One log as rows of the data set: selections from its session, which is read in parts.

Invariant: memory does not grow with the kernels of the log. `steps` and `requests` come in pieces
of PIECE rows; `ops` has one row for each op and bucket of durations. A step counts as in `instr
stats`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from llamacpp_instr.converters.exports.names import name_of
from llamacpp_instr.converters.fleet.dataset import N_BUCKETS, Int64, bucket_of
from llamacpp_instr.log.parts import JoinedParts
from llamacpp_instr.log.requests import Request, find_requests
from llamacpp_instr.log.session import Session, load_parts
from llamacpp_instr.log.steps import Account, counted_steps

PIECE = 1 << 13
"""rows of a table that are in memory at once"""

Row = dict[str, Any]
Write = Callable[[str, list[Row]], object]


@dataclass(frozen=True)
class LogRows:
    """How many of each there were; `kernels` also counts those of steps that do not count."""

    session: Session
    """with all steps and requests, but not all kernels (`JoinedParts`)"""
    steps: int
    failed: int
    warm_up: int
    kernels: int
    requests: int


def write_rows(path: Path, log: str, write: Write, lenient: bool) -> LogRows:
    """Hands the rows of the log at `path` to `write`, which gets the name of a table. `log` is the
    log's id in the data set. Raises LogError like `load_parts`."""
    joined, durations, kernels = JoinedParts(), _Durations(), 0
    for part in load_parts(path, lenient=lenient):
        joined.add(part)
        durations.add(part)
        kernels += sum(of.dur.size for of in (*part.ops, *part.device_ops))
    session = joined.session()
    of_contexts = {
        ctx: {"log": log, "ctx": ctx, "model": name_of(session.models[context.model])}
        for ctx, context in session.contexts.items()
    }

    def of_context(ctx: int, phase: str) -> Row:
        """What every row of a context contains."""
        context = session.contexts[ctx]
        threads = context.n_threads if phase == "decode" else context.n_threads_batch
        return {**of_contexts[ctx], "threads": threads}

    def time(t: int) -> int:
        """µs since 1970, UTC."""
        return (session.start.wall + t - session.start.t) // 1000

    steps = session.steps
    counted = np.isin(steps["step"], counted_steps(session)[0]["step"])

    def of_step(row: Sequence[Any], counts: bool) -> Row:
        step, ctx, phase, tokens, outputs, sequences, position, begin, end, prepare, readback = row
        return {
            **of_context(ctx, phase), "step": step, "phase": phase, "tokens": tokens,
            "outputs": outputs, "sequences": sequences, "position": position, "time": time(begin),
            "ns": end - begin, "prepare_ns": prepare, "readback_ns": readback, "counted": counts,
        }  # fmt: skip

    def of_request(request: Request) -> Row:
        between = request.between_tokens
        return {
            **of_context(request.ctx, "decode"), "sequence": request.seq,
            "name": request.name or None, "time": time(request.first), "ns": request.total,
            "queued_ns": request.queued, "first_token_ns": request.to_first_token,
            "between_tokens_ns": float(np.median(between)) if len(between) else None,
            "prompt": request.prompt, "reused": request.reused,
            "output": len(request.token_times),
        }  # fmt: skip

    names = (
        "step", "ctx", "phase", "n_tokens", "n_outputs", "n_seqs", "pos", "begin", "end",
        "prepare", "readback",
    )  # fmt: skip
    rows = zip(steps.tuples(*names), counted.tolist(), strict=True)
    _, requests = find_requests(session)
    tables: dict[str, Iterator[Row]] = {
        "steps": (of_step(row, counts) for row, counts in rows),
        "requests": map(of_request, requests),
        "ops": durations.rows(of_context),
    }
    for name, found in tables.items():
        while piece := list(islice(found, PIECE)):
            write(name, piece)
    ok = steps["status"] == 0
    failed, warm_up = int((~ok).sum()), int((ok & ~counted).sum())
    return LogRows(session, len(steps), failed, warm_up, kernels, len(requests))


class _Durations:
    """Counts the durations of the kernels of thread 0 and of devices in steps that count, by
    bucket."""

    def __init__(self) -> None:
        self._counts: dict[tuple[int, str], dict[tuple[str, str], Int64]] = defaultdict(
            lambda: defaultdict(lambda: np.zeros((2, N_BUCKETS), np.int64))
        )
        """of each op and block in one phase of a context: kernels and ns by bucket"""

    def add(self, part: Session) -> None:
        account = Account(part, counted_steps(part)[0])
        for ops in account.kernels:
            kernels = part.kernels(ops.plan)
            names = list(zip(kernels.label, kernels.block, strict=True))
            contexts, buckets = account.steps["ctx"][account.rows_of(ops)], bucket_of(ops.dur)
            columns = defaultdict(list)
            for i, name in enumerate(names):
                columns[name].append(i)
            for phase, rows in account.by_phase(ops):
                for ctx in np.unique(contexts[rows]).tolist():
                    mine = np.flatnonzero(contexts[rows] == ctx)
                    of_phase = self._counts[ctx, phase]
                    for name, at in columns.items():
                        bucket = buckets[rows][mine][:, at].ravel()
                        ns = ops.dur[rows][mine][:, at].ravel()
                        # in floats, a sum of ns is exact up to 2**53: 104 days in one part
                        counted = np.bincount(bucket, minlength=N_BUCKETS)
                        total = np.bincount(bucket, ns, N_BUCKETS)
                        of_phase[name] += np.array((counted, total), np.int64)

    def rows(self, of_context: Callable[[int, str], Row]) -> Iterator[Row]:
        for (ctx, phase), of_phase in self._counts.items():
            where = {**of_context(ctx, phase), "phase": phase}
            for (op, block), (kernels, ns) in of_phase.items():
                for bucket in np.flatnonzero(kernels).tolist():
                    amounts = {"kernels": int(kernels[bucket]), "ns": int(ns[bucket])}
                    yield {**where, "op": op, "block": block, "bucket": bucket, **amounts}
