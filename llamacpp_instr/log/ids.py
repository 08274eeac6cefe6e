"""What is known of the events that later events can name."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from llamacpp_instr.log.batches import Batches, Part
from llamacpp_instr.log.caches import Caches
from llamacpp_instr.log.graph.attention import Ubatch
from llamacpp_instr.log.schema import Compute, Context, Graph, Model, Plan, StepBegin


class Numbers:
    """The ids that were assigned. They count up, so one range and a few others suffice."""

    def __init__(self) -> None:
        self._first = self._next = 0
        self._others: set[int] = set()

    def add(self, number: int) -> None:
        if self._first == self._next:
            self._first = self._next = number  # a part of a rotated log does not begin at zero
        self._others.add(number)
        while self._next in self._others:
            self._others.remove(self._next)
            self._next += 1

    def __contains__(self, number: int) -> bool:
        return self._first <= number < self._next or number in self._others

    def __len__(self) -> int:
        return self._next - self._first + len(self._others)


@dataclass(eq=False)
class KnownModel:
    """A model and which of its weights were given."""

    event: Model
    tensors: Numbers = field(default_factory=Numbers)


@dataclass(eq=False)
class KnownContext:
    """A context, its graphs and its latest compute."""

    event: Context
    model: KnownModel
    graphs: dict[int, KnownGraph] = field(default_factory=dict)
    """the one that was given or computed last at the end"""
    compute: KnownCompute | None = None
    """the latest"""
    kept: Any = None
    """what a reader keeps with the context, forgotten with it; the same for the others"""

    def __post_init__(self) -> None:
        self.caches = Caches(self.event, self.model.event)
        self.batches = Batches(self.event.n_batch)


@dataclass(eq=False)
class KnownGraph:
    """A graph that can be named."""

    event: Graph
    context: KnownContext
    plans: list[int] = field(default_factory=list)
    kept: Any = None


@dataclass(eq=False)
class KnownPlan:
    """A plan that can be named."""

    event: Plan
    graph: KnownGraph
    kept: Any = None


@dataclass(eq=False)
class KnownStep:
    """A step that has not ended."""

    event: StepBegin
    line: int
    """where it began"""
    parts: list[Part]
    """what the batch has of each sequence, as far as that is known"""
    kept: Any = None

    @property
    def phase(self) -> str:
        """What reports, tables and traces call the step: prefill, decode or encode. In logs that do
        not have the sequences, what the recorder made of the number of tokens."""
        if self.event.kind == "encode":
            return "encode"
        if not self.parts:
            return self.event.phase
        return "prefill" if any(part.prompt for part in self.parts) else "decode"

    @property
    def n_prompt(self) -> int:
        """The tokens of prompts in the batch."""
        if not self.parts:
            return 0 if self.phase == "decode" else self.event.n_tokens
        return sum(part.tokens for part in self.parts if part.prompt)


@dataclass(eq=False)
class KnownCompute:
    """The latest compute of a context."""

    event: Compute
    graph: KnownGraph
    ubatch: Ubatch
    """what is known of its masks"""
    kept: Any = None
