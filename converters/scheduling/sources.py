"""The tasks of a recorded session, of a model's predicted steps, or of a handwritten graph.

Invariants: a source is read once, however many sets of engines it is divided for. Nothing in a log
is estimated: times are those of thread 0 and of devices behind it, the median of each kernel over
the steps of a phase. What was not timed (gaps between kernels, whatever a step does outside its
compute) is in no task; a note says how much it is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np

from llamacpp_instr.base.errors import UsageError
from llamacpp_instr.base.terminal import counted, progress_bar
from llamacpp_instr.converters.scheduling.joined import joined
from llamacpp_instr.converters.scheduling.report import SweepPoint, sweep_point
from llamacpp_instr.converters.scheduling.schedule import Schedule, schedule_list, schedule_program
from llamacpp_instr.converters.scheduling.split import Split, divide, part_shapes
from llamacpp_instr.converters.scheduling.tasks import (
    Engines,
    Int64,
    Tasks,
    beside,
    equal_engines,
    read_hand_made,
    several_sequences,
    several_tokens,
    with_devices,
)
from llamacpp_instr.converters.scheduling.timed_graph import TimedGraph, timed_graph
from llamacpp_instr.log.devices import covered, other_backends
from llamacpp_instr.log.graph.kernels import KernelWork, plan_kernels
from llamacpp_instr.log.schema import Graph, Plan
from llamacpp_instr.log.session import Session, Timings
from llamacpp_instr.log.steps import PHASES, counted_steps
from llamacpp_instr.prediction.model import PredictedStep
from llamacpp_instr.prediction.probe.file import AttentionShape, KernelShape, PartTimes, Probe


@dataclass(frozen=True)
class Recorded:
    """One graph of a log with the medians of its kernels."""

    timed: TimedGraph
    quartiles: tuple[Int64, Int64]
    """by kernel: a quarter of its times are below the first, a quarter above the second"""
    rest_ns: int
    """the median of the time that a compute took outside its kernels"""
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
    their times; of several graphs, the one with the most computes. `layers` chooses kernels. Raises
    UsageError for a log without ops, one whose computes a debugger or `--stats` disturbed, one with
    a device that is not timed, and if there is no such phase, step or layer."""
    if session.start.perturbed:
        raise UsageError(
            f"{session.path}: recorded with --stats or by the debugger, which change the times;"
            " record without them"
        )
    if session.start.level == "minimal":
        raise UsageError(f"{session.path}: no ops at level minimal; record with --level detailed")
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
    wholes = [joined(session, ops) for ops in timed]
    graph, plan, latest = max(wholes, key=lambda of: of[2][0][0].place[-1:].sum())
    rows = [computes[n] for _, _, parts in wholes for n in parts[0][0].compute.tolist()]
    if len(covered(graph, plan)) < len(graph.splits) or not rows:
        raise UsageError(
            f"{session.path}: {', '.join(other_backends(graph))} ran part of the graph, but the log"
            " does not have the kernels of that part; record on the CPU"
        )
    durations = np.concatenate([_columns([(of.dur, at) for of, at in ps]) for _, _, ps in wholes])
    low, middle, high = np.percentile(durations, [25, 50, 75], axis=0).round().astype(np.int64)
    devices = [""] * len(plan.node)
    for of, places in latest:
        for place in places:
            devices[place] = of.device
    work = _whole_work(session, [parts for _, _, parts in wholes])
    made = timed_graph(graph, plan, middle, work, layers, session.path, devices)
    threads = int(session.computes["n_threads"][rows].max())
    rest = np.median(session.computes["dur"][rows] - durations.sum(axis=1, dtype=np.int64))
    rest = 0 if any(devices) else max(0, int(rest))
    found = Recorded(made, (low, high), rest, len(rows), threads, [])
    others = sum(len(ops) for group in groups.values() for ops in group) - len(rows)
    found.notes.extend([*_notes(found, what, others), *notes, *session.log_end.notes()])
    return found


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
            has = "no step counts"
            if others:
                has = f"it has {' and '.join(others)}: choose with --phase"
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


Parts = list[tuple[Timings, list[int]]]
"""what ran on thread 0 and on each device, with the places of its kernels in the plan"""


def _columns(parts: Sequence[tuple[Any, list[int]]]) -> Int64:
    """Columns of several parts, at their places."""
    found = np.concatenate([columns for columns, _ in parts], axis=-1)
    order = np.argsort([place for _, places in parts for place in places])
    ordered: Int64 = found[..., order]
    return ordered


def _whole_work(session: Session, wholes: Sequence[Parts]) -> KernelWork:
    """The median work of each kernel of the plan."""
    works = [
        (_median_work(session, [parts[i][0] for parts in wholes]), places)
        for i, (_, places) in enumerate(wholes[0])
    ]
    flops, moved = (
        _columns([(getattr(of, name), at) for of, at in works]) for name in ("flops", "bytes")
    )
    bound = _columns([(of.bound.astype(np.int64), at) for of, at in works])
    return KernelWork(flops, moved, bound > 0)


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
    if names := ", ".join(sorted({of for of in timed.devices if of})):
        notes.append(
            f"Kernels of {names} have the times of the device. Each device is an engine of its own,"
            " unless the engines name it; nothing else runs on it."
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
            f" {100 * share:.1f} % of the compute; no task includes that."
        )
    return notes


TimeParts = Callable[[str, list[KernelShape]], "dict[KernelShape, PartTimes] | str"]
"""times the parts of kernels on this machine, or names this machine if it is not the given one; the
native library, which this room does not import, does the timing"""
Made = tuple[Tasks, list[str]]
"""tasks, and notes about their times"""
MakeTasks = Callable[[Engines], Made]


