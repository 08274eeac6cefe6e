"""Where the time, the bytes or the FLOPs of a session went: session, phase, layer, block, op.

Invariant: the leaves add up to what `summary` and `stats` show for the same steps. Times are those
of thread 0, which takes part in each of its kernels; a device has a tree of its own.
"""

from __future__ import annotations

from typing import Literal

from llamacpp_instr.base.errors import UsageError
from llamacpp_instr.converters.analyses.tables import layer_order
from llamacpp_instr.log.graph.ops import BLOCKS
from llamacpp_instr.log.session import Session
from llamacpp_instr.log.steps import BESIDE, Account, Measure, Place, counted_steps
from llamacpp_instr.report.tree import Node, Tree

MEASURES: dict[Measure, tuple[str, Literal["ns", "bytes", "flop"]]] = {
    "time": ("time", "ns"),
    "bytes": ("bytes", "bytes"),
    "flops": ("FLOPs", "flop"),
}
"""measure -> (its heading, its unit)"""
LEVELS = ("phase", "layer", "block", "op")
NO_LAYER = "outside of layers"


def build_tree(session: Session, by: Measure = "time") -> Tree:
    """The tree of the steps that count, in the order of PHASES, layers and BLOCKS.

    `time` also has what the steps did besides kernels, one leaf for each part and phase; without
    ops in the log, layers are leaves. `bytes` are read and written at least once, `flops` as
    `ops.flops` counts them. Raises UsageError if `by` needs ops and the log's level has none.
    """
    if by != "time" and session.start.level == "minimal":
        raise UsageError(
            f"{session.path}: by {by} needs ops, which the level minimal does not record;"
            " by time works, or record with --level detailed"
        )
    steps, notes = counted_steps(session)
    account = Account(session, steps)
    amounts, bounded = account.by_place(by)
    root = Node("session")
    for phase in account.phases:
        parts = _layer_nodes({
            place: n for place, n in amounts.items()
            if place.phase == phase and not (place.device and by == "time")
        })  # fmt: skip
        if by == "time":
            spent = account.of_phase(phase)
            parts += [Node(name, spent[name]) for name in BESIDE if spent.get(name)]
        root.children.append(Node(phase, children=parts))
    if by == "time" and session.start.level == "minimal":
        notes.append("No ops were recorded: blocks and ops need the level detailed.")
    if by != "time":
        notes.append("Computed from the shapes of the kernels, not measured.")
    if bounded:
        notes.append("Attention is an upper bound: the log does not record what its mask hid.")
    notes += session.log_end.notes()
    return Tree(root, *MEASURES[by], levels=LEVELS, notes=notes)


def device_trees(session: Session) -> list[Tree]:
    """A tree for each device: the time of its kernels in the steps that count."""
    account = Account(session, counted_steps(session)[0])
    amounts = account.by_place()[0]
    trees = []
    for device in account.devices:
        root = Node(device)
        for phase in account.phases:
            of = {p: ns for p, ns in amounts.items() if (p.phase, p.device) == (phase, device)}
            if of:
                root.children.append(Node(phase, children=_layer_nodes(of)))
        notes = ["It ran while thread 0 computed, submitted or waited: its time is not added."]
        trees.append(Tree(root, "time", "ns", levels=LEVELS, notes=notes))
    return trees


def _layer_nodes(amounts: dict[Place, int]) -> list[Node]:
    """A node for each layer; blocks and ops without a name have none."""
    layers: dict[int, dict[str, list[Node]]] = {}
    for place, amount in amounts.items():
        blocks = layers.setdefault(place.layer, {})
        blocks.setdefault(place.block, []).append(Node(place.op, amount))
    nodes = []
    for layer, blocks in sorted(layers.items(), key=lambda of: layer_order(of[0])):
        name = NO_LAYER if layer < 0 else f"layer {layer}"
        if "" in blocks:
            nodes.append(Node(name, blocks[""][0].own))
        else:
            children = [Node(b, children=blocks[b]) for b in BLOCKS if b in blocks]
            nodes.append(Node(name, children=children))
    return nodes
