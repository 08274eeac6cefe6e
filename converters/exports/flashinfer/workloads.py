"""What the computes of sessions used: which definition, with which sizes, how often, how long.

Invariant: the time of a kernel counts once: for the use that has its nodes, or as an op without
definition. Times are those of thread 0, which takes part in every kernel.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from math import prod
from typing import Any

import numpy as np

from llamacpp_instr.base.errors import UsageError
from llamacpp_instr.base.terminal import OnProgress
from llamacpp_instr.converters.exports.flashinfer import simple
from llamacpp_instr.converters.exports.flashinfer.attention import (
    Case,
    Int32,
    attention,
    case_of,
    views_of_log,
)
from llamacpp_instr.converters.exports.flashinfer.definition import Axes, Catalog, Definition
from llamacpp_instr.converters.exports.flashinfer.use import GraphNodes, Use
from llamacpp_instr.log.graph.attention import Attention, Ubatch, attentions
from llamacpp_instr.log.graph.kernels import kernel_nodes, node_backends, without_copies
from llamacpp_instr.log.schema import Plan
from llamacpp_instr.log.session import Session, in_order
from llamacpp_instr.log.steps import Account, counted_steps

_Matcher = Callable[[GraphNodes, int], Use | None]
_MATCHERS: dict[str, tuple[_Matcher, int]] = {
    "MUL_MAT": (simple.gemm, 2),
    "MUL_MAT_ID": (simple.experts, 3),
    "RMS_NORM": (simple.norm, 1),
    "NORM": (simple.norm, 1),
    "GET_ROWS": (simple.rows, 2),
    "ROPE": (simple.rope, 2),
    "GLU": (simple.activation, 1),
    "UNARY": (simple.activation, 1),
    "SOFT_MAX": (simple.softmax, 1),
    "ARGSORT": (simple.topk, 1),
    "TOP_K": (simple.topk, 1),
    "FLASH_ATTN_EXT": (attention, 3),
    **dict.fromkeys(("ADD", "SUB", "MUL", "DIV"), (simple.elementwise, 2)),
}
"""by op: what describes a node, and how many sources it has at least"""


def uses_of(g: GraphNodes) -> list[Use]:
    """The uses of definitions, in the order of their first nodes. A node belongs to one use at
    most; nodes in none have no definition."""
    found: dict[int, Use] = {}
    # a norm takes the sum before it and the product behind it
    norms = [i for i, op in enumerate(g.nodes.op) if op in ("RMS_NORM", "NORM")]
    for node in [*norms, *range(len(g.nodes.op))]:
        matcher, least = _MATCHERS.get(g.nodes.op[node], (None, 0))
        if node in found or matcher is None or not g.nodes.exec[node]:
            continue
        if len(g.nodes.src[node]) < least:
            continue
        with suppress(ArithmeticError, ValueError):  # impossible sizes and parameters
            use = matcher(g, node)
            if use is not None:
                found.update(dict.fromkeys(use.nodes, use))
    return sorted(dict.fromkeys(found.values()), key=lambda use: use.nodes[0])


_MOST = 1 << 24
"""rows or cells, beyond which a log is damaged"""
_NAMES = uuid.UUID("5f7e1c7a-52d1-4a0e-9c44-0d5f4f3f7a51")


@dataclass
class Workload:
    """A definition with sizes that occurred."""

    name: str
    """of the definition in the catalog"""
    axes: Axes
    integers: dict[str, Int32]
    scalars: dict[str, float]
    times: int = 0
    """how often it was computed"""
    ns: int = 0
    at_most: bool = False
    """whether the log does not record what a mask showed, so sizes are those of all cells"""

    @cached_property
    def id(self) -> str:
        """The same for the same sizes, in every export."""
        lists = {name: values.tolist() for name, values in self.integers.items()}
        content = json.dumps([self.name, self.axes, lists, self.scalars], sort_keys=True)
        return str(uuid.uuid5(_NAMES, content))


@dataclass
class Undescribed:
    """An op that no definition describes."""

    times: int = 0
    ns: int = 0


@dataclass
class Found:
    """All that the sessions used."""

    catalog: Catalog = field(default_factory=Catalog)
    workloads: dict[tuple[Any, ...], Workload] = field(default_factory=dict)
    undescribed: dict[str, Undescribed] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def workload(self, case: Case, at_most: bool = False) -> Workload:
        """The workload of a case, which is a new one if no other has its sizes."""
        name = self.catalog.add(case.definition)
        integers = tuple((key, values.tobytes()) for key, values in case.integers.items())
        key = (name, *case.axes.items(), *integers, *case.scalars.items())
        if key not in self.workloads:
            self.workloads[key] = Workload(name, case.axes, case.integers, case.scalars)
        found = self.workloads[key]
        found.at_most |= at_most
        return found


@dataclass(frozen=True)
class _Kernels:
    """Of a plan: what each kernel is a part of."""

    uses: list[Use]
    kinds: list[Any]
    """by use: equal for those that are one workload in every compute"""
    attention: dict[int, Attention]
    """by use"""
    use: list[int]
    """by kernel: its number in `uses`, -1 for none"""
    op: list[str]


def find_workloads(sessions: Sequence[Session], on_progress: OnProgress) -> Found:
    """What all computes of the steps that count used. `on_progress` gets lists of kernels done and
    in total. Raises `UsageError` for a log without kernels."""
    found = Found()
    total = sum(len(ops) for session in sessions for ops in session.ops)
    done = 0
    for session in sessions:
        for _ in _of_session(found, session):
            done += 1
            on_progress(done, total)
    return found


def _of_session(found: Found, session: Session) -> Iterator[None]:
    """Yields after each compute."""
    steps, notes = counted_steps(session)
    found.notes += [f"{session.path}: {note}" for note in [*notes, *session.log_end.notes()]]
    account = Account(session, steps)
    kernels: dict[int, _Kernels] = {}
    cases: dict[tuple[int, Any, Ubatch | None], Workload] = {}
    graphs = {
        number: GraphNodes(without_copies(of)) for number, of in session.graphs.items() if of.nodes
    }
    if not account.ops:
        raise UsageError(f"{session.path}: no kernels; record with --level detailed")
    for ops, row in in_order(account.ops):
        plan = session.plans[ops.plan]
        g = graphs[plan.graph]
        if ops.plan not in kernels:
            kernels[ops.plan] = _kernels(g, plan)
        of, ubatch = kernels[ops.plan], session.ubatches.get(int(ops.compute[row]))
        spent = [0] * len(of.uses)
        for use, op, ns in zip(of.use, of.op, ops.dur[row].tolist(), strict=True):
            if use >= 0:
                spent[use] += ns
            else:
                undescribed = found.undescribed.setdefault(op, Undescribed())
                undescribed.times += 1
                undescribed.ns += ns
        for number, ns in enumerate(spent):
            shape = of.attention.get(number)
            key = (ops.plan, of.kinds[number], ubatch if shape else None)
            if key not in cases:
                cases[key] = found.workload(*_case(g, of.uses[number], shape, ubatch))
            cases[key].times += 1
            cases[key].ns += ns
        yield


def _kernels(g: GraphNodes, plan: Plan) -> _Kernels:
    uses = uses_of(g)
    of_node = {node: number for number, use in enumerate(uses) for node in use.nodes}
    belongs, ops = [], []
    for nodes in kernel_nodes(g.graph, plan):
        belongs.append(next((of_node[node] for node in nodes if node in of_node), -1))
        ops.append("+".join(g.nodes.op[node] for node in nodes))
    # a plan may leave out the kernels of devices
    there = sorted(set(belongs) - {-1})
    numbers = {use: number for number, use in enumerate(there)} | {-1: -1}
    shapes = attentions(g.graph, node_backends(g.graph))
    used = [uses[use] for use in there]
    attention = {i: shapes[use.nodes[0]] for i, use in enumerate(used) if use.attention}
    kinds = [_kind(g, use, attention[i]) if use.attention else i for i, use in enumerate(used)]
    return _Kernels(used, kinds, attention, [numbers[use] for use in belongs], ops)


def _kind(g: GraphNodes, use: Use, attention: Attention) -> Any:
    """What the layers of a model have in common."""
    params = tuple(g.params(use.nodes[0]).items())
    shapes = tuple((g.ne(use.reads[name]), g.type(use.reads[name])) for name in "qkv")
    return attention, params, shapes, "sinks" in use.reads


def _case(
    g: GraphNodes, use: Use, attention: Attention | None, ubatch: Ubatch | None
) -> tuple[Case, bool]:
    if attention is None:
        if max(use.axes.values(), default=0) > _MOST:
            raise UsageError(f"graph {g.graph.graph}: impossible tensor sizes")
        return simple_case(use.definition, use), False
    if max(prod(g.ne(use.reads["q"])[1:]), prod(g.ne(use.reads["k"])[1:])) > _MOST:
        raise UsageError(f"graph {g.graph.graph}: impossible tensor sizes")
    views, known = views_of_log(attention, ubatch)
    return case_of(g, use, views), not known


def simple_case(definition: Definition, use: Use) -> Case:
    """A use whose sizes the graph determines, with integers that are valid: they count from 0, or
    are random below their bound."""
    integers = {}
    for name, of in use.indices.items():
        shape = definition.shape(name, use.axes)
        if of.below:
            integers[name] = np.random.default_rng(0).integers(0, of.below, shape, np.int32)
        else:
            integers[name] = np.arange(np.prod(shape), dtype=np.int32).reshape(shape)
    return Case(definition, use.axes, integers, {})
