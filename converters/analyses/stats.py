"""The statistics of a session: time, its spread and the rates, by one of seven keys.

Invariant: clocks of different threads are never added. Times are those of thread 0, which takes
part in every kernel; only the table of threads covers all threads. Notes name what is excluded.

The title of the table tells what is counted, which depends on the key: by op, tensor and type
every kernel that ran; by layer and block their total in each compute; by phase every step.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from converters.report.report import BOUND, Cell, Column, Report, rate_of, shown
from llamacpp_instr.errors import UsageError
from llamacpp_instr.graph.kernels import weight_read
from llamacpp_instr.graph.ops import BLOCKS
from llamacpp_instr.log.session import Session, Table, Timed
from llamacpp_instr.log.steps import PHASES, counted_steps, phase_of_compute

By = Literal["op", "layer", "block", "tensor", "type", "phase", "thread"]
BYS: tuple[By, ...] = ("op", "layer", "block", "tensor", "type", "phase", "thread")
NO_WEIGHT = "(no weight)"

Int64 = NDArray[np.int64]
Key: TypeAlias = "str | int"


@dataclass
class _Samples:
    """The things that are counted, one element each: group, time, work."""

    key: list[Key]
    """names of the groups"""
    group: Int64
    dur: Int64
    flops: Int64
    bytes: Int64
    bound: NDArray[np.bool_]
    """whether `flops` and `bytes` are upper bounds"""
    wait: Int64 | None = None
    """the part of `dur` in barriers; None if it was not recorded"""


def compute_stats(
    session: Session, by: By | None = None, phase: str | None = None, warm_up: bool = False
) -> list[Report]:
    """The table by `by` (default: op, or layer if the log has no ops) of one phase or all, and the
    table of threads if every thread was recorded.

    Warm-up runs are left out unless `warm_up` is set; failed steps are always left out. Raises
    UsageError for a key that the log's level does not support, and for a phase without steps that
    count.
    """
    by = by or ("layer" if session.start.level == "minimal" else "op")
    _check_level(session, by)
    steps, notes = counted_steps(session, warm_up)
    if phase is not None:
        steps = steps.rows(steps["phase"] == phase)
        if not len(steps):
            raise UsageError(f"{session.path}: no {phase} step to count; {_kept(session, notes)}")
    phase_of = phase_of_compute(session, steps)
    ops = [of for of in session.ops if of.compute in phase_of]
    layers = [of for of in session.layers if of.compute in phase_of]
    threads = _threads(ops)
    what = "all phases" if phase is None else phase
    notes = [*notes, *_session_notes(session)]
    if by == "thread":
        threads.title = f"Kernels by thread, {what}"
        threads.notes += notes
        return [threads]
    of_caller = [of for of in ops if of.thread == 0]
    if by == "phase":
        report = _report("phase", "Steps", _by_phase(session, steps, of_caller))
    elif by == "layer" and not session.ops:
        report = _report("layer", "Computes", _by_layer_runs(layers))
        notes.append("A layer's time is from its first kernel to its last.")
        if session.start.level == "minimal":
            notes.append("By op, block, tensor and type needs the level detailed.")
    elif by in ("layer", "block"):
        report = _report(by, "Computes", _per_compute(_kernels(session, of_caller, by), of_caller))
    else:
        report = _report(by, "Kernels", _kernels(session, of_caller, by))
    report.title += f", {what}"
    if not report.rows:
        report.notes.append("The log has nothing to count here.")
    if len(threads.rows) > 1 and by != "phase":
        report.notes.append(
            "Times are those of thread 0, which takes part in every kernel;"
            " waiting is its time in barriers inside them."
        )
    report.notes += notes
    return [report, threads] if len(threads.rows) > 1 else [report]


def _check_level(session: Session, by: By) -> None:
    level = session.start.level
    if by not in ("layer", "phase") and level == "minimal":
        raise UsageError(
            f"{session.path}: by {by} needs ops, which the level minimal does not record;"
            " by layer and by phase work, or record with --level detailed"
        )
    if by == "thread" and level != "verbose":
        raise UsageError(
            f"{session.path}: by thread needs every thread, recorded with --level verbose"
        )


def _kept(session: Session, notes: Sequence[str]) -> str:
    return " ".join(notes).rstrip(".") or f"the log has {len(session.steps)} steps"


def _session_notes(session: Session) -> list[str]:
    notes = []
    if outside := int((session.computes["step"] < 0).sum()):
        notes.append(f"{outside} graph computes outside of steps are left out.")
    if ended := session.log_end.sentence():
        notes.append(f"{ended[0].upper()}{ended[1:]}.")
    if session.start.perturbed:
        notes.append("Tensor values were read (--stats): do not compare times.")
    if session.start.args.get("dialect"):
        notes.append("Converted from an earlier fork's log: it measured times differently.")
    return notes


# --- samples ---


def _kernels(session: Session, ops: Sequence[Timed], by: By) -> _Samples:
    """Every kernel that ran, grouped by a property of its node."""
    number: dict[Key, int] = {block: i for i, block in enumerate(BLOCKS)} if by == "block" else {}
    columns: dict[int, Int64] = {}
    for plan in {of.plan: None for of in ops}:
        keys = _kernel_keys(session, plan, by)
        columns[plan] = np.array([number.setdefault(k, len(number)) for k in keys], np.int64)
    works = [session.work(of) for of in ops]
    waits = [of.wait for of in ops if of.wait is not None]
    return _Samples(
        list(number),
        _joined([columns[of.plan] for of in ops]),
        _joined([of.dur for of in ops]),
        _joined([of.flops for of in works]),
        _joined([of.bytes for of in works]),
        _joined([of.bound for of in works]).astype(np.bool_),
        _joined(waits) if ops and len(waits) == len(ops) else None,
    )


def _kernel_keys(session: Session, plan: int, by: By) -> Sequence[Key]:
    kernels = session.kernels(plan)
    if by == "op":
        return kernels.label
    if by == "block":
        return kernels.block
    if by == "layer":
        keys: list[int] = kernels.layer.tolist()
        return keys
    of = session.plans[plan]
    graph = session.graphs[of.graph]
    counts = of.n or [1] * len(of.node)
    inside = (range(first, first + n) for first, n in zip(of.node, counts, strict=True))
    return [weight_read(graph, nodes)[by == "type"] or NO_WEIGHT for nodes in inside]


def _per_compute(kernels: _Samples, ops: Sequence[Timed]) -> _Samples:
    """The kernels of one compute and one group, combined."""
    compute = np.repeat(np.array([of.compute for of in ops], np.int64), [len(of.dur) for of in ops])
    n = max(len(kernels.key), 1)
    pairs, at = np.unique(compute * n + kernels.group, return_inverse=True)

    def summed(column: Int64 | NDArray[np.bool_]) -> Int64:
        total = np.zeros(len(pairs), np.int64)
        np.add.at(total, at, column)
        return total

    return _Samples(
        kernels.key,
        pairs % n,
        summed(kernels.dur),
        summed(kernels.flops),
        summed(kernels.bytes),
        summed(kernels.bound) > 0,
        None if kernels.wait is None else summed(kernels.wait),
    )


def _by_layer_runs(layers: Sequence[Timed]) -> _Samples:
    """The layers of every compute, for logs without ops."""
    spent: dict[tuple[int, int], int] = defaultdict(int)
    for of in layers:
        assert of.label is not None
        for layer, dur in zip(of.label.tolist(), of.dur.tolist(), strict=True):
            spent[of.compute, layer] += dur
    number: dict[Key, int] = {}
    group = [number.setdefault(layer, len(number)) for _, layer in spent]
    zeros = np.zeros(len(group), np.int64)
    dur = np.array(list(spent.values()), np.int64)
    return _Samples(list(number), np.array(group, np.int64), dur, zeros, zeros, zeros > 0)


def _by_phase(session: Session, steps: Table, ops: Sequence[Timed]) -> _Samples:
    """Every step, with the time that its caller waited; its work is that of its ops."""
    row = {step: i for i, step in enumerate(steps["step"].tolist())}
    columns = (session.computes[name].tolist() for name in ("compute", "step"))
    step_of = dict(zip(*columns, strict=True))
    n_flops, n_bytes = np.zeros(len(steps), np.int64), np.zeros(len(steps), np.int64)
    bound = np.zeros(len(steps), np.bool_)
    for of in ops:
        work, at = session.work(of), row[step_of[of.compute]]
        n_flops[at] += work.flops.sum()
        n_bytes[at] += work.bytes.sum()
        bound[at] |= work.bound.any()
    group = np.array([PHASES.index(label) for label in steps["phase"]], np.int64)
    return _Samples(list(PHASES), group, steps["end"] - steps["begin"], n_flops, n_bytes, bound)


# --- tables ---


def _report(by: str, counted: str, samples: _Samples) -> Report:
    """One row for each group with samples: the slowest first, layers and phases in order."""
    order = np.argsort(samples.group, kind="stable")
    sorted_groups = samples.group[order]
    present, begin = np.unique(sorted_groups, return_index=True)
    groups = np.split(order, begin[1:]) if len(order) else []
    all_time = int(samples.dur.sum())
    rows: list[list[Cell]] = []
    bounded = False
    for number, at in zip(present.tolist(), groups, strict=True):
        dur = samples.dur[at]
        total = int(dur.sum())
        quantiles = np.quantile(dur, (0.5, 0.9, 0.99)).tolist()
        work = (int(samples.flops[at].sum()), int(samples.bytes[at].sum()))
        bound = bool(samples.bound[at].any())
        rates = [rate_of(amount, total, bound) for amount in work]
        bounded |= bound
        share = total / all_time if all_time else None
        mean = total / len(dur)
        wait = None if samples.wait is None else int(samples.wait[at].sum())
        first = [samples.key[number], len(dur), total, share, mean]
        rows.append([*first, *quantiles, *rates, wait])
    if by == "layer":
        rows.sort(key=lambda row: int(row[0] or 0))
    elif by != "phase":
        rows.sort(key=lambda row: -int(row[2] or 0))
    columns = [
        Column(by, "layer" if by == "layer" else "text"),
        Column("count", "count"),
        Column("total", "ns"),
        Column("share", "fraction"),
        Column("mean", "ns"),
        Column("p50", "ns"),
        Column("p90", "ns"),
        Column("p99", "ns"),
        Column("FLOP/s", "flop_per_second"),
        Column("bytes/s", "bytes_per_second"),
        Column("waiting", "ns"),
    ]
    return Report(f"{counted} by {by}", columns, rows, [BOUND] * bounded)


def _threads(ops: Sequence[Timed]) -> Report:
    """Busy and waiting time of every thread, and how evenly the work of a compute is spread.

    Busy is the time in kernels without their barriers. Imbalance is the sum over computes of the
    busiest thread's time, divided by that of the mean thread: 1 if all threads work equally.
    """
    recorded = [of for of in ops if of.wait is not None]
    per_thread: dict[int, list[tuple[int, int, int]]] = defaultdict(list)
    busy_of: dict[int, list[int]] = defaultdict(list)
    for of in recorded:
        assert of.wait is not None
        dur, wait = int(of.dur.sum()), int(of.wait.sum())
        between = 0 if of.gap is None else int(of.gap.sum())
        per_thread[of.thread].append((len(of.dur), dur - wait, wait + between))
        busy_of[of.compute].append(dur - wait)
    rows: list[list[Cell]] = []
    for thread, of_thread in sorted(per_thread.items()):
        n, busy, waiting = (sum(column) for column in zip(*of_thread, strict=True))
        share = waiting / (busy + waiting) if busy + waiting else None
        rows.append([thread, n, busy, waiting, share])
    columns = [
        Column("thread", "count"),
        Column("kernels", "count"),
        Column("busy", "ns"),
        Column("waiting", "ns"),
        Column("of its time", "fraction"),
    ]
    report = Report("Threads", columns, rows)
    mean = sum(sum(busy) / len(busy) for busy in busy_of.values())
    longest = sum(max(busy) for busy in busy_of.values())
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


def _joined(pieces: Sequence[Int64 | NDArray[np.bool_]]) -> Int64:
    column: Int64 = np.concatenate([np.zeros(0, np.int64), *pieces])
    return column
