"""The times of a log's kernels: the median of each over the steps of a phase.

Invariant: nothing is estimated. Times are those of thread 0, and what was not timed (gaps between
kernels, whatever a step does beside its compute) is in no task; a note says how much it is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
import numpy as np

from llamacpp_instr.base.errors import UsageError
from llamacpp_instr.base.terminal import counted
from llamacpp_instr.converters.scheduling.tasks import Int64
from llamacpp_instr.converters.scheduling.timed_graph import TimedGraph, timed_graph
from llamacpp_instr.log.graph.kernels import KernelWork, untimed_backends
from llamacpp_instr.log.schema import Graph, Plan
from llamacpp_instr.log.session import Session, Timings
from llamacpp_instr.log.steps import PHASES, counted_steps


@dataclass(frozen=True)
class Recorded:
    """One graph of a log with the medians of its kernels."""

    timed: TimedGraph
    quartiles: tuple[Int64, Int64]
    """by kernel: a quarter of its times are below the first, a quarter above the second"""
    rest_ns: int
    """the median of what a compute took beside its kernels"""
    n_computes: int
    n_threads: int
    notes: list[str]


def recorded_graph(
    session: Session,
    phase: str | None = None,
    step: int | None = None,
    layers: tuple[int, int] | None = None,
) -> Recorded:
    """The kernels of one phase's steps, by default decode's, or of one step, with the median of
    their times; of several graphs that with the most computes. `layers` chooses kernels.

    Raises UsageError for a log without ops, one whose computes a debugger or `--stats` disturbed,
    one of another backend than the CPU, and if there is no such phase, step or layer.
    """
    _check(session)
    computes, what, notes = _computes(session, phase, step)
    groups: dict[bytes, list[Timings]] = {}
    for of in session.ops:
        if of.thread == 0 and of.plan >= 0:
            ops = of.rows([i for i, n in enumerate(of.compute.tolist()) if n in computes])
            plan = session.plans[ops.plan]
            if len(ops):
                key = _shape_key(session.graphs[plan.graph], plan)
                groups.setdefault(key, []).append(ops)
    if not groups:
        raise UsageError(f"{session.path}: no ops in {what}; record with --level detailed")
    timed = max(groups.values(), key=lambda of: sum(map(len, of)))
    plan = session.plans[max(timed, key=lambda of: of.place[-1]).plan]
    graph = session.graphs[plan.graph]
    if untimed := untimed_backends(graph):
        raise UsageError(
            f"{session.path}: {', '.join(untimed)} ran part of the graph, and only kernels of the"
            " CPU are timed; record on the CPU"
        )
    durations = np.concatenate([ops.dur for ops in timed])
    low, middle, high = np.percentile(durations, [25, 50, 75], axis=0).round().astype(np.int64)
    made = timed_graph(graph, plan, middle, _median_work(session, timed), layers, session.path)
    rows = [computes[compute] for ops in timed for compute in ops.compute.tolist()]
    threads = int(session.computes["n_threads"][rows].max())
    rest = np.median(session.computes["dur"][rows] - durations.sum(axis=1, dtype=np.int64))
    found = Recorded(made, (low, high), max(0, int(rest)), len(rows), threads, [])
    others = sum(len(ops) for group in groups.values() for ops in group) - len(rows)
    found.notes.extend([*_notes(found, what, others), *notes, *session.log_end.notes()])
    return found


def _check(session: Session) -> None:
    if session.start.perturbed:
        raise UsageError(
            f"{session.path}: recorded with --stats or by the debugger, which change the times;"
            " record without them"
        )
    if session.start.level == "minimal":
        raise UsageError(
            f"{session.path}: no ops at the level minimal; record with --level detailed"
        )


def _computes(
    session: Session, phase: str | None, step: int | None
) -> tuple[dict[int, int], str, list[str]]:
    """The rows of the chosen computes by their numbers, what they are, and notes."""
    if step is None:
        steps, notes = counted_steps(session)
        chosen = phase or "decode"
        found = set(steps["step"][steps["phase"] == chosen].tolist())
        if not found:
            others = [of for of in PHASES if (steps["phase"] == of).any()]
            has = (
                f"it has {' and '.join(others)}: choose with --phase"
                if others
                else "no step counts"
            )
            raise UsageError(f"{session.path}: no {chosen} to schedule; {has}")
        what = counted(len(found), chosen)
    else:
        ended = session.steps.rows(session.steps["status"] == 0)["step"].tolist()
        if step not in ended:
            has = f"its steps are {min(ended)} to {max(ended)}" if ended else "it has no steps"
            raise UsageError(f"{session.path}: no step {step}; {has}")
        found, what, notes = {step}, f"step {step}", []
    of_step = enumerate(session.computes.tuples("step", "compute"))
    return {compute: row for row, (in_step, compute) in of_step if in_step in found}, what, notes


def _shape_key(graph: Graph, plan: Plan) -> bytes:
    """Equal for plans whose kernels compute the same."""
    nodes = graph.whole
    leafs = [(leaf.name, leaf.type, leaf.ne) for leaf in graph.leafs]
    return msgspec.msgpack.encode(
        (plan.node, plan.n, nodes.op, nodes.type, nodes.ne, nodes.src, nodes.exec, leafs)
    )


def _median_work(session: Session, timed: Sequence[Timings]) -> KernelWork:
    """The median work of each kernel: attention reads more cells with every token."""
    works = [session.work(ops) for ops in timed]
    n_flops, n_bytes = works[0].flops.copy(), works[0].bytes.copy()
    bound = np.zeros(len(n_flops), np.bool_)
    for kernel in works[0].varying:
        columns = zip(*(work.varying[kernel] for work in works), strict=True)
        flops, moved, bounds = (np.concatenate(column) for column in columns)
        n_flops[kernel], n_bytes[kernel] = np.median(flops), np.median(moved)
        bound[kernel] = bounds.any()
    return KernelWork(n_flops, n_bytes, bound)


def _notes(found: Recorded, what: str, others: int) -> list[str]:
    timed, (low, high) = found.timed, found.quartiles
    total = int(timed.ns.sum())
    spread = float((high - low).sum()) / max(1, total)
    threads = counted(found.n_threads, "thread")
    notes = [
        f"Times are medians of {found.n_computes:,} computes of {what}, recorded with {threads};"
        f" the middle half of a kernel's times spans {100 * spread:.0f} % of its median on average."
        if found.n_computes > 1
        else f"Times are those of one compute of {what}, recorded with {threads}."
    ]
    if found.n_threads > 1:
        notes.append(
            f"A task's time is that of thread 0, which shares a kernel with {found.n_threads - 1}"
            " more: one engine here is as fast as all threads of the recording together."
        )
    if others:
        notes.append(
            f"Left out: {counted(others, 'compute')} with another graph (more cells of the cache,"
            " or another number of tokens)."
        )
    if found.rest_ns:
        share = found.rest_ns / (total + found.rest_ns)
        notes.append(
            f"A compute took {found.rest_ns / 1000:.1f} µs more between its kernels,"
            f" {100 * share:.1f} % of the compute: no task has that."
        )
    return notes
