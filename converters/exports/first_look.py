"""The part of a session that a viewer shows first: a prefill and the decodes after it."""

from __future__ import annotations

from collections.abc import Iterable

from llamacpp_instr.log.resolve import Resolver
from llamacpp_instr.log.schema import Event, Mark, StepEnd

DECODES = 3


def first_look(events: Iterable[tuple[int, Event]]) -> tuple[int, int] | None:
    """Begin and end of the part to show first, in ns; None if the log has no step that ended.

    The part has the first three decodes and the last prefill before them. Of a long prefill it has
    only the end, which takes at most as long as the decodes together. Steps inside a mark named
    `warm-up` are skipped. Reads no further than necessary.
    """
    refs = Resolver()
    warm_up: int | None = None
    prefill: tuple[int, int] | None = None
    decodes: list[tuple[int, int]] = []
    for line, event in events:
        refs.take(line, event)  # what is not whole is shown as far as possible
        if isinstance(event, Mark) and event.name == "warm-up" and event.phase == "begin":
            warm_up = event.mark
        elif isinstance(event, Mark) and event.mark == warm_up and event.phase == "end":
            warm_up, prefill, decodes = None, None, []
        elif isinstance(event, StepEnd) and (step := refs.step):
            span = step.event.t, max(event.t, step.event.t)
            if step.phase == "decode":
                decodes.append(span)
            elif not decodes:
                prefill = span
            if len(decodes) == DECODES and warm_up is None:
                break
    if prefill is None and not decodes:
        return None
    if not decodes:
        return prefill
    begin, end = decodes[0][0], decodes[-1][1]
    if prefill is not None:
        begin = max(prefill[0], min(begin, prefill[1]) - (end - begin))
    # without margins: the UI ignores a range that extends beyond the trace
    return begin, end
