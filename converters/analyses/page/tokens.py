"""The text that a session generated, token by token, with the time of each."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from converters.report.page import Section
from converters.report.report import shown
from converters.report.text_figures import Passage, timed_text
from llamacpp_instr.log.session import Session
from llamacpp_instr.log.steps import counted_steps

MOST_TOKENS = 3000
"""tokens shown; of more, the first and the last half of this"""
MOST_TEXT = 100
"""characters shown of one token"""


def tokens_with_times(session: Session) -> Iterator[Section]:
    """Passages of the tokens of steps that count. A passage begins after a prefill. A token's time
    is since the sampling of the one before it, that of the first since its step began."""
    steps, _ = counted_steps(session)
    begin = dict(zip(steps["step"].tolist(), steps["begin"].tolist(), strict=True))
    phase = dict(zip(steps["step"].tolist(), steps["phase"].tolist(), strict=True))
    tokens = session.tokens.rows(np.isin(session.tokens["step"], steps["step"]))
    if not len(tokens):
        return
    order = np.lexsort((tokens["t"], tokens["ctx"]))
    tokens = tokens.rows(order)
    notes = ["Milliseconds are below each token; the background marks slow ones."]
    n = len(tokens)
    if n > MOST_TOKENS:
        half = MOST_TOKENS // 2
        tokens = tokens.rows(np.r_[0:half, n - half : n])
        notes.append(f"The first and the last {half:,} of {n:,} tokens.")
    passages: list[Passage] = []
    pieces: list[tuple[str, int]] = []
    before: tuple[int, int] | None = None
    names = ("ctx", "step", "t", "dur", "text")
    for ctx, step, t, dur, text in zip(*(tokens[name].tolist() for name in names), strict=True):
        end = t + dur
        first = before is None or before[0] != ctx or phase[step] == "prefill"
        if first:
            since = shown(begin[step] - session.start.t, "ns")
            pieces = []
            passages.append(Passage(f"Context {ctx}, from {since}", pieces))
        since_ns = begin[step] if first or before is None else before[1]
        pieces.append((text[:MOST_TEXT], max(end - since_ns, 0)))
        before = ctx, end
    yield timed_text("Tokens with their times", passages, notes)
