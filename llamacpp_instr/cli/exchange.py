"""The commands that convert logs for other tools, and those about a data set of many logs."""

from __future__ import annotations

import sys
from collections import Counter
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from click import Choice, IntRange

from llamacpp_instr.base.errors import UsageError
from llamacpp_instr.base.system import need
from llamacpp_instr.base.terminal import counted, notice, print_line, progress_bar
from llamacpp_instr.cli import options as cli
from llamacpp_instr.cli.logs import LOGS, MAX_SIZE, Logs, SizeBound, is_model

if TYPE_CHECKING:
    from llamacpp_instr.model.file import ModelFile


@cli.command(
    "instr to-perfetto session.log",
    "instr to-perfetto session.log --steps 1-3 --layers 0 --flows -o block.pftrace",
)
def to_perfetto(
    output: str | None = cli.option(
        "Output; - is stdout.  [default: LOG's name, .pftrace]", "-o --output TRACE"
    ),
    force: bool = cli.FORCE,
    steps: tuple[int, int] | None = cli.range_option("Only steps A to B, inclusive."),
    layers: tuple[int, int] | None = cli.range_option(
        "Only layers A to B, inclusive; none: what lies outside of layers."
    ),
    ops: str | None = cli.OPS,
    no_threads: bool = cli.flag("Leave out the tracks of individual threads."),
    flows: bool = cli.flag("Draw arrows from ops to readers, tokens to decodes."),
    form: str = cli.option(
        "json is Chrome's format for other tools: larger, and without flows.",
        "--format",
        Choice(["protobuf", "json"]),
        default="protobuf",
    ),
    max_size: int = MAX_SIZE,
    compress: bool = cli.flag("Compress; Perfetto can open the result.", "--gzip"),
    logs: Logs = LOGS,
) -> None:
    """The trace is for Perfetto's UI (ui.perfetto.dev). It shows the steps with their tokens, the
    layers with their blocks and ops, threads, the sampler and counters. LOG is a file, plain or
    compressed (.gz, .zst), or - for standard input. The parts of a rotated log are one session;
    other logs have tracks of their own below.
    """
    from llamacpp_instr.base.output import check_output, open_output
    from llamacpp_instr.converters.exports.traced import Options
    from llamacpp_instr.log.graph.timeline import Selection

    selection = Selection(
        steps,
        layers,
        frozenset(op.strip().upper() for op in ops.split(",")) if ops is not None else None,
    )
    if form == "protobuf" and output and output.lower().endswith((".json", ".json.gz")):
        raise UsageError(f"-o {output}: add --format json, or give a name that ends in .pftrace")
    if form == "json" and flows:
        raise UsageError("--flows needs --format protobuf")
    if form == "json":
        from llamacpp_instr.converters.exports.chrome import write_chrome as write
    else:
        from llamacpp_instr.converters.exports.perfetto import write_perfetto as write
    kind = "json" if form == "json" else "pftrace"
    output = output or cli.default_name(logs.names[0], kind + ".gz" * compress, "trace")
    check_output(output, force, *logs.names)
    if output == "-" and sys.stdout.isatty():
        raise UsageError("a trace is binary and the output is a terminal; name a file, or pipe it")
    bound = SizeBound(max_size, whole=steps is None)
    options = Options(selection, not no_threads, flows, compress, logs.lenient)
    with logs.converting(bound) as (first, *others), open_output(output, force) as whole:
        write(first, bound.counted(whole), options, others)
    if output != "-":
        print_line(output)


@cli.command(
    "instr to-torch session.log -o profile", "instr to-torch server.log server.part2.log -o profile"
)
def to_torch(
    output: str = cli.DIRECTORY,
    steps: tuple[int, int] | None = cli.range_option("Only steps A to B, inclusive."),
    max_size: int = MAX_SIZE,
    logs: Logs = LOGS,
    force: bool = cli.REPLACE,
) -> None:
    """
    Writes a trace in the format of PyTorch's profiler, which TensorBoard's plugin torch-tb-profiler
    and Holistic Trace Analysis read, and an event file with the session's scalars: tokens per
    second, memory, the KV cache. Show both with `tensorboard --logdir DIR`. The CPU's kernels
    appear as those of a GPU, because these tools analyse no others.

    LOG is a file, plain or compressed (.gz, .zst), or - for standard input, recorded with --level
    detailed or verbose. The parts of a rotated log are one session. DIR holds one session, and
    appears when its files are complete.
    """
    from llamacpp_instr.base.output import check_not_input, open_output_directory
    from llamacpp_instr.converters.exports.torch import NAMES, write_torch
    from llamacpp_instr.converters.exports.traced import Options
    from llamacpp_instr.log.graph.timeline import Selection

    need("torch")
    for name in NAMES:
        check_not_input(Path(output) / name, *logs.names)
    bound = SizeBound(max_size, whole=steps is None)
    with logs.converting(bound) as readers:
        if len(readers) > 1:
            raise UsageError(f"{len(readers)} sessions; a directory is for one")
        with open_output_directory(output, NAMES, force) as folder:
            options = Options(Selection(steps), lenient=logs.lenient)
            write_torch(readers[0], folder, options, bound.take)
    notice(f"{output}: {', '.join(NAMES)}")


