"""The text that a session generated, token by token, with the time of each."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from converters.report.page import Section
from converters.report.report import shown
from converters.report.text_figures import Passage, timed_text
from llamacpp_instr.log.requests import find_requests
from llamacpp_instr.log.session import Session

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
