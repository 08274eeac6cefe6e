"""The memory that a session's log recorded."""

from __future__ import annotations

from collections import defaultdict

from converters.analyses.memory.report_of_context import Held
from llamacpp_instr.log.session import Session
from llamacpp_instr.memory.breakdown import read_breakdown
from llamacpp_instr.schema import Memory


def recorded_memory(session: Session) -> dict[int, list[Held]]:
    """The memory of each model's contexts, by model; equal contexts are combined."""
    events: dict[int, list[Memory]] = defaultdict(list)
    for event in session.memory:
        events[event.ctx].append(event)
    rss = max((event.rss for event in session.memory), default=0)
    found: dict[int, dict[tuple[object, ...], Held]] = defaultdict(dict)
    for ctx, of_context in events.items():
        context = session.contexts[ctx]
        tensors = session.tensors_of.get(context.model, [])
        first, last = (read_breakdown(context, of_context[i].buffers, tensors) for i in (0, -1))
        key = last.settings, tuple(first.uses), tuple(last.uses)
        held = found[context.model].setdefault(key, Held(None, last, first, [], rss))
        held.contexts.append(ctx)
    return {model: list(helds.values()) for model, helds in found.items()}