@cli.command(
    "instr to-parquet session.log -o tables",
    "instr to-parquet session.log server.log --csv -o tables",
)
def to_parquet(
    output: str = cli.DIRECTORY,
    as_csv: bool = cli.flag("Write CSV, which needs no pyarrow.", "--csv"),
    logs: Logs = LOGS,
    force: bool = cli.REPLACE,
) -> None:
    """
    Writes one file for each table: sessions, steps, requests, layers, ops, nodes, tensors, tokens,
    kv, memory, marks, machine, computes, messages, notes, tensor_stats. Times are in ns, sizes in
    bytes; Parquet's fields have their unit as metadata. In sessions, the id is that of `instr
    collect`, and wall is the time of day at the start, so logs can be joined.

    LOG is a file, plain or compressed (.gz, .zst), or - for standard input. The parts of a rotated
    log are one session. The tables of several sessions have a first column `log` with the name of
    each row's log. DIR appears when all its files are complete.
    """
    from llamacpp_instr.base.output import check_not_input, open_output_directory
    from llamacpp_instr.converters.exports.table_files import stream_runs, write_csv, write_parquet
    from llamacpp_instr.converters.exports.tables import NAMES
    from llamacpp_instr.log.reader import LogEnd
    from llamacpp_instr.log.runs import Run, find_runs

    if not as_csv:
        need("parquet", hint="or use --csv")
    names = [f"{table}.{suffix}" for table in NAMES for suffix in ("parquet", "csv")]
    for name in names:
        check_not_input(Path(output) / name, *logs.names)
    runs = find_runs(logs.names)
    notices: list[str] = []

    def on_end(run: Run, end: LogEnd) -> None:
        if sentence := end.sentence():
            notices.append(f"{run.name}: {sentence}")

    with (
        open_output_directory(output, names, force) as directory,
        progress_bar(f"Reading {', '.join(run.name for run in runs)}") as on_progress,
    ):
        write = write_csv if as_csv else write_parquet
        n_rows = write(stream_runs(runs, on_progress, on_end, logs.lenient), directory)
    for line in notices:
        notice(line)
    notice(f"{output}: " + ", ".join(f"{name} {n_rows[name]:,}" for name in NAMES))


