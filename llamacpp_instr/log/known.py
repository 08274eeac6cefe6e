"""What an event of a log can name: models, contexts, graphs, plans, steps and computes, each with
what is kept about it."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

from llamacpp_instr.log import schema
from llamacpp_instr.log.batches import Batches, Caches, Part
from llamacpp_instr.log.devices import device_splits
from llamacpp_instr.log.graph.attention import Ubatch
from llamacpp_instr.log.graph.experts import Choice, Used, choices
from llamacpp_instr.log.graph.kernels import graph_problems
from llamacpp_instr.log.numbers import Numbers


@dataclass(eq=False)
class KnownModel:
    """A model and which of its weights were given."""

    event: schema.Model
    tensors: Numbers = field(default_factory=Numbers)
    weights: dict[int, schema.Leaf] = field(default_factory=dict)
    """the first WEIGHTS_KEPT, as graphs read them"""


@dataclass(eq=False)
class KnownContext:
    """A context, its graphs and its latest compute."""

    event: schema.Context
    model: KnownModel
    graphs: dict[int, KnownGraph] = field(default_factory=dict)
    """the one that was given or computed last is at the end"""
    compute: KnownCompute | None = None
    """the latest"""

    def __post_init__(self) -> None:
        self.caches = Caches(self.event, self.model.event)
        self.batches = Batches(self.event.n_batch)


def clients_context() -> KnownContext:
    """What the graphs and computes belong to that the clients of an RPC server asked for."""
    model = schema.Model(
        t=0, model=0, path="", arch="", params=0, bytes=0, ftype="", hparams={}, dur=0, n_tensors=0
    )
    context = schema.Context(
        t=0, ctx=0, model=0, n_ctx=0, n_ctx_seq=0, n_batch=0, n_ubatch=0, n_seq_max=0, n_threads=0,
        n_threads_batch=0, type_k="", type_v="", flash_attn=False, causal=False, embeddings=False,
        kv_unified=False, offload_kqv=False, backends=[],
    )  # fmt: skip
    return KnownContext(context, KnownModel(model))


@dataclass(eq=False)
class KnownGraph:
    """A graph that can be named."""

    event: schema.Graph
    context: KnownContext
    plans: list[int] = field(default_factory=list)
    used: Used = field(default_factory=Used)
    """of its latest compute, which the next one often shares"""

    @cached_property
    def choices(self) -> dict[int, Choice]:
        """The experts of its nodes; none if it has no nodes or is damaged."""
        return {} if self.is_damaged else choices(self.event)

    @cached_property
    def device_splits(self) -> dict[int, str]:
        """The splits whose kernels a device may run behind the caller, with its name; none if the
        graph has no nodes or is damaged."""
        only_cpu = all(split.backend == "CPU" for split in self.event.splits)
        return {} if only_cpu or self.is_damaged else device_splits(self.event)

    @cached_property
    def is_damaged(self) -> bool:
        """Whether it has no nodes, or ones that do not fit each other."""
        return self.event.nodes is None or any(graph_problems(self.event))


@dataclass(eq=False)
class KnownPlan:
    """A plan that can be named."""

    event: schema.Plan
    graph: KnownGraph


@dataclass(eq=False)
class KnownStep:
    """A step that has not ended."""

    event: schema.StepBegin
    line: int
    """where it began"""
    parts: list[Part]
    """what the batch has of each sequence, as far as that is known"""
    target: int = -1
    """the context that it drafts for, -1 for none"""

    @property
    def phase(self) -> str:
        """What reports, tables and traces call the step: prefill, decode, encode or draft. In logs
        without sequences, what the recorder concluded from the number of tokens."""
        if self.target >= 0:
            return "draft"
        if self.event.kind == "encode":
            return "encode"
        if not self.parts:
            return self.event.phase
        return "prefill" if any(part.prompt for part in self.parts) else "decode"

    @property
    def n_prompt(self) -> int:
        """The tokens of prompts in the batch; those of a draft model count for its target."""
        if self.target >= 0:
            return 0
        if not self.parts:
            return 0 if self.phase == "decode" else self.event.n_tokens
        return sum(part.tokens for part in self.parts if part.prompt)


@dataclass(eq=False)
class KnownCompute:
    """The latest compute of a context."""

    event: schema.Compute
    graph: KnownGraph
    ubatch: Ubatch | None
    """what is known of its masks and experts, None for nothing"""
    step: KnownStep | None = None
    """that it belongs to, even if that has ended"""
    given: set[int] = field(default_factory=set)
    """its splits whose `ops` a device has given"""
