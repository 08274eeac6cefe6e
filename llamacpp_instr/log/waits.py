"""What the time of a request went to: the queue, its own steps, those of others, the rest.

Invariant: the parts add up to the request's total, from its arrival, or from the start of its first
step if the log does not know the arrival. All times are in ns.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from llamacpp_instr.log.requests import Request
from llamacpp_instr.log.session import Int64, Table


class Waits(NamedTuple):
    """What the time of a request went to; the parts add up to its total, in ns."""

    queue: int
    prompt: int
    """in its steps, until the first token"""
    tokens: int
    """in its later steps"""
    others: int
    """in steps of its context that did nothing for it, and encoding for others"""
    rest: int
    """outside steps: the sampler and the application"""
    encoder: int = 0
    """of its images and audio"""

    @property
    def longest(self) -> str:
        names = (
            "the queue", "its prompt", "its tokens", "other requests", "sampling, application",
            "the encoder",
        )  # fmt: skip
        return names[self.index(max(self))]


def waits_of(requests: Sequence[Request], steps: Table) -> list[Waits]:
    """What the time of each request went to. `steps` is in order of time; the requests refer to its
    rows."""
    dur = steps["end"] - steps["begin"]
    of_context: dict[int, tuple[Int64, Int64, Int64]] = {}
    for ctx in {request.ctx for request in requests}:
        of = [request for request in requests if request.ctx == ctx]
        # also those of draft models, whose steps are for the requests of another context
        contexts = {ctx}.union(*(np.unique(steps["ctx"][request.steps]).tolist() for request in of))
        mine = np.isin(steps["ctx"], list(contexts))
        encoded = [(part.begin, part.end) for request in of for part in request.encoded]
        spans = np.stack([steps["begin"][mine], steps["end"][mine]], axis=1)
        spans = np.concatenate([spans, np.array(encoded, np.int64).reshape(-1, 2)])
        begins, ends = spans[np.argsort(spans[:, 0], kind="stable")].T
        of_context[ctx] = begins, ends, np.concatenate([[0], np.cumsum(ends - begins)])
    found = []
    for request in requests:
        own = dur[request.steps]
        encoder = sum(part.end - part.begin for part in request.encoded)
        after = request.token_times[0] if request.token_times else request.end
        is_prompt = steps["begin"][request.steps] < after
        begins, ends, total = of_context[request.ctx]
        # whole steps of a context do not overlap, and nothing is encoded meanwhile
        first = np.searchsorted(begins, request.begin)
        last = max(int(np.searchsorted(ends, request.end, side="right")), int(first))
        others = max(int(total[last] - total[first]) - int(own.sum()) - encoder, 0)
        of_steps = int(own[is_prompt].sum()), int(own[~is_prompt].sum())
        parts = request.queued or 0, *of_steps, others
        found.append(Waits(*parts, request.total - sum(parts) - encoder, encoder))
    return found
