"""The requests of a session: the steps and tokens that served each, from arrival to last token.

A request is a prompt and the tokens that follow it in one sequence of a context. The log does not
say where a request begins, so a new one begins with the first tokens of a sequence, and later when

- the span ends that the application marked for the request (`Mark.seq`), or
- after a token was sampled, tokens come that are a prompt (`log.batches`), or
- a token is sampled from logits that gave one already: an application that finds a whole prompt in
  the cache samples at once.

A marked span belongs to the first request of its sequence that begins in it and has none. A slot
that says which request it took has that one until its mark ends.

Its prompt ends with its first token. The position of its first prompt token is the number of tokens
that it reused. If the application does its own sampling, the log has no tokens: a token then counts
when the step that computed its logits ends. That holds until the first token of a context comes.

Invariant: a RequestFinder keeps at most the open request of each sequence, KEPT more of each that
may yet turn out to be a mark's, and SPANS spans, of CONTEXTS_KEPT contexts.
"""

from __future__ import annotations

import heapq
from array import array
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from operator import itemgetter
from typing import Any, Literal, TypeVar

import msgspec
import numpy as np
from numpy.typing import NDArray

from llamacpp_instr.log.batches import Part
from llamacpp_instr.log.schema import CONTEXTS_KEPT, LATEST, Context, Note
from llamacpp_instr.log.session import Session, Table
from llamacpp_instr.log.steps import counted_steps

Int64 = NDArray[np.int64]

KEPT = 64
"""ended requests of a sequence that wait for the end of their mark"""
OPEN = LATEST
"""the end of a mark that has not ended"""
SPANS = 1024
"""ended marks that wait for the end of the step in which their request begins"""


class Served(msgspec.Struct, frozen=True):
    """What llama-server notes when a request ends, even one that left before a slot took it."""

    mark: int
    """the span from its arrival in the server's queue"""
    task: int
    slot: int
    """both -1 if it had no slot"""
    cached: int
    """prompt tokens that it found in the cache"""
    computed: int
    """prompt tokens that it computed"""
    generated: int
    drafted: int
    accepted: int
    verified: int
    """steps that verified drafted tokens"""
    stream: bool
    truncated: bool
    stop: Literal["none", "eos", "word", "limit", "done"]
    path: str = ""
    """of the address that the client requested; empty if no tokens were asked for"""
    traceparent: str = ""
    """of the client, as W3C Trace Context has it; empty without one"""

    @property
    def end(self) -> str:
        """Why it ended."""
        names = {"none": "cancelled", "eos": "end token", "word": "stop word"}
        return names.get(self.stop, self.stop)

    @property
    def operation(self) -> str:
        """Its `gen_ai.operation.name` in OpenTelemetry's conventions."""
        if self.stop == "done" or (self.slot < 0 and not self.path):
            return "embeddings"
        chats = {"chat", "messages", "responses"} & set(self.path.split("/"))
        return "chat" if chats else "text_completion"


class Taken(msgspec.Struct, frozen=True):
    """What llama-server notes when a slot takes a request: which prompt tokens it already had."""

    mark: int
    """the span from its arrival in the server's queue"""
    slot: int
    prompt: int
    """all its tokens"""
    cached: int
    """that the slot reuses"""
    here: int
    """at the beginning of what the slot held"""
    elsewhere: int
    """at the beginning of what another slot holds, the most"""
    before: int
    """at the beginning of what some slot held, the most; in whole blocks"""
    moved: int
    """behind the cached ones, that some slot held at any position; in whole blocks"""
    reuse: bool
    """whether the request allows it to reuse any"""
    task: int = -1


class Encoded(msgspec.Struct, frozen=True):
    """What the encoder of images and audio notes: the parts that it turns into embeddings."""

    mark: int
    """the span in which it did"""
    kind: Literal["image", "audio"]
    parts: int
    width: int
    """of a part, in pixels, or in frames of audio"""
    height: int
    tokens: int
    """embeddings of all parts"""
    begin: int = -1
    end: int = -1
    """of the span, in ns"""


COPY_OPS = ("save", "load")


