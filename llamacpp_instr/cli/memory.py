"""`instr memory MODEL|LOG...`: prints the size of each tensor and the memory of a context."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import click

from llamacpp_instr.base.errors import NativeError, UsageError
from llamacpp_instr.cli.logs import Logs, is_model
from llamacpp_instr.cli.options import (
    ReportOutput,
    bytes_of_size,
    command,
    context_options,
    lenient_option,
    report_options,
)

if TYPE_CHECKING:
    from llamacpp_instr.converters.analyses.memory.report_of_context import ContextMemory
    from llamacpp_instr.converters.analyses.stored_weights import StoredModel
    from llamacpp_instr.llama.engine import ContextOptions
    from llamacpp_instr.log.session import Session
    from llamacpp_instr.model.file import ModelFile
    from llamacpp_instr.report.charts import Chart
    from llamacpp_instr.report.page import Figure
    from llamacpp_instr.report.report import Report

    Shown = list[tuple[StoredModel, list[Report]]]

MOST_CHARTS = 20
"""charts of a page; further models of a log have none"""


@command(
    "instr memory model-Q4_K_M.gguf --ctx 32768 --cache-type-k q8_0",
    "instr memory session.log -o memory.html",
)
@click.argument("sources", metavar="MODEL|LOG...", nargs=-1, required=True)
@context_options
@click.option("--no-mmap", is_flag=True, help="Predict for a model that is read, not mapped.")
@click.option(
    "--memory",
    "room",
    callback=bytes_of_size,
    metavar="SIZE",
    help="Say whether MODEL fits into SIZE, such as 8GB.  [default: this machine's memory]",
)
@lenient_option
@report_options
def memory(
    sources: tuple[str, ...],
    context: ContextOptions,
    no_mmap: bool,
    room: int | None,
    lenient: bool,
    output: ReportOutput,
) -> None:
    """Print the memory that a model takes, or that a log recorded.

    Prints the size of each tensor and its share of F16 and F32, also by type, role and layer,
    and the memory by kind: file, mapped, repacked, KV cache, compute buffers. Says whether a model
    fits: what stays in use counts, not mapped pages that the system can drop.

    llama.cpp's own dry run, which reads no weights, predicts the memory of the context that instr
    run would create with the same options. For a log, the measured memory is printed as well, and
    differences are explained.

    MODEL is a GGUF file, the first part of a split model, or demo for the demo model. LOG is a
    file, plain or compressed, or - for standard input. The parts of a rotated log are one session;
    other logs are shown one after the other.
    """
    from llamacpp_instr.converters.analyses.memory import joined_tensors, shortened
    from llamacpp_instr.converters.analyses.memory.pictures import chart_bits_by_layer, draw_memory
    from llamacpp_instr.llama.engine import ContextOptions
    from llamacpp_instr.report.arrange import named_by

    output.check(*sources)
    source = next(filter(is_model, sources), sources[0])
    if is_model(source):
        if len(sources) > 1:
            raise UsageError(f"{source} is a model; one model or several logs can be shown")
        shown = [_of_model(source, context, not no_mmap, room)]
    elif no_mmap or room or context != ContextOptions():
        raise UsageError(
            f"{source} is not a GGUF model, and a log has its own settings: leave out "
            "--ctx, --memory and the like"
        )
    else:
        sessions = Logs(sources, lenient).sessions()
        shown = [
            (stored, named_by(session.path, reports) if len(sessions) > 1 else reports)
            for session in sessions
            for stored, reports in _of_session(session)
        ]
    models = [reports for _, reports in shown]
    table = joined_tensors(models)
    if output.form == "text" and output.path == "-":
        models = [shortened(reports) for reports in models]
    reports = [report for of_model in models for report in of_model]
    charts: list[Chart | Figure] = []
    for stored, of_model in shown[:MOST_CHARTS]:
        charts += [*draw_memory(of_model), chart_bits_by_layer(stored.tensors)]
    output.write(reports, table=table, charts=charts)


def _of_model(
    name: str, options: ContextOptions, mmap: bool, room: int | None
) -> tuple[StoredModel, list[Report]]:
    from llamacpp_instr.converters.analyses.memory import compression_reports
    from llamacpp_instr.converters.analyses.memory.report_of_context import ContextMemory
    from llamacpp_instr.converters.analyses.stored_weights import stored_in_file
    from llamacpp_instr.model.file import load_model_file
    from llamacpp_instr.recording.memory.breakdown import machine_memory
    from llamacpp_instr.recording.memory.plan import LoadError, plan_memory

    options.check()
    model = load_model_file(name)
    try:
        plan = plan_memory(model, options, mmap)
        context = ContextMemory(predicted=plan, room=room or machine_memory())
    except (NativeError, LoadError) as error:
        reason = f"KV cache and compute buffers cannot be predicted: {error}."
        context = ContextMemory(notes=[reason])
    stored = stored_in_file(model)
    return stored, compression_reports(stored, [context])


def _of_session(session: Session) -> Shown:
    from llamacpp_instr.converters.analyses.memory import compression_reports
    from llamacpp_instr.converters.analyses.memory.report_of_context import recorded_memory
    from llamacpp_instr.converters.analyses.stored_weights import recorded_file, stored_in_log

    if not session.tensors:
        raise UsageError(f"{session.path} contains no tensors of a model")
    shown: Shown = []
    memory = recorded_memory(session)
    for number, model in session.models.items():
        file, why = None, ""
        try:
            file = recorded_file(session, model)
        except UsageError as error:
            why = f"Nothing was predicted: {error}."
        contexts = [_predicted(context, file, why) for context in memory.get(number, [])]
        stored = stored_in_log(session, model, file)
        shown.append((stored, compression_reports(stored, contexts)))
        shown[-1][1][0].notes.extend(session.log_end.notes())
    return shown


def _predicted(context: ContextMemory, file: ModelFile | None, why_not: str) -> ContextMemory:
    """`context` with the prediction for the measured settings, or with the reason for its lack."""
    from llamacpp_instr.recording.memory.plan import plan_memory_again

    if file is None or context.measured is None:
        return replace(context, notes=[*context.notes, why_not])
    try:
        return replace(context, predicted=plan_memory_again(file, context.measured))
    except (NativeError, UsageError) as error:
        return replace(context, notes=[*context.notes, f"Nothing was predicted: {error}."])
