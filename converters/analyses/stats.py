"""The statistics of a session: time, its spread and the rates, by one key or two.

Invariant: clocks of different threads are never added. The time of a kernel is that of its device,
or of thread 0, which takes part in every other one; only the table of threads covers all threads.
Notes name what is excluded. A value of a key is the same wherever it is used: as a row's name and
in a filter.

The title of the table states what is counted, which depends on the keys: by phase, context and
mark every step; by layer and block, also together with those, the total of the kernels in each
compute; by op, role, tensor and type every kernel that ran.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from itertools import chain
from typing import Any, Literal, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from llamacpp_instr.base.errors import UsageError
from llamacpp_instr.base.patterns import name_matches
from llamacpp_instr.base.terminal import counted
from llamacpp_instr.converters.analyses.clock import untimed_note
from llamacpp_instr.converters.analyses.experts import experts_report
from llamacpp_instr.converters.analyses.tables import grouped, header
from llamacpp_instr.log.graph.kernels import Work, node_backends
from llamacpp_instr.log.graph.ops import BLOCKS, VIEW_OPS
from llamacpp_instr.log.graph.timeline import plan_timeline
from llamacpp_instr.log.requests import find_requests
from llamacpp_instr.log.session import Int64, Matrix, Session, Table, Timings
from llamacpp_instr.log.steps import (
    PHASES,
    Account,
    counted_steps,
    untimed_splits,
)
from llamacpp_instr.model.file import role_of
from llamacpp_instr.report.report import BOUND, Cell, Column, Report, Unit, rate_of, shown

OfKernel = Literal["op", "layer", "block", "role", "tensor", "type", "device"]
OfStep = Literal["phase", "context", "sequence", "request", "mark"]
By = Literal[OfKernel, OfStep, "thread", "expert"]
Value: TypeAlias = "str | int"
Key: TypeAlias = tuple[Value, ...]
"""of a group: the values of its keys"""

OF_KERNEL: tuple[OfKernel, ...] = ("op", "layer", "block", "role", "tensor", "type", "device")
OF_STEP: tuple[OfStep, ...] = ("phase", "context", "sequence", "request", "mark")
BYS: tuple[By, ...] = (*OF_KERNEL, *OF_STEP, "thread", "expert")
IN_ORDER: tuple[By, ...] = ("layer", "phase", "context")
"""keys whose rows are in the order of their values, not of time"""
BESIDE_CALLER = (
    "Kernels of a device overlap the work of thread 0: their times do not add up to wall-clock"
    " time."
)
COARSE_TICK = 10.0
"""a tick in ns that is visible in a kernel's time"""
LEFT_OUT: Key = ()
"""the group of what a filter leaves out"""
NO_WEIGHT = "(no weight)"
NO_MARK = "(no mark)"
NO_DEVICE = "(not known)"
NONE_KNOWN, SEVERAL = "(none known)", "(several)"
"""sequence or request of a step: the log does not record it, or the step serves several"""


def parse_by(text: str) -> tuple[By, ...]:
    """One key or two, separated by a comma. Raises UsageError otherwise."""
    names = [name.strip() for name in text.split(",")]
    keys = tuple(by for name in names for by in BYS if by == name)
    if len(keys) != len(names) or len(set(keys)) != len(keys) or len(keys) > 2:
        raise UsageError(f"--by {text}: give one of {', '.join(BYS)}, or two, such as layer,op")
    for alone in {"thread", "expert"} & set(keys):
        if len(keys) > 1:
            raise UsageError(f"--by {text}: {alone} cannot be combined with another key")
    return keys


@dataclass(frozen=True)
class Filter:
    """Keeps the kernels, or the steps, whose value of `key` is accepted."""

    key: By
    accepts: Callable[[Value], bool]


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