class Copied(msgspec.Struct, frozen=True):
    """What llama-server notes when a prompt moved between a slot and its copies in RAM."""

    op: Literal["save", "load"]
    slot: int
    tokens: int
    bytes: int
    """of the copy: its state, and the checkpoints"""
    dur: int
    """of the move, in ns"""
    copies: int
    """after it"""
    held: int
    """bytes of all copies after it"""
    limit: int
    """maximum bytes of all copies, 0 for no limit"""


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
    """when the mark ended, or the last token was ready"""
    reused: int = 0
    """prompt tokens whose cells were in the cache"""
    prompt: int = 0
    """prompt tokens that were computed"""
    first_step: int = -1
    last_step: int = -1
    """the latest so far; both as the RequestFinder was given them. A request that found its whole
    prompt in the cache begins with the step of the logits that it sampled"""
    token_times: array[int] = field(default_factory=lambda: array("q"))
    """when each output token was ready"""
    steps: list[int] = field(default_factory=list)
    """rows of the table of steps, in order; only `find_requests` fills it"""
    begin: int = 0
    """of its first step or encoding, or of the sampling of its first token if that needs no step"""
    length: int = 0
    """position after its last token that was computed"""
    left: int = 0
    """outputs of its last step that a token may be sampled from"""
    marked_end: int = -1
    """when the mark ended, -1 without one, OPEN before"""
    served: Served | None = None
    """what llama-server noted at its end; `find_requests` and the live view fill both"""
    taken: Taken | None = None
    """when a slot took it"""
    encoded: list[Encoded] = field(default_factory=list)
    """its images and audio; only `find_requests` fills it"""

    @property
    def first(self) -> int:
        """When it arrived, or began if the arrival is unknown."""
        return self.begin if self.arrival < 0 else self.arrival

    @property
    def queued(self) -> int | None:
        """From its arrival until it began, None if the arrival is unknown."""
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


@dataclass
class _Span:
    seq: int
    begin: int
    end: int
    name: str
    taken: set[int] = field(default_factory=set)
    """contexts that have a request with this mark"""

    def fits(self, request: Request) -> bool:
        if request.marked_end == OPEN:
            return request.arrival == self.begin
        return request.arrival < 0 and self.begin <= request.begin < self.end

    def give(self, request: Request) -> None:
        self.taken.add(request.ctx)
        request.name, request.arrival, request.marked_end = self.name, self.begin, self.end
        request.end = max(request.end, self.end)


@dataclass
class _Stream:
    """The requests of one sequence of a context."""

    current: Request | None = None
    unnamed: deque[Request] = field(default_factory=deque)
    """ended ones without a mark"""

    def requests(self) -> Iterator[Request]:
        yield from self.unnamed
        if self.current is not None:
            yield self.current


@dataclass
class _Context:
    streams: dict[int, _Stream] = field(default_factory=dict)
    samples: bool = False
    """whether the log has its tokens, as far as it was read"""

    def goes_on(self, request: Request, part: Part) -> bool:
        """Whether more of a prompt comes after batches of it that had outputs."""
        if request.marked_end == OPEN:
            return True
        return not self.samples and part.pos == request.length == request.reused + request.prompt


