"""What `instr probe` measured, how much of it a session reached, and the times that it predicts.

Invariant: nothing is guessed. An op is compared with the bandwidth for the memory that its computes
read, and with ggml's kernel for its weight's type, or, without one, with the fastest kernel.
https://en.wikipedia.org/wiki/Roofline_model. Every predicted figure comes from `prediction.model`;
a sum over ops, layers or blocks is the time of the kernels of the same graph.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import inf, prod
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from llamacpp_instr.base.errors import UsageError
from llamacpp_instr.base.terminal import counted
from llamacpp_instr.converters.analyses.tables import grouped, header
from llamacpp_instr.log.graph.timeline import plan_timeline
from llamacpp_instr.log.session import Int64, Session
from llamacpp_instr.log.steps import PHASES, Account, counted_steps
from llamacpp_instr.prediction.probe.file import Probe, check_machine
from llamacpp_instr.report.charts import Chart, Point, roofline_chart
from llamacpp_instr.report.report import BOUND, AtMost, Cell, Column, Report, Unit, rate_of

if TYPE_CHECKING:
    from llamacpp_instr.prediction.calibrate import Kind
    from llamacpp_instr.prediction.model import Case, Step

BUSY = 0.5
"""load per core above which the figures are doubtful"""
DRAWN = 5
"""ops of a phase in the picture of roofs, those that took longest"""
Z95 = 1.96

Rates: TypeAlias = "Mapping[tuple[str | int, int], float]"
"""by row and number of threads"""


def probe_reports(probe: Probe) -> list[Report]:
    """Memory, kernels and barriers, a column for each number of threads."""
    copied: Rates = {(of.bytes, of.threads): of.bytes_per_second for of in probe.bandwidth}
    memory = _table("Copying memory", Column("working set", "bytes"), copied, "bytes_per_second")
    memory.notes.append(f"Bytes read and written per second, on {probe.cpu or 'this machine'}.")
    if note := busy_note(probe):
        memory.notes.append(note)
    rates: Rates = {
        (f"{of.type}, {of.tokens}", of.threads): of.flops_per_second for of in probe.kernels
    }
    kernels = _table("Multiplying", Column("weight, tokens"), rates, "flop_per_second")
    kernels.notes.append("FLOP/s of ggml's kernels, with weights that stay in the caches.")
    times: Rates = {("time", of.threads): of.ns for of in probe.barriers}
    barriers = _table("An op that computes nothing", Column("", key="what"), times, "ns")
    return [memory, kernels, barriers]


def device_reports(probe: Probe, name: str) -> list[Report]:
    """The same for a device that was measured."""
    of = probe.of_device(name)
    assert of is not None
    reports = probe_reports(of)
    description = next(of.description for of in probe.devices if of.device == name)
    reports[0].notes[0] = f"Bytes read and written per second, on {name} ({description})."
    reports[1].notes[0] = "FLOP/s of ggml's kernels, with weights of up to 4,096 rows."
    for report in reports:
        report.columns[1:] = [replace(report.columns[1], name=name, key=name)]
    return reports


def calibration_report(factors: Mapping[Kind, float]) -> Report:
    """How much slower than the probe each kind of kernel was taken to be."""
    columns = [Column("kernels", key="kind"), Column("slower by", "ratio", key="factor")]
    rows: list[list[Cell]] = [[_KINDS[kind], factor] for kind, factor in factors.items()]
    note = (
        "A factor is the ratio of the times that are predicted from now on to those predicted"
        " before. It is drawn towards 1, because another model would also differ."
    )
    return Report("Calibration", columns, rows, notes=[note])


_KINDS: dict[Kind, str] = {
    "attention": "attention", "decode": "products of a decode", "prefill": "products of a prefill",
    "reading": "reading of weights in a decode",
    "small": "other ops of one token", "large": "other ops of several tokens",
}  # fmt: skip


def busy_note(probe: Probe) -> str | None:
    """A sentence if the machine was busy when it was measured."""
    if probe.left_out:
        return (
            f"{probe.left_out} figures were left out: more threads, or less memory, were less than"
            " half as fast. Run `instr probe` again while no other process computes."
        )
    if probe.load <= BUSY * probe.cores:
        return None
    load = f"load {probe.load:g} on {probe.cores} CPUs"
    return f"The machine was busy ({load}): it can do better than these figures."


def _table(title: str, first: Column, values: Rates, unit: Unit) -> Report:
    threads = sorted({n for _, n in values})
    columns = header(first, (unit, *(counted(n, "thread") for n in threads)))
    keys = dict.fromkeys(key for key, _ in values)
    rows: list[list[Cell]] = [[key, *(values.get((key, n)) for n in threads)] for key in keys]
    return Report(title, columns, rows)


# --- ops under the roofs ---


@dataclass
class _Op:
    """One role in one phase."""

    sums: Int64 = field(default_factory=lambda: np.zeros(4, np.int64))
    """ns, FLOPs, bytes, and how many of these are upper bounds"""
    roofs: list[tuple[float, float]] = field(default_factory=list)
    """FLOP/s and bytes/s, of each compute"""


def roofline(session: Session, probe: Probe) -> tuple[list[Report], list[Chart]]:
    """A table for each phase, a row for each role, and a picture for the caller and each device
    that was measured, if it multiplied. Raises UsageError for a log without ops, and for one of
    another machine."""
    check_machine(session.path, session.start.host.cpu, probe)
    steps, notes = counted_steps(session)
    found = _ops(Account(session, steps), probe)
    if not found:
        raise UsageError(f"{session.path}: no ops; record with --level detailed")
    points: dict[str, list[Point]] = defaultdict(list)
    tables = sorted(found, key=lambda of: (of[0], PHASES.index(of[1])))
    reports = [_of_phase(*of, found[of], points[of[0]]) for of in tables]
    reports[-1].notes.append(
        "More than 100 % of the memory: the data came from a cache that is smaller than what a"
        " compute reads."
    )
    limits = {device: _limits(session, probe, device) for device in points}
    unknown = {device for device, of in limits.items() if of is None}
    if unknown:
        names = ", ".join(sorted(unknown))
        reports[-1].notes.append(
            f"The probe has no limits for {names}: run `instr probe --device {min(unknown)}` there."
        )
    if any(op.sums[3] for of_phase in found.values() for op in of_phase.values()):
        reports[-1].notes.append(BOUND)
    if note := busy_note(probe):
        reports[-1].notes.append(note)
    reports[-1].notes += [*notes, *session.log_end.notes()]
    drawn = [(of, device) for device, of in limits.items() if of and points[device]]
    return reports, [_chart(session, of, device, points[device]) for of, device in drawn]


def _of_phase(device: str, phase: str, ops: dict[str, _Op], points: list[Point]) -> Report:
    """The table of a phase on a device that runs behind the caller, or, without one, of the caller:
    the slowest op first; adds the slowest to `points`."""
    total = sum(int(op.sums[0]) for op in ops.values())
    rows: list[list[Cell]] = []
    for title, op in sorted(ops.items(), key=lambda item: -item[1].sums[0]):
        ns, flops, moved, bound = op.sums.tolist()
        n_flops, n_bytes = (rate_of(work, ns, bool(bound)) for work in (flops, moved))
        intensity = flops / moved if flops and moved else None
        if not op.roofs:
            no_roofs: list[Cell] = [None] * 3
            share_of = ns / total if total else None
            rows.append([title, ns, share_of, n_flops, n_bytes, intensity, *no_roofs])
            continue
        flop_roof, byte_roof = (float(np.median(roof)) for roof in zip(*op.roofs, strict=True))
        by_memory = intensity is None or intensity * byte_roof < flop_roof
        attainable = None if intensity is None else min(flop_roof, intensity * byte_roof)
        share = (n_bytes or 0) / byte_roof if by_memory else (n_flops or 0) / flop_roof
        reached = None if n_bytes is None else AtMost(share) if bound else share
        limit = None if n_bytes is None else "memory" if by_memory else "compute"
        rates = [n_flops, n_bytes, intensity, attainable, reached, limit]
        rows.append([title, ns, ns / total if total else None, *rates])
        if intensity and n_flops and len(rows) <= DRAWN:
            points.append(Point(f"{phase}: {title}", intensity, n_flops))
    columns = header(
        "op", ("ns", "time"), ("fraction", "share"), ("flop_per_second", "FLOP/s"),
        ("bytes_per_second", "bytes/s"), ("ratio", "FLOP/byte"), ("flop_per_second", "attainable"),
        ("fraction", "reached"), "limit",
    )  # fmt: skip
    where = f"On {device}" if device else "Under the roofs"
    return Report(f"{where}: {phase}", columns, rows)


def _ops(account: Account, probe: Probe) -> dict[tuple[str, str], dict[str, _Op]]:
    """By device (empty for the caller) and phase, and by title."""
    session = account.session
    threads = dict(session.computes.tuples("compute", "n_threads"))
    found: dict[tuple[str, str], dict[str, _Op]] = defaultdict(lambda: defaultdict(_Op))
    for ops in account.kernels:
        work, kernels = session.work(ops), _kernels(session, ops.plan)
        n_bytes = work.of_computes().bytes
        for phase, rows in account.by_phase(ops):
            total = work.total(rows)
            ns = ops.dur[rows].sum(axis=0, dtype=np.int64)
            sums = np.stack([ns, total.flops, total.bytes, total.bound], axis=1)
            for (title, _, _), of_kernel in zip(kernels, sums, strict=True):
                found[ops.device, phase][title].sums += of_kernel
            limits = _limits(session, probe, ops.device)
            if limits is None:
                continue
            first = {title: (type_, tokens) for title, type_, tokens in reversed(kernels)}
            computes = zip(ops.compute[rows].tolist(), n_bytes[rows].tolist(), strict=True)
            for n, read in ((max(1, threads[compute]), read) for compute, read in computes):
                byte_roof = limits.bandwidth_of(n, float(read)).bytes_per_second
                fastest = limits.fastest_kernel(n).flops_per_second
                for title, (type_, tokens) in first.items():
                    kernel = limits.kernel_of(type_, tokens, n) if type_ else None
                    flop_roof = kernel.flops_per_second if kernel else fastest
                    found[ops.device, phase][title].roofs.append((flop_roof, byte_roof))
    return found


def _limits(session: Session, probe: Probe, device: str) -> Probe | None:
    """The measurements of the CPU, or of the same device by name and description."""
    if not device:
        return probe
    described = session.devices.get(device)
    here = (of.description for of in probe.devices if of.device == device)
    known = described is not None and described.description in here
    return probe.of_device(device) if known else None


def _kernels(session: Session, number: int) -> list[tuple[str, str | None, int]]:
    """Title, type of the weight of a matrix product, and its tokens, of each kernel of a plan."""
    plan = session.plans[number]
    graph = session.graphs[plan.graph]
    nodes, types = graph.whole, session.kernels(number).weight_type
    rows = []
    for first, op, type_ in zip(plan.node, plan_timeline(graph, plan).ops, types, strict=True):
        product = nodes.op[first].startswith("MUL_MAT")
        rows.append((op.title, type_ if product else None, prod(nodes.ne[first][1:])))
    return rows


def _chart(session: Session, probe: Probe, device: str, points: list[Point]) -> Chart:
    """The roofs of a device, or, without one, for as many threads as the session's computes had."""
    threads = int(np.median(session.computes["n_threads"]))
    roofs = {"fastest kernel": probe.fastest_kernel(threads).flops_per_second}
    for type_ in sorted({tensor.type.upper() for tensor in session.tensors}):
        if (kernel := probe.kernel_of(type_, 1, threads)) is not None:
            roofs[f"{type_}, one token"] = kernel.flops_per_second
    sizes = {"memory": inf, "caches": 0}
    slopes = {of: probe.bandwidth_of(threads, n).bytes_per_second for of, n in sizes.items()}
    title = f"Ops under the roofs of {device}" if device else "Ops under the roofs"
    return roofline_chart(title, slopes, roofs, points)


