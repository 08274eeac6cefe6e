"""The statistics of a session: time, its spread and the rates, by one key or two (`stats_keys`).

Invariant: clocks of different threads are never added. Times are those of thread 0, which takes
part in every kernel; only the table of threads covers all threads. Notes name what is excluded.

The title of the table tells what is counted, which depends on the keys: by phase, context and
mark every step; by layer and block, also together with those, the total of the kernels in each
compute; by op, role, tensor and type every kernel that ran.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

import numpy as np
from numpy.typing import NDArray

from llamacpp_instr.base.errors import UsageError
from llamacpp_instr.base.terminal import counted
from llamacpp_instr.converters.analyses.clock import untimed_note
from llamacpp_instr.converters.analyses.stats_keys import (
    LEFT_OUT,
    OF_KERNEL,
    OF_STEP,
    By,
    Filter,
    Key,
    Value,
    Where,
    kernel_keys,
    parse_by,
    step_values,
    where_of,
)
from llamacpp_instr.log.graph.kernels import untimed_backends
from llamacpp_instr.log.graph.ops import BLOCKS
from llamacpp_instr.log.session import Session, Table, Timed
from llamacpp_instr.log.steps import PHASES, counted_steps, phase_of_compute
from llamacpp_instr.report.report import (
    BOUND,
    Cell,
    Column,
    Report,
    Unit,
    columns_of,
    rate_of,
    shown,
)

Int64 = NDArray[np.int64]
IN_ORDER: tuple[By, ...] = ("layer", "phase", "context")
"""keys whose rows are in the order of their values, not of time"""


@dataclass
class _Samples:
    """The things that are counted, one element each: group, time, work."""

    key: list[Key]
    """of the groups"""
    group: Int64
    dur: Int64
    flops: Int64
    bytes: Int64
    bound: NDArray[np.bool_]
    """whether `flops` and `bytes` are upper bounds"""
    wait: Int64 | None = None
    """the part of `dur` in barriers; None if it was not recorded"""


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
    phase_of = phase_of_compute(session, steps)
    where = where_of(session, steps, {*keys, *(of.key for of in filters)})
    ops = [of for of in session.ops if of.compute in phase_of]
    layers = [of for of in session.layers if of.compute in phase_of]
    threads = thread_report(ops)
    what = "all phases" if phase is None else phase
    notes = [*notes, *_session_notes(session)]
    if keys == ("thread",):
        threads.title = f"Kernels by thread, {what}"
        threads.notes += notes
        return [threads]
    of_caller = [of for of in ops if of.thread == 0]
    if not of_kernels:
        report = _report(keys, "Steps", _by_phase(session, steps, of_caller, keys, filters))
    elif keys == ("layer",) and not session.ops:
        report = _report(keys, "Computes", _by_layer_runs(layers))
        notes.append("A layer's time is from its first kernel to its last.")
        if session.start.level == "minimal":
            notes.append("By op, block, role, tensor and type needs the level detailed.")
    else:
        kernels = _kernels(session, of_caller, keys, where, filters)
        if {"op", "role", "tensor", "type"}.isdisjoint(keys):
            report = _report(keys, "Computes", _per_compute(kernels, of_caller))
        else:
            report = _report(keys, "Kernels", kernels)
    if filters and not report.rows:
        raise UsageError(f"{session.path}: the filters leave nothing; {_kept(session, notes)}")
    report.title += f", {what}"
    if not report.rows:
        report.notes.append("The log has nothing to count here.")
    if of_kernels and (untimed := untimed_note(session)):
        notes.append(untimed)
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
        raise UsageError("by thread counts all kernels: leave out --layer, --op and --where")


def _kept(session: Session, notes: Sequence[str]) -> str:
    return " ".join(notes).rstrip(".") or f"the log has {counted(len(session.steps), 'step')}"


def _session_notes(session: Session) -> list[str]:
    notes = []
    if outside := int((session.computes["step"] < 0).sum()):
        notes.append(f"Left out: {counted(outside, 'graph compute')} outside of steps.")
    notes += session.log_end.notes()
    if session.start.perturbed:
        notes.append("Tensor values were read (--stats): do not compare times.")
    if session.start.args.get("dialect"):
        notes.append("Converted from an earlier fork's log: it measured times differently.")
    return notes


def op_table(session: Session, ops: Sequence[Timed]) -> Report:
    """The table by op of kernels of thread 0."""
    return _report(
        ("op",), "Kernels", _kernels(session, ops, ("op",), {of.compute: {} for of in ops}, ())
    )


# --- samples ---


def _kernels(
    session: Session,
    ops: Sequence[Timed],
    by: Sequence[By],
    where: Where,
    filters: Sequence[Filter],
) -> _Samples:
    """Every kernel that ran, grouped by properties of its node and of its step."""
    blocks: list[Key] = [(block,) for block in BLOCKS] if tuple(by) == ("block",) else []
    number: dict[Key, int] = {key: i for i, key in enumerate(blocks)}
    columns: dict[tuple[Value, ...], Int64] = {}
    groups: list[Int64] = []
    for of in ops:
        place = (of.plan, *where[of.compute].values())
        if place not in columns:
            keys = kernel_keys(session, of.plan, by, where[of.compute], filters)
            columns[place] = np.array([number.setdefault(k, len(number)) for k in keys], np.int64)
        groups.append(columns[place])
    works = [session.work(of) for of in ops]
    waits = [of.wait for of in ops if of.wait is not None]
    return _Samples(
        list(number),
        _joined(groups),
        _joined([of.dur for of in ops]),
        _joined([of.flops for of in works]),
        _joined([of.bytes for of in works]),
        _joined([of.bound for of in works]).astype(np.bool_),
        _joined(waits) if ops and len(waits) == len(ops) else None,
    )


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
    group = [number.setdefault((layer,), len(number)) for _, layer in spent]
    zeros = np.zeros(len(group), np.int64)
    dur = np.array(list(spent.values()), np.int64)
    return _Samples(list(number), np.array(group, np.int64), dur, zeros, zeros, zeros > 0)


def _by_phase(
    session: Session,
    steps: Table,
    ops: Sequence[Timed],
    by: Sequence[By],
    filters: Sequence[Filter],
) -> _Samples:
    """Every step, with the time that its caller waited; its work is that of its ops, or unknown if
    a step of its group had kernels on a device."""
    row = {step: i for i, step in enumerate(steps["step"].tolist())}
    step_of = dict(session.computes.tuples("compute", "step"))
    n_flops, n_bytes = np.zeros(len(steps), np.int64), np.zeros(len(steps), np.int64)
    bound = np.zeros(len(steps), np.bool_)
    for of in ops:
        work, at = session.work(of), row[step_of[of.compute]]
        n_flops[at] += work.flops.sum()
        n_bytes[at] += work.bytes.sum()
        bound[at] |= work.bound.any()
    needed = {*by, *(of.key for of in filters)}
    values = {key: step_values(session, steps, key) for key in OF_STEP if key in needed}
    keys: list[Key] = list(zip(*(values[key] for key in OF_STEP if key in by), strict=True))
    if tuple(by) != tuple(key for key in OF_STEP if key in by):
        keys = [key[::-1] for key in keys]
    for kept in filters:
        column = next(of for key, of in values.items() if key == kept.key)
        keys = [k if kept.accepts(v) else LEFT_OUT for k, v in zip(keys, column, strict=True)]
    number = {key: i for i, key in enumerate(dict.fromkeys(keys))}
    group = np.array([number[key] for key in keys], np.int64)
    graph_of = {of.compute: session.graphs[session.plans[of.plan].graph] for of in ops}
    untimed = [row[step_of[c]] for c, graph in graph_of.items() if untimed_backends(graph)]
    unknown = np.isin(group, group[untimed])
    n_flops[unknown] = n_bytes[unknown] = bound[unknown] = 0
    return _Samples(list(number), group, steps["end"] - steps["begin"], n_flops, n_bytes, bound)


# --- tables ---


def _kept_samples(samples: _Samples) -> _Samples:
    """Those that the filters did not leave out."""
    if LEFT_OUT not in samples.key:
        return samples
    kept = samples.group != samples.key.index(LEFT_OUT)
    columns = {of.name: getattr(samples, of.name) for of in fields(samples) if of.name != "key"}
    return replace(samples, **{name: of[kept] for name, of in columns.items() if of is not None})


def _report(by: Sequence[By], counted: str, samples: _Samples) -> Report:
    """One row for each group with samples: the slowest first, layers and phases in order."""
    samples = _kept_samples(samples)
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
        middle = [_median_rate(of[at], dur) for of in (samples.flops, samples.bytes)]
        bounded |= bound
        share = total / all_time if all_time else None
        mean = total / len(dur)
        wait = None if samples.wait is None else int(samples.wait[at].sum())
        first = [*samples.key[number], len(dur), total, share, mean]
        rows.append([*first, *quantiles, rates[0], middle[0], rates[1], middle[1], wait])
    rows.sort(key=lambda row: (*map(_rank, by, row), -int(row[len(by) + 1] or 0)))
    units: dict[By, Unit] = {"layer": "layer", "context": "id"}
    columns = [
        *(Column(key, units.get(key, "text")) for key in by),
        Column("count", "count"),
        Column("total", "ns"),
        Column("share", "fraction"),
        *columns_of("ns", "mean", "p50", "p90", "p99"),
        *columns_of("flop_per_second", "FLOP/s", "FLOP/s p50"),
        *columns_of("bytes_per_second", "bytes/s", "bytes/s p50"),
        Column("waiting", "ns"),
    ]
    title = f"{counted} by {' and '.join(by)}"
    return Report(title, columns, rows, [BOUND] * bounded, labels=len(by))


def _median_rate(amounts: Int64, dur: Int64) -> float | None:
    """The median of the rates, per second; None if nothing has one."""
    known = (amounts > 0) & (dur > 0)
    return float(np.median(amounts[known] / dur[known])) * 1e9 if known.any() else None


def _rank(key: By, value: Cell) -> int:
    """Where a row with this value stands; 0 for keys whose slowest rows come first."""
    if key == "phase":
        return PHASES.index(str(value))
    return int(value or 0) if key in IN_ORDER else 0


def _joined(pieces: Sequence[Int64 | NDArray[np.bool_]]) -> Int64:
    column: Int64 = np.concatenate([np.zeros(0, np.int64), *pieces])
    return column


def thread_report(ops: Sequence[Timed]) -> Report:
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
        Column("thread", "id"),
        Column("kernels", "count"),
        *columns_of("ns", "busy", "waiting"),
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
