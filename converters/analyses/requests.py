"""The requests of a session: how long each took, and why.

Invariant: times are from the arrival of a request, or from the start of its first step if the log
does not know the arrival. A request's parts (queue, its own steps, steps of others, the rest) add
up to its total.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from llamacpp_instr.base.terminal import counted
from llamacpp_instr.converters.analyses.tables import header
from llamacpp_instr.log.requests import Request, find_requests
from llamacpp_instr.log.session import Session, Table
from llamacpp_instr.report.report import Cell, Figures, Report, shown

TOP = 20
"""requests that are shown unless asked otherwise"""
POINTS = (0.5, 0.9, 0.99)
PARTS = 12
"""of the time, for the number of requests at once"""

Int64 = NDArray[np.int64]


class Waits(NamedTuple):
    """What the time of a request went to; the parts add up to its total, in ns."""

    queue: int
    prompt: int
    """in its steps, until the first token"""
    tokens: int
    """in its later steps"""
    others: int
    """in steps of its context that did nothing for it"""
    rest: int
    """outside of steps: the sampler and the application"""

    @property
    def longest(self) -> str:
        """The name of the longest part."""
        names = ("the queue", "its prompt", "its tokens", "other requests", "sampling, application")
        return names[self.index(max(self))]


def compute_requests(session: Session, top: int = TOP) -> list[Report]:
    """The latencies of a session's requests, and the `top` slowest with what they waited for."""
    steps, requests = find_requests(session)
    ended = session.log_end.notes()
    if not requests:
        return [Report("Requests", [], [], ["The log has no requests.", *ended])]
    latencies = _latencies(requests)
    latencies.notes.extend(ended)
    return [latencies, *_over_time(requests), _slowest(requests, steps, top)]


def _latencies(requests: Sequence[Request]) -> Report:
    between = [np.zeros(0, np.int64), *(request.between_tokens for request in requests)]
    samples = {
        "queued": [request.queued for request in requests],
        "to the first token": [request.to_first_token for request in requests],
        "between tokens": np.concatenate(between).tolist(),
        "total": [request.total for request in requests],
    }
    rows: list[list[Cell]] = []
    for label, values in samples.items():
        known = [value for value in values if value is not None]
        if known:
            rows.append([label, len(known), *np.quantile(known, POINTS).tolist(), max(known)])
    n_tokens = sum(len(request.token_times) for request in requests)
    prompt = sum(request.prompt for request in requests)
    reused = sum(request.reused for request in requests)
    span = max(r.end for r in requests) - min(r.first for r in requests)
    mean, most = concurrency(requests)
    rate = n_tokens / max(span, 1) * 1e9
    figures: Figures = {
        "requests": (len(requests), "count"),
        "output tokens": (n_tokens, "count"),
        "prompt tokens computed": (prompt, "count"),
        "prompt tokens reused": (reused, "count"),
        "tokens/s by the clock": (rate, "per_second"),
        "concurrent, mean": (mean, "number"),
        "concurrent, most": (most, "count"),
    }
    notes = [
        f"{counted(len(requests), 'request')} in {shown(span, 'ns')}:"
        f" {counted(n_tokens, 'output token')} ({shown(rate, 'per_second')}/s by the clock),"
        f" {counted(prompt, 'prompt token')} computed and {reused:,} reused from the cache.",
        f"At most {most} at once, {mean:.3g} on average.",
    ]
    if unknown := sum(request.arrival < 0 for request in requests):
        notes.append(
            f"The arrival of {unknown:,} is not in the log: their times count from their first"
            " step. docs/reference/requests.md describes how an application marks its requests."
        )
    points_ns = (f"p{100 * point:.0f}" for point in POINTS)
    columns = header("Time", ("count", "count"), ("ns", *points_ns), ("ns", "longest"))
    return Report("Latency of requests", columns, rows, notes, figures=figures)


def concurrency(requests: Sequence[Request]) -> tuple[float, int]:
    """The mean number of requests between the first arrival and the last end, and the largest."""
    times, counts = concurrency_over_time(requests)
    span = int(times[-1] - times[0])
    return float((np.diff(times) * counts[:-1]).sum() / max(span, 1)), int(counts.max())


