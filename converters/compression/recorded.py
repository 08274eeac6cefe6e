"""What a session's log tells of memory, and the model file that it was recorded with."""

from __future__ import annotations

from pathlib import Path

from converters.compression.held import Held
from llamacpp_instr.errors import UsageError
from llamacpp_instr.memory import read_breakdown
from llamacpp_instr.model_file import ModelFile, load_model_file
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


def recorded_file(session: Session, model: Model) -> ModelFile:
    """The model's file, where the log says that it was, or beside the log.

    Raises `UsageError`, which says why, when it is not there or holds other tensors.
    """
    file = load_model_file(_where(session, model))
    for tensor in session.tensors:
        if tensor.model != model.model:
            continue
        weight = file.by_name.get(tensor.name)
        ne = [n for n in (weight.ne if weight else ()) if n > 1]
        same = weight and weight.type.name == tensor.type.upper() and weight.n_bytes == tensor.bytes
        if not same or ne != [n for n in tensor.ne if n > 1]:
            raise UsageError(
                f"{file.path} is no longer the model of the log: {tensor.name} differs"
            )
    return file


def _where(session: Session, model: Model) -> Path:
    path = Path(model.path)
    beside = Path(session.path).parent / path.name
    return beside if not path.exists() and beside.is_file() else path
