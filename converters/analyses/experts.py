"""Which experts the tokens used: how evenly, and how much of the weights a compute read.

Invariant: only steps that count are counted. Prefill and decode are apart, because a compute of
many tokens reads nearly all experts, and one of a single token only those of this token.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from llamacpp_instr.base.errors import UsageError
from llamacpp_instr.converters.analyses.tables import header, layer_order
from llamacpp_instr.log.graph.experts import choices
from llamacpp_instr.log.graph.kernels import weight_read
from llamacpp_instr.log.session import Int64, Session
from llamacpp_instr.log.steps import Account
from llamacpp_instr.model.file import role_of
from llamacpp_instr.report.report import Cell, Column, Report


class Place(NamedTuple):
    """Where experts are: in the weights of a layer that are chosen by the same ids."""

    layer: int
    weight: str
    """the role of the first of these weights"""
    n: int
    bytes: int
    """of one expert in all these weights"""


class Usage(NamedTuple):
    """How the experts of a place were used in one phase."""

    computes: int
    read: int
    """experts that were read, summed over the computes"""
    uses: Int64
    """how many tokens used each expert"""


def expert_usage(account: Account) -> dict[tuple[str, Place], Usage]:
    """The usage of experts by phase and place, in this order; empty if the log has none."""
    session, recorded = account.session, account.session.experts
    graph_of = dict(session.computes.tuples("compute", "graph"))
    computes, at = np.unique(recorded.compute, return_inverse=True)
    row = np.array([account.row.get(of, -1) for of in computes.tolist()], np.int64)[at]
    graph = np.array([graph_of[of] for of in computes.tolist()], np.int64)[at]
    phases = [*account.phases, ""]  # the last is for what does not count
    phase_of = np.array([phases.index(of) for of in (*account.steps["phase"], "")], np.int64)
    places: dict[Place, int] = {}
    # a graph and a node as one number: few are distinct
    step = int(recorded.node.max(initial=0)) + 1
    chosen, which = np.unique(graph * step + recorded.node, return_inverse=True)
    place_of = np.array([
        places.setdefault(_place(session, *divmod(of, step)), len(places)) for of in chosen.tolist()
    ], np.int64)  # fmt: skip
    width = max((of.n for of in places), default=1)
    group = place_of[which] * len(phases) + phase_of[row]
    shape = len(places), len(phases)
    n_computes = np.bincount(group, minlength=shape[0] * shape[1]).reshape(shape)
    read = np.bincount(group, recorded.n, shape[0] * shape[1]).reshape(shape)
    cells = np.repeat(group, recorded.n) * width + recorded.expert
    uses = np.bincount(cells, recorded.uses, shape[0] * shape[1] * width).reshape(*shape, width)
    return {
        (phase, place): Usage(
            int(n_computes[i, k]), int(read[i, k]), uses[i, k, : place.n].astype(np.int64)
        )
        for k, phase in enumerate(account.phases)
        for place, i in sorted(places.items(), key=lambda of: layer_order(of[0].layer))
        if n_computes[i, k]
    }


def _place(session: Session, graph: int, node: int) -> Place:
    of = session.graphs[graph]
    weight, _ = weight_read(of, [node])
    known = choices(of)
    n_bytes = sum(choice.bytes for choice in known.values() if choice.node == node)
    role = "" if weight is None else role_of(weight)
    return Place(of.whole.layer[node], role, known[node].n, n_bytes)


def experts_report(account: Account, accepts: Sequence[Callable[[int], bool]] = ()) -> Report:
    """A row for each layer and phase, for the layers that all of `accepts` let through; if only one
    layer is left, a row for each of its experts. Raises UsageError if the log has none."""
    session = account.session
    found = expert_usage(account)
    if not found:
        raise UsageError(f"{session.path}: {_why_none(session)}")
    found = {key: usage for key, usage in found.items() if all(of(key[1].layer) for of in accepts)}
    if not found:
        raise UsageError(f"{session.path}: no experts in these layers")
    if accepts and len({place for _, place in found}) == 1:
        return _of_layer(found)
    several = len({place.layer for _, place in found}) < len({place for _, place in found})
    rows: list[list[Cell]] = []
    for (phase, place), of in found.items():
        total, most = int(of.uses.sum()), int(of.uses.max(initial=0))
        each = of.read / of.computes
        rows.append([
            phase, place.layer, place.weight if several else None, place.n,
            int((of.uses > 0).sum()), each, each * place.bytes, int(of.uses.argmax()),
            most / total if total else None, most * place.n / total if total else None,
        ])  # fmt: skip
    columns = header(
        "phase", ("layer", "layer"), "weight", ("count", "experts", "used"), ("number", "read"),
        ("bytes", "bytes read"), ("id", "busiest"), ("fraction", "its share"),
        ("number", "busiest/mean"),
    )  # fmt: skip
    notes = [
        "Used: experts that any token used. Read: experts that a compute read, on average."
        " Busiest/mean: the uses of the busiest expert, divided by the mean of all experts.",
        "`--layers N` shows each expert of layer N.",
    ]
    return Report("Experts by layer", columns, rows, notes, labels=2)


def _of_layer(found: dict[tuple[str, Place], Usage]) -> Report:
    ((_, place), *_) = found
    phases = [phase for phase, _ in found]
    totals = {phase: max(int(of.uses.sum()), 1) for (phase, _), of in found.items()}
    rows: list[list[Cell]] = []
    for expert in range(place.n):
        rows.append([str(expert)])
        for (phase, _), of in found.items():
            n = int(of.uses[expert])
            rows[-1] += [n, n / totals[phase]]
    rows.sort(key=lambda row: -sum(int(row[at] or 0) for at in range(1, len(row), 2)))
    pairs = [header(("count", phase), ("share", f"of {phase}")) for phase in phases]
    columns = header(Column("expert"), *(column for pair in pairs for column in pair))
    notes = ["How many tokens used each expert."]
    return Report(f"Experts of layer {place.layer}", columns, rows, notes, key="experts_of_layer")


def _why_none(session: Session) -> str:
    has = any(
        isinstance(n := model.hparams.get("n_expert"), int) and n > 0
        for model in session.models.values()
    )
    if not has:
        return "no model of this log has experts"
    return (
        "the log lacks the experts of the steps that count; record again, with experts on the CPU"
    )