@cli.command(
    "instr to-onnx model.gguf -o decode.onnx --past 500",
    "instr to-onnx model.gguf -o prefill.onnx --tokens 64 --no-weights",
)
def to_onnx(
    source: str = cli.argument(metavar="MODEL|LOG"),
    output: str = cli.option("The ONNX file.", "-o --output FILE", required=True),
    tokens: int | None = cli.option(
        "Tokens that the graph of a model computes; more than 1 is a prefill.  [default: 1]",
        "N",
        IntRange(1, cli.MOST_TOKENS),
    ),
    past: int | None = cli.PAST,
    step: int | None = cli.option("Step of a log.  [default: the last]", "N", IntRange(0)),
    no_weights: bool = cli.flag("Leave the weights out: they become inputs."),
    lenient: bool = cli.LENIENT,
    force: bool = cli.FORCE,
) -> None:
    """
    It is the graph that llama.cpp runs in a prefill or a decode, for Netron, ONNX Runtime and other
    tools. Its operators are standard ones. An op that none of them can express becomes an operator
    of the domain `ggml`, and is named in the output. Caches are inputs and outputs. Shapes are
    fixed: those of one graph, with its number of tokens and of cells in the cache.

    Weights are written beside it, to a file that ends with .data, dequantized to float32; F16
    weights stay F16. MODEL is a GGUF file, or demo for the demo model; its graph comes from a dry
    run, which reads no weights. A LOG must be recorded with --level verbose.
    """
    need("onnx", "onnx")
    from llamacpp_instr.base.output import check_output, open_output
    from llamacpp_instr.converters.analyses.memory import recorded_file
    from llamacpp_instr.converters.exports.onnx import export
    from llamacpp_instr.lab.weights.measure import LeafWeights
    from llamacpp_instr.llama.engine import ContextOptions
    from llamacpp_instr.model.file import load_model_file
    from llamacpp_instr.recording.memory.plan import UbatchShape, dry_graphs

    data = Path(output).with_suffix(".data")
    check_output(output, force, source)
    if not no_weights:
        if output == "-":
            raise UsageError("weights need a file beside the graph; name one, or add --no-weights")
        if str(data) == output:
            raise UsageError(f"{output}: the weights have this name; call the graph FILE.onnx")
        check_output(data, force, source)
    if is_model(source):
        if step is not None:
            raise UsageError(f"{source} is a model; --step is for logs")
        model: ModelFile | None
        model = dry = load_model_file(source)
        (graph,) = dry_graphs(dry, ContextOptions(), [UbatchShape(tokens or 1, past or 0)])
    else:
        if tokens is not None or past is not None:
            raise UsageError(f"{source} is not a GGUF model; --tokens and --past are for models")
        (session,) = Logs((source,), lenient).sessions()
        graph = export.graph_of_step(session, step)
        model = None
        if not no_weights:
            try:
                model = recorded_file(session, session.models[session.contexts[graph.ctx].model])
            except UsageError as error:
                raise UsageError(f"{error}; --no-weights needs no model file") from None
    exported = export.export_graph(graph)
    with ExitStack() as files:
        # the last to be opened gets its name first
        file = files.enter_context(open_output(output, force))
        if no_weights or model is None:
            whole = export.with_weights_as_inputs(exported, graph)
        else:
            stored = files.enter_context(open_output(data, force))
            on_progress = files.enter_context(progress_bar("Writing weights"))
            weights = LeafWeights(model)
            whole = export.with_external_weights(
                exported, graph, weights, data.name, stored, on_progress
            )
        file.write(whole.SerializeToString())
    n = len(exported.model.graph.node)
    notice(f"{output}: {counted(n, 'operator')}, {counted(len(exported.weights), 'weight')}")
    if exported.missing:
        named = ", ".join(f"{op} ({n})" for op, n in sorted(exported.missing.items()))
        notice(f"operators of the domain ggml, because no standard one is known: {named}")


@cli.command(
    "instr to-otlp server.log", "instr to-otlp server.log --endpoint http://localhost:4318"
)
def to_otlp(
    output: str | None = cli.option(
        "Output; - is stdout.  [default: LOG's name, .otlp.jsonl]", "-o --output FILE"
    ),
    endpoint: str | None = cli.option("Send them to this collector instead.", "--endpoint ADDRESS"),
    force: bool = cli.FORCE,
    logs: Logs = LOGS,
) -> None:
    """Each request is a span from its arrival to its end, with the child spans queue, prefill and
    decode, and steps as events. Times and tokens are those of `instr requests`. Attributes follow
    OpenTelemetry's conventions for generative AI. Spans contain no text.

    Without --endpoint, FILE gets lines of OTLP/JSON, which collectors read. The usual environment
    variables, such as OTEL_EXPORTER_OTLP_HEADERS and OTEL_SERVICE_NAME, set the rest. LOG is a
    file, plain or compressed (.gz, .zst), or - for standard input. The parts of a rotated log are
    one session.
    """
    need("otlp")
    from llamacpp_instr.base.output import check_output, open_output
    from llamacpp_instr.converters.exports.otlp import (
        Collector,
        Deliver,
        export_sessions,
        json_lines,
    )

    deliver: Deliver
    if output and endpoint:
        raise UsageError("give -o or --endpoint, not both")
    with ExitStack() as stack:
        if endpoint:
            collector = Collector(endpoint)
            place, deliver = collector.url, collector.deliver
        else:
            place = output or cli.default_name(logs.names[0], "otlp.jsonl", "output")
            check_output(place, force, *logs.names)
        sessions = logs.sessions(computes=False)
        if not endpoint:
            deliver = json_lines(stack.enter_context(open_output(place, force)))
        on_progress = stack.enter_context(progress_bar(f"Exporting to {place}"))
        n_all, n_sampled = export_sessions(sessions, deliver, on_progress)
    for session in sessions:
        if sentence := session.log_end.sentence():
            notice(f"{session.path}: {sentence}")
    left_out = f"; {n_all - n_sampled:,} not sampled" if n_sampled < n_all else ""
    notice(f"{place}: {counted(n_sampled, 'request')}{left_out}")


