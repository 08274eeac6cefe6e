"""Reads the parts of a rotated log as one log.

Invariant: several parts give the events that one file would have, except that each part has the
graphs that it uses again, with ids of their own (`schema`, Lifetimes). Steps and marks count
through all parts. The other ids begin anew in each part and are replaced:

    model      described alike and loaded at the same moment as one of an earlier part: that one
    context    with the settings of one of an earlier part: that one, if it goes on (`_Contexts`)
    token      its `index` counts on where its context does
    the rest   graphs, plans and computes continue to count
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, islice

import msgspec

from llamacpp_instr.errors import LogError
from llamacpp_instr.log.reader import EventReader, LogEnd, LogReader, read_events
from llamacpp_instr.log.runs import Run
from llamacpp_instr.log.source import file_size, open_log
from llamacpp_instr.progress import OnProgress
from llamacpp_instr.schema import (
    CONTEXTS_KEPT,
    EVENTS,
    Context,
    Event,
    Kv,
    Mark,
    Model,
    SessionEnd,
    SessionStart,
    StepBegin,
    Tensor,
    Token,
    event_name,
)


def read_run(run: Run, lenient: bool = False, on_progress: OnProgress | None = None) -> EventReader:
    """The events of a run as (line number, event), as `read_events` gives those of a log."""
    if len(run.paths) == 1:
        return read_events(run.paths[0], lenient, on_progress)
    return _Parts(run, lenient, on_progress)


_COUNTED = ("graph", "plan", "compute")
_KEYS = {
    event: tuple(key for key in ("model", "ctx", *_COUNTED) if key in event.__struct_fields__)
    for event in EVENTS
}
"""the ids of each event that a part numbers"""
_NEVER = 2**31 - 1
"""replaces the id of a context or a model that the part never gave"""
_LOOK_AHEAD = 1000
"""events in which the first step of a context is looked for"""


@dataclass
class _Known:
    """A context as far as it was read."""

    ctx: int
    settings: Context
    part: int
    """the latest that has it"""
    pos: int = 0
    """of its next token"""
    n_tokens: int = 0
    """sampled"""
    earlier: int = 0
    """of these, in earlier parts"""


class _Contexts:
    """Finds the context of an earlier part that a context of this part is.

    It has the same settings and model, and its first step goes on at the position of the latest
    one, or is of the same thread. Positions tell nothing if there are several sequences, or for
    embeddings. Of several such contexts, position counts first, then the thread, then latest use.
    """

    def __init__(self) -> None:
        self._known: dict[int, _Known] = {}
        """the one that was named last at the end, as `log.resolve` keeps them"""
        self._latest_of_thread: dict[int, int] = {}
        self._n = 0

    def named(self, ctx: int) -> _Known | None:
        known = self._known.pop(ctx, None)
        if known is not None:
            self._known[ctx] = known
        return known

    def find(self, event: Context, part: int, ahead: Sequence[Kv | StepBegin]) -> _Known | None:
        """`ahead` are the context's next events, up to its first step."""
        settings = _settings(event)
        found: list[tuple[bool, bool, _Known]] = []
        for known in self._known.values():
            if known.part == part or known.settings != settings:
                continue
            first = ahead[-1] if ahead and isinstance(ahead[-1], StepBegin) else None
            goes_on = first is not None and _position(known.pos, ahead[:-1]) == first.pos
            thread = first is not None and self._latest_of_thread.get(first.thread) == known.ctx
            if goes_on or thread or first is None or event.n_seq_max > 1 or event.embeddings:
                found.append((goes_on, thread, known))
        return max(reversed(found), key=lambda of: of[:2])[2] if found else None

    def add(self, event: Context, part: int) -> _Known:
        known = self._known[self._n] = _Known(self._n, _settings(event), part)
        self._n += 1
        if len(self._known) > CONTEXTS_KEPT:
            del self._known[next(iter(self._known))]
        return known

    def step(self, event: StepBegin) -> None:
        if known := self._known.get(event.ctx):
            known.pos = event.pos + event.n_tokens
            self._latest_of_thread[event.thread] = event.ctx

    def kv(self, event: Kv) -> None:
        if known := self._known.get(event.ctx):
            known.pos = _position(known.pos, [event])


def _position(pos: int, events: Sequence[Kv | StepBegin]) -> int:
    """The position after `pos`, once the cache was cleared or cut off."""
    for event in events:
        if isinstance(event, Kv) and event.op == "clear":
            pos = 0
        elif isinstance(event, Kv) and event.op == "seq_rm":
            pos = min(pos, max(event.p0 or 0, 0))
    return pos


def _settings(event: Context) -> Context:
    return msgspec.structs.replace(event, t=0, ctx=0)


@dataclass
class _Names:
    """The ids of one part: what each is in the whole."""

    models: dict[int, int] = field(default_factory=dict)
    contexts: dict[int, int] = field(default_factory=dict)
    repeated: set[int] = field(default_factory=set)
    """models that an earlier part has"""
    first: Counter[str] = field(default_factory=Counter)
    """what 0 is in the whole, for each key of _COUNTED"""


