"""The requests of a session: which steps and tokens served whom, from arrival to last token.

A request is a prompt and the tokens that follow it in one sequence of a context. The log does not
say where a request begins, so a new one begins with the first tokens of a sequence, and later when

- the span ends that the application marked for the request (`Mark.seq`), or
- after a token was sampled, tokens come that are a prompt: they go back before the end of the last
  prompt, or they are several of which not all have an output. Several that all have one are the
  draft of speculative decoding.

Its prompt ends with its first token. The position of its first prompt token is the number of tokens
that it reused. If the application samples by itself, the log has no tokens: a token then counts
when the step ends that computed its logits.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from llamacpp_instr.log.session import Session, Table
from llamacpp_instr.log.steps import counted_steps

Int64 = NDArray[np.int64]


@dataclass
class Request:
    """One request; times in ns."""

    ctx: int
    seq: int
    name: str = ""
    """of the application's mark, empty without one"""
    arrival: int = -1
    """when the mark began, -1 if unknown"""
    end: int = -1
    """when the mark ended, or the last token was there"""
    reused: int = 0
    """prompt tokens whose cells were in the cache"""
    prompt: int = 0
    """prompt tokens that were computed"""
    steps: list[int] = field(default_factory=list)
    """rows of the table of steps, in order"""
    token_times: list[int] = field(default_factory=list)
    """when each output token was there"""
    begin: int = 0
    """of its first step"""
    prompt_end: int = 0
    """position after the last prompt token"""

    @property
    def first(self) -> int:
        """When it arrived, or began if the arrival is unknown."""
        return self.begin if self.arrival < 0 else self.arrival

    @property
    def queued(self) -> int | None:
        """From its arrival to its first step, None if the arrival is unknown."""
        return None if self.arrival < 0 else self.begin - self.arrival

    @property
    def to_first_token(self) -> int | None:
        """From `first` to the first token, None without tokens."""
        return self.token_times[0] - self.first if self.token_times else None

    @cached_property
    def between_tokens(self) -> Int64:
        """The time from each token to the next, (tokens - 1,)."""
        times = np.array(self.token_times, np.int64)
        return times[1:] - times[:-1]

    @property
    def total(self) -> int:
        """From `first` to `end`."""
        return self.end - self.first


def find_requests(session: Session) -> tuple[Table, list[Request]]:
    """The steps that count in order of time, and the requests that they serve, in order of their
    first steps. A log without sequences has requests only of batches with one sequence."""
    steps, _ = counted_steps(session)
    steps = steps.rows(np.argsort(steps["begin"], kind="stable"))
    found: list[Request] = []
    entries = _entries(session, steps)
    sampled = _sampled(session, steps)
    samples = set(session.tokens["ctx"].tolist())
    spans = _spans(session.marks)
    times = steps["begin"].tolist(), steps["end"].tolist()
    for (ctx, seq), parts in entries.items():
        tokens = sampled.get((ctx, seq), [])
        found += _of_sequence(ctx, seq, parts, tokens, spans.get(seq, []), times, ctx in samples)
    found.sort(key=lambda request: request.begin)
    return steps, found


@dataclass(frozen=True, slots=True)
class _Part:
    """What one step does for one sequence."""

    step: int
    pos: int
    tokens: int
    outputs: int


@dataclass(frozen=True)
class _Span:
    begin: int
    end: int
    name: str


def _entries(session: Session, steps: Table) -> dict[tuple[int, int], list[_Part]]:
    """The parts of each context and sequence, in order."""
    row = {step: i for i, step in enumerate(steps["step"].tolist())}
    ctx = steps["ctx"].tolist()
    found: dict[tuple[int, int], list[_Part]] = {}
    of = session.sequences
    names = ("step", "seq", "pos", "tokens", "outputs")
    parts: Iterable[tuple[int, ...]] = zip(*(of[n].tolist() for n in names), strict=True)
    if not len(of):
        columns = (steps[n].tolist() for n in ("step", "n_seqs", "pos", "n_tokens", "n_outputs"))
        parts = ((s, 0, *rest) for s, n, *rest in zip(*columns, strict=True) if n == 1)
    for step, seq, pos, tokens, outputs in sorted(parts, key=lambda part: row.get(part[0], -1)):
        at = row.get(step)
        if at is not None:
            found.setdefault((ctx[at], seq), []).append(_Part(at, pos, tokens, outputs))
    return found


def _sampled(session: Session, steps: Table) -> dict[tuple[int, int], list[tuple[int, int]]]:
    """For each context and sequence, the row of the step and the time of every sampled token."""
    row = {step: i for i, step in enumerate(steps["step"].tolist())}
    found: dict[tuple[int, int], list[tuple[int, int]]] = {}
    tokens = session.tokens
    columns = (tokens[name].tolist() for name in ("ctx", "seq", "step", "t", "dur"))
    for ctx, seq, step, t, dur in zip(*columns, strict=True):
        if step in row:
            found.setdefault((ctx, max(seq, 0)), []).append((row[step], t + dur))
    return found


def _spans(marks: Table) -> dict[int, list[_Span]]:
    """The spans that the application marked for each sequence, in the order of their ends."""
    found: dict[int, list[_Span]] = {}
    columns = (marks[name].tolist() for name in ("end", "begin", "seq", "name"))
    for end, begin, seq, name in sorted(zip(*columns, strict=True)):
        if seq >= 0 and end >= 0:
            found.setdefault(seq, []).append(_Span(begin, end, name))
    return found


def _of_sequence(
    ctx: int,
    seq: int,
    parts: list[_Part],
    sampled: list[tuple[int, int]],
    spans: list[_Span],
    times: tuple[list[int], list[int]],
    has_tokens: bool,
) -> list[Request]:
    found: list[Request] = []
    begins, ends = times
    next_token = next_span = 0
    span: _Span | None = None
    for part in parts:
        t = begins[part.step]
        over = span is not None and span.end <= t
        if not found or over or _is_new_prompt(found[-1], part):
            # those of a sequence are served one after the other
            while next_span < len(spans) and spans[next_span].end <= t:
                next_span += 1
            span = spans[next_span] if next_span < len(spans) else None
            span = span if span and span.begin <= t else None
            found.append(Request(ctx, seq, reused=max(part.pos, 0), begin=t))
            if span is not None:
                found[-1].name, found[-1].arrival = span.name, span.begin
                next_span += 1
        request = found[-1]
        request.steps.append(part.step)
        if not request.token_times:
            request.prompt += part.tokens
            request.prompt_end = part.pos + part.tokens
        request.end = ends[part.step]
        if not has_tokens and part.outputs:
            request.token_times.append(ends[part.step])
        while next_token < len(sampled) and sampled[next_token][0] <= part.step:
            if sampled[next_token][0] == part.step:
                request.token_times.append(sampled[next_token][1])
            next_token += 1
        request.end = max([request.end, *request.token_times[-1:]])
        if span is not None:
            request.end = max(request.end, span.end)
    return found


def _is_new_prompt(request: Request, part: _Part) -> bool:
    if not request.token_times:
        return False
    return part.pos < request.prompt_end or part.tokens > max(part.outputs, 1)