class RequestFinder:
    """Calls `found` with each request that has ended. Steps, tokens and marks come as they end."""

    def __init__(self, found: Callable[[Request], object]) -> None:
        self._found = found
        self._contexts: dict[int, _Context] = {}
        self._spans: deque[_Span] = deque(maxlen=SPANS)
        self._taken: dict[int, Request] = {}
        """of slots, before their first steps"""

    def take(self, taken: Taken, arrival: int, name: str) -> Request:
        """A slot took the request of a mark that began at `arrival`; its steps follow."""
        request = Request(-1, taken.slot, name, arrival, arrival, begin=arrival, marked_end=OPEN)
        request.taken, request.reused = taken, taken.cached
        self._taken[taken.slot] = request
        return request

    def step(
        self, number: int, ctx: int, begin: int, end: int, parts: Sequence[Part], target: int = -1
    ) -> list[Request]:
        """A step that counts has ended; returns the requests that it served. One that drafts for
        the context `target` serves the latest requests there."""
        if target >= 0:
            streams = self._context(target).streams
            found = (streams[part.seq].current for part in parts if part.seq in streams)
            return [request for request in found if request is not None]
        context = self._context(ctx)
        served: list[Request] = []
        for part in parts:
            stream = context.streams.setdefault(part.seq, _Stream())
            request, taken = stream.current, self._taken.pop(part.seq, None)
            if (
                taken is not None
                or request is None
                or (request.arrival >= 0 and request.marked_end <= begin)
                or (part.prompt and request.token_times and not context.goes_on(request, part))
            ):
                request = taken or Request(ctx, part.seq)
                request.ctx, request.begin, request.first_step = ctx, begin, number
                request.reused = max(part.pos, 0)
                self._begin(stream, request)
            request.last_step = number
            request.length = part.pos + part.tokens
            request.left = 1 if part.prompt else max(part.outputs, 1)
            request.prompt += part.tokens * part.prompt
            request.end = max(request.end, end)
            if not context.samples and part.outputs:
                request.token_times = array("q", () if part.prompt else request.token_times)
                request.token_times.append(end)
            served.append(request)
        return served

    def token(self, ctx: int, seq: int, step: int, t: int, dur: int) -> Request | None:
        """A token of the step was sampled from `t` on; returns its sequence's latest request."""
        context = self._context(ctx)
        if not context.samples:
            context.samples = True
            for of in context.streams.values():
                for earlier in of.requests():
                    earlier.token_times = array("q")
        stream = context.streams.get(max(seq, 0))
        if seq >= 0 and not (stream and stream.current and stream.current.last_step == step):
            stream = self._copied(context, seq, step, t) or stream
        if stream and (request := stream.current) and request.last_step == step:
            if not request.left and seq >= 0 and request.marked_end != OPEN:
                again = Request(ctx, seq, reused=request.length, first_step=step, last_step=step)
                again.begin, again.length, again.left = t, request.length, 1
                request = self._begin(stream, again)
            request.left -= 1
            request.token_times.append(t + dur)
            request.end = max(request.end, t + dur)
        return stream.current if stream else None

    def _copied(self, context: _Context, seq: int, step: int, t: int) -> _Stream | None:
        """A token of a sequence without tokens in the step: the sequence is a copy of one that has
        some, such as that of another answer to the same prompt."""
        of = (stream.current for stream in context.streams.values())
        other = next((of for of in of if of and of.last_step == step), None)
        if step < 0 or other is None:
            return None
        stream = context.streams.setdefault(seq, _Stream())
        length = other.length
        request = Request(other.ctx, seq, reused=length, begin=t, length=length, left=1)
        request.first_step = request.last_step = step
        self._begin(stream, request)
        return stream

    def samples(self, ctx: int) -> bool:
        """Whether the log has tokens of a context, as far as it was read."""
        return ctx in self._contexts and self._contexts[ctx].samples

    def span(self, seq: int, begin: int, end: int, name: str) -> None:
        """A mark of a sequence has ended."""
        span = _Span(seq, begin, end, name)
        self._spans.append(span)
        if (taken := self._taken.get(seq)) is not None and span.fits(taken):
            span.give(self._taken.pop(seq))
        for context in self._contexts.values():
            stream = context.streams.get(seq, _Stream())
            request = next((r for r in stream.requests() if span.fits(r)), None)
            if request is not None:
                span.give(request)
                if request is not stream.current:
                    stream.unnamed.remove(request)
                    self._found(request)

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
        for stream in self._contexts.pop(ctx).streams.values():
            for request in stream.requests():
                self._found(request)

    def _begin(self, stream: _Stream, request: Request) -> Request:
        """The request, which is now the latest of its sequence."""
        if stream.current is not None:
            if stream.current.arrival >= 0:
                self._found(stream.current)
            else:
                stream.unnamed.append(stream.current)
                if len(stream.unnamed) > KEPT:
                    self._found(stream.unnamed.popleft())
        stream.current = request
        for span in self._spans:
            fits = span.seq == request.seq and request.ctx not in span.taken
            if fits and span.fits(request):
                span.give(request)
                break
        return request


