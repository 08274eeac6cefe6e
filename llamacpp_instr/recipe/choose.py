"""The type of each tensor: the least KL divergence within bounds of size and speed.

Effects are taken to add up. Each tensor gets one of its choices, so this is a knapsack with
multiple choices; OR-Tools' CP-SAT (extra `schedule`) solves it.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass

from llamacpp_instr.base.system import need
from llamacpp_instr.recipe.measure import Choice

SECONDS = 20.0
"""the solver's limit. For a model with hundreds of tensors it finds the optimum in less time, or a
bound that shows how near it came"""

_STEPS = 10**12
"""steps of the objective that the largest sum of effects has"""


@dataclass(frozen=True)
class Bounds:
    """What the chosen tensors may take together; None: no bound."""

    n_bytes: int | None = None
    ns: float | None = None
    """of a decode"""


@dataclass(frozen=True)
class Chosen:
    """The choice of each tensor, by its index."""

    choices: list[int]
    kl: float
    """in nats, if effects add up"""
    gap: float
    """how much less KL divergence another choice can have at most, in nats; 0 for an optimum"""


def choose(tensors: Sequence[Sequence[Choice]], bounds: Bounds) -> Chosen | None:
    """The choices with the least KL divergence within the bounds; None if there are none. Raises
    `UsageError` without OR-Tools."""
    need("schedule")
    from ortools.sat.python import cp_model

    largest = sum(max(of.kl for of in choices) for choices in tensors)
    scale = _STEPS / largest if largest > 0 else 0.0
    model = cp_model.CpModel()
    taken = [[model.new_bool_var("") for _ in choices] for choices in tensors]
    n_bytes, ns, loss = [], [], []
    for choices, chosen in zip(tensors, taken, strict=True):
        model.add_exactly_one(chosen)
        for choice, variable in zip(choices, chosen, strict=True):
            n_bytes.append(choice.n_bytes * variable)
            ns.append(round(choice.ns) * variable)
            loss.append(round(choice.kl * scale) * variable)
    if bounds.n_bytes is not None:
        model.add(sum(n_bytes) <= bounds.n_bytes)
    if bounds.ns is not None:
        model.add(sum(ns) <= round(bounds.ns))
    model.minimize(sum(loss))
    solver = cp_model.CpSolver()
    solver.parameters.max_time_in_seconds = SECONDS
    solver.parameters.num_workers = min(os.cpu_count() or 1, 8)
    status = solver.solve(model)
    if status not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        return None
    found = [
        next(i for i, variable in enumerate(chosen) if solver.value(variable)) for chosen in taken
    ]
    kl = sum(choices[i].kl for choices, i in zip(tensors, found, strict=True))
    gap = solver.objective_value - solver.best_objective_bound
    return Chosen(found, kl, gap / scale if scale else 0.0)


def nearest(tensors: Sequence[Sequence[Choice]], bounds: Bounds, fixed: int) -> str:
    """Why nothing is within the bounds, with the nearest possible value. `fixed` are bytes of the
    file that no choice changes."""
    smallest = sum(min(of.n_bytes for of in choices) for choices in tensors)
    fastest = sum(min(of.ns for of in choices) for choices in tensors)
    if bounds.n_bytes is not None and smallest > bounds.n_bytes:
        return (
            f"the smallest file has {smallest + fixed:,} bytes, but"
            f" only {max(bounds.n_bytes + fixed, 0):,} are available"
        )
    if bounds.ns is not None and fastest > bounds.ns:
        return (
            f"the fastest mixture reads its weights in {fastest / 1e6:.3g} ms for each token, but"
            f" only {max(bounds.ns, 0) / 1e6:.3g} ms are available"
        )
    return "none is both small and fast enough; relax one of the limits"
