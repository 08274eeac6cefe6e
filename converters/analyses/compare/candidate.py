"""One side of a comparison: a model's weights, and what is known of them besides."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from converters.analyses.step_times import StepTimes
from converters.analyses.stored_weights import StoredModel, StoredTensor, stored_in_log
from llamacpp_instr.errors import UsageError
from llamacpp_instr.log.session import Session
from llamacpp_instr.memory.breakdown import MemoryBreakdown, read_breakdown
from llamacpp_instr.model.file import ModelFile
from llamacpp_instr.schema import Model
from llamacpp_instr.weights.error import Sums, WeightError


@dataclass(frozen=True)
class Candidate:
    """A model that is compared. What is not known is None or empty, and is not shown."""

    name: str
    """short, as tables call it"""
    model: StoredModel
    file: ModelFile | None = None
    sessions: Sequence[Session] = ()
    """recorded with it"""
    memory: MemoryBreakdown | None = None
    """measured where there are sessions, else predicted"""
    errors: Mapping[str, WeightError] = field(default_factory=dict)
    """of the weights by name, against the reference"""
    is_reference: bool = False
    """errors are against this one: it has none"""

    @cached_property
    def weights(self) -> Mapping[str, StoredTensor]:
        """By name."""
        return {tensor.name: tensor for tensor in self.model.tensors}

    @cached_property
    def times(self) -> list[StepTimes]:
        """What its steps took, by session."""
        return [StepTimes(session) for session in self.sessions]

    def sqnr_db(self, names: Iterable[str]) -> float | None:
        """Of the weights of these names together: infinite where nothing differs from the
        reference, None where it was not computed."""
        sums = sum((self.errors[name].sums for name in names if name in self.errors), Sums())
        return math.inf if self.is_reference else sums.sqnr_db if sums.n else None

    def phases(self) -> set[str]:
        """Those that have steps in every session."""
        return set.intersection(*(of.phases for of in self.times)) if self.times else set()

    def tokens_per_second(self, phase: str) -> float | None:
        """The median of the sessions' medians; None without steps of the phase."""
        rates = [rate for of in self.times if (rate := of.tokens_per_second(phase)) is not None]
        return statistics.median(rates) if rates else None


def check_recorded(session: Session, model: StoredModel) -> None:
    """Raises UsageError, naming a tensor, unless the session ran the model."""
    there = {tensor.name: tensor for tensor in model.tensors}
    for tensor in stored_in_log(session, recorded_model(session), None).tensors:
        same = there.get(tensor.name)
        if same is None or (same.type, same.n_bytes) != (tensor.type, tensor.n_bytes):
            has = same.type if same else "not there"
            raise UsageError(
                f"{session.path} recorded another model than {model.name}: {tensor.name} is "
                f"{tensor.type} in the log, {has} in the file"
            )


def recorded_model(session: Session) -> Model:
    """The one model that a session ran; raises UsageError when it ran several, or none."""
    if len(session.models) != 1:
        raise UsageError(
            f"{session.path} recorded {len(session.models)} models; a comparison needs a log of one"
        )
    return next(iter(session.models.values()))


def recorded_memory(session: Session) -> MemoryBreakdown | None:
    """What llama.cpp said that the session's last context holds; None when it said nothing."""
    if not session.memory:
        return None
    last = session.memory[-1]
    context = session.contexts[last.ctx]
    return read_breakdown(context, last.buffers, session.tensors_of.get(context.model, []))


def short_names(paths: Sequence[Path], otherwise: Sequence[Path]) -> list[str]:
    """What to call each model: its file's name without what all names begin with, up to a hyphen;
    the name of the file in `otherwise` (its log, say) where names are the same."""
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
    """Bits per weight of all of them together; 0 of none."""
    elements = sum(tensor.n_elements for tensor in tensors)
    return 8 * sum(tensor.n_bytes for tensor in tensors) / elements if elements else 0.0


def types_of(tensors: Sequence[StoredTensor]) -> str:
    """Their storage types, the one of the most bytes first."""
    n_bytes: dict[str, int] = {}
    for tensor in tensors:
        n_bytes[tensor.type] = n_bytes.get(tensor.type, 0) + tensor.n_bytes
    return " ".join(sorted(n_bytes, key=lambda name: -n_bytes[name]))