def concurrency_over_time(requests: Sequence[Request]) -> tuple[Int64, Int64]:
    """Times in ns at which the number of requests changes, and the number from then on; both (n,)
    with n at most twice the number of requests."""
    changes = np.array(
        [(r.first, 1) for r in requests] + [(max(r.end, r.first), -1) for r in requests], np.int64
    )
    times, at = np.unique(changes[:, 0], return_inverse=True)
    change = np.zeros(len(times), np.int64)
    np.add.at(change, at, changes[:, 1])
    return times, np.cumsum(change)


def _over_time(requests: Sequence[Request]) -> Iterator[Report]:
    """How many requests there were at once in each of PARTS equal parts of the time."""
    times, counts = concurrency_over_time(requests)
    if len(requests) < 2 or times[-1] - times[0] < PARTS:
        return
    edges = np.linspace(times[0], times[-1], PARTS + 1).astype(np.int64)
    # requests × time until each change; between two changes it grows evenly
    until = np.concatenate([[0], np.cumsum(np.diff(times) * counts[:-1])])
    means = np.diff(np.interp(edges, times, until)) / np.diff(edges)
    first = np.searchsorted(times, edges[:-1], side="right") - 1
    after = np.searchsorted(times, edges[1:])
    rows: list[list[Cell]] = [
        [int(edge - times[0]), float(mean), int(counts[low:high].max())]
        for edge, mean, low, high in zip(edges, means, first, after, strict=False)
    ]
    columns = header(("ns", "from"), ("number", "mean"), ("count", "most"))
    notes = ["Times count from the first request."]
    yield Report("Requests at once, over time", columns, rows, notes)


def waits_of(requests: Sequence[Request], steps: Table) -> list[Waits]:
    """What the time of each request went to. `steps` is in order of time, as the requests name its
    rows."""
    dur = steps["end"] - steps["begin"]
    of_context: dict[int, tuple[Int64, Int64, Int64]] = {}
    for ctx in {request.ctx for request in requests}:
        mine = steps["ctx"] == ctx
        total = np.concatenate([[0], np.cumsum(dur[mine])])
        of_context[ctx] = steps["begin"][mine], steps["end"][mine], total
    found = []
    for request in requests:
        own = dur[request.steps]
        after = request.token_times[0] if request.token_times else request.end
        is_prompt = steps["begin"][request.steps] < after
        begins, ends, total = of_context[request.ctx]
        # whole steps of a context do not overlap
        first = np.searchsorted(begins, request.begin)
        last = max(int(np.searchsorted(ends, request.end, side="right")), int(first))
        others = max(int(total[last] - total[first]) - int(own.sum()), 0)
        parts = request.queued or 0, int(own[is_prompt].sum()), int(own[~is_prompt].sum()), others
        found.append(Waits(*parts, request.total - sum(parts)))
    return found


def _slowest(requests: Sequence[Request], steps: Table, top: int) -> Report:
    waits = waits_of(requests, steps)
    order = sorted(range(len(requests)), key=lambda i: -requests[i].total)[:top]
    named = any(request.name for request in requests)
    began = min(request.first for request in requests)
    rows: list[list[Cell]] = []
    for i in order:
        request, wait = requests[i], waits[i]
        between = request.between_tokens
        rows.append([
            i + 1, request.name if named else None, request.ctx, request.seq,
            request.first - began, request.queued, request.prompt, request.reused,
            len(request.token_times), request.to_first_token,
            float(np.median(between)) if len(between) else None, request.total,
            wait.longest, *wait,
        ])  # fmt: skip
    columns = header(
        ("id", "Request"), "name", ("id", "context", "sequence"), ("ns", "from", "queued"),
        ("count", "prompt", "reused", "output"), ("ns", "first token", "between", "total"),
        "waited for", ("ns", "queue", "its prompt", "its tokens", "other requests", "the rest"),
    )  # fmt: skip
    title = "Requests, the slowest first"
    notes = [
        "A request waits in the queue, then for its own steps, for steps that serve only others,"
        " and for the sampler and the application (the rest)."
    ]
    if len(order) < len(requests):
        title = "The slowest requests"
        notes.append(
            f"{len(order)} of {len(requests):,}; `instr requests --top {len(requests)}` shows all."
        )
    return Report(title, columns, rows, notes, key="requests")
