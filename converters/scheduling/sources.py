"""The tasks of a recorded session, of a model's predicted steps, or of a graph by hand.

Invariant: a source is read once, however many sets of engines it is divided for.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from llamacpp_instr.base.errors import UsageError
from llamacpp_instr.base.terminal import progress_bar
from llamacpp_instr.converters.scheduling.engines import Engines, equal_engines
from llamacpp_instr.converters.scheduling.from_log import recorded_graph
from llamacpp_instr.converters.scheduling.hand_made import read_hand_made
from llamacpp_instr.converters.scheduling.policies import schedule_list, schedule_program
from llamacpp_instr.converters.scheduling.report import SweepPoint, sweep_point
from llamacpp_instr.converters.scheduling.schedule import Schedule
from llamacpp_instr.converters.scheduling.split import Split, divide, part_shapes
from llamacpp_instr.converters.scheduling.tasks import (
    Tasks,
    beside,
    several_sequences,
    several_tokens,
)
from llamacpp_instr.converters.scheduling.timed_graph import TimedGraph, timed_graph
from llamacpp_instr.log.graph.kernels import plan_kernels
from llamacpp_instr.log.session import Session
from llamacpp_instr.prediction.model import PredictedStep
from llamacpp_instr.prediction.probe.file import Probe
from llamacpp_instr.prediction.probe.shapes import AttentionShape, KernelShape, PartTimes

TimeParts = Callable[[str, list[KernelShape]], "dict[KernelShape, PartTimes] | str"]
"""times the parts of kernels on this machine, or names it if it is not the one that is given; the
native library does that, which this room does not import"""
Made = tuple[Tasks, list[str]]
"""tasks, and notes about their times"""
MakeTasks = Callable[[Engines], Made]


@dataclass(frozen=True)
class Wanted:
    """What of a source is scheduled, and how; the options of `instr schedule`."""

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
        """The tasks of all tokens and sequences."""
        return several_sequences(several_tokens(tasks, self.tokens), self.sequences)

    def plan(self, tasks: Tasks, engines: Engines) -> Schedule:
        """The schedule of the policy. Raises what `schedule_optimal` raises."""
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
            f"{path}: a graph by hand is scheduled as it is; --split, --layers, --phase, --step"
            " and --beside-prefill need a log or a model"
        )
    tasks = wanted.in_flight(read_hand_made(path))
    return lambda _: (tasks, [])


def tasks_of_session(session: Session, wanted: Wanted, time_parts: TimeParts) -> MakeTasks:
    """The tasks of a recorded compute. Raises `UsageError` if the log has none of that kind, or if
    the parts of its kernels cannot be timed on this machine."""

    def graph_of(prefill: bool) -> tuple[TimedGraph, list[str]]:
        phase, step = ("prefill", None) if prefill else (wanted.phase, wanted.step)
        found = recorded_graph(session, phase, step, wanted.layers)
        return found.timed, found.notes

    return _of_graphs(graph_of, session.start.host.cpu, session.path, wanted, time_parts)


def tasks_of_model(
    path: str,
    probe: Probe,
    steps: tuple[PredictedStep, PredictedStep],
    wanted: Wanted,
    time_parts: TimeParts,
) -> MakeTasks:
    """The tasks of the decode or the prefill of a model, with their predicted times on one
    thread."""

    def graph_of(beside: bool) -> tuple[TimedGraph, list[str]]:
        step = steps[1 if beside or wanted.phase == "prefill" else 0]
        work = plan_kernels(step.graph, step.plan).work(step.ubatch)
        ns = np.maximum(1, step.predicted.ns.round()).astype(np.int64)
        made = timed_graph(step.graph, step.plan, ns, work, wanted.layers, path)
        total, error = step.predicted.total()
        notes = [
            f"Times are predicted for a {step.what} tokens and one thread, from what `instr probe`"
            f" measured; their sum is uncertain by {100 * error / total:.0f} %."
        ]
        return made, notes

    return _of_graphs(graph_of, probe.cpu, path, wanted, time_parts)


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
    graph_of: Callable[[bool], tuple[TimedGraph, list[str]]],
    cpu: str,
    source: str,
    wanted: Wanted,
    time_parts: TimeParts,
) -> MakeTasks:
    """`graph_of` makes the wanted graph, or the prefill beside it; their times are of `cpu`."""
    dividers = [
        _divider(*graph_of(prefill), cpu, source, wanted.split, time_parts)
        for prefill in ((False, True) if wanted.beside_prefill else (False,))
    ]

    def make(engines: Engines) -> Made:
        (tasks, notes), *others = [divide(engines) for divide in dividers]
        tasks = wanted.in_flight(tasks)
        for prefill, more in others:
            tasks = beside(tasks, prefill, "prefill")
            notes = list(dict.fromkeys([*notes, *more]))
        return tasks, notes

    return make


def _divider(
    timed: TimedGraph,
    graph_notes: list[str],
    cpu: str,
    source: str,
    split: Split,
    time_parts: TimeParts,
) -> MakeTasks:
    """Times the parts of kernels once, if they are wanted. `graph_notes` go before its own."""
    times = {}
    notes = []
    shapes = part_shapes(timed) if split == "heads" else {}
    if shapes:
        known = time_parts(cpu, list(dict.fromkeys(shapes.values())))
        if isinstance(known, dict):
            times = {kernel: known[shape] for kernel, shape in shapes.items()}
        elif any(isinstance(of, AttentionShape) and of.fused for of in shapes.values()):
            raise UsageError(
                f"{source}: recorded on {cpu}, but this machine is {known}, and the parts of flash"
                " attention must be timed where it ran; record there with"
                " `instr run --flash-attn off`"
            )
        else:
            notes.append(
                "Soft-max and fused kernels stay whole: the log is of"
                f" {cpu}, this machine is {known}."
            )

    def make(engines: Engines) -> Made:
        divided = divide(timed, split, engines, times)
        return divided.tasks, [*graph_notes, *divided.notes, *notes]

    return make
