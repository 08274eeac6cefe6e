"""A prefill and a decode of a model file, predicted."""

from __future__ import annotations

from dataclasses import dataclass

from llamacpp_instr.base.errors import UsageError
from llamacpp_instr.llama.engine import ContextOptions
from llamacpp_instr.log.graph.attention import Ubatch
from llamacpp_instr.log.graph.kernels import cpu_plan, untimed_backends
from llamacpp_instr.log.schema import Graph, Plan
from llamacpp_instr.model.file import ModelFile, load_model_file
from llamacpp_instr.prediction.features import ubatch_of
from llamacpp_instr.prediction.model import Predicted, PredictedStep, predict_kernels
from llamacpp_instr.prediction.probe.file import Probe
from llamacpp_instr.recording.memory.plan import UbatchShape, dry_graphs, window

DEFAULT_TOKENS = 512
"""of a prefill, and in the cache before a decode, if the model allows as many"""
MOST_TOKENS = 1 << 16
"""of a prefill, if a model file does not say what it was trained on"""


def trained_tokens(model: ModelFile) -> int:
    """The length of the contexts that the model was trained on, or MOST_TOKENS."""
    trained = model.metadata.get(f"{model.architecture}.context_length")
    return trained if isinstance(trained, int) and trained > 0 else MOST_TOKENS


@dataclass(frozen=True)
class PlannedStep:
    """A step that a dry run has planned."""

    shape: UbatchShape
    graph: Graph
    plan: Plan

    def ubatch(self, threads: int) -> Ubatch:
        """What its tokens see."""
        of = self.shape
        return ubatch_of(of.tokens, of.past, threads, window(of))

    def predict(self, probe: Probe, threads: int) -> Predicted:
        """Raises `UsageError` like `predict_kernels`."""
        return predict_kernels(self.graph, self.plan, probe, threads, self.ubatch(threads))


def usual_steps(path: str, probe: Probe) -> tuple[PredictedStep, PredictedStep]:
    """The decode after DEFAULT_TOKENS tokens and the prefill of as many, or as the model at `path`
    allows, on one thread. Raises `UsageError` for a file that is no model, and like
    `planned_steps` and `predict_kernels`."""
    model = load_model_file(path)
    trained = trained_tokens(model)
    shapes = [
        UbatchShape(1, min(DEFAULT_TOKENS, trained - 1)),
        UbatchShape(min(DEFAULT_TOKENS, trained)),
    ]
    decode, prefill = (
        PredictedStep(what, of.graph, of.plan, of.ubatch(1), of.predict(probe, 1))
        for of, what in zip(
            planned_steps(model, ContextOptions(), shapes),
            (f"decode after {shapes[0].past}", f"prefill of {shapes[1].tokens}"),
            strict=True,
        )
    )
    return decode, prefill


def planned_steps(
    model: ModelFile, options: ContextOptions, shapes: list[UbatchShape]
) -> list[PlannedStep]:
    """The steps of these shapes, in the graphs that llama.cpp would build. Raises like
    `dry_graphs`, and `UsageError` for a graph that does not run on the CPU alone."""
    found = []
    for shape, graph in zip(shapes, dry_graphs(model, options, shapes), strict=True):
        if others := untimed_backends(graph):
            raise UsageError(
                f"{model.path}: parts would run on {', '.join(others)}; only the CPU is predicted"
            )
        found.append(PlannedStep(shape, graph, cpu_plan(graph)))
    return found
