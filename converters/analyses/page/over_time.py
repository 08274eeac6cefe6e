"""What changed during a session: speed, memory, cells of the KV cache; its text by token."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from llamacpp_instr.log.requests import find_requests
from llamacpp_instr.log.session import Session
from llamacpp_instr.log.steps import PHASES, counted_steps
from llamacpp_instr.report.page import Section
from llamacpp_instr.report.plain_charts import (
    BINS,
    Axis,
    Line,
    Passage,
    areas_over_time,
    binned,
    lines_over_time,
    timed_text,
)
from llamacpp_instr.report.report import shown

MOST_LINES = 8
"""caches in a chart: those with the most cells used"""
FAR = 8.0
"""ratio of the fastest to the slowest step from which the axis is logarithmic"""


def speed_over_time(session: Session) -> Iterator[Section]:
    """A dot for each step that counts, or for the median of many."""
    steps, _ = counted_steps(session)
    steps = steps.rows((steps["n_tokens"] > 0) & (steps["end"] > steps["begin"]))
    if not len(steps):
        return
    start = session.start.t
    x = (steps["begin"] + steps["end"]) // 2 - start
    rates = steps["n_tokens"] / (steps["end"] - steps["begin"]) * 1e9
    span = _wide(int(steps["begin"].min()) - start, int(steps["end"].max()) - start)
    lines = [
        binned(phase, x[steps["phase"] == phase], rates[steps["phase"] == phase], span)
        for phase in PHASES
        if (steps["phase"] == phase).any()
    ]
    notes = []
    if any(len(line.x) < int((steps["phase"] == line.name).sum()) for line in lines):
        notes.append(f"Each dot is the median of 1/{BINS} of the time, with its range.")
    far = bool(rates.max() > FAR * rates.min())
    axis = Axis("tokens/s of each step", "per_second", logarithmic=far)
    yield lines_over_time("Speed over time", axis, lines, span, notes, dots=True)


def memory_over_time(session: Session) -> Iterator[Section]:
    """What the contexts hold by kind, stacked, and the process's resident memory. The weights of a
    model count once, whatever the number of its contexts."""
    if not session.memory:
        return
    span = _span(session)
    events = sorted(session.memory, key=lambda event: event.t)
    sizes: dict[tuple[str, int], int] = {}
    total = [0, 0, 0]
    rows: list[tuple[int, ...]] = []
    for event in events:
        model = session.contexts[event.ctx].model
        for i, (owner, key) in enumerate(
            (("model", model), ("context", event.ctx), ("compute", event.ctx))
        ):
            now = sum(getattr(use, owner) for use in event.buffers)
            total[i] += now - sizes.get((owner, key), 0)
            sizes[owner, key] = now
        row = (event.t - session.start.t, *total, event.rss)
        if rows and (row[0] - rows[-1][0]) * BINS < span[1] - span[0] and len(events) > BINS:
            rows[-1] = (rows[-1][0], *row[1:])
        else:
            rows.append(row)
    x, *kinds, resident = np.array(rows, np.float64).T
    names = ("weights", "KV cache, state", "compute buffers")
    line = Line("resident memory of the process", x, resident, resident, resident)
    yield areas_over_time(
        "Memory over time",
        Axis("memory by kind", "bytes"),
        x,
        dict(zip(names, kinds, strict=True)),
        span,
        line if resident.any() else None,
    )


def cells_over_time(session: Session) -> Iterator[Section]:
    """The cells in use of each cache."""
    kv = session.kv
    if not len(kv):
        return
    span = _span(session)
    order = np.lexsort((kv["t"], kv["cache"], kv["ctx"]))
    changes = (np.diff(kv["ctx"][order]) != 0) | (np.diff(kv["cache"][order]) != 0)
    caches = [kv.rows(rows) for rows in np.split(order, np.flatnonzero(changes) + 1)]
    caches.sort(key=lambda rows: -int(rows["used"].max()))
    has_several = set(kv["ctx"][kv["cache"] > 0].tolist())
    lines = []
    for rows in caches[:MOST_LINES]:
        ctx, cache = int(rows["ctx"][0]), int(rows["cache"][0])
        name = f"context {ctx}" + (f", cache {cache}" if ctx in has_several else "")
        name += f", of {int(rows['size'].max()):,} cells"
        used = rows["used"].astype(np.float64)
        lines.append(binned(name, rows["t"] - session.start.t, used, span))
    notes = []
    if len(caches) > MOST_LINES:
        notes.append(f"{len(caches) - MOST_LINES} caches with fewer used cells are left out.")
    axis = Axis("cells in use", "count")
    yield lines_over_time("KV cache over time", axis, lines, span, notes)


def _span(session: Session) -> tuple[int, int]:
    """From the first context or step to the last step, since the session began."""
    begins = [event.t for event in session.memory] + session.steps["begin"].tolist()[:1]
    ends = [*begins, int(session.steps["end"].max(initial=0)), int(session.kv["t"].max(initial=0))]
    start = session.start.t
    return _wide(min(begins, default=start) - start, max(ends, default=start) - start)


def _wide(low: int, high: int) -> tuple[int, int]:
    return low, max(high, low + 1)


MOST_TOKENS = 3000
"""tokens shown; of more, the first and the last half of this"""
MOST_TEXT = 100
"""characters shown of one token"""


def tokens_with_times(session: Session) -> Iterator[Section]:
    """A passage for each request, with the tokens of steps that count. A token's time is since the
    one before it was there, that of the first since the request arrived, or began."""
    steps, requests = find_requests(session)
    tokens = session.tokens.rows(np.isin(session.tokens["step"], steps["step"]))
    if not len(tokens):
        return
    begins = {(of.ctx, of.seq, of.token_times[0]): of for of in requests if of.token_times}
    tokens = tokens.rows(np.lexsort((tokens["t"], tokens["seq"], tokens["ctx"])))
    notes = ["Milliseconds are below each token; the background marks slow ones."]
    n = len(tokens)
    if n > MOST_TOKENS:
        half = MOST_TOKENS // 2
        tokens = tokens.rows(np.r_[0:half, n - half : n])
        notes.append(f"The first and the last {half:,} of {n:,} tokens.")
    passages: list[Passage] = []
    pieces: list[tuple[str, int]] = []
    before: tuple[int, int, int] | None = None
    for ctx, seq, t, dur, text in tokens.tuples("ctx", "seq", "t", "dur", "text"):
        end = t + dur
        request = begins.get((ctx, max(seq, 0), end))
        if request is not None or before is None or before[:2] != (ctx, seq):
            began = t if request is None else request.first
            where = f"Context {ctx}" + (f", sequence {seq}" if seq > 0 else "")
            name = request.name if request is not None else ""
            heading = f"{name or where}, from {shown(began - session.start.t, 'ns')}"
            pieces = []
            passages.append(Passage(heading, pieces))
            before = ctx, seq, began
        pieces.append((text[:MOST_TEXT], max(end - before[2], 0)))
        before = ctx, seq, end
    yield timed_text("Tokens with their times", passages, notes)
