"""Ops under the roofs that `instr probe` measured: what they reached of what is attainable.

Invariant: nothing is guessed. An op is compared with the bandwidth for the memory that its computes
read, and with ggml's kernel for its weight's type, or, without one, with the fastest kernel.
https://en.wikipedia.org/wiki/Roofline_model
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from math import inf, prod

import numpy as np

from llamacpp_instr.base.errors import UsageError
from llamacpp_instr.converters.analyses.probe import busy_note
from llamacpp_instr.log.graph.timeline import plan_timeline
from llamacpp_instr.log.session import Session
from llamacpp_instr.log.steps import PHASES, Account, counted_steps
from llamacpp_instr.prediction.probe.file import Probe
from llamacpp_instr.report.charts import Chart, Point, roofline_chart
from llamacpp_instr.report.report import BOUND, AtMost, Cell, Column, Report, rate_of

DRAWN = 5
"""ops of a phase in the picture, those that took longest"""


@dataclass
class _Op:
    """One role in one phase."""

    ns: int = 0
    flops: int = 0
    bytes: int = 0
    bound: bool = False
    roofs: list[tuple[float, float]] = field(default_factory=list)
    """FLOP/s and bytes/s, of each compute"""


def roofline(session: Session, probe: Probe) -> tuple[list[Report], Chart]:
    """A table for each phase, a row for each role, and the picture. Raises UsageError for a log
    without ops, and for one of another machine."""
    host = session.start.host.cpu
    if host and probe.cpu and host != probe.cpu:
        raise UsageError(
            f"{session.path}: recorded on {host}, but the probe is of {probe.cpu};"
            " run `instr probe` there and name its file with --machine"
        )
    steps, notes = counted_steps(session)
    found = _ops(Account(session, steps), probe)
    if not found:
        raise UsageError(f"{session.path}: no ops; record with --level detailed")
    points: list[Point] = []
    reports = []
    for phase in PHASES:
        of_phase = {title: op for (at, title), op in found.items() if at == phase}
        if of_phase:
            reports.append(_report(phase, of_phase, points))
    reports[-1].notes.append(
        "More than 100 % of the memory: the data came from a cache that is smaller than what a"
        " compute reads."
    )
    if any(op.bound for op in found.values()):
        reports[-1].notes.append(BOUND)
    if note := busy_note(probe):
        reports[-1].notes.append(note)
    reports[-1].notes += [*notes, *session.log_end.notes()]
    return reports, _chart(session, probe, points)


def _report(phase: str, ops: dict[str, _Op], points: list[Point]) -> Report:
    """The table of a phase, the slowest op first; adds the slowest to `points`."""
    total = sum(op.ns for op in ops.values())
    rows: list[list[Cell]] = []
    for title, op in sorted(ops.items(), key=lambda item: -item[1].ns):
        flop_roof, byte_roof = (float(np.median(roof)) for roof in zip(*op.roofs, strict=True))
        n_flops = rate_of(op.flops, op.ns, op.bound)
        n_bytes = rate_of(op.bytes, op.ns, op.bound)
        intensity = op.flops / op.bytes if op.flops and op.bytes else None
        by_memory = intensity is None or intensity * byte_roof < flop_roof
        attainable = None if intensity is None else min(flop_roof, intensity * byte_roof)
        share = (n_bytes or 0) / byte_roof if by_memory else (n_flops or 0) / flop_roof
        reached = None if n_bytes is None else AtMost(share) if op.bound else share
        limit = None if n_bytes is None else "memory" if by_memory else "compute"
        rates = [n_flops, n_bytes, intensity, attainable, reached, limit]
        rows.append([title, op.ns, op.ns / total if total else None, *rates])
        if intensity and n_flops and len(rows) <= DRAWN:
            points.append(Point(f"{phase}: {title}", intensity, n_flops))
    columns = [
        Column("op"),
        Column("time", "ns"),
        Column("share", "fraction"),
        Column("FLOP/s", "flop_per_second"),
        Column("bytes/s", "bytes_per_second"),
        Column("FLOP/byte", "ratio"),
        Column("attainable", "flop_per_second"),
        Column("reached", "fraction"),
        Column("limit"),
    ]
    return Report(f"Under the roofs: {phase}", columns, rows)


def _ops(account: Account, probe: Probe) -> dict[tuple[str, str], _Op]:
    session = account.session
    threads = dict(session.computes.tuples("compute", "n_threads"))
    found: dict[tuple[str, str], _Op] = defaultdict(_Op)
    for ops in account.ops:
        work, kernels = session.work(ops), _kernels(session, ops.plan)
        n_bytes = work.of_computes().bytes
        for phase, rows in account.by_phase(ops):
            total = work.total(rows)
            ns = ops.dur[rows].sum(axis=0, dtype=np.int64)
            amounts = (of.tolist() for of in (ns, total.flops, total.bytes, total.bound))
            for (title, _, _), *of in zip(kernels, *amounts, strict=True):
                op = found[phase, title]
                op.ns += of[0]
                op.flops += of[1]
                op.bytes += of[2]
                op.bound |= of[3]
            first = {title: (type_, tokens) for title, type_, tokens in reversed(kernels)}
            computes = zip(ops.compute[rows].tolist(), n_bytes[rows].tolist(), strict=True)
            for n, read in ((max(1, threads[compute]), read) for compute, read in computes):
                byte_roof = probe.bandwidth_of(n, float(read)).bytes_per_second
                fastest = probe.fastest_kernel(n).flops_per_second
                for title, (type_, tokens) in first.items():
                    kernel = probe.kernel_of(type_, tokens, n) if type_ else None
                    flop_roof = kernel.flops_per_second if kernel else fastest
                    found[phase, title].roofs.append((flop_roof, byte_roof))
    return found


def _kernels(session: Session, number: int) -> list[tuple[str, str | None, int]]:
    """Title, type of the weight of a matrix product, and its tokens, of each kernel of a plan."""
    plan = session.plans[number]
    graph = session.graphs[plan.graph]
    nodes = graph.whole
    rows = []
    for first, op in zip(plan.node, plan_timeline(graph, plan).ops, strict=True):
        product = nodes.op[first].startswith("MUL_MAT")
        type_ = str(op.args["weight_type"]) if product and "weight_type" in op.args else None
        rows.append((op.title, type_, prod(nodes.ne[first][1:])))
    return rows


def _chart(session: Session, probe: Probe, points: list[Point]) -> Chart:
    """The roofs for as many threads as the session's computes had."""
    threads = int(np.median(session.computes["n_threads"]))
    roofs = {"fastest kernel": probe.fastest_kernel(threads).flops_per_second}
    types = sorted({tensor.type.upper() for tensor in session.tensors})
    for type_ in types:
        kernel = probe.kernel_of(type_, 1, threads)
        if kernel is not None:
            roofs[f"{type_}, one token"] = kernel.flops_per_second
    sizes = {"memory": inf, "caches": 0}
    slopes = {of: probe.bandwidth_of(threads, n).bytes_per_second for of, n in sizes.items()}
    return roofline_chart("Ops under the roofs", slopes, roofs, points)
