"""The command that simulates a recorded server under other loads and settings."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from click import Choice, IntRange

from llamacpp_instr.base.errors import InstrError, UsageError
from llamacpp_instr.base.terminal import progress_bar
from llamacpp_instr.cli import options as cli
from llamacpp_instr.cli.logs import Logs

if TYPE_CHECKING:
    from llamacpp_instr.converters.scheduling.capacity.step_times import Predict
    from llamacpp_instr.log.session import Session

MOST_RATE = 1e6
TRIED = 256
"""the most clients that a goal tries, if no number is given"""


@cli.command(
    "instr capacity server.log",
    "instr capacity server.log --clients 1-64 --slots 4,8",
    'instr capacity server.log --goal "first token p95 < 2 s, 8 tokens/s"',
    "instr capacity server.log --workload chat.toml --rate 0.5-10 -o capacity.html",
)
def capacity(
    log: str = cli.argument(metavar="LOG"),
    clients: tuple[int, int] | None = cli.range_option(
        "A to B clients that each wait for their answer.  [default: 1 to 4 for each slot]"
    ),
    rate: str | None = cli.option(
        "A to B requests per second, which arrive whether or not earlier ones were answered.",
        "A[-B]",
    ),
    slots: list[int] = cli.numbers("Numbers of slots.  [default: as recorded]"),
    settings: dict[str, Any] = cli.gathered(
        dict,
        ctx=cli.option("Context size of all slots.  [default: as recorded]", "TOKENS", IntRange(1)),
        batch=cli.option("Maximum tokens per decode.", "TOKENS", IntRange(1)),
        ubatch=cli.option("Maximum tokens per graph.", "TOKENS", IntRange(1)),
        type_k=cli.option("Storage type of the K cache.", "--cache-type-k TYPE"),
        type_v=cli.option("Storage type of the V cache.", "--cache-type-v TYPE"),
    ),
    draft: str | None = cli.option(
        "With or without the recorded drafts.", type=Choice(["on", "off"])
    ),
    goal: str | None = cli.option(
        "Find the most clients, and the slots, for which this holds.", "TEXT"
    ),
    workload: str | None = cli.option(
        "A TOML file with the lengths of prompts and answers, instead of the recorded ones.", "FILE"
    ),
    machine: str | None = cli.option(
        "A file from `instr probe`, of any machine.  [default: the one in the user's cache]", "FILE"
    ),
    seed: int = cli.option("Seed of the requests and the noise of steps.", "N", int, default=0),
    lenient: bool = cli.LENIENT,
    output: cli.ReportOutput = cli.REPORT,
) -> None:
    """Simulates the llama-server of LOG, with its queue, slots and batches. Steps take as long as
    the recorded ones. Steps unlike any recorded one are predicted from the log's model, if `instr
    probe` has measured this machine. Prints throughput and waits by load, the load above which
    requests only wait longer, the bottleneck, and what would help.

    A goal has parts such as `first token p95 < 2 s`, `queue p50 < 500 ms` or `8 tokens/s`.
    """
    from llamacpp_instr.converters.scheduling.capacity import capacity as of
    from llamacpp_instr.converters.scheduling.capacity import report
    from llamacpp_instr.converters.scheduling.capacity.workload import read_workload
    from llamacpp_instr.llama.engine import ContextOptions

    output.check(log, machine, workload)
    if clients is not None and rate is not None:
        raise UsageError("give --clients or --rate, not both")
    type_k, type_v = (settings[name] or "f16" for name in ("type_k", "type_v"))
    ContextOptions(cache_type_k=type_k, cache_type_v=type_v).check()
    wishes = of.parse_goal(goal) if goal is not None else []
    asked = read_workload(workload, seed=seed) if workload is not None else None
    ends = _parse_rate(rate) if rate is not None else None
    (session,) = Logs((log,), lenient).sessions()
    predict, elsewhere, why = find_prediction(session, machine)
    here = find_prediction(session, None)[0] if elsewhere else predict
    recorded = of.recorded_server(session, here)
    own = recorded.settings
    given = {name: value for name, value in settings.items() if value is not None}
    if draft is not None:
        if draft == "on" and not recorded.times.drafts:
            raise UsageError(f"{log} has no drafts; record a llama-server with a draft model")
        given["drafts"] = draft == "on"
    if given.get("batch", own.batch) < own.ubatch and "ubatch" not in given:
        given["ubatch"] = given["batch"]  # as llama.cpp does
    load = of.Load(asked or recorded.workload, "arrivals/s" if ends else "clients", seed)
    made = of.Capacity(recorded, load, predict, elsewhere, why)
    several = [replace(own, slots=n, **given) for n in slots or [own.slots]]
    for one in several:
        made.check(one)
    if ends is None:
        first, last = clients or (1, 4 * max(one.slots for one in several))
        first, last = max(first, 1), min(last, of.MOST_CLIENTS)
        if clients is not None and (clients[0] < 1 or clients[1] > of.MOST_CLIENTS):
            raise UsageError(f"--clients {clients[0]}-{clients[1]}: from 1 to {of.MOST_CLIENTS}")
        ends = float(first), float(last)
    amounts = of.loads(*ends, whole=load.by == "clients")
    points: list[of.Point] = []
    with progress_bar("Simulating") as on_progress:
        for one in several:
            for amount in amounts:
                on_progress(len(points), len(several) * len(amounts))
                points.append(made.point(amount, one))
    reached = None
    if wishes:
        tried = several if slots else of.other_slots(made, several[0])
        with progress_bar("Looking for the most") as on_progress:
            most = float(TRIED) if clients is None and rate is None else ends[1]
            reached = of.reach(made, wishes, tried, most, on_progress)
    title = f"Capacity of {log}"
    found = report.reports(made, points, wishes, reached)
    table = next(each for each in found if each.key == "capacity")
    output.write(found, table=table, charts=report.charts(made, points, title, wishes), title=title)


def _parse_rate(text: str) -> tuple[float, float]:
    first, dash, last = text.partition("-")
    try:
        ends = float(first), float(last if dash else first)
    except ValueError:
        ends = 0.0, 0.0
    if not 0 < ends[0] <= ends[1] <= MOST_RATE:
        raise UsageError(f"--rate {text}: give requests per second, such as 2 or 0.5-10")
    return ends


def find_prediction(session: Session, machine: str | None) -> tuple[Predict | None, bool, str]:
    """A function that predicts steps of the log's model, and whether it does so for another machine
    than the log's; or None and why. For a `machine` that was given, an error is raised instead."""
    from llamacpp_instr.converters.analyses.memory import recorded_file
    from llamacpp_instr.llama.engine import ContextOptions
    from llamacpp_instr.log.requests import server_context
    from llamacpp_instr.prediction.probe.file import check_machine, read_probe
    from llamacpp_instr.prediction.steps import predict_shapes
    from llamacpp_instr.recording.memory.plan import UbatchShape

    context = server_context(session.contexts.values())
    if context is None:
        return None, False, ""
    asked = read_probe(machine) if machine is not None else None
    try:
        file = recorded_file(session, session.models[context.model])
        probe = asked or read_probe(None)
        if asked is None:
            check_machine(session.path, session.start.host.cpu, probe)
    except InstrError as error:
        if machine is not None:
            raise
        return None, False, str(error)

    def predict(shapes: Sequence[tuple[int, int, int]], type_k: str, type_v: str) -> list[float]:
        options = ContextOptions(cache_type_k=type_k, cache_type_v=type_v)
        ubatches = [UbatchShape(tokens, past, outputs) for tokens, outputs, past in shapes]
        return predict_shapes(file.path, context.n_threads, ubatches, probe, options)

    return predict, probe.cpu != session.start.host.cpu, ""