# --- predicted times ---


def predict_reports(
    cases: Sequence[Case], past: int, probe: Probe, features: Collection[str]
) -> list[Report]:
    """The table of all cases, a row for each file type and number of threads, and the prefill and
    the decode of the first by op, layer, block. `features` are the instruction sets of the library
    that built the graphs."""
    first = cases[0]
    reports = [_overview(cases, past, probe)]
    if probe.features and (differ := sorted({*probe.features} ^ {*features})):
        reports[0].notes.append(
            f"The measured processor and this one differ in {', '.join(differ)}: llama.cpp may"
            " interleave weights of other types there."
        )
    for name, step in (("prefill", first.prefill), ("decode", first.decode)):
        title = f"{name}, {first.type}, {counted(first.threads, 'thread')}"
        kernels = step.timeline.kernels
        for column, keys in (
            (Column("op"), kernels.label),
            (Column("layer", "layer"), kernels.layer.tolist()),
            (Column("block"), list(kernels.block)),
        ):
            key = f"{name}_by_{column.name}"
            columns = header(column, ("count", "kernels"), ("ns", "time"), ("fraction", "share"))
            rows = _parts(step, keys, in_order=column.name == "layer")
            reports.append(Report(f"By {column.name}: {title}", columns, rows, key=key))
    return reports


