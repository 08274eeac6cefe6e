"""The unchanged continuation beside the changed one: tokens, logits and their divergence."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import zip_longest

import numpy as np
import numpy.typing as npt

from llamacpp_instr.base.errors import UsageError
from llamacpp_instr.debugger.graph import LiveGraph, Ubatch
from llamacpp_instr.debugger.stop import Stop
from llamacpp_instr.debugger.tensors import Array


class CollectedLogits:
    """Keeps the last row of what each compute gives, from which a token is sampled; a witness of a
    `Debugger`."""

    def __init__(self) -> None:
        self.rows: list[npt.NDArray[np.float32]] = []
        """(vocabulary,) each"""

    def wants(self, graph: LiveGraph, _ubatch: Ubatch) -> Collection[int]:
        """The last op."""
        return [max((node.index for node in graph.nodes if node.runs), default=-1)]

    def passed(self, stop: Stop) -> None:
        """Computes of a prompt's first parts give no logits."""
        values = stop.values()
        if values.size:
            self.rows.append(np.atleast_2d(values)[-1].copy())


@dataclass(frozen=True)
class Continuation:
    """What a run generated, and from which logits."""

    tokens: Sequence[int]
    logits: npt.NDArray[np.float32]
    """(tokens, vocabulary) row i: what token i was chosen from"""


@dataclass(frozen=True)
class Step:
    """One generated token of both runs; None where a run had ended."""

    number: int
    before: int | None
    after: int | None
    same_past: bool
    """both runs had generated the same tokens so far, so their logits answer the same question"""
    divergence: float | None
    """Kullback-Leibler divergence of the changed run's probabilities from the unchanged ones, in
    nats: sum of p log(p/q)"""
    largest: float | None
    """the largest difference of two logits"""


@dataclass(frozen=True)
class Comparison:
    """Two continuations of one prompt."""

    steps: list[Step]
    first_difference: int | None
    """the number of the first generated token that differs, None if none does"""


def compare(before: Continuation, after: Continuation) -> Comparison:
    """Both continuations, token by token. Raises `UsageError` if their vocabularies differ."""
    for run in (before, after):
        if len(run.tokens) != len(run.logits):
            raise UsageError(f"{len(run.tokens)} tokens were chosen from {len(run.logits)} logits")
    if before.logits.shape[1:] != after.logits.shape[1:]:
        raise UsageError("the two runs are of models with different vocabularies")
    steps: list[Step] = []
    same = True
    for i, (old, new) in enumerate(zip_longest(before.tokens, after.tokens)):
        kl = largest = None
        if old is not None and new is not None:
            p, q = before.logits[i], after.logits[i]
            kl, largest = divergence(p, q), float(np.abs(p.astype(np.float64) - q).max())
        steps.append(Step(i, old, new, same, kl, largest))
        same = same and old == new
    first = next((step.number for step in steps if step.before != step.after), None)
    return Comparison(steps, first)


def divergence(before: Array, after: Array) -> float:
    """Kullback-Leibler divergence in nats of the probabilities that the logits `after` give from
    those that `before` give: how surprised one is who expects `after` and sees `before`."""
    p, q = log_soft_max(before), log_soft_max(after)
    return max(0.0, float(np.sum(np.exp(p) * np.where(np.isneginf(p), 0.0, p - q))))


def log_soft_max(logits: Array) -> npt.NDArray[np.float64]:
    """Logarithms of the probabilities, in float64."""
    shifted = logits.astype(np.float64) - float(logits.max())
    return np.asarray(shifted - np.log(np.exp(shifted).sum()))
