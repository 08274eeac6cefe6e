"""Finds the kernels of two sides that do the same work, from graphs and plans alone.

Invariant: every kernel belongs to exactly one unit. Two kernels, of the same session or not, belong
to one unit if they compute a node of the same role. So work that is fused on one side and computed
in parts on the other is one unit, and the sums are compared.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain

import numpy as np
from numpy.typing import NDArray

from llamacpp_instr.log.graph.kernels import Kernels, kernel_nodes
from llamacpp_instr.log.graph.ops import Block, blocks_of
from llamacpp_instr.log.schema import Graph, Nodes, Plan
from llamacpp_instr.log.session import Session

Int64 = NDArray[np.int64]


@dataclass(frozen=True)
class Role:
    """The identity of a node in its model, independent of the graph."""

    layer: int
    block: Block
    op: str
    name: str
    """the weight's base name (`attn_q`), else the tensor's (`Qcur`); empty for `node_21`"""
    occurrence: int
    """number among nodes that are equal in all of the above, in the graph's order"""


@dataclass
class Unit:
    """Work that is compared as one; labels are empty on a side that does not do it."""

    layer: int
    block: Block
    name: str
    labels: tuple[list[str], list[str]] = field(default_factory=lambda: ([], []))
    """labels of the kernels of A and of B that do it: [`RMS_NORM+MUL`] or [`RMS_NORM`, `MUL`]"""

    @property
    def label(self) -> str:
        """`MUL_MAT f16`, or `MUL_MAT f16 → MUL_MAT q8_0` if the sides differ."""
        a, b = (", ".join(labels) for labels in self.labels)
        return a if a == b or not b else b if not a else f"{a} → {b}"

    @property
    def is_in_both(self) -> bool:
        return bool(self.labels[0] and self.labels[1])


@dataclass(frozen=True)
class Alignment:
    """`of_kernel[side][i][plan]` has the unit of each kernel of a plan of a side's i-th session, as
    indices of `units`."""

    units: list[Unit]
    of_kernel: list[list[dict[int, Int64]]]


def align(*sides: Sequence[Session]) -> Alignment:
    """The units of the kernels of both sides, in order of execution: first A's, then those only in
    B."""
    roles_of: list[list[dict[int, list[list[Role]]]]] = [[] for _ in sides]
    parent: dict[Role, Role] = {}
    for side, sessions in enumerate(sides):
        for session in sessions:
            of_plan = {
                plan.plan: list(_kernel_roles(session.graphs[plan.graph], plan))
                for plan in session.plans.values()
            }
            roles_of[side].append(of_plan)
            for roles in chain.from_iterable(of_plan.values()):
                for role in roles:
                    parent[_root(parent, role)] = _root(parent, roles[0])
    units: list[Unit] = []
    number: dict[Role, int] = {}
    of_kernel: list[list[dict[int, Int64]]] = [[{} for _ in sessions] for sessions in sides]
    for side, sessions in enumerate(sides):
        labelled: set[int] = set()
        for at, session in enumerate(sessions):
            for plan_number, kernels in roles_of[side][at].items():
                column = np.zeros(len(kernels), np.int64)
                for i, roles in enumerate(kernels):
                    root = _root(parent, roles[0])
                    if root not in number:
                        number[root] = len(units)
                        units.append(Unit(roles[-1].layer, roles[0].block, roles[-1].name))
                    column[i] = number[root]
                _label(units, column, session.kernels(plan_number), side, labelled)
                of_kernel[side][at][plan_number] = column
    return Alignment(units, of_kernel)


def _label(
    units: list[Unit], column: Int64, kernels: Kernels, side: int, labelled: set[int]
) -> None:
    """Label each unit after the first plan that has it."""
    for unit, label in zip(column.tolist(), kernels.label, strict=True):
        if unit not in labelled:
            units[unit].labels[side].append(label)
    labelled.update(column.tolist())


def _kernel_roles(graph: Graph, plan: Plan) -> Iterator[list[Role]]:
    """The roles of the executed nodes of each kernel."""
    nodes = graph.whole
    roles = list(_node_roles(graph, nodes))
    for inside in kernel_nodes(graph, plan):
        yield [roles[i] for i in inside]


def _node_roles(graph: Graph, nodes: Nodes) -> Iterator[Role]:
    blocks = blocks_of(nodes.op, nodes.name, nodes.layer, nodes.src, [f.name for f in graph.leafs])
    seen: Counter[tuple[int, Block, str, str]] = Counter()
    for i, op in enumerate(nodes.op):
        leafs = (graph.leaf(s).name for s in nodes.src[i] if s < 0)
        key = (nodes.layer[i], blocks[i], op, _base_name(nodes.name[i], leafs))
        yield Role(*key, seen[key])
        seen[key] += 1


def _base_name(node: str, leafs: Iterable[str]) -> str:
    """`blk.3.attn_q.weight` -> `attn_q`, else `Qcur-3 (view)` -> `Qcur`."""
    for leaf in leafs:
        if leaf.endswith((".weight", ".bias")):
            return re.sub(r"^.*?blk\.\d+\.|\.weight$", "", leaf)
    plain = re.sub(r"-\d+$", "", node.split(" (", 1)[0])
    plain = re.sub(r"^(cache_\w+)_l\d+$", r"\1", plain)
    return "" if re.fullmatch(r"(node|leaf)_\d+", plain) else plain


def _root(parent: dict[Role, Role], role: Role) -> Role:
    passed = []
    while (above := parent.setdefault(role, role)) != role:
        passed.append(role)
        role = above
    # path compression: later lookups go directly to the root
    parent.update(dict.fromkeys(passed, role))
    return role