def compute_stats(
    session: Session,
    by: str | None = None,
    phase: str | None = None,
    warm_up: bool = False,
    filters: Sequence[Filter] = (),
) -> list[Report]:
    """The table by one key or two (`parse_by`; default: op, or layer if the log has no ops) of one
    phase or all, and the table of threads if every thread was recorded and nothing is filtered.

    Warm-up runs are left out unless `warm_up` is set; failed steps are always left out. Raises
    UsageError for a key that the log's level does not support, for a phase without steps that
    count, and if the filters keep nothing.
    """
    keys = parse_by(by or ("layer" if session.start.level == "minimal" else "op"))
    of_kernels = [key for key in (*keys, *(of.key for of in filters)) if key in OF_KERNEL]
    _check(session, keys, filters)
    steps, notes = counted_steps(session, warm_up)
    if phase is not None:
        steps = steps.rows(steps["phase"] == phase)
        if not len(steps):
            raise UsageError(f"{session.path}: no {phase} step to count; {_kept(session, notes)}")
    account = Account(session, steps)
    inside = [n in account.row for n in session.threads["compute"].tolist()]
    threads = thread_report(session.threads.rows(np.array(inside, np.bool_)))
    what = "all phases" if phase is None else phase
    if outside := int((session.computes["step"] < 0).sum()):
        notes = [*notes, f"Left out: {counted(outside, 'graph compute')} outside of steps."]
    notes = [*notes, *session.log_end.notes(), *recording_notes(session)]
    if keys == ("thread",):
        threads.title = f"Kernels by thread, {what}"
        threads.notes += notes
        return [threads]
    if keys == ("expert",):
        report = experts_report(account, [of.accepts for of in filters])
        report.title += f", {what}"
        report.notes += notes
        return [report]
    if not of_kernels:
        report = _report(keys, "Steps", _by_step(account, keys, filters))
    elif keys == ("layer",) and not session.has_ops:
        report = _report(keys, "Computes", _by_layer_runs(account))
        notes.append("A layer's time is from its first kernel to its last.")
        if session.start.level == "minimal":
            notes.append("By op, block, role, tensor and type needs the level detailed.")
    elif {"op", "role", "tensor", "type", "device"}.isdisjoint(keys):
        report = _report(keys, "Computes", _by_compute(account, keys, filters))
    else:
        report = _report(keys, "Kernels", _by_kernel(account, keys, filters))
    if filters and not report.rows:
        raise UsageError(f"{session.path}: the filters leave nothing; {_kept(session, notes)}")
    report.title += f", {what}"
    if not report.rows:
        report.notes.append("The log has nothing to count here.")
    if of_kernels:
        notes += untimed_note(account)
        if account.device_ops:
            notes.append(BESIDE_CALLER)
    if len(threads.rows) > 1 and of_kernels:
        report.notes.append(
            "Times are those of thread 0, which takes part in every kernel;"
            " waiting is its time in barriers inside them."
        )
    report.notes += notes
    return [report, threads] if len(threads.rows) > 1 and not filters else [report]


def _check(session: Session, keys: Sequence[By], filters: Sequence[Filter]) -> None:
    level = session.start.level
    needing = [f"by {key}" for key in keys if key not in (*OF_STEP, "layer")]
    needing += [f"by {' and '.join(keys)}" for key in keys if key == "layer" and len(keys) > 1]
    needing += [f"a filter by {of.key}" for of in filters if of.key in OF_KERNEL]
    if needing and level == "minimal":
        raise UsageError(
            f"{session.path}: {needing[0]} needs ops, which the level minimal does not record;"
            " by layer and by phase work, or record with --level detailed"
        )
    if "thread" in keys and level != "verbose":
        raise UsageError(
            f"{session.path}: by thread needs every thread, recorded with --level verbose"
        )
    if "thread" in keys and filters:
        raise UsageError("by thread counts all kernels: leave out --layers, --ops and --where")
    if "expert" in keys and any(of.key != "layer" for of in filters):
        raise UsageError("by expert counts tokens of layers: leave out --ops and --where")


def _kept(session: Session, notes: Sequence[str]) -> str:
    return " ".join(notes).rstrip(".") or f"the log has {counted(len(session.steps), 'step')}"


def recording_notes(session: Session) -> Iterator[str]:
    """Why the times of a session must not be compared with others, or why they are coarse."""
    if session.start.perturbed:
        yield "Tensor values were read (--stats): do not compare times."
    if session.start.args.get("dialect"):
        yield "Converted from an earlier fork's log: it measured times differently."
    if session.start.tick >= COARSE_TICK:
        yield (
            f"Single times are multiples of {shown(session.start.tick, 'ns')}, a tick of this"
            " processor's counter; totals, and means of many, are finer."
        )


def op_table(account: Account) -> Report:
    """By op, and by device if there were several."""
    session = account.session
    graphs = {session.plans[of.plan].graph for of in account.kernels}
    backends = {split.backend for graph in graphs for split in session.graphs[graph].splits}
    by: tuple[By, ...] = ("device", "op") if len(backends) > 1 else ("op",)
    return _report(by, "Kernels", _by_kernel(account, by, ()))


