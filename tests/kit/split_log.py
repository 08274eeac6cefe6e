"""Splits a made log into the parts that a recorder would have written: `instr exec --rotate`.

A part begins at a step. A step that began earlier stays in the previous part, with all that belongs
to it. Each part describes again what it names: models and contexts with their numbers, graphs and
plans with new ones, in the order in which they are first named; open marks end and begin again.
"""

from __future__ import annotations

from collections import Counter
from random import Random
from typing import Any, TypeVar

from msgspec.structs import replace

from llamacpp_instr.log import schema as s
from tests.kit.made_log import encode

E = TypeVar("E", bound=s.Event)


def split_log(events: list[s.Event], n_parts: int, random: Random) -> list[list[s.Event]]:
    """The events of at most `n_parts` logs. One part has the same events, numbered as above."""
    steps = [i for i, event in enumerate(events) if isinstance(event, s.StepBegin)]
    cuts = set(random.sample(steps, min(n_parts - 1, len(steps))))
    given = _Given(events)
    parts = [_Part(given, 1)]
    of_step: dict[int, _Part] = {}
    latest: dict[int, _Part] = {}  # by context: where its step is
    marks: dict[int, s.Mark] = {}  # that are open
    for i, event in enumerate(events[1:-1], start=1):
        if i in cuts:
            for mark in marks.values():
                parts[-1].events.append(replace(mark, t=event.t, phase="end"))
            parts.append(_Part(given, len(parts) + 1))
            parts[-1].events += [replace(mark, t=event.t) for mark in marks.values()]
        if isinstance(event, s.StepBegin):
            of_step[event.step] = latest[event.ctx] = parts[-1]
        elif isinstance(event, s.Mark) and event.phase == "begin":
            marks[event.mark] = event
        elif isinstance(event, s.Mark) and event.phase == "end":
            del marks[event.mark]
        if (step := given.step_of(event)) is not None:
            of_step[step].take(event)
        else:
            latest.get(given.ctx_of(event), parts[-1]).take(event)
    return [part.closed(events[-1], last=part is parts[-1]) for part in parts]


class _Given:
    """What a part may have to describe again."""

    def __init__(self, events: list[s.Event]) -> None:
        self.start = events[0]
        self.model = [e for e in events if isinstance(e, s.Model | s.Tensor)]
        self.contexts = {e.ctx: e for e in events if isinstance(e, s.Context)}
        self.memory = {e.ctx: e for e in reversed(events) if isinstance(e, s.Memory)}
        self.graphs = {e.graph: e for e in events if isinstance(e, s.Graph)}
        self.plans = {e.plan: e for e in events if isinstance(e, s.Plan)}
        self.computes = {e.compute: e for e in events if isinstance(e, s.Compute)}
        self.counts: Counter[str] = Counter()

    def step_of(self, event: s.Event) -> int | None:
        if isinstance(event, s.Rpc):  # of several
            return None
        compute = self.computes.get(getattr(event, "compute", -1))
        step: int = compute.step if compute else getattr(event, "step", -1)
        return step if step >= 0 else None

    def ctx_of(self, event: s.Event) -> int:
        graph = self.graphs[event.graph] if isinstance(event, s.Plan) else event
        return getattr(graph, "ctx", -1)


class _Part:
    def __init__(self, given: _Given, number: int) -> None:
        assert isinstance(given.start, s.SessionStart)
        self.given = given
        self.events: list[s.Event] = [replace(given.start, part=number)]
        self.ids: dict[tuple[str, int], int] = {}
        self.described = False
        self.first_token: dict[int, int] = {}
        self.decode_ns = 0

    def take(self, event: s.Event) -> None:
        """Appends the event with the part's numbers, after what it names."""
        if isinstance(event, s.Model | s.Tensor):
            self._describe_model()
            return
        if isinstance(event, s.Context) or event is self.given.memory.get(self.given.ctx_of(event)):
            return  # come when the context is first used
        new: dict[str, Any] = {}
        for key in ("ctx", "graph", "plan"):
            if hasattr(event, key):
                new[key] = self._id(key, getattr(event, key), event)
        if isinstance(event, s.Token):
            first = self.first_token.setdefault(event.ctx, event.index)
            new["index"] = event.index - first
        self.events.append(replace(event, **new))

    def _id(self, key: str, number: int, event: s.Event) -> int:
        if key == "ctx":
            return self._context(number)
        described = {"graph": self.given.graphs, "plan": self.given.plans}.get(key, {}).get(number)
        if (key, number) not in self.ids and described is not None and described is not event:
            self.take(described)
        if (key, number) not in self.ids:
            self.ids[key, number] = self.given.counts[key]
            self.given.counts[key] += 1
        return self.ids[key, number]

    def _context(self, ctx: int) -> int:
        if ("ctx", ctx) not in self.ids:
            self._describe_model()
            self.ids["ctx", ctx] = ctx
            self.events += [self.given.contexts[ctx], self.given.memory[ctx]]
        return ctx

    def _describe_model(self) -> None:
        if not self.described:
            self.events += self.given.model
            self.described = True

    def closed(self, end: s.Event, last: bool) -> list[s.Event]:
        assert isinstance(end, s.SessionEnd)
        begins = {e.step: e.t for e in self.events if isinstance(e, s.StepBegin)}
        ends = [e for e in self.events if isinstance(e, s.StepEnd)]
        own_end = replace(
            end,
            reason="closed" if last else "rotated",
            events=dict(Counter(map(s.event_name, self.events))),
            bytes=len(encode(self.events)),
            decode_ns=sum(e.t - begins[e.step] for e in ends),
        )
        return [*self.events, own_end]
