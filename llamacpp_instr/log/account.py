"""Where the time of a session's steps went: every nanosecond of every step, once.

Invariant: the parts of a step add up to the time that its caller saw, from its start until its
result was there. Kernels count as long as thread 0, which takes part in each, was in them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from functools import cached_property
from typing import Any, Literal, NamedTuple

import numpy as np

from llamacpp_instr.log.graph.kernels import untimed_backends
from llamacpp_instr.log.session import Session, Table
from llamacpp_instr.log.steps import PHASES, step_rows
from llamacpp_instr.log.timings import Int64, Timings, without_copy
from llamacpp_instr.model.file import role_of

Measure = Literal["time", "bytes", "flops"]
KERNELS, LAYERS = "kernels", "layers"
BESIDE = (
    "compute", "between ops", "between layers", "KV slots", "graph build", "the device",
    "the recorder", "the rest",
)  # fmt: skip
"""what a step does beside its kernels; beside its layers, if the log has no kernels"""


class Place(NamedTuple):
    """Where a kernel belongs; without kernels in the log, a layer has no block and no op."""

    phase: str
    layer: int
    block: str
    op: str
    """as `stats` calls it, and the role of the weight that it reads: `MUL_MAT q4_K ffn_down`"""


class Account:
    """The time of `steps`, which are those that count, of one session."""

    def __init__(self, session: Session, steps: Table) -> None:
        self.session = session
        self.steps = steps
        self.row = step_rows(session, steps)
        """compute -> its row in `steps`; of the computes in `steps`"""
        self.phases = [phase for phase in PHASES if (steps["phase"] == phase).any()]
        self.ops = self._of_steps(of for of in session.ops if of.thread == 0)
        """the kernels of thread 0 in `steps`"""
        self.layers = self._of_steps(session.layers)

    def _of_steps(self, timings: Iterable[Timings]) -> list[Timings]:
        """The computes of `steps` among `timings`."""
        kept = ((of, np.flatnonzero(self.rows_of(of) >= 0)) for of in timings)
        return [of.rows(rows) for of, rows in kept if len(rows)]

    def rows_of(self, timings: Timings) -> Int64:
        """The row in `steps` of each compute; -1 for one that is in none."""
        return np.array([self.row.get(of, -1) for of in timings.compute.tolist()], np.int64)

    @cached_property
    def total(self) -> Int64:
        """The time of each step as its caller saw it, ns."""
        seen: Int64 = self.steps["end"] - self.steps["begin"]
        return seen

    @cached_property
    def parts(self) -> dict[str, Int64]:
        """ns of each step in its `kernels` (or `layers`), and in each part of BESIDE. The last part
        is what remains."""
        session, steps = self.session, self.steps
        layers_alone = bool(session.layers) and not session.ops
        timed = self.layers if layers_alone else self.ops
        computes = session.computes.rows(np.isin(session.computes["step"], steps["step"]))
        numbers = computes["compute"].tolist()
        at = {compute: i for i, compute in enumerate(numbers)}
        rows = np.array([self.row[of] for of in numbers], np.int64)
        inside, is_timed = np.zeros(len(at), np.int64), np.zeros(len(at), np.bool_)
        for of in timed:
            these = [at[compute] for compute in of.compute.tolist()]
            np.add.at(inside, these, of.totals)
            is_timed[these] = True
        # layers last from their first kernel to their last, with what a device did between
        elsewhere = {} if layers_alone else device_times(session)
        on_device = np.array([elsewhere.get(of, 0) for of in numbers], np.int64)
        beside = computes["dur"] - inside - on_device

        def of_step(ns: Int64) -> Int64:
            total = np.zeros(len(steps), np.int64)
            np.add.at(total, rows, ns)
            return total

        amounts: dict[str, Int64] = {
            LAYERS if layers_alone else KERNELS: of_step(inside),
            "compute": of_step(np.where(is_timed, 0, beside)),
            "between layers" if layers_alone else "between ops": of_step(
                np.where(is_timed, beside, 0)
            ),
            "KV slots": of_step(computes["apply"]),
            "graph build": of_step(computes["build"] + computes["alloc"]),
            "the device": of_step(on_device) + steps["end"] - steps["returned"],
            "the recorder": steps["recorder"],
        }
        return amounts | {"the rest": self.total - sum(amounts.values())}

    def of_phase(self, phase: str) -> dict[str, int]:
        """`parts` of all steps of a phase."""
        rows = self.steps["phase"] == phase
        return {name: int(ns[rows].sum()) for name, ns in self.parts.items()}

    def by_place(self, by: Measure = "time") -> tuple[dict[Place, int], bool]:
        """The amount of all kernels of each place (of layers for time without kernels), and whether
        one of them is an upper bound."""
        if by == "time" and not self.session.ops:
            layers = self.by_layer.items()
            return {Place(phase, layer, "", ""): ns for (phase, layer), ns in layers}, False
        bounded = False
        amounts: dict[Place, int] = defaultdict(int)
        for ops in self.ops:
            places = self._places(ops.plan)
            work = None if by == "time" else self.session.work(ops)
            for phase, rows in self.by_phase(ops):
                if work is None:
                    column = ops.dur[rows].sum(axis=0, dtype=np.int64)
                else:
                    total = work.total(rows)
                    column = total.bytes if by == "bytes" else total.flops
                    bounded |= bool(total.bound.any())
                for place, amount in zip(places, column.tolist(), strict=True):
                    amounts[Place(phase, *place)] += amount
        return amounts, bounded

    @cached_property
    def by_layer(self) -> dict[tuple[str, int], int]:
        """ns by phase and layer, from a layer's first kernel to its last; empty if the log has
        kernels alone."""
        amounts: dict[tuple[str, int], int] = defaultdict(int)
        for layers in self.layers:
            for phase, rows in self.by_phase(layers):
                column = layers.dur[rows].sum(axis=0, dtype=np.int64)
                for layer, ns in zip(layers.label.tolist(), column.tolist(), strict=True):
                    amounts[phase, layer] += ns
        return amounts

    def by_phase(self, timings: Timings) -> Iterator[tuple[str, Any]]:
        """Each phase of `timings`, which are in `steps`, and an index of its computes."""
        phases = self.steps["phase"][self.rows_of(timings)]
        rows = ((phase, np.flatnonzero(phases == phase)) for phase in self.phases)
        return ((phase, without_copy(of)) for phase, of in rows if len(of))

    def _places(self, plan: int) -> list[tuple[int, str, str]]:
        """Layer, block and op of each kernel of a plan."""
        kernels = self.session.kernels(plan)
        names = [
            label if weight is None else f"{label} {role_of(weight)}"
            for label, weight in zip(kernels.label, kernels.weight, strict=True)
        ]
        return list(zip(kernels.layer.tolist(), kernels.block, names, strict=True))


def device_times(session: Session) -> dict[int, int]:
    """By compute with parts on a device: the ns in which thread 0 copied inputs for a part, waited
    for the part before it, or was in one that is not the CPU's. Then it ran no kernel."""
    graph_of = dict(session.computes.tuples("compute", "graph"))
    found: dict[int, int] = {}
    for splits in session.splits:
        gaps = 0 if splits.gap is None else splits.gap.sum(axis=1, dtype=np.int64)
        by_graph: dict[int, list[int]] = defaultdict(list)
        for row, compute in enumerate(splits.compute.tolist()):
            by_graph[graph_of[compute]].append(row)
        for number, rows in by_graph.items():
            graph = session.graphs[number]
            if untimed_backends(graph):
                backends = [graph.splits[i].backend for i in splits.label.tolist()]
                elsewhere = np.array([backend != "CPU" for backend in backends], np.bool_)
                ns = gaps + splits.dur[:, elsewhere].sum(axis=1, dtype=np.int64)
                found.update(zip(splits.compute[rows].tolist(), ns[rows].tolist(), strict=True))
    return found