# --- the values of the keys ---


def kernel_values(session: Session, plan: int, key: By) -> Sequence[Value] | None:
    """The value of each kernel of a plan; None for a key of steps. A role is that of the weight
    that the kernel reads (`ffn_down`), or else what it does, in words (`residual add`)."""
    kernels = session.kernels(plan)
    if key == "role":
        of = session.plans[plan]
        ops = plan_timeline(session.graphs[of.graph], of).ops
        return [
            role_of(weight) if weight is not None else str(op.args["what"])
            for weight, op in zip(kernels.weight, ops, strict=True)
        ]
    if key in ("tensor", "type"):
        weights = kernels.weight_type if key == "type" else kernels.weight
        return [NO_WEIGHT if weight is None else weight for weight in weights]
    if key == "layer":
        layers: list[int] = kernels.layer.tolist()
        return layers
    if key == "op":
        return kernels.label
    if key == "device":
        backends = node_backends(session.graphs[session.plans[plan].graph])
        return [backends[nodes[0]] or NO_DEVICE for nodes in kernels.nodes]
    return kernels.block if key == "block" else None


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
    if key in ("phase", "context"):
        values: list[Value] = steps["phase" if key == "phase" else "ctx"].tolist()
        return values
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
        of_thread = np.flatnonzero(steps["thread"] == thread)
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


def _needed_values(
    account: Account, by: Sequence[By], filters: Sequence[Filter]
) -> dict[By, list[Value]]:
    """The value of each needed key of steps, in each step."""
    keys = {*by, *(of.key for of in filters)}
    return {key: step_values(account.session, account.steps, key) for key in OF_STEP if key in keys}


def kernel_keys(
    session: Session,
    plan: int,
    by: Sequence[By],
    of_step: Mapping[By, Value],
    filters: Sequence[Filter],
) -> list[Key]:
    """The group of each kernel of a plan in a step: its values of `by`."""
    n = len(session.plans[plan].node)

    def values(key: By) -> Sequence[Value]:
        of_kernel = kernel_values(session, plan, key)
        return [of_step[key]] * n if of_kernel is None else of_kernel

    keys: list[Key] = list(zip(*map(values, by), strict=True))
    for of in filters:
        accepted = [of.accepts(value) for value in values(of.key)]
        if of.key == "tensor":
            # an activation is also a tensor
            computed = [any(map(of.accepts, names)) for names in _computed(session, plan)]
            accepted = [one or other for one, other in zip(accepted, computed, strict=True)]
        keys = [key if is_in else LEFT_OUT for key, is_in in zip(keys, accepted, strict=True)]
    return keys


# --- samples ---


class _Samples(NamedTuple):
    """The things of one group that are counted: kernels, computes or steps."""

    dur: Matrix
    flops: tuple[int, float | None]
    """their sum, and the median per second of what has any; None if nothing has"""
    bytes: tuple[int, float | None]
    bound: bool
    """whether `flops` and `bytes` are upper bounds"""
    wait: int | None = None
    """the part of `dur` in barriers; None if it was not recorded"""


Groups: TypeAlias = "Iterable[tuple[Key, _Samples]]"


class _Piece(NamedTuple):
    """Kernels of one group: some columns of some rows of `ops`."""

    ops: Timings
    work: Work
    rows: Int64
    kernels: Int64

    def cells(self, of: Matrix) -> Matrix:
        """(computes, kernels)."""
        cells: Matrix = of[np.ix_(self.rows, self.kernels)]
        return cells

    def amounts(self, which: int) -> Iterator[NDArray[Any]]:
        """FLOPs (0), bytes (1), or whether these are bounds (2) of each kernel, by compute."""
        return (self.work.of_kernel(of)[which][self.rows] for of in self.kernels.tolist())


