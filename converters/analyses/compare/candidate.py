"""One side of a comparison: a model's weights, with its sessions, memory and errors."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from llamacpp_instr.base.errors import UsageError
from llamacpp_instr.converters.analyses.step_times import StepTimes
from llamacpp_instr.converters.analyses.stored_weights import (
    StoredModel,
    StoredTensor,
    stored_in_log,
)
from llamacpp_instr.lab.weights.error import Sums, WeightError
from llamacpp_instr.log.schema import Model
from llamacpp_instr.log.session import Session
from llamacpp_instr.model.file import ModelFile
from llamacpp_instr.recording.memory.breakdown import MemoryBreakdown, read_breakdown

SHOWN_PHASES = ("decode", "prefill", "encode")
"""in the order in which they are shown: users wait for decodes most of the time"""


@dataclass(frozen=True)
class Candidate:
    """A model that is compared. Fields that are None or empty are unknown, and are not shown."""

    name: str
    """short name for tables"""
    model: StoredModel
    file: ModelFile | None = None
    sessions: Sequence[Session] = ()
    """sessions of this model"""
    memory: MemoryBreakdown | None = None
    """measured if there are sessions, else predicted"""
    errors: Mapping[str, WeightError] = field(default_factory=dict)
    """errors of the weights against the reference, by name"""
    is_reference: bool = False
    """this is the reference, so it has no errors"""

    @cached_property
    def weights(self) -> Mapping[str, StoredTensor]:
        return {tensor.name: tensor for tensor in self.model.tensors}

    @cached_property
    def times(self) -> list[StepTimes]:
        """The times of its steps, by session, in order of time."""
        by_time = sorted(self.sessions, key=lambda session: session.start.wall)
        return [StepTimes(session) for session in by_time]

    def sqnr_db(self, names: Iterable[str]) -> float | None:
        """SQNR of these weights together, in dB: infinite if they equal the reference, None if it
        was not computed."""
        sums = sum((self.errors[name].sums for name in names if name in self.errors), Sums())
        return math.inf if self.is_reference else sums.sqnr_db if sums.n else None

    def phases(self) -> set[str]:
        """The phases that have steps in every session."""
        return set.intersection(*(of.phases for of in self.times)) if self.times else set()

    def tokens_per_second(self, phase: str) -> float | None:
        """The median of the sessions' medians; None without steps of the phase."""
        rates = [rate for of in self.times if (rate := of.tokens_per_second(phase)) is not None]
        return statistics.median(rates) if rates else None


def check_recorded(session: Session, model: StoredModel) -> None:
    """Raises UsageError, which names a tensor, unless the session ran the model."""
    there = {tensor.name: tensor for tensor in model.tensors}
    for tensor in stored_in_log(session, recorded_model(session), None).tensors:
        same = there.get(tensor.name)
        if same is None or (same.type, same.n_bytes) != (tensor.type, tensor.n_bytes):
            has = same.type if same else "missing"
            raise UsageError(
                f"{session.path} recorded another model than {model.name}: {tensor.name} is "
                f"{tensor.type} in the log, {has} in the file"
            )


def recorded_model(session: Session) -> Model:
    """The only model that a session ran. Raises UsageError if it ran several, or none."""
    if len(session.models) != 1:
        raise UsageError(
            f"{session.path} recorded {len(session.models)} models; a comparison needs a log of one"
        )
    return next(iter(session.models.values()))


def recorded_memory(session: Session) -> MemoryBreakdown | None:
    """The recorded memory of the session's last context; None if the log has none."""
    if not session.memory:
        return None
    last = session.memory[-1]
    context = session.contexts[last.ctx]
    return read_breakdown(context, last.buffers, session.tensors_of.get(context.model, []))


def short_names(paths: Sequence[Path], otherwise: Sequence[Path]) -> list[str]:
    """A short name for each model: its file name without the common prefix, up to a hyphen. Equal
    names are replaced by those of the files in `otherwise`, such as the logs."""
    names = [path.stem for path in paths]
    if len(set(names)) < len(names):
        names = [path.stem for path in otherwise]
    if len(set(names)) < len(names):
        names = [str(path) for path in otherwise]
    parts = [name.split("-") for name in names]
    while all(len(of) > 1 for of in parts) and len({of[0] for of in parts}) == 1:
        parts = [of[1:] for of in parts]
    return ["-".join(of) for of in parts]


def bits_per_weight(tensors: Sequence[StoredTensor]) -> float:
    """Bits per weight of all tensors together; 0 if there are none."""
    elements = sum(tensor.n_elements for tensor in tensors)
    return 8 * sum(tensor.n_bytes for tensor in tensors) / elements if elements else 0.0