def find_requests(session: Session) -> tuple[Table, list[Request]]:
    """The steps that count in order of time, and the requests that they serve, in order of their
    first steps. A log without sequences has requests only of batches with one sequence."""
    steps, _ = counted_steps(session)
    steps = steps.rows(np.argsort(steps["begin"], kind="stable"))
    found: list[Request] = []
    finder = RequestFinder(found.append)

    def step(row: int, ctx: int, begin: int, end: int, parts: list[Part]) -> None:
        target = session.contexts[ctx].target
        for request in finder.step(row, ctx, begin, end, parts, target):
            request.steps.append(row)

    parts = parts_of_steps(session, steps)
    row_of = {number: row for row, number in enumerate(parts)}
    # for each call: when, its rank among those of one time, and what the finder gets
    of_steps = _by_time(steps, steps["end"], "step", "ctx", "begin")
    tokens, marks = session.tokens, session.marks
    served, taken = _noted(session, "request", Served), _noted(session, "slot", Taken)
    slot = {mark: of.slot for mark, of in taken.items()}
    of_tokens = _by_time(tokens, tokens["t"] + tokens["dur"], "ctx", "seq", "step", "t", "dur")
    of_marks = _by_time(marks, marks["end"], "mark", "seq", "begin", "name")
    calls: tuple[Iterator[tuple[int, int, Callable[..., object], tuple[Any, ...]]], ...] = (
        ((end, 0, step, (row, ctx, begin, end, parts[number]))
         for end, row, number, ctx, begin in of_steps),
        ((end, 1, finder.token, (ctx, seq, row_of.get(number, -1), t, dur))
         for end, _, ctx, seq, number, t, dur in of_tokens),
        # a server that ends drops what its slots have, and the marks then end without a sequence
        ((end, 2, finder.span, (max(seq, slot.get(mark, -1)), begin, end, name))
         for end, _, mark, seq, begin, name in of_marks
         if max(seq, slot.get(mark, -1)) >= 0 and end >= 0),
    )  # fmt: skip
    for _, _, call, arguments in heapq.merge(*calls, key=itemgetter(0, 1)):
        call(*arguments)
    finder.finish()
    _add_encoded(session, steps, found)
    found.sort(key=lambda request: (request.begin, request.ctx, request.seq))
    arrived = {
        (begin, max(seq, slot.get(mark, -1))): mark
        for mark, begin, seq in marks.tuples("mark", "begin", "seq")
    }
    for request in found:
        mark = arrived.get((request.arrival, request.seq), -1)
        request.taken = taken.get(mark)
        request.served = of if (of := served.get(mark)) and of.slot >= 0 else None
    return steps, found


Noted = TypeVar("Noted", Served, Taken, Encoded)


def _noted(session: Session, name: str, kind: type[Noted]) -> dict[int, Noted]:
    """What llama-server noted under this name, by the mark of the request."""
    found = (read_note(note) for note in session.notes if note.name == name)
    return {of.mark: of for of in found if isinstance(of, kind)}


NOTES: dict[str, type[Served | Taken | Encoded | Copied]] = {
    "request": Served, "slot": Taken, "encode": Encoded, "prompt-copy": Copied,
}  # fmt: skip


def read_note(note: Note) -> Served | Taken | Encoded | Copied | None:
    """What llama-server notes about a request or a prompt; None for another note."""
    kind = NOTES.get(note.name)
    with suppress(msgspec.ValidationError):  # another application's
        return None if kind is None else msgspec.convert(note.data, kind)
    return None