def _pieces(
    account: Account, by: Sequence[By], filters: Sequence[Filter]
) -> Iterator[tuple[Key, list[_Piece]]]:
    """Every kernel that ran, grouped by properties of its node and of its step."""
    session = account.session
    blocks: list[Key] = [(block,) for block in BLOCKS] if tuple(by) == ("block",) else []
    found: dict[Key, list[_Piece]] = {key: [] for key in blocks}
    of_steps = _needed_values(account, by, filters)
    for ops in account.kernels:
        work = session.work(ops)
        rows_of: dict[Key, list[int]] = defaultdict(list)
        for row, step in enumerate(account.rows_of(ops).tolist()):
            rows_of[tuple(values[step] for values in of_steps.values())].append(row)
        for of_step, rows in rows_of.items():
            values = dict(zip(of_steps, of_step, strict=True))
            keys = kernel_keys(session, ops.plan, by, values, filters)
            for key, kernels in grouped(range(len(keys)), keys.__getitem__).items():
                piece = _Piece(ops, work, np.array(rows), np.array(kernels))
                found.setdefault(key, []).append(piece)
    return ((key, of) for key, of in found.items() if of and key != LEFT_OUT)


def _by_kernel(account: Account, by: Sequence[By], filters: Sequence[Filter]) -> Groups:
    """A sample for each kernel that ran."""
    for key, pieces in _pieces(account, by, filters):
        cells = [of.cells(of.ops.dur) for of in pieces]
        columns = [column for of in cells for column in of.T]
        n_flops, n_bytes = (
            _work(chain.from_iterable(of.amounts(which) for of in pieces), columns)
            for which in range(2)
        )
        dur = np.concatenate([of.ravel() for of in cells])
        yield key, _Samples(dur, n_flops, n_bytes, *_bound_and_wait(account, pieces))


def _by_compute(account: Account, by: Sequence[By], filters: Sequence[Filter]) -> Groups:
    """A sample for each compute and group: its kernels, combined."""
    for key, pieces in _pieces(account, by, filters):
        computes = np.concatenate([of.ops.compute[of.rows] for of in pieces])
        sums = [of.cells(of.ops.dur).sum(axis=1, dtype=np.int64) for of in pieces]
        dur = _of_computes(computes, sums)
        amounts = (
            _of_computes(computes, [reduce(np.add, of.amounts(which)) for of in pieces])
            for which in range(2)
        )
        n_flops, n_bytes = (_work([of], [dur]) for of in amounts)
        yield key, _Samples(dur, n_flops, n_bytes, *_bound_and_wait(account, pieces))


def _bound_and_wait(account: Account, pieces: Sequence[_Piece]) -> tuple[bool, int | None]:
    bound = any(of.any() for piece in pieces for of in piece.amounts(2))
    if any(of.wait is None for of in account.ops):
        return bound, None
    waits = ((of, of.ops.wait) for of in pieces)
    sums = (of.cells(ns).sum(dtype=np.int64) for of, ns in waits if ns is not None)
    return bound, int(sum(sums))


def _by_layer_runs(account: Account) -> Groups:
    """A sample for each layer of each compute, for logs without ops."""
    columns = ((of, i, layer) for of in account.layers for i, layer in enumerate(of.label.tolist()))
    for layer, found in grouped(columns, lambda of: of[2]).items():
        computes = np.concatenate([of.compute for of, _, _ in found])
        dur = _of_computes(computes, [of.dur[:, i] for of, i, _ in found])
        yield (layer,), _Samples(dur, (0, None), (0, None), bound=False)


def _of_computes(computes: Int64, amounts: Sequence[Matrix]) -> Int64:
    """The sum of each compute; `amounts` are those of `computes`, in parts."""
    present, at = np.unique(computes, return_inverse=True)
    total = np.zeros(len(present), np.int64)
    np.add.at(total, at, np.concatenate(amounts))
    return total


def _by_step(account: Account, by: Sequence[By], filters: Sequence[Filter]) -> Groups:
    """A sample for each step, with the time that its caller waited; its work is that of its ops, or
    unknown if a step of its group had kernels that are not timed."""
    session, steps = account.session, account.steps
    n_flops, n_bytes, bound, untimed = np.zeros((4, len(steps)), np.int64)
    for of in account.kernels:
        work, at = session.work(of).of_computes(), account.rows_of(of)
        np.add.at(n_flops, at, work.flops)
        np.add.at(n_bytes, at, work.bytes)
        np.add.at(bound, at, work.bound)
    untimed[[account.row[of] for of in untimed_splits(session) if of in account.row]] = 1
    values = _needed_values(account, by, filters)
    kept = [i for i in range(len(steps)) if all(of.accepts(values[of.key][i]) for of in filters)]
    for key, rows in grouped(kept, lambda row: tuple(values[key][row] for key in by)).items():
        if untimed[rows].any():
            n_flops[rows] = n_bytes[rows] = bound[rows] = 0
        dur = account.total[rows]
        flops, moved = (_work([of[rows]], [dur]) for of in (n_flops, n_bytes))
        yield key, _Samples(dur, flops, moved, bool(bound[rows].any()))


