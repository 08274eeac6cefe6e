"""`instr schedule LOG|FILE.toml|MODEL`: a graph's tasks on engines that may not exist."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import click

from llamacpp_instr.base.errors import UsageError
from llamacpp_instr.base.progress import progress_bar
from llamacpp_instr.cli.logs import Logs, is_model
from llamacpp_instr.cli.options import (
    LAST,
    ReportOutput,
    command,
    given_options,
    lenient_option,
    range_option,
    report_options,
)

if TYPE_CHECKING:
    from llamacpp_instr.converters.scheduling.engines import Engines
    from llamacpp_instr.converters.scheduling.schedule import Schedule
    from llamacpp_instr.converters.scheduling.tasks import Tasks
    from llamacpp_instr.converters.scheduling.timed_graph import TimedGraph
    from llamacpp_instr.log.session import Session

MOST_SWEPT = 1024


@dataclass(frozen=True)
class _Chosen:
    """What of a source is scheduled, and how."""

    split: Any
    policy: str
    seconds: float
    phase: str | None
    step: int | None
    layers: tuple[int, int] | None
    sequences: int
    tokens: int
    beside_prefill: bool


Made = tuple["Tasks", list[str]]
MakeTasks = Callable[["Engines"], Made]


@command(
    "instr schedule session.log --engines 4",
    "instr schedule session.log --engines 4 --split heads --layers 0 -o heads.html",
    "instr schedule session.log --engines chip.toml --perfetto chip.pftrace",
    "instr schedule session.log --sweep 1-64 --split rows",
    "instr schedule graph.toml --engines 2 --policy optimal --seconds 10",
)
@click.argument("source", metavar="LOG|GRAPH.toml|MODEL")
@click.option(
    "--engines",
    default="4",
    show_default=True,
    metavar="N|FILE",
    help="How many equal engines, or a TOML file that describes them.",
)
@click.option(
    "--split",
    type=click.Choice(["none", "heads", "rows", "tiles"]),
    default="none",
    show_default=True,
    help="Divide ops into parts that may run at the same time.",
)
@click.option(
    "--policy",
    type=click.Choice(["program", "list", "optimal"]),
    default="list",
    show_default=True,
    help="In order, by critical path, or the shortest that can be found.",
)
@click.option(
    "--seconds",
    type=click.FloatRange(min=0, min_open=True, max=86400),
    default=60,
    show_default=True,
    help="How long --policy optimal may search.",
)
@click.option(
    "--phase",
    type=click.Choice(["prefill", "decode", "encode"]),
    help="Steps of this phase: the median of each op.  [default: decode]",
)
@click.option("--step", type=click.IntRange(min=0), help="This step alone.")
@range_option("--layers", "Only layers A to B; 0: only the first.")
@click.option(
    "--sequences",
    type=click.IntRange(1, 1024),
    default=1,
    show_default=True,
    help="Independent sequences in flight.",
)
@click.option(
    "--tokens",
    type=click.IntRange(1, 1024),
    default=1,
    show_default=True,
    help="Tokens of each sequence, one after the other.",
)
@click.option("--beside-prefill", is_flag=True, help="Add the log's prefill, independent of it.")
@click.option(
    "--machine",
    metavar="FILE",
    help="For a model: a file of `instr probe`.  [default: the one in the user's cache]",
)
@range_option("--sweep", "Print a curve: from A to B equal engines.")
@click.option("--perfetto", metavar="FILE", help="Also write the schedule as a Perfetto trace.")
@lenient_option
@report_options
def schedule(
    source: str,
    engines: str,
    machine: str | None,
    sweep: tuple[int, int] | None,
    perfetto: str | None,
    lenient: bool,
    output: ReportOutput,
    **how: Any,
) -> None:
    """Schedule the ops of a log or a model on other engines.

    Prints how long the ops of a decode would take on engines that may not exist, what these do,
    the critical path by layer and block, and the lower bound that binds. The times are those that a
    log recorded, the median of each op, divided by the speeds of the engines.

    --split heads makes parts for each head, of flash attention dot products, three passes of a
    soft-max and a weighted sum, and of a fused kernel its ops, each timed on this machine. --split
    rows divides ops as ggml divides them among threads, --split tiles divides matrix products into
    tiles.

    LOG is a file, plain or compressed (.gz, .zst), or - for standard input. GRAPH.toml has tasks by
    hand. For a MODEL (a GGUF file or demo) the times are predicted: a decode after 512 tokens, or a
    prefill of 512, on one thread.
    """
    from llamacpp_instr.base.output import check_output
    from llamacpp_instr.converters.scheduling.engines import equal_engines, parse_engines

    if sweep is not None:
        for other in given_options("engines", "perfetto"):
            raise UsageError(f"--sweep has its own numbers of engines; leave out {other}")
        if sweep[0] < 1 or sweep[1] == LAST or sweep[1] - sweep[0] >= MOST_SWEPT:
            last = "" if sweep[1] == LAST else sweep[1]
            raise UsageError(
                f"--sweep {sweep[0]}-{last}: give A-B, from 1, at most {MOST_SWEPT} numbers"
            )
    chosen = _Chosen(**how)
    if chosen.step is not None and chosen.phase is not None:
        raise UsageError("give --phase or --step, not both")
    read = engines if not engines.isdecimal() else None
    output.check(source, read, machine)
    if perfetto is not None:
        check_output(perfetto, output.force, source, read, machine)
        if perfetto == "-" and output.path == "-":
            raise UsageError("--perfetto -: name the report with -o, or the trace")
    hardware = parse_engines(engines) if sweep is None else equal_engines(sweep[0])
    make = _tasks_of(source, chosen, machine, lenient)
    plan = _planner(chosen)
    if sweep is None:
        tasks, notes = make(hardware)
        _write(plan(tasks, hardware), source, notes, perfetto, output)
    else:
        _write_sweep(source, make, plan, range(sweep[0], sweep[1] + 1), output)


def _tasks_of(source: str, chosen: _Chosen, machine: str | None, lenient: bool) -> MakeTasks:
    """What makes the tasks of a source for some engines; the source is read once."""
    if is_model(source):
        return _of_model(source, chosen, machine)
    if machine is not None:
        raise UsageError(f"{source} is not a GGUF model; --machine is for models")
    if source.lower().endswith(".toml"):
        return _of_graph(source, chosen)
    (session,) = Logs((source,), lenient).sessions()
    return _of_log(session, chosen)


def _of_graph(source: str, chosen: _Chosen) -> MakeTasks:
    from llamacpp_instr.converters.scheduling.hand_made import read_hand_made

    none = chosen.layers is None and chosen.phase is None and chosen.step is None
    if not none or chosen.split != "none" or chosen.beside_prefill:
        raise UsageError(
            f"{source}: a graph by hand is scheduled as it is; --split, --layers, --phase, --step"
            " and --beside-prefill need a log or a model"
        )
    tasks = _in_flight(read_hand_made(source), chosen)
    return lambda _: (tasks, [])


def _of_log(session: Session, chosen: _Chosen) -> MakeTasks:
    from llamacpp_instr.converters.scheduling.from_log import recorded_graph

    def graph_of(prefill: bool) -> tuple[TimedGraph, list[str]]:
        phase, step = ("prefill", None) if prefill else (chosen.phase, chosen.step)
        found = recorded_graph(session, phase, step, chosen.layers)
        return found.timed, found.notes

    return _of_graphs(graph_of, session.start.host.cpu, session.path, chosen)


def _of_graphs(
    graph_of: Callable[[bool], tuple[TimedGraph, list[str]]],
    cpu: str,
    source: str,
    chosen: _Chosen,
) -> MakeTasks:
    """`graph_of` makes the chosen graph, or the prefill beside it; their times are of `cpu`."""
    from llamacpp_instr.converters.scheduling.tasks import beside

    dividers = [
        _divider(*graph_of(prefill), cpu, source, chosen.split)
        for prefill in ((False, True) if chosen.beside_prefill else (False,))
    ]

    def make(engines: Engines) -> Made:
        (tasks, notes), *others = [divide(engines) for divide in dividers]
        tasks = _in_flight(tasks, chosen)
        for prefill, more in others:
            tasks = beside(tasks, prefill, "prefill")
            notes = list(dict.fromkeys([*notes, *more]))
        return tasks, notes

    return make


def _divider(
    timed: TimedGraph, graph_notes: list[str], cpu: str, source: str, split: Any
) -> MakeTasks:
    """Times the parts of kernels once, if they are wanted. `graph_notes` go before its own."""
    from llamacpp_instr.converters.scheduling.split import divide, part_shapes

    times = {}
    notes = []
    shapes = part_shapes(timed) if split == "heads" else {}
    if shapes:
        from llamacpp_instr.prediction.probe.parts import differs, time_all
        from llamacpp_instr.prediction.probe.shapes import AttentionShape

        flash = any(isinstance(of, AttentionShape) and of.fused for of in shapes.values())
        if (other := differs(cpu)) and flash:
            raise UsageError(
                f"{source}: recorded on {cpu}, but this machine is {other}, and the parts of flash"
                " attention must be timed where it ran; record there with"
                " `instr run --flash-attn off`"
            )
        if other:
            notes.append(
                "Soft-max and fused kernels stay whole: the log is of"
                f" {cpu}, this machine is {other}."
            )
        else:
            with progress_bar("Timing the parts of kernels") as on_progress:
                known = time_all(list(dict.fromkeys(shapes.values())), on_progress)
            times = {kernel: known[shape] for kernel, shape in shapes.items()}

    def make(engines: Engines) -> Made:
        divided = divide(timed, split, engines, times)
        return divided.tasks, [*graph_notes, *divided.notes, *notes]

    return make


def _of_model(source: str, chosen: _Chosen, machine: str | None) -> MakeTasks:
    """The graph of a dry run, with the times that are predicted for one thread."""
    import numpy as np

    from llamacpp_instr.converters.scheduling.timed_graph import timed_graph
    from llamacpp_instr.llama.engine import ContextOptions
    from llamacpp_instr.log.graph.kernels import plan_kernels
    from llamacpp_instr.model.file import load_model_file
    from llamacpp_instr.prediction.probe.file import read_probe
    from llamacpp_instr.prediction.steps import DEFAULT_TOKENS, planned_steps, trained_tokens
    from llamacpp_instr.recording.memory.dry_graph import UbatchShape

    if chosen.step is not None or chosen.phase == "encode":
        raise UsageError(f"{source} is a model: choose --phase prefill or decode")
    probe = read_probe(machine)
    model = load_model_file(source)
    trained = trained_tokens(model)
    shapes = (
        UbatchShape(1, min(DEFAULT_TOKENS, trained - 1)),
        UbatchShape(min(DEFAULT_TOKENS, trained)),
    )
    decode, prefill = planned_steps(model, ContextOptions(), list(shapes))

    def graph_of(beside: bool) -> tuple[TimedGraph, list[str]]:
        step = prefill if beside or chosen.phase == "prefill" else decode
        found = step.predict(probe, 1)
        work = plan_kernels(step.graph, step.plan).work(step.ubatch(1))
        ns = np.maximum(1, found.ns.round()).astype(np.int64)
        made = timed_graph(step.graph, step.plan, ns, work, chosen.layers, source)
        total, error = found.total()
        shape = step.shape
        what = f"prefill of {shape.tokens}" if step is prefill else f"decode after {shape.past}"
        notes = [
            f"Times are predicted for a {what} tokens and one thread, from what `instr probe`"
            f" measured; their sum is uncertain by {100 * error / total:.0f} %."
        ]
        return made, notes

    return _of_graphs(graph_of, probe.cpu, source, chosen)


def _in_flight(tasks: Tasks, chosen: _Chosen) -> Tasks:
    from llamacpp_instr.converters.scheduling.tasks import several_sequences, several_tokens

    return several_sequences(several_tokens(tasks, chosen.tokens), chosen.sequences)


def _planner(chosen: _Chosen) -> Callable[[Tasks, Engines], Schedule]:
    from llamacpp_instr.converters.scheduling.policies import schedule_list, schedule_program

    if chosen.policy == "program":
        return schedule_program
    if chosen.policy == "list":
        return schedule_list
    from llamacpp_instr.converters.scheduling.optimum import schedule_optimal

    def search(tasks: Tasks, engines: Engines) -> Schedule:
        with progress_bar("Searching") as on_progress:
            return schedule_optimal(tasks, engines, chosen.seconds, on_progress)

    return search


def _write(
    made: Schedule, source: str, notes: list[str], perfetto: str | None, output: ReportOutput
) -> None:
    from llamacpp_instr.converters.scheduling.report import gantt_chart, schedule_reports

    title = f"Schedule of {source}"
    if perfetto is not None:
        from llamacpp_instr.base.output import open_output
        from llamacpp_instr.converters.scheduling.trace import write_trace

        with open_output(perfetto, output.force) as file:
            write_trace(made, file.write, title)
    chart = gantt_chart(made, title)
    charts = [chart] if chart is not None else []
    output.write(schedule_reports(made, notes), charts=charts, title=title)


def _write_sweep(
    source: str,
    make: MakeTasks,
    plan: Callable[[Tasks, Engines], Schedule],
    counts: range,
    output: ReportOutput,
) -> None:
    from llamacpp_instr.converters.scheduling.engines import equal_engines
    from llamacpp_instr.converters.scheduling.report import sweep_chart, sweep_point, sweep_reports

    points = []
    notes: list[str] = []
    with progress_bar("Scheduling") as on_progress:
        for i, n in enumerate(counts):
            engines = equal_engines(n)
            tasks, notes = make(engines)
            points.append(sweep_point(plan(tasks, engines)))
            on_progress(i + 1, len(counts))
    title = f"Schedules of {source}"
    output.write(sweep_reports(points, notes), charts=[sweep_chart(points, title)], title=title)