def _parts(step: Step, keys: Sequence[str | int], *, in_order: bool) -> list[list[Cell]]:
    """Kernels, ns and share of each key, the slowest first unless they are in order."""
    times = zip(keys, step.predicted.ns.tolist(), strict=True)
    groups = grouped(times, lambda of: of[0])
    ns = {key: sum(time for _, time in of) for key, of in groups.items()}
    total = sum(ns.values())
    order = list(ns) if in_order else sorted(ns, key=lambda key: -ns[key])
    return [[key, len(groups[key]), ns[key], ns[key] / total] for key in order]


def _overview(cases: Sequence[Case], past: int, probe: Probe) -> Report:
    energy = any(case.watts for case in cases)
    tokens = cases[0].prefill.tokens
    rows: list[list[Cell]] = []
    for case in cases:
        prefill, prefill_error = case.prefill.predicted.total()
        decode, error = case.decode.predicted.total()
        # a ratio's errors are symmetric in its logarithm
        low, high = (decode * float(np.exp(side * Z95 * error / decode)) for side in (-1, 1))
        row: list[Cell] = [
            case.type, case.threads, prefill, prefill_error / prefill, tokens / prefill * 1e9,
            decode, error / decode, 1e9 / decode, 1e9 / high, 1e9 / low, case.memory,
        ]  # fmt: skip
        if energy:
            row.append(None if case.watts is None else case.watts * decode / 1e9)
        rows.append(row)
    columns = header(
        "type", ("count", "threads"), ("ns", "prefill"), ("fraction", "± prefill"),
        ("per_second", "prefill tokens"), ("ns", "decode"), ("fraction", "± decode"),
        ("per_second", "tokens", "at least", "at most"), ("bytes", "memory"),
    )  # fmt: skip
    columns += header(("number", "joules per token")) if energy else []
    notes = [
        f"Predicted for {probe.cpu or 'the measured machine'}, measured {probe.time}; nothing was"
        " run.",
        "± is one standard deviation. The decodes per second lie between `at least` and `at most`"
        " with a probability of 95 % if the errors are like those of the measurement.",
    ]
    steps = (step for case in cases for step in (case.prefill, case.decode))
    if unknown := dict.fromkeys(name for step in steps for name in step.predicted.unknown):
        notes.append(f"Not measured, so predicted from others: {', '.join(unknown)}.")
    if not energy:
        notes.append("Energy is left out: `instr probe` found no counter (RAPL) that it may read.")
    title = f"Predicted: a prefill of {counted(tokens, 'token')}, a decode after {past:,}"
    return Report(title, columns, rows, notes, labels=2, key="predicted")