@dataclass(frozen=True)
class Wanted:
    """Which part of a source is scheduled, and how; the options of `instr schedule`."""

    split: Split
    policy: str
    seconds: float
    phase: str | None
    step: int | None
    layers: tuple[int, int] | None
    sequences: int
    tokens: int
    beside_prefill: bool

    def in_flight(self, tasks: Tasks) -> Tasks:
        return several_sequences(several_tokens(tasks, self.tokens), self.sequences)

    def plan(self, tasks: Tasks, engines: Engines) -> Schedule:
        """The schedule of the policy. Raises what `schedule_optimal` raises."""
        engines = with_devices(engines, tasks)
        if self.policy == "program":
            return schedule_program(tasks, engines)
        if self.policy == "list":
            return schedule_list(tasks, engines)
        from llamacpp_instr.converters.scheduling.optimum import schedule_optimal

        with progress_bar("Searching") as on_progress:
            return schedule_optimal(tasks, engines, self.seconds, on_progress)


def tasks_by_hand(path: str, wanted: Wanted) -> MakeTasks:
    """The tasks of a TOML file. Raises `UsageError` if it is wrong, or for a choice that needs a
    log or a model."""
    whole = wanted.layers is None and wanted.phase is None and wanted.step is None
    if not whole or wanted.split != "none" or wanted.beside_prefill:
        raise UsageError(
            f"{path}: a handwritten graph is scheduled unchanged; --split, --layers, --phase,"
            " --step and --beside-prefill need a log or a model"
        )
    tasks = wanted.in_flight(read_hand_made(path))
    return lambda _: (tasks, [])


def tasks_of_session(session: Session, wanted: Wanted, time_parts: TimeParts) -> MakeTasks:
    """The tasks of a recorded compute. Raises `UsageError` if the log has none of that kind, or if
    the parts of its kernels cannot be timed on this machine."""
    graphs = [recorded_graph(session, wanted.phase, wanted.step, wanted.layers)]
    if wanted.beside_prefill:
        graphs.append(recorded_graph(session, "prefill", layers=wanted.layers))
    timed = [(of.timed, of.notes) for of in graphs]
    return _of_graphs(timed, session.start.host.cpu, session.path, wanted, time_parts)


def tasks_of_model(
    path: str,
    probe: Probe,
    steps: tuple[PredictedStep, PredictedStep],
    wanted: Wanted,
    time_parts: TimeParts,
) -> MakeTasks:
    """The tasks of the decode or the prefill of a model, with their predicted times on one
    thread."""
    graphs = []
    for prefill in (wanted.phase == "prefill", *[True] * wanted.beside_prefill):
        step = steps[prefill]
        work = plan_kernels(step.graph, step.plan).work(step.ubatch)
        ns = np.maximum(1, step.predicted.ns.round()).astype(np.int64)
        made = timed_graph(step.graph, step.plan, ns, work, wanted.layers, path)
        total, error = step.predicted.total()
        note = (
            f"Times are predicted for a {step.what} tokens and one thread, from what `instr probe`"
            f" measured; their sum is uncertain by {100 * error / total:.0f} %."
        )
        graphs.append((made, [note]))
    return _of_graphs(graphs, probe.cpu, path, wanted, time_parts)


def sweep(make: MakeTasks, wanted: Wanted, counts: range) -> tuple[list[SweepPoint], list[str]]:
    """The schedules on each number of equal engines, and the notes about the tasks."""
    points = []
    notes: list[str] = []
    with progress_bar("Scheduling") as on_progress:
        for i, n in enumerate(counts):
            engines = equal_engines(n)
            tasks, notes = make(engines)
            points.append(sweep_point(wanted.plan(tasks, engines)))
            on_progress(i + 1, len(counts))
    return points, notes


def _of_graphs(
    graphs: Sequence[tuple[TimedGraph, list[str]]],
    cpu: str,
    source: str,
    wanted: Wanted,
    time_parts: TimeParts,
) -> MakeTasks:
    """The tasks of the wanted graph and of the prefill beside it, each with notes; their times are
    those of `cpu`. Times the parts of kernels once, if they are wanted."""
    prepared = [
        (timed, notes, *_part_times(timed, cpu, source, wanted.split, time_parts))
        for timed, notes in graphs
    ]

    def make(engines: Engines) -> Made:
        made: list[Tasks] = []
        notes: list[str] = []
        for timed, of_graph, times, of_parts in prepared:
            divided = divide(timed, wanted.split, engines, times)
            made.append(divided.tasks)
            notes += [*of_graph, *divided.notes, *of_parts]
        tasks = wanted.in_flight(made[0])
        for prefill in made[1:]:
            tasks = beside(tasks, prefill, "prefill")
        return tasks, list(dict.fromkeys(notes))

    return make


def _part_times(
    timed: TimedGraph, cpu: str, source: str, split: Split, time_parts: TimeParts
) -> tuple[dict[int, PartTimes], list[str]]:
    shapes = part_shapes(timed) if split == "heads" else {}
    known = time_parts(cpu, list(dict.fromkeys(shapes.values()))) if shapes else {}
    if isinstance(known, dict):
        return {kernel: known[shape] for kernel, shape in shapes.items()}, []
    if any(isinstance(of, AttentionShape) and of.fused for of in shapes.values()):
        raise UsageError(
            f"{source}: recorded on {cpu}, but this machine is {known}, and the parts of flash"
            " attention must be timed where it ran; record there with"
            " `instr run --flash-attn off`"
        )
    return {}, [
        f"Soft-max and fused kernels stay whole: the log is from {cpu}, this machine is {known}."
    ]
