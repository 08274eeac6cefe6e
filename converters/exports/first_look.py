"""The part of a session that says most at first sight: prefill, then the first decodes."""

from __future__ import annotations

from collections.abc import Iterable

from llamacpp_instr.schema import Event, Mark, StepBegin, StepEnd

DECODES = 3


def first_look(events: Iterable[tuple[int, Event]]) -> tuple[int, int] | None:
    """Begin and end of what to show first, in ns; None when the log has no step that ended.

    That is the last prefill before the first decodes, and three of these. Of a prefill that is
    longer than they are together only so much of its end is in it. Steps of a warm-up, a mark of
    that name, are passed over. Reads no further than it has to.
    """
    begun: dict[int, StepBegin] = {}
    warm_up: int | None = None
    prefill: tuple[int, int] | None = None
    decodes: list[tuple[int, int]] = []
    for _, event in events:
        if isinstance(event, Mark) and event.name == "warm-up" and event.phase == "begin":
            warm_up = event.mark
        elif isinstance(event, Mark) and event.mark == warm_up and event.phase == "end":
            warm_up, prefill, decodes = None, None, []
        elif isinstance(event, StepBegin):
            begun[event.step] = event
        elif isinstance(event, StepEnd) and event.step in begun:
            step = begun.pop(event.step)
            span = step.t, max(event.t, step.t)
            if step.name == "decode":
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
    # no margins: the UI ignores a time that reaches beyond the trace
    return begin, end
