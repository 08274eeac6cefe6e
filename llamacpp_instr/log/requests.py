"""The requests of a session: which steps and tokens served whom, from arrival to last token.

A request is a prompt and the tokens that follow it in one sequence of a context. The log does not
say where a request begins, so a new one begins with the first tokens of a sequence, and later when

- the span ends that the application marked for the request (`Mark.seq`), or
- after a token was sampled, tokens come that are a prompt: they go back before the end of the last
  prompt, or they are several of which not all have an output. Several that all have one are the
  draft of speculative decoding.

A marked span belongs to the first request of its sequence that begins in it and has none.

Its prompt ends with its first token. The position of its first prompt token is the number of tokens
that it reused. If the application samples by itself, the log has no tokens: a token then counts
when the step ends that computed its logits. That is so if none was sampled in the first UNDECIDED
steps of a context.

Invariant: a RequestFinder keeps at most the open request of each sequence, KEPT more of each that
may yet turn out to be a mark's, SPANS spans, and UNDECIDED steps of each of CONTEXTS_KEPT contexts.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llamacpp_instr.log.session import Session, Table
from llamacpp_instr.log.steps import counted_steps
from llamacpp_instr.schema import CONTEXTS_KEPT

Int64 = NDArray[np.int64]

UNDECIDED = 256
"""steps of a context that wait for its first token"""
KEPT = 64
"""ended requests of a sequence that wait for the end of their mark"""
SPANS = 1024
"""ended marks that wait for the end of the step in which their request begins"""


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
    first_step: int = -1
    last_step: int = -1
    """the latest so far; both as the RequestFinder was given them"""
    token_times: array[int] = field(default_factory=lambda: array("q"))
    """when each output token was there"""
    steps: list[int] = field(default_factory=list)
    """rows of the table of steps, in order; only `find_requests` fills it"""
    begin: int = 0
    """of its first step"""
    prompt_end: int = 0
    """position after the last prompt token"""
    marked_end: int = -1
    """when the mark ended, -1 without one"""

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


@dataclass(frozen=True)
class Part:
    """What one step does for one sequence."""

    seq: int
    pos: int
    tokens: int
    outputs: int


@dataclass
class _Step:
    number: int
    begin: int
    end: int
    parts: Sequence[Part]


@dataclass
class _Span:
    seq: int
    begin: int
    end: int
    name: str
    taken: set[int] = field(default_factory=set)
    """contexts of which a request has it"""


@dataclass
class _Stream:
    """The requests of one sequence of a context."""

    current: Request | None = None
    unnamed: deque[Request] = field(default_factory=deque)
    """ended ones without a mark"""


@dataclass
class _Context:
    streams: dict[int, _Stream] = field(default_factory=dict)
    samples: bool | None = None
    """whether the log has its tokens; None if that is not known"""
    waiting: list[_Step] = field(default_factory=list)
    """until it is known"""


class RequestFinder:
    """Finds requests in steps, tokens and marks, given in the order in which they end, and calls
    `found` with each request that has ended, and `served` with the number of each step and the
    requests that it served, as soon as they are known."""

    def __init__(
        self,
        found: Callable[[Request], object],
        served: Callable[[int, list[Request]], object] = lambda _, __: None,
    ) -> None:
        self._found = found
        self._served = served
        self._contexts: dict[int, _Context] = {}
        self._spans: deque[_Span] = deque(maxlen=SPANS)

    def step(self, number: int, ctx: int, begin: int, end: int, parts: Sequence[Part]) -> None:
        """A step that counts has ended."""
        context = self._context(ctx)
        step = _Step(number, begin, end, parts)
        if context.samples is not None:
            self._serve(ctx, context, step)
            return
        context.waiting.append(step)
        if len(context.waiting) >= UNDECIDED:
            self._decide(ctx, context, False)

    def token(self, ctx: int, seq: int, step: int, t: int) -> None:
        """A token of the step was there at `t`."""
        context = self._context(ctx)
        self._decide(ctx, context, True)
        stream = context.streams.get(max(seq, 0))
        if stream and (request := stream.current) and request.last_step == step:
            request.token_times.append(t)
            request.end = max(request.end, t)

    def span(self, seq: int, begin: int, end: int, name: str) -> None:
        """A mark of a sequence has ended."""
        span = _Span(seq, begin, end, name)
        self._spans.append(span)
        for ctx, context in self._contexts.items():
            stream = context.streams.get(seq, _Stream())
            request = next((r for r in _requests(stream) if _fits(span, r)), None)
            if request is not None:
                _assign(span, request, ctx)
                if request is not stream.current:
                    stream.unnamed.remove(request)
                    self._found(request)

    def current(self, ctx: int, seq: int) -> Request | None:
        """The latest request of a sequence, ended or not; None while it is not known."""
        context = self._contexts.get(ctx)
        stream = context.streams.get(max(seq, 0)) if context else None
        return stream.current if stream else None

    def finish(self) -> None:
        """The log has ended."""
        for ctx in list(self._contexts):
            self._end(ctx)

    def _context(self, ctx: int) -> _Context:
        """The context, which is now the one that was named last (`schema`, Lifetimes)."""
        context = self._contexts.pop(ctx) if ctx in self._contexts else _Context()
        self._contexts[ctx] = context
        if len(self._contexts) > CONTEXTS_KEPT:
            self._end(next(iter(self._contexts)))
        return context

    def _end(self, ctx: int) -> None:
        context = self._contexts[ctx]
        if context.samples is None:
            self._decide(ctx, context, False)
        for stream in context.streams.values():
            for request in _requests(stream):
                self._found(request)
        del self._contexts[ctx]

    def _decide(self, ctx: int, context: _Context, samples: bool) -> None:
        context.samples = samples
        waiting, context.waiting = context.waiting, []
        for step in waiting:
            self._serve(ctx, context, step)

    def _serve(self, ctx: int, context: _Context, step: _Step) -> None:
        served: list[Request] = []
        for part in step.parts:
            stream = context.streams.setdefault(part.seq, _Stream())
            request = stream.current
            if request is None or _is_over(request, step.begin) or _is_new_prompt(request, part):
                request = self._begin(ctx, stream, part, step)
            request.last_step = step.number
            served.append(request)
            if not request.token_times:
                request.prompt += part.tokens
                request.prompt_end = part.pos + part.tokens
            request.end = max(request.end, step.end)
            if not context.samples and part.outputs:
                request.token_times.append(step.end)
        self._served(step.number, served)

    def _begin(self, ctx: int, stream: _Stream, part: Part, step: _Step) -> Request:
        if stream.current is not None:
            if stream.current.arrival >= 0:
                self._found(stream.current)
            else:
                stream.unnamed.append(stream.current)
                if len(stream.unnamed) > KEPT:
                    self._found(stream.unnamed.popleft())
        request = stream.current = Request(ctx, part.seq, reused=max(part.pos, 0), begin=step.begin)
        request.first_step = step.number
        for span in self._spans:
            if span.seq == part.seq and ctx not in span.taken and _fits(span, request):
                _assign(span, request, ctx)
                break
        return request


def _requests(stream: _Stream) -> Iterator[Request]:
    yield from stream.unnamed
    if stream.current is not None:
        yield stream.current


def _fits(span: _Span, request: Request) -> bool:
    return request.arrival < 0 and span.begin <= request.begin < span.end


def _assign(span: _Span, request: Request, ctx: int) -> None:
    span.taken.add(ctx)
    request.name, request.arrival, request.marked_end = span.name, span.begin, span.end
    request.end = max(request.end, span.end)


def _is_over(request: Request, t: int) -> bool:
    return request.arrival >= 0 and request.marked_end <= t


def _is_new_prompt(request: Request, part: Part) -> bool:
    if not request.token_times:
        return False
    return part.pos < request.prompt_end or part.tokens > max(part.outputs, 1)


def find_requests(session: Session) -> tuple[Table, list[Request]]:
    """The steps that count in order of time, and the requests that they serve, in order of their
    first steps. A log without sequences has requests only of batches with one sequence."""
    steps, _ = counted_steps(session)
    steps = steps.rows(np.argsort(steps["begin"], kind="stable"))
    found: list[Request] = []
    finder = RequestFinder(found.append, _add_step)
    calls = [*_steps(finder, session, steps), *_tokens(finder, session, steps)]
    calls += _marks(finder, session.marks)
    calls.sort(key=lambda call: call[:2])
    for _, _, call, arguments in calls:
        call(*arguments)
    finder.finish()
    found.sort(key=lambda request: (request.begin, request.ctx, request.seq))
    return steps, found


def _add_step(row: int, served: list[Request]) -> None:
    for request in served:
        request.steps.append(row)


_Call = tuple[int, int, Callable[..., None], tuple[Any, ...]]
"""of the finder: when, its rank among those of one time, and its arguments"""


def _steps(finder: RequestFinder, session: Session, steps: Table) -> Iterator[_Call]:
    parts = parts_of_steps(session, steps)
    columns = (steps[name].tolist() for name in ("step", "ctx", "begin", "end"))
    for row, (step, ctx, begin, end) in enumerate(zip(*columns, strict=True)):
        yield end, 0, finder.step, (row, ctx, begin, end, parts[step])


def parts_of_steps(session: Session, steps: Table) -> dict[int, list[Part]]:
    """What the batch of each of `steps` has of each sequence."""
    of = session.sequences
    found: dict[int, list[Part]] = {}
    columns = (of[name].tolist() for name in ("step", "seq", "pos", "tokens", "outputs"))
    for step, *part in zip(*columns, strict=True):
        found.setdefault(step, []).append(Part(*part))
    names = ("step", "n_seqs", "pos", "n_tokens", "n_outputs")
    rows = zip(*(steps[name].tolist() for name in names), strict=True)
    return {step: found.get(step) or parts_of([], *rest) for step, *rest in rows}


def parts_of(
    sequences: Iterable[tuple[int, int, int, int]], n_seqs: int, pos: int, tokens: int, outputs: int
) -> list[Part]:
    """The parts of a step: of its `sequences`, or, in a log without them, of its only one."""
    return [Part(*each) for each in sequences] or [Part(0, pos, tokens, outputs)] * (n_seqs == 1)


def _tokens(finder: RequestFinder, session: Session, steps: Table) -> Iterator[_Call]:
    row = {step: i for i, step in enumerate(steps["step"].tolist())}
    tokens = session.tokens
    columns = (tokens[name].tolist() for name in ("ctx", "seq", "step", "t", "dur"))
    for ctx, seq, step, t, dur in zip(*columns, strict=True):
        yield t + dur, 1, finder.token, (ctx, seq, row.get(step, -1), t + dur)


def _marks(finder: RequestFinder, marks: Table) -> Iterator[_Call]:
    columns = (marks[name].tolist() for name in ("seq", "begin", "end", "name"))
    for seq, begin, end, name in zip(*columns, strict=True):
        if seq >= 0 and end >= 0:
            yield end, 2, finder.span, (seq, begin, end, name)