def left_requests(session: Session) -> list[Request]:
    """The requests of a llama-server that left before a slot took them, in order of their end.
    They have no context and no sequence, and begin when they end; logs of older recorders lack what
    was noted about them (`Request.served`)."""
    if not (taken := _noted(session, "slot", Taken)):
        return []  # another application's marks need no sequence
    marks, served = session.marks, _noted(session, "request", Served)
    none = (marks["seq"] < 0) & ~np.isin(marks["mark"], list(taken))
    left = marks.rows((marks["name"] == "request") & none & (marks["end"] >= 0))
    order = np.argsort(left["end"], kind="stable")
    return [
        left_request(begin, end, served.get(mark))
        for mark, begin, end in left.rows(order).tuples("mark", "begin", "end")
    ]


def left_request(arrival: int, end: int, served: Served | None) -> Request:
    """A request that waited from `arrival` to `end`, both in ns, and got no slot."""
    return Request(-1, -1, "request", arrival, end, begin=end, marked_end=end, served=served)


def server_context(contexts: Iterable[Context]) -> Context | None:
    """The context whose sequences are a server's slots: the latest that drafts nothing. `contexts`
    are in the order in which they came."""
    return next((of for of in reversed(list(contexts)) if of.target < 0), None)


def prompt_copies(session: Session) -> list[Copied]:
    """The moves of prompts between slots and copies in RAM, in order."""
    found = map(read_note, session.notes)
    return [of for of in found if isinstance(of, Copied)]


def step_tokens(session: Session, steps: Table) -> tuple[Int64, Int64]:
    """The prompt tokens and the output tokens of each of `steps`, both (steps,). An output token is
    one that was sampled from the step's logits; if the application does its own sampling, every
    output counts, but only one for a prompt. Tokens of a draft model are neither."""
    row_of = {step: row for row, step in enumerate(steps["step"].tolist())}
    draft = steps["phase"] == "draft"
    prompt = np.where(steps["phase"] == "prefill", steps["n_tokens"], 0)
    outputs = np.where(steps["phase"] == "decode", steps["n_outputs"], prompt > 0)
    for step, parts in parts_of_steps(session, steps).items():
        if parts:
            prompt[row_of[step]] = sum(of.tokens for of in parts if of.prompt)
            of_parts = (min(of.outputs, 1) if of.prompt else of.outputs for of in parts)
            outputs[row_of[step]] = sum(of_parts)
    samples = np.isin(steps["ctx"], session.tokens["ctx"])
    sampled = np.zeros(len(steps), np.int64)
    rows = [row_of[step] for step in session.tokens["step"].tolist() if step in row_of]
    np.add.at(sampled, rows, 1)
    prompt[draft] = 0
    return prompt, np.where(draft, 0, np.where(samples, sampled, outputs))


def _add_encoded(session: Session, steps: Table, requests: Sequence[Request]) -> None:
    """Give each request what was encoded for it: the next step of the same thread computes that."""
    spans = {mark: of for mark, *of in session.marks.tuples("mark", "thread", "begin", "end")}
    row_of = {number: row for row, number in enumerate(steps["step"].tolist())}
    serves = {row: request for request in requests for row in request.steps}
    for noted in _noted(session, "encode", Encoded).values():
        thread, begin, end = spans.get(noted.mark, (-1, -1, -1))
        later = (session.steps["thread"] == thread) & (session.steps["begin"] >= end)
        if end < 0 or not later.any():
            continue
        first = np.where(later, session.steps["begin"], LATEST).argmin()
        request = serves.get(row_of.get(int(session.steps["step"][first]), -1))
        if request is not None:
            request.encoded.append(msgspec.structs.replace(noted, begin=begin, end=end))
            request.begin = min(request.begin, begin)


def parts_of_steps(session: Session, steps: Table) -> dict[int, list[Part]]:
    """What the batch of each of `steps` has of each sequence."""
    found: dict[int, list[Part]] = {step: [] for step in steps["step"].tolist()}
    for step, *part in session.sequences.tuples(*session.sequences.columns):
        if step in found:
            found[step].append(Part._make(part))
    return found


def _by_time(table: Table, when: Int64, *names: str) -> Iterator[Any]:
    """When, row number and these columns of each row, in the order of time."""
    order = np.argsort(when, kind="stable")
    columns = (table[name][order].tolist() for name in names)
    return zip(when[order].tolist(), order.tolist(), *columns, strict=True)
