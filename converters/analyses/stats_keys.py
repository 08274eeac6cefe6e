"""What statistics group by, and the filters: properties of kernels, and of the steps that ran them.

Invariant: a value of a key is the same wherever it is used: as a row's name and in a filter.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from itertools import islice, repeat
from typing import Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from llamacpp_instr.base.errors import UsageError
from llamacpp_instr.base.patterns import name_matches
from llamacpp_instr.log.graph.ops import VIEW_OPS
from llamacpp_instr.log.graph.timeline import plan_timeline
from llamacpp_instr.log.requests import find_requests
from llamacpp_instr.log.session import Session, Table
from llamacpp_instr.log.steps import Account
from llamacpp_instr.model.file import role_of

OfKernel = Literal["op", "layer", "block", "role", "tensor", "type"]
OfStep = Literal["phase", "context", "sequence", "request", "mark"]
By = Literal[OfKernel, OfStep, "thread"]
Value: TypeAlias = "str | int"

OF_KERNEL: tuple[OfKernel, ...] = ("op", "layer", "block", "role", "tensor", "type")
OF_STEP: tuple[OfStep, ...] = ("phase", "context", "sequence", "request", "mark")
BYS: tuple[By, ...] = (*OF_KERNEL, *OF_STEP, "thread")
Key: TypeAlias = tuple[Value, ...]
"""of a group: the values of its keys"""
Where: TypeAlias = dict[int, dict[By, Value]]
"""by compute: what its step is"""
LEFT_OUT: Key = ()
"""the group of what a filter leaves out"""
NO_WEIGHT = "(no weight)"
NO_MARK = "(no mark)"
NONE_KNOWN, SEVERAL = "(none known)", "(several)"
"""sequence or request of a step: the log does not record it, or the step serves several"""


@dataclass(frozen=True)
class Filter:
    """Keeps the kernels, or the steps, whose value of `key` is accepted."""

    key: By
    accepts: Callable[[Value], bool]


def parse_by(text: str) -> tuple[By, ...]:
    """One key or two, separated by a comma. Raises UsageError otherwise."""
    names = [name.strip() for name in text.split(",")]
    keys = tuple(by for name in names for by in BYS if by == name)
    if len(keys) != len(names) or len(set(keys)) != len(keys) or len(keys) > 2:
        raise UsageError(f"--by {text}: give one of {', '.join(BYS)}, or two, such as layer,op")
    if "thread" in keys and len(keys) > 1:
        raise UsageError(f"--by {text}: thread cannot be combined with another key")
    return keys


def layer_filter(first: int, last: int) -> Filter:
    """Layers `first` to `last`, both included."""
    return Filter("layer", lambda layer: first <= int(layer) <= last)


def op_filter(text: str) -> Filter:
    """Kernels of one of the ops, separated by commas; also as a part of a fused kernel."""
    wanted = {op.strip().upper() for op in text.split(",")}

    def accepts(label: Value) -> bool:
        return any(part.partition(" ")[0] in wanted for part in str(label).split("+"))

    return Filter("op", accepts)


def where_filter(text: str) -> Filter:
    """`COLUMN=PATTERN`: a key, and a pattern (`base.patterns`). Raises UsageError for another form
    or key."""
    name, equals, pattern = text.partition("=")
    keys = [by for by in (*OF_KERNEL, *OF_STEP) if by == name]
    if not equals or not keys:
        known = ", ".join((*OF_KERNEL, *OF_STEP))
        raise UsageError(f"--where {text}: give COLUMN=PATTERN; COLUMN is one of {known}")
    return Filter(keys[0], lambda value: name_matches(str(value), pattern))


def kernel_values(session: Session, plan: int, key: OfKernel) -> Sequence[Value]:
    """The value of each kernel of a plan. A role is that of the weight that the kernel reads
    (`ffn_down`), or else what it does, in words (`residual add`)."""
    kernels = session.kernels(plan)
    if key == "op":
        return kernels.label
    if key == "block":
        return kernels.block
    if key == "layer":
        layers: list[int] = kernels.layer.tolist()
        return layers
    if key == "role":
        of = session.plans[plan]
        ops = plan_timeline(session.graphs[of.graph], of).ops
        return [
            role_of(weight) if weight is not None else str(op.args["what"])
            for weight, op in zip(kernels.weight, ops, strict=True)
        ]
    weights = kernels.weight_type if key == "type" else kernels.weight
    return [NO_WEIGHT if weight is None else weight for weight in weights]


def _computed(session: Session, plan: int) -> list[list[str]]:
    """What each kernel computes: the names of its nodes, and of the views of these."""
    graph = session.graphs[session.plans[plan].graph].whole
    owner: list[int] = []
    names: dict[int, list[str]] = defaultdict(list)
    nodes = zip(graph.op, graph.src, graph.name, strict=True)
    for i, (op, sources, name) in enumerate(nodes):
        is_view = op in VIEW_OPS and sources and 0 <= sources[0] < i
        owner.append(owner[sources[0]] if is_view else i)
        names[owner[i]].append(name)
    kernels = session.kernels(plan).nodes
    return [[name for node in of for name in names[node]] for of in kernels]


def step_values(session: Session, steps: Table, key: OfStep) -> list[Value]:
    """The value of each of `steps`. A mark is the innermost one that is open on the thread when
    the step begins. Requests have the numbers of `instr requests`."""
    if key == "phase":
        phases: list[Value] = steps["phase"].tolist()
        return phases
    if key == "context":
        contexts: list[Value] = steps["ctx"].tolist()
        return contexts
    if key == "sequence":
        return _one_of(steps, session.sequences.tuples("step", "seq"))
    if key == "request":
        by_time, requests = find_requests(session)
        number = by_time["step"].tolist()
        served = ((number[at], i) for i, of in enumerate(requests, start=1) for at in of.steps)
        return _one_of(steps, served)
    return _marks_of(session.marks, steps)


def _one_of(steps: Table, of_step: Iterable[tuple[int, int]]) -> list[Value]:
    """The only number of each of `steps`; `of_step` has pairs of a step and one of its numbers."""
    found: dict[int, Value] = {}
    for step, number in of_step:
        found[step] = SEVERAL if step in found else number
    return [found.get(step, NONE_KNOWN) for step in steps["step"].tolist()]


def _marks_of(marks: Table, steps: Table) -> list[Value]:
    found: list[Value] = [NO_MARK] * len(steps)
    for thread in np.unique(steps["thread"]):
        inside = marks.rows(marks["thread"] == thread)
        inside = inside.rows(np.argsort(inside["begin"], kind="stable"))
        spans = list(inside.tuples("begin", "end", "name"))
        of_thread: NDArray[np.int64] = np.flatnonzero(steps["thread"] == thread)
        begins = steps["begin"][of_thread]
        still_open: list[tuple[int, str]] = []
        at = 0
        for i in np.argsort(begins, kind="stable").tolist():
            t = int(begins[i])
            while at < len(spans) and spans[at][0] <= t:
                still_open.append(spans[at][1:])
                at += 1
            # one that ends when it begins is an instant
            while still_open and 0 <= still_open[-1][0] <= t:
                still_open.pop()
            if still_open:
                found[int(of_thread[i])] = still_open[-1][1]
    return found


def where_of(account: Account, keys: Collection[By]) -> Where:
    """For each compute of the steps the values of those of `keys` that are of steps."""
    values: list[tuple[By, list[Value]]] = [
        (key, step_values(account.session, account.steps, key)) for key in OF_STEP if key in keys
    ]
    of_step = [{key: column[i] for key, column in values} for i in range(len(account.steps))]
    return {compute: of_step[row] for compute, row in account.row.items()}


def kernel_keys(
    session: Session,
    plan: int,
    by: Sequence[By],
    of_step: dict[By, Value],
    filters: Sequence[Filter],
) -> list[Key]:
    """The group of each kernel of a plan in a step: its values of `by`."""

    def values(key: By) -> Iterable[Value]:
        for of_kernel in OF_KERNEL:
            if key == of_kernel:
                return kernel_values(session, plan, of_kernel)
        return repeat(of_step[key])

    n = len(session.plans[plan].node)
    keys: list[Key] = list(zip(*(islice(values(key), n) for key in by), strict=True))
    for of in filters:
        accepted = [of.accepts(value) for value in islice(values(of.key), n)]
        if of.key == "tensor":
            # an activation is a tensor, too
            computed = [any(map(of.accepts, names)) for names in _computed(session, plan)]
            accepted = [one or other for one, other in zip(accepted, computed, strict=True)]
        keys = [key if is_in else LEFT_OUT for key, is_in in zip(keys, accepted, strict=True)]
    return keys