@cli.command(
    "instr to-flashinfer session.log -o dataset",
    "instr to-flashinfer demo.log -o dataset --capture",
    "instr to-flashinfer session.log -o dataset --dataset flashinfer-trace",
)
def to_flashinfer(
    output: str = cli.DATASET,
    capture: bool = cli.flag(
        "Run the first prefill and decode of a log again, and store their tensors."
    ),
    dataset: Path | None = cli.option(
        "Report which definitions this data set has, and their share of the time.", "DIR", cli.PATH
    ),
    logs: Logs = LOGS,
    report: cli.ReportOutput = cli.FORM,
) -> None:
    """
    Writes a definition for each op, with a reference in PyTorch, and its workloads: the sizes that
    occurred. Prints how often each definition was computed, how long that took, and which ops have
    no definition. Inputs are random, but indices are valid. With --capture they come from a run.

    LOG is a file, plain or compressed (.gz, .zst), or - for standard input, recorded with --level
    detailed or verbose. DATASET must not exist; it appears when all its files are complete.
    """
    from llamacpp_instr.base.output import check_output_directory, open_output_directory
    from llamacpp_instr.converters.exports.flashinfer import workloads

    need("tensors")
    check_output_directory(output, ())
    there = workloads.load_definitions(dataset) if dataset else None
    sessions = logs.sessions()
    with progress_bar("Finding workloads") as on_progress:
        found = workloads.find_workloads(sessions, on_progress)
    with open_output_directory(output, ()) as folder:
        if capture:
            from llamacpp_instr.converters.analyses.memory import recorded_file
            from llamacpp_instr.converters.validate import workload_tensors
            from llamacpp_instr.llama.log import captured

            file = recorded_file(sessions[0], workload_tensors.only_model(sessions[0]))
            with captured() as log, progress_bar("Capturing") as on_progress:
                workload_tensors.capture(file, sessions[0], found, folder, log, on_progress)
        workloads.write_dataset(found, folder)
    report.write([workloads.coverage_report(found, there)])
    notice(f"{output}: {len(found.catalog):,} definitions, {len(found.workloads):,} workloads")


@cli.command(
    "instr collect session.log server.log -o fleet",
    "instr collect session.log --host rack-7 -o fleet",
)
def collect(
    output: str = cli.DATASET,
    host: str | None = cli.option(
        "Name of the recording machine.  [default: its processor, cores and memory]", "NAME"
    ),
    dask: str | None = cli.option(
        "Read the logs on the workers of this Dask scheduler.", "ADDRESS"
    ),
    logs: Logs = LOGS,
) -> None:
    """Reads steps, requests and the times of ops of each log, and adds them to DATASET, for `instr
    sql` or any engine that reads Parquet. Logs that it already has are skipped; logs that have
    grown are read again. A damaged log is named and left out, and the exit status is then 1. The
    command may be interrupted at any time: each log is in DATASET as a whole or not at all.

    LOG is a file, plain or compressed (.gz, .zst), a folder, a pattern in quotes, or a URL that
    fsspec knows, such as s3://bucket/logs. Each part of a rotated log counts as a log.
    """
    from llamacpp_instr.converters.fleet.collect import FATES, find_sources, on_dask
    from llamacpp_instr.converters.fleet.collect import collect as collect_logs

    if dask:
        need("dask")
    spread = partial(on_dask, dask) if dask else map
    sources = find_sources(logs.names)
    fates: Counter[str] = Counter()
    kernels = 0
    with progress_bar(f"Collecting into {output}") as on_progress:
        for taken in collect_logs(sources, Path(output), host, logs.lenient, on_progress, spread):
            fates[taken.fate] += 1
            kernels += taken.kernels
            if taken.fate == "damaged":
                notice(f"left out: {taken.message}")
            elif taken.message:
                notice(f"{taken.source}: {taken.message}")
    counts = ", ".join(f"{fates[fate]:,} {fate}" for fate in FATES if fates[fate])
    notice(f"{output}: logs: {counts}; {counted(kernels, 'kernel')} read")
    if fates["damaged"]:
        raise SystemExit(1)


@cli.command(
    "instr sql fleet",
    "instr sql fleet regressions",
    "instr sql fleet \"select host, median(ns) from steps where phase = 'decode' group by host\"",
)
def sql(
    dataset: Path = cli.argument(metavar="DATASET", type=cli.PATH),
    query: str | None = cli.argument(required=False),
    output: cli.ReportOutput = cli.REPORT,
) -> None:
    """
    `instr collect` makes data sets. QUERY is a SELECT in DuckDB's SQL, or the name of a built-in
    query; without QUERY, the names are listed. The tables are logs, steps, requests, ops, hosts and
    op_percentiles. A column whose name ends in ns holds nanoseconds; times are UTC. In ops, a row
    counts the kernels of one op whose durations differ by at most 2 %, and the percentiles
    of op_percentiles are within 1 %.
    """
    from llamacpp_instr.converters.fleet.queries import answer, named_queries, open_database

    output.check()
    with open_database(dataset) as connection:
        output.write([answer(connection, query) if query else named_queries()])