class _Parts:
    """Reads the parts one after the other; `path` is the one that is being read, for errors."""

    dialect = None

    def __init__(self, run: Run, lenient: bool, on_progress: OnProgress | None) -> None:
        self.path = run.paths[0]
        self.end: LogEnd | None = None
        self._run = run
        self._lenient = lenient
        self._on_progress = on_progress
        self._ends: list[LogEnd] = []
        self._models: dict[bytes, int] = {}
        """by all that describes one"""
        self._contexts = _Contexts()
        self._next: Counter[str] = Counter()
        self._begun: set[int] = set()
        """marks"""
        self._sum: SessionEnd | None = None

    def __iter__(self) -> Iterator[tuple[int, Event]]:
        paths = self._run.paths
        sizes = [_size(path) for path in paths]
        for i, path in enumerate(paths):
            self.path = path
            reader = LogReader(path, "skip" if self._lenient else "raise", self._progress(i, sizes))
            yield from self._of_part(i, iter(reader))
            assert reader.end is not None
            self._ends.append(reader.end)
        self.path = paths[0]
        self.end = self._joined_end()

    def _progress(self, i: int, sizes: list[int]) -> OnProgress | None:
        tell = self._on_progress
        if tell is None:
            return None
        before, total = sum(sizes[:i]), sum(sizes)
        return lambda done, _size: tell(before + done, total)

    def _joined_end(self) -> LogEnd:
        *earlier, last = self._ends
        told = [f"part {number} is missing" for number in self._run.missing]
        for path, end in zip(self._run.paths, earlier, strict=False):
            if end.state != "closed":
                told.append(f"{path} was not closed")
        skipped = sum(end.skipped for end in self._ends)
        return replace(last, skipped=skipped, parts=tuple(told))

    # --- one part ---

    def _of_part(
        self, part: int, events: Iterator[tuple[int, Event]]
    ) -> Iterator[tuple[int, Event]]:
        names = _Names(first=self._next.copy())
        waiting: deque[tuple[int, Event]] = deque()
        while True:
            item = waiting.popleft() if waiting else next(events, None)
            if item is None:
                return
            line, event = item
            if isinstance(event, Context):
                self._rename(line, event, "model", names)
                ahead = _ahead(event.ctx, waiting, events) if part else []
                wanted = self._context(event, names, part, ahead)
            else:
                wanted = self._take(line, event, names, part)
            if wanted:
                yield line, event

    def _take(self, line: int, event: Event, names: _Names, part: int) -> bool:
        """Gives the event the ids of the whole; returns whether the whole has it."""
        if isinstance(event, SessionStart):
            return part == 0
        if isinstance(event, SessionEnd):
            return self._session_end(event, part)
        if isinstance(event, Mark):
            return self._mark(event, part)
        if isinstance(event, Model):
            return self._model(event, names)
        if isinstance(event, Tensor) and event.model in names.repeated:
            return False
        for key in _KEYS[type(event)]:
            self._rename(line, event, key, names)
        if isinstance(event, StepBegin):
            self._contexts.step(event)
        elif isinstance(event, Kv):
            self._contexts.kv(event)
        elif isinstance(event, Token) and (known := self._contexts.named(event.ctx)):
            event.index += known.earlier
            known.n_tokens = event.index + 1
        return True

    def _rename(self, line: int, event: Event, key: str, names: _Names) -> None:
        number: int = getattr(event, key)
        if key in _COUNTED:
            new = number + names.first[key]
            self._next[key] = max(self._next[key], new + 1)
        else:
            new = (names.models if key == "model" else names.contexts).get(number, _NEVER)
            if new == _NEVER and not self._lenient:
                what = {"ctx": "context"}.get(key, key)
                raise LogError(
                    f"{event_name(event)}: {what} {number} was never given", self.path, line
                )
            if key == "ctx":
                self._contexts.named(new)
        setattr(event, key, new)

    def _model(self, event: Model, names: _Names) -> bool:
        described = msgspec.json.encode(msgspec.structs.replace(event, model=0))
        known = self._models.get(described)
        number = len(self._models) if known is None else known
        names.models[event.model] = event.model = self._models[described] = number
        if known is not None:
            names.repeated.add(number)
        return known is None

    def _context(
        self, event: Context, names: _Names, part: int, ahead: Sequence[Kv | StepBegin]
    ) -> bool:
        known = self._contexts.find(event, part, ahead)
        of = known or self._contexts.add(event, part)
        of.part, of.earlier = part, of.n_tokens
        names.contexts[event.ctx] = event.ctx = of.ctx
        return known is None

    def _mark(self, event: Mark, part: int) -> bool:
        """A rotation ends the open marks, and begins them again in the next part."""
        goes_on = part + 1 < len(self._run.marks) and event.mark in self._run.marks[part + 1]
        if event.phase == "end":
            return not (goes_on and event.mark in self._begun)
        repeated = event.mark in self._begun
        self._begun.add(event.mark)
        return not repeated

    def _session_end(self, event: SessionEnd, part: int) -> bool:
        """The last one has the totals of all parts."""
        if before := self._sum:
            event.events = dict(Counter(before.events) + Counter(event.events))
            for total in ("bytes", "dropped", "dropped_ops", "decode_ns", "overhead_ns"):
                setattr(event, total, getattr(before, total) + getattr(event, total))
        self._sum = event
        return part + 1 == len(self._run.paths)


def _ahead(
    ctx: int, waiting: deque[tuple[int, Event]], events: Iterator[tuple[int, Event]]
) -> list[Kv | StepBegin]:
    """The next events of a context, up to its first step; what is read for that waits."""
    found: list[Kv | StepBegin] = []
    more = islice(events, max(0, _LOOK_AHEAD - len(waiting)))
    for _, event in chain(list(waiting), _kept(more, waiting)):
        if isinstance(event, Kv | StepBegin) and event.ctx == ctx:
            found.append(event)
            if isinstance(event, StepBegin):
                break
    return found


def _kept(
    items: Iterable[tuple[int, Event]], waiting: deque[tuple[int, Event]]
) -> Iterator[tuple[int, Event]]:
    for item in items:
        waiting.append(item)
        yield item


def _size(path: str) -> int:
    with open_log(path, path) as file:
        return file_size(file)