def _work(amounts: Iterable[Matrix], dur: Sequence[Matrix]) -> tuple[int, float | None]:
    """The sum, and the median per second of what has any."""
    total = n = 0
    # one array: joining arrays would take the memory of all rates twice
    rates = np.empty(sum(map(len, dur)))
    for these, ns in zip(amounts, dur, strict=True):
        known = (these > 0) & (ns > 0)
        found = these[known] / ns[known]
        rates[n : n + len(found)] = found
        n += len(found)
        total += int(these.sum())
    return total, float(np.median(rates[:n], overwrite_input=True)) * 1e9 if n else None


# --- tables ---


def _report(by: Sequence[By], what: str, groups: Groups) -> Report:
    """One row for each group: the slowest first, layers and phases in order."""
    rows: list[list[Cell]] = []
    bounded = False
    for key, of in groups:
        n, total = len(of.dur), int(of.dur.sum(dtype=np.int64))
        copy = of.dur.astype(np.float64)
        quantiles = np.quantile(copy, (0.5, 0.9, 0.99), overwrite_input=True).tolist()
        rates: list[Cell] = []
        for work, median in (of.flops, of.bytes):
            rates += [rate_of(work, total, of.bound), median]
        bounded |= of.bound
        rows.append([*key, n, total, None, total / n, *quantiles, *rates, of.wait])
    at = len(by) + 1
    all_time = sum(int(row[at] or 0) for row in rows)
    for row in rows:
        row[at + 1] = int(row[at] or 0) / all_time if all_time else None
    rows.sort(key=lambda row: (*map(_rank, by, row), -int(row[at] or 0)))
    units: dict[By, Unit] = {"layer": "layer", "context": "id"}
    columns = header(
        *(Column(key, units.get(key, "text")) for key in by),
        ("count", "count"), ("ns", "total"), ("fraction", "share"),
        ("ns", "mean", "p50", "p90", "p99"), ("flop_per_second", "FLOP/s", "FLOP/s p50"),
        ("bytes_per_second", "bytes/s", "bytes/s p50"), ("ns", "waiting"),
    )  # fmt: skip
    title = f"{what} by {' and '.join(by)}"
    return Report(title, columns, rows, [BOUND] * bounded, labels=len(by))


def _rank(key: By, value: Cell) -> int:
    """The place of a row with this value; 0 for keys whose slowest rows come first."""
    if key == "phase":
        return PHASES.index(str(value))
    return int(value or 0) if key in IN_ORDER else 0


def thread_report(threads: Table) -> Report:
    """Busy and waiting time of every thread, and how evenly the work of a compute is spread, from
    rows of `Session.threads`.

    Imbalance is the sum over computes of the busiest thread's time, divided by that of the mean
    thread: 1 if all threads work equally.
    """
    every = list(threads.tuples("thread", "compute", "kernels", "busy", "waiting"))
    rows: list[list[Cell]] = []
    for thread, of_thread in sorted(grouped(every, lambda of: of[0]).items()):
        n, busy, waiting = (sum(of[i] for of in of_thread) for i in (2, 3, 4))
        share = waiting / (busy + waiting) if busy + waiting else None
        rows.append([thread, n, busy, waiting, share])
    columns = header(
        ("id", "thread"), ("count", "kernels"), ("ns", "busy", "waiting"),
        ("fraction", "of its time"),
    )  # fmt: skip
    report = Report("Threads", columns, rows)
    computes = grouped(every, lambda of: of[1]).values()
    mean = sum(sum(of[3] for of in compute) / len(compute) for compute in computes)
    longest = sum(max(of[3] for of in compute) for compute in computes)
    if rows:
        report.notes.append("Waiting is time in barriers, inside kernels and between them.")
    if mean and len(rows) > 1:
        report.notes.append(
            f"Imbalance {longest / mean:.3f}: over all computes, the busiest thread worked"
            f" {shown(longest - mean, 'ns')} longer than the average thread."
        )
        report.figures["imbalance"] = (longest / mean, "ratio")
        report.figures["busiest thread beyond the mean one"] = (longest - mean, "ns")
    return report
