"""Where the time, the bytes or the FLOPs of a session went: session, phase, layer, block, op.

Invariant: the leaves add up to what `summary` and `stats` show of the same steps. Times are those
of thread 0, which takes part in every kernel.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from llamacpp_instr.base.errors import UsageError
from llamacpp_instr.converters.analyses.clock import device_times
from llamacpp_instr.log.graph.kernels import kernel_nodes, weight_read
from llamacpp_instr.log.graph.ops import BLOCKS
from llamacpp_instr.log.session import Session, Table, Timed
from llamacpp_instr.log.steps import PHASES, counted_steps, phase_of_compute
from llamacpp_instr.model.file import role_of
from llamacpp_instr.report.tree import Node, Tree

Measure = Literal["time", "bytes", "flops"]
MEASURES: dict[Measure, tuple[str, Literal["ns", "bytes", "flop"]]] = {
    "time": ("time", "ns"),
    "bytes": ("bytes", "bytes"),
    "flops": ("FLOPs", "flop"),
}
"""measure -> (its heading, its unit)"""
LEVELS = ("phase", "layer", "block", "op")
NO_LAYER = "outside of layers"

Int64 = NDArray[np.int64]
_Place = tuple[str, int, str, str]  # phase, layer, block, op


def build_tree(session: Session, by: Measure = "time") -> Tree:
    """The tree of the steps that count, in the order of PHASES, layers and BLOCKS.

    `time` also has what the steps did beside kernels, in one leaf each per phase; without ops in
    the log, layers are leaves. `bytes` are read and written at least once, `flops` as `ops.flops`
    counts them. Raises UsageError if `by` needs ops and the log's level has none.
    """
    if by != "time" and session.start.level == "minimal":
        raise UsageError(
            f"{session.path}: by {by} needs ops, which the level minimal does not record;"
            " by time works, or record with --level detailed"
        )
    steps, notes = counted_steps(session)
    phase_of = phase_of_compute(session, steps)
    layers_alone = by == "time" and not session.ops
    bounded = False
    if layers_alone:
        amounts = by_layer(session, phase_of)
    else:
        amounts, bounded = by_op(session, phase_of, by)
    root = Node("session")
    for phase in PHASES:
        if (steps["phase"] == phase).any():
            of_phase = {place: n for place, n in amounts.items() if place[0] == phase}
            parts = _layer_nodes(of_phase)
            if by == "time":
                timed, inside = session.ops or session.layers, sum(of_phase.values())
                rest = beside(session, steps, phase_of, phase, timed, inside)
                parts += [Node(name, amount) for name, amount in rest.items() if amount]
            root.children.append(Node(phase, children=parts))
    if layers_alone:
        notes.append("No ops were recorded: blocks and ops need the level detailed.")
    if by != "time":
        notes.append("Computed from the shapes of the kernels, not measured.")
    if bounded:
        notes.append("Attention is an upper bound: the log does not tell what its mask hid.")
    notes += session.log_end.notes()
    return Tree(root, *MEASURES[by], levels=LEVELS, notes=notes)


def by_op(
    session: Session, phase_of: dict[int, str], by: Measure
) -> tuple[dict[_Place, int], bool]:
    """The amount of every op by its place, summed over computes, and whether one of them is an
    upper bound."""
    bounded = False
    of_plan: dict[tuple[str, int], Int64] = {}
    for ops in session.ops:
        phase = phase_of.get(ops.compute)
        if ops.thread == 0 and phase is not None:
            column = ops.dur
            if by != "time":
                work = session.work(ops)
                column = work.bytes if by == "bytes" else work.flops
                bounded |= bool(work.bound.any())
            before = of_plan.get((phase, ops.plan))
            of_plan[phase, ops.plan] = column if before is None else before + column
    amounts: dict[_Place, int] = defaultdict(int)
    for (phase, plan), column in of_plan.items():
        kernels = session.kernels(plan)
        names = _op_names(session, plan)
        places = zip(kernels.layer.tolist(), kernels.block, names, column.tolist(), strict=True)
        for layer, block, label, amount in places:
            amounts[phase, layer, block, label] += amount
    return amounts, bounded


def _op_names(session: Session, plan: int) -> list[str]:
    """The kernels as `stats` calls them, and the role of the weight that each reads, if any:
    `MUL_MAT q4_K ffn_down`."""
    of = session.plans[plan]
    graph = session.graphs[of.graph]
    names = []
    for label, inside in zip(session.kernels(plan).label, kernel_nodes(graph, of), strict=True):
        weight, _ = weight_read(graph, inside)
        names.append(label if weight is None else f"{label} {role_of(weight)}")
    return names


def by_layer(session: Session, phase_of: dict[int, str]) -> dict[_Place, int]:
    """The time of every layer, from its first kernel to its last, for logs without ops."""
    amounts: dict[_Place, int] = defaultdict(int)
    for layers in session.layers:
        phase = phase_of.get(layers.compute)
        if phase is not None and layers.label is not None:
            for layer, dur in zip(layers.label.tolist(), layers.dur.tolist(), strict=True):
                amounts[phase, layer, "", ""] += dur
    return amounts


def _layer_nodes(amounts: dict[_Place, int]) -> list[Node]:
    """A node for each layer; blocks and ops without a name have none."""
    layers: dict[int, dict[str, list[Node]]] = {}
    for (_, layer, block, label), amount in amounts.items():
        layers.setdefault(layer, {}).setdefault(block, []).append(Node(label, amount))
    nodes = []
    for layer in sorted(layers, key=lambda layer: (layer < 0, layer)):
        name = NO_LAYER if layer < 0 else f"layer {layer}"
        blocks = layers[layer]
        if "" in blocks:
            nodes.append(Node(name, blocks[""][0].own))
        else:
            children = [Node(b, children=blocks[b]) for b in BLOCKS if b in blocks]
            nodes.append(Node(name, children=children))
    return nodes


def beside(
    session: Session,
    steps: Table,
    phase_of: dict[int, str],
    phase: str,
    parts: Sequence[Timed],
    inside: int,
) -> dict[str, int]:
    """What the steps of a phase did beside `parts`, the session's kernels or layers, which took
    `inside`; ns. The last part is what remains."""
    computes = session.computes
    timed = {of.compute for of in parts if of.thread == 0}
    of_phase = np.array([phase_of.get(n) == phase for n in computes["compute"].tolist()], np.bool_)
    has_parts = np.array([n in timed for n in computes["compute"].tolist()], np.bool_)

    def total(rows: NDArray[np.bool_], *names: str) -> int:
        return sum(int(computes[name][rows].sum()) for name in names)

    # layers last from their first kernel to their last, with what a device did between
    on_device = {} if parts is session.layers else device_times(session)
    elsewhere = np.array([on_device.get(n, 0) for n in computes["compute"].tolist()], np.int64)
    with_parts, without = (int(elsewhere[of_phase & of].sum()) for of in (has_parts, ~has_parts))
    ours = steps.rows(steps["phase"] == phase)
    amounts = {
        "compute": total(of_phase & ~has_parts, "dur") - without,
        "between layers" if parts is session.layers else "between ops": (
            total(of_phase & has_parts, "dur") - inside - with_parts
        ),
        "KV slots": total(of_phase, "apply"),
        "graph build": total(of_phase, "build", "alloc"),
        "the device": int((ours["end"] - ours["returned"]).sum()) + with_parts + without,
        "the recorder": int(ours["recorder"].sum()),
    }
    whole = int((ours["end"] - ours["begin"]).sum())
    return amounts | {"the rest": whole - inside - sum(amounts.values())}
