"""The unchanged continuation beside the changed one: tokens, logits and their divergence."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import starmap, zip_longest
from typing import Any

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
    """One generated token of both runs; None where a run had ended. It has figures if both had
    generated the same tokens so far: then their logits answer the same question."""

    before: int | None
    after: int | None
    divergence: float | None = None
    """Kullback-Leibler divergence of the changed run's probabilities from the unchanged ones, in
    nats: sum of p log(p/q)"""
    largest: float | None = None
    """the largest difference of two logits"""


def compare(before: Continuation, after: Continuation) -> list[Step]:
    """Both continuations, token by token. Raises `UsageError` if their vocabularies differ."""
    for run in (before, after):
        if len(run.tokens) != len(run.logits):
            raise UsageError(f"{len(run.tokens)} tokens were chosen from {len(run.logits)} logits")
    if before.logits.shape[1:] != after.logits.shape[1:]:
        raise UsageError("the two runs are of models with different vocabularies")
    steps = list(starmap(Step, zip_longest(before.tokens, after.tokens)))
    for i, (step, p, q) in enumerate(zip(steps, before.logits, after.logits, strict=False)):
        largest = float(np.abs(p.astype(np.float64) - q).max())
        steps[i] = replace(step, divergence=divergence(p, q), largest=largest)
        if step.before != step.after:
            break
    return steps


def as_table(steps: Sequence[Step], texts: Mapping[int, str]) -> str:
    """The steps line by line; `texts` are those of their tokens."""
    lines = [f"{'':5}{'unchanged':>16}  {'changed':<16}  logits by  KL divergence, nats"]
    for number, step in enumerate(steps):
        before, after = (
            repr(texts[token]) if token is not None else "" for token in (step.before, step.after)
        )
        difference = ""
        if step.largest is not None:
            difference = f"{step.largest:9.3g}  {step.divergence:.3g}"
        lines.append(f"{number:4} {before:>16}  {after:<16}  {difference}".rstrip())
    return "\n".join(lines)


def as_json(steps: Sequence[Step], texts: Mapping[int, str]) -> dict[str, Any]:
    """The same for the page, with the number of the first token that differs."""
    differ = (number for number, step in enumerate(steps) if step.before != step.after)
    return {
        "firstDifference": next(differ, None),
        "steps": [
            {
                "number": number,
                "before": None if step.before is None else texts[step.before],
                "after": None if step.after is None else texts[step.after],
                "logitsBy": step.largest,
                "divergence": step.divergence,
            }
            for number, step in enumerate(steps)
        ],
    }


def divergence(before: Array, after: Array) -> float:
    """Kullback-Leibler divergence in nats of the probabilities that the logits `after` give from
    those that `before` give: how surprised one is who expects `after` and sees `before`."""
    p, q = log_soft_max(before), log_soft_max(after)
    return max(0.0, float(np.sum(np.exp(p) * np.where(np.isneginf(p), 0.0, p - q))))


def log_soft_max(logits: Array) -> npt.NDArray[np.float64]:
    """Logarithms of the probabilities, in float64."""
    shifted = logits.astype(np.float64) - float(logits.max())
    return np.asarray(shifted - np.log(np.exp(shifted).sum()))
