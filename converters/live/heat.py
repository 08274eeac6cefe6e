"""Where the time of a step goes: layers × blocks, of the latest step and on average."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from llamacpp_instr.log.graph.kernels import plan_kernels
from llamacpp_instr.log.graph.ops import BLOCKS
from llamacpp_instr.log.resolve import KnownPlan
from llamacpp_instr.log.schema import Layers, Ops

Float64 = NDArray[np.float64]
Int64 = NDArray[np.int64]

_COLUMN = {block: i for i, block in enumerate(BLOCKS)}


@dataclass(frozen=True)
class PlanCells:
    """The cells of the kernels of one plan, with what names them."""

    layer: Int64
    block: Int64
    label: list[str]


def cells_of(plan: KnownPlan) -> PlanCells | None:
    """The cells of a plan, kept with it; None at `minimal`, where graphs have no nodes."""
    if plan.kept is None and plan.graph.event.nodes is not None:
        kernels = plan_kernels(plan.graph.event, plan.event)
        block = np.array([_COLUMN[name] for name in kernels.block], np.int64)
        plan.kept = PlanCells(kernels.layer, block, kernels.label)
    kept: PlanCells | None = plan.kept
    return kept


@dataclass
class Heat:
    """The times of steps of one phase, in ns; (layers + 1, blocks), row 0 is outside of layers."""

    n_layers: int
    steps: int = 0
    sum: Float64 = field(init=False)
    last: Float64 = field(init=False)

    def __post_init__(self) -> None:
        self.sum = np.zeros((self.n_layers + 1, len(BLOCKS)))
        self.last = np.zeros_like(self.sum)

    def add(self, step: Float64) -> None:
        """A step has ended."""
        self.sum += step
        self.last = step
        self.steps += 1

    @property
    def mean(self) -> Float64:
        """The average of all steps so far."""
        return self.sum / max(self.steps, 1)


def add_ops(step: Float64, ops: Ops, cells: PlanCells) -> None:
    """Add the kernels of a compute to the times of its step."""
    rows = np.minimum(cells.layer + 1, len(step) - 1)
    np.add.at(step, (rows, cells.block), np.array(ops.dur, np.float64))


def add_layers(step: Float64, layers: Layers) -> None:
    """Add the layers of a compute whose kernels the log does not have, as the block `other`."""
    rows = np.minimum(np.array(layers.layer, np.int64) + 1, len(step) - 1)
    np.add.at(step[:, _COLUMN["other"]], rows, np.array(layers.dur, np.float64))
