"""The memory of a model as llama.cpp predicts it, and that of a session next to the prediction for
its settings."""

from __future__ import annotations

from dataclasses import replace

from llamacpp_instr.base.errors import NativeError, UsageError
from llamacpp_instr.base.machine import machine_memory
from llamacpp_instr.converters.analyses.memory import (
    ContextMemory,
    StoredModel,
    recorded_file,
    recorded_memory,
    stored_in_file,
    stored_in_log,
)
from llamacpp_instr.llama.devices import ANYWHERE, Placement
from llamacpp_instr.llama.engine import ContextOptions
from llamacpp_instr.log.session import Session
from llamacpp_instr.model.file import ModelFile, load_model_file
from llamacpp_instr.recording.memory.plan import (
    LoadError,
    most_layers,
    plan_memory,
    plan_memory_again,
)

Found = tuple[StoredModel, list[ContextMemory]]
"""the weights of a model, and the memory of its contexts"""


def memory_of_model(
    name: str,
    options: ContextOptions,
    mmap: bool,
    room: int | None,
    placement: Placement = ANYWHERE,
) -> Found:
    """The memory of a context with these options, which has to fit into `room` bytes, by default
    those of the machine, and into the devices. If it cannot be predicted, a note says why. Raises
    UsageError for wrong options, devices that do not exist, and a file that is not a model."""
    options.check()
    model = load_model_file(name)
    try:
        placement.check()
        plan, advice = plan_memory(model, options, mmap, placement), ""
        if plan.too_large():
            layers = most_layers(model, options, mmap, placement)
            advice = f" With --gpu-layers {layers} it fits."
        context = ContextMemory(predicted=plan, room=room or machine_memory(), advice=advice)
    except (NativeError, LoadError) as error:
        reason = f"KV cache and compute buffers cannot be predicted: {error}."
        context = ContextMemory(notes=[reason])
    return stored_in_file(model), [context]


def memory_of_session(session: Session) -> list[Found]:
    """The same for each model of a session, with the measured memory of its contexts. Raises
    UsageError for a session without tensors."""
    if not session.tensors:
        raise UsageError(f"{session.path} contains no tensors of a model")
    found: list[Found] = []
    memory = recorded_memory(session)
    for number, model in session.models.items():
        file, why = None, ""
        try:
            file = recorded_file(session, model)
        except UsageError as error:
            why = f"Nothing was predicted: {error}."
        contexts = [_predicted(context, file, why) for context in memory.get(number, [])]
        found.append((stored_in_log(session, model, file), contexts))
    return found


def _predicted(context: ContextMemory, file: ModelFile | None, why_not: str) -> ContextMemory:
    """`context` with the prediction for the measured settings, or with why there is none."""
    if file is None or context.measured is None:
        return replace(context, notes=[*context.notes, why_not])
    try:
        return replace(context, predicted=plan_memory_again(file, context.measured))
    except (NativeError, UsageError) as error:
        return replace(context, notes=[*context.notes, f"Nothing was predicted: {error}."])
