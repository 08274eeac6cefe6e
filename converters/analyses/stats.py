"""The statistics of a session: time, its spread and the rates, by one key or two (`stats_keys`).

Invariant: clocks of different threads are never added. Times are those of thread 0, which takes
part in every kernel; only the table of threads covers all threads. Notes name what is excluded.

The title of the table states what is counted, which depends on the keys: by phase, context and
mark every step; by layer and block, also together with those, the total of the kernels in each
compute; by op, role, tensor and type every kernel that ran.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, TypeAlias

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
    kernel_keys,
    parse_by,
    step_values,
    where_of,
)
from llamacpp_instr.log.graph.kernels import Work, untimed_backends
from llamacpp_instr.log.graph.ops import BLOCKS
from llamacpp_instr.log.session import Int64, Matrix, Session, Table, Timings
from llamacpp_instr.log.steps import PHASES, Account, counted_steps
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

IN_ORDER: tuple[By, ...] = ("layer", "phase", "context")
"""keys whose rows are in the order of their values, not of time"""


@dataclass
class _Samples:
    """The things of one group that are counted: kernels, computes or steps."""

    dur: Matrix
    flops: int
    bytes: int
    bound: bool
    """whether `flops` and `bytes` are upper bounds"""
    rates: tuple[float | None, float | None]
    """medians of FLOPs and bytes per second; None if nothing has one"""
    wait: int | None = None
    """the part of `dur` in barriers; None if it was not recorded"""


Groups: TypeAlias = "Iterable[tuple[Key, _Samples]]"


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
    notes = [*notes, *_session_notes(session)]
    if keys == ("thread",):
        threads.title = f"Kernels by thread, {what}"
        threads.notes += notes
        return [threads]
    if not of_kernels:
        report = _report(keys, "Steps", _by_step(account, keys, filters))
    elif keys == ("layer",) and not session.ops:
        report = _report(keys, "Computes", _by_layer_runs(account))
        notes.append("A layer's time is from its first kernel to its last.")
        if session.start.level == "minimal":
            notes.append("By op, block, role, tensor and type needs the level detailed.")
    elif {"op", "role", "tensor", "type"}.isdisjoint(keys):
        report = _report(keys, "Computes", _by_compute(account, keys, filters))
    else:
        report = _report(keys, "Kernels", _by_kernel(account, keys, filters))
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
        raise UsageError("by thread counts all kernels: leave out --layers, --ops and --where")


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


def op_table(account: Account) -> Report:
    """The table by op."""
    return _report(("op",), "Kernels", _by_kernel(account, ("op",), ()))


# --- samples ---


class _Piece(NamedTuple):
    """Kernels of one group: some columns of some rows of `ops`."""

    ops: Timings
    work: Work
    rows: Int64
    kernels: Int64


def _pieces(
    account: Account, by: Sequence[By], filters: Sequence[Filter]
) -> Iterator[tuple[Key, list[_Piece]]]:
    """Every kernel that ran, grouped by properties of its node and of its step."""
    session = account.session
    blocks: list[Key] = [(block,) for block in BLOCKS] if tuple(by) == ("block",) else []
    found: dict[Key, list[_Piece]] = {key: [] for key in blocks}
    where = where_of(account, {*by, *(of.key for of in filters)})
    for ops in account.ops:
        work = session.work(ops)
        rows_of: dict[tuple[Value, ...], list[int]] = defaultdict(list)
        for row, compute in enumerate(ops.compute.tolist()):
            rows_of[tuple(where[compute].values())].append(row)
        for rows in rows_of.values():
            of_step = where[int(ops.compute[rows[0]])]
            kernels_of: dict[Key, list[int]] = defaultdict(list)
            for kernel, key in enumerate(kernel_keys(session, ops.plan, by, of_step, filters)):
                kernels_of[key].append(kernel)
            for key, kernels in kernels_of.items():
                piece = _Piece(ops, work, np.array(rows), np.array(kernels))
                found.setdefault(key, []).append(piece)
    return ((key, of) for key, of in found.items() if of and key != LEFT_OUT)


def _by_kernel(account: Account, by: Sequence[By], filters: Sequence[Filter]) -> Groups:
    """A sample for each kernel that ran."""
    for key, pieces in _pieces(account, by, filters):
        n_flops, n_bytes, bounds = zip(*map(_work, pieces), strict=True)
        dur = np.concatenate([_cells(of, of.ops.dur) for of in pieces])
        rates = _median_kernel_rate(pieces, 0), _median_kernel_rate(pieces, 1)
        waited = _waited(account, pieces)
        yield key, _Samples(dur, sum(n_flops), sum(n_bytes), any(bounds), rates, waited)


def _work(piece: _Piece) -> tuple[int, int, bool]:
    """FLOPs and bytes of all its kernels, and whether they are upper bounds."""
    total, kernels = piece.work.total(piece.rows), piece.kernels
    bound = bool(total.bound[kernels].any())
    return int(total.flops[kernels].sum()), int(total.bytes[kernels].sum()), bound


def _cells(piece: _Piece, of: Matrix) -> Matrix:
    cells: Matrix = of[np.ix_(piece.rows, piece.kernels)].ravel()
    return cells


def _median_kernel_rate(pieces: Sequence[_Piece], which: Literal[0, 1]) -> float | None:
    """The median of FLOPs (0) or bytes (1) per second of the kernels that have any."""
    rates = np.empty(sum(len(of.rows) * len(of.kernels) for of in pieces))
    n = 0
    for of in pieces:
        for kernel in of.kernels.tolist():
            amounts, dur = of.work.of_kernel(kernel)[which][of.rows], of.ops.dur[of.rows, kernel]
            found = _rates(amounts, dur)
            rates[n : n + len(found)] = found
            n += len(found)
    return _median(rates[:n])


def _waited(account: Account, pieces: Sequence[_Piece]) -> int | None:
    """None unless all kernels of the session have waits."""
    if any(of.wait is None for of in account.ops):
        return None
    waits = ((of, of.ops.wait) for of in pieces)
    return sum(int(_cells(of, wait).sum(dtype=np.int64)) for of, wait in waits if wait is not None)


def _by_compute(account: Account, by: Sequence[By], filters: Sequence[Filter]) -> Groups:
    """A sample for each compute and group: its kernels, combined."""
    for key, pieces in _pieces(account, by, filters):
        computes = np.concatenate([of.ops.compute[of.rows] for of in pieces])
        present, at = np.unique(computes, return_inverse=True)
        dur, n_flops, n_bytes, bound = np.zeros((4, len(present)), np.int64)
        begin = 0
        for of in pieces:
            these = at[begin : begin + len(of.rows)]
            begin += len(of.rows)
            cells = of.ops.dur[np.ix_(of.rows, of.kernels)]
            np.add.at(dur, these, cells.sum(axis=1, dtype=np.int64))
            for kernel in of.kernels.tolist():
                amounts = zip((n_flops, n_bytes, bound), of.work.of_kernel(kernel), strict=True)
                for total, amount in amounts:
                    np.add.at(total, these, amount[of.rows])
        yield key, _samples(dur, n_flops, n_bytes, bound > 0, _waited(account, pieces))


def _by_layer_runs(account: Account) -> Groups:
    """A sample for each layer of each compute, for logs without ops."""
    spent: dict[int, dict[int, int]] = defaultdict(lambda: defaultdict(int))
    for of in account.layers:
        for column, layer in enumerate(of.label.tolist()):
            dur = of.dur[:, column].tolist()
            for compute, ns in zip(of.compute.tolist(), dur, strict=True):
                spent[layer][compute] += ns
    for layer, by_compute in spent.items():
        zeros = np.zeros(len(by_compute), np.int64)
        dur = np.array(list(by_compute.values()), np.int64)
        yield (layer,), _samples(dur, zeros, zeros, zeros > 0)


def _by_step(account: Account, by: Sequence[By], filters: Sequence[Filter]) -> Groups:
    """A sample for each step, with the time that its caller waited; its work is that of its ops, or
    unknown if a step of its group had kernels on a device."""
    session, steps = account.session, account.steps
    n_flops, n_bytes, bound, untimed = np.zeros((4, len(steps)), np.int64)
    for of in account.ops:
        work, at = session.work(of).of_computes(), account.rows_of(of)
        np.add.at(n_flops, at, work.flops)
        np.add.at(n_bytes, at, work.bytes)
        np.add.at(bound, at, work.bound)
        untimed[at] |= bool(untimed_backends(session.graphs[session.plans[of.plan].graph]))
    needed = {*by, *(of.key for of in filters)}
    values: dict[By, list[Value]] = {
        key: step_values(session, steps, key) for key in OF_STEP if key in needed
    }
    rows_of: dict[Key, list[int]] = defaultdict(list)
    for row in range(len(steps)):
        if all(of.accepts(values[of.key][row]) for of in filters):
            rows_of[tuple(values[key][row] for key in by)].append(row)
    for key, rows in rows_of.items():
        if untimed[rows].any():
            n_flops[rows] = n_bytes[rows] = bound[rows] = 0
        samples = account.total[rows], n_flops[rows], n_bytes[rows], bound[rows] > 0
        yield key, _samples(*samples)


def _samples(
    dur: Int64, n_flops: Int64, n_bytes: Int64, bound: NDArray[np.bool_], wait: int | None = None
) -> _Samples:
    rates = (_median(_rates(n_flops, dur)), _median(_rates(n_bytes, dur)))
    return _Samples(dur, int(n_flops.sum()), int(n_bytes.sum()), bool(bound.any()), rates, wait)


# --- tables ---


def _report(by: Sequence[By], counted: str, groups: Groups) -> Report:
    """One row for each group: the slowest first, layers and phases in order."""
    rows: list[list[Cell]] = []
    bounded = False
    for key, of in groups:
        n, total = len(of.dur), int(of.dur.sum(dtype=np.int64))
        copy = of.dur.astype(np.float64)
        quantiles = np.quantile(copy, (0.5, 0.9, 0.99), overwrite_input=True).tolist()
        n_flops, n_bytes = (rate_of(work, total, of.bound) for work in (of.flops, of.bytes))
        rates = [n_flops, of.rates[0], n_bytes, of.rates[1]]
        bounded |= of.bound
        rows.append([*key, n, total, None, total / n, *quantiles, *rates, of.wait])
    at = len(by) + 1
    all_time = sum(int(row[at] or 0) for row in rows)
    for row in rows:
        row[at + 1] = int(row[at] or 0) / all_time if all_time else None
    rows.sort(key=lambda row: (*map(_rank, by, row), -int(row[at] or 0)))
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


def _rates(amounts: Int64, dur: Matrix) -> NDArray[np.float64]:
    """Per second, of what has any."""
    known = (amounts > 0) & (dur > 0)
    rates: NDArray[np.float64] = amounts[known] / dur[known]
    return rates


def _median(rates: NDArray[np.float64]) -> float | None:
    return float(np.median(rates, overwrite_input=True)) * 1e9 if len(rates) else None


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
    per_thread: dict[int, list[tuple[int, int, int]]] = defaultdict(list)
    busy_of: dict[int, list[int]] = defaultdict(list)
    for compute, thread, *of in threads.tuples("compute", "thread", "kernels", "busy", "waiting"):
        per_thread[thread].append((of[0], of[1], of[2]))
        busy_of[compute].append(of[1])
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
