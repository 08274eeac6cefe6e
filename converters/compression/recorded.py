"""What a session's log tells of memory."""

from __future__ import annotations

from converters.compression.held import Held
from llamacpp_instr.memory import read_breakdown
from llamacpp_instr.schema import Model
from llamacpp_instr.session import Session


def recorded_memory(session: Session, model: Model) -> list[Held]:
    """The memory of the model's contexts; those that are alike are one."""
    tensors = [tensor for tensor in session.tensors if tensor.model == model.model]
    found: dict[tuple[object, ...], Held] = {}
    for ctx, context in session.contexts.items():
        events = [memory for memory in session.memory if memory.ctx == ctx]
        if context.model != model.model or not events:
            continue
        first, last = (read_breakdown(context, events[i].buffers, tensors) for i in (0, -1))
        key = last.settings, tuple(first.uses), tuple(last.uses)
        rss = max(memory.rss for memory in session.memory)
        held = found.setdefault(key, Held(None, last, first, [], rss))
        held.contexts.append(ctx)
    return list(found.values())
