"""The commands about a model as it is: imported, listed, planned in memory, and checked."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

from click import Choice, FloatRange, IntRange

from llamacpp_instr.base.errors import UsageError
from llamacpp_instr.base.system import need
from llamacpp_instr.base.terminal import notice, progress_bar
from llamacpp_instr.cli import options as cli
from llamacpp_instr.cli.logs import Logs, is_model

if TYPE_CHECKING:
    from llamacpp_instr.llama.devices import Placement
    from llamacpp_instr.llama.engine import ContextOptions
    from llamacpp_instr.report.charts import Chart
    from llamacpp_instr.report.page import Figure

MOST_CHARTS = 20
"""charts of a page; further models of a log have none"""
_DECODES = 4


@cli.command(
    "instr import Llama-3.2-1B -o llama.gguf",
    "instr import llama-2-7b -o llama.gguf --type Q8_0 --force",
    "instr import adapter -o adapter.gguf --base Llama-3.2-1B",
)
def import_(
    source: Path = cli.argument(type=cli.PATH),
    output: Path = cli.option(
        "The GGUF file to write.", "-o --output FILE", cli.PATH, required=True
    ),
    type_: str | None = cli.option(
        "Type of the weights: F16, BF16, F32 or Q8_0.  "
        "[default: BF16 if the source has it, else F16; adapters F32]",
        "--type TYPE",
        Choice(("F16", "BF16", "F32", "Q8_0"), case_sensitive=False),
    ),
    base: Path | None = cli.option(
        "For an adapter: the folder with config.json of its base model.", "FOLDER", cli.PATH
    ),
    force: bool = cli.FORCE,
) -> None:
    """
    SOURCE is a Hugging Face folder with safetensors or PyTorch files, a folder in Meta's own layout
    (consolidated.*.pth, params.json, tokenizer.model; Llama 1 to 3), or a LoRA adapter of PEFT.
    llama.cpp's own converter does the work, in its own process. It needs the packages of
    llamacpp-instr[hf]. No code from the folder runs, and only the converter is downloaded.
    """
    from llamacpp_instr.base.output import check_model_output
    from llamacpp_instr.lab.importer.source import import_model, open_source

    if str(output) == "-":
        raise UsageError("a model is written to a file, not to standard output; name one")
    check_model_output(output, force)
    found = open_source(source, base)
    found.check_output(output)
    with progress_bar(f"Importing {source.name}") as on_progress:
        model = import_model(found, output, type_, force=force, on_progress=on_progress)
    if model is None:
        notice(f"{output}: a LoRA adapter, {output.stat().st_size:,} bytes")
        return
    architecture = model.metadata.get("general.architecture")
    notice(f"{output}: {architecture}, {len(model.weights)} tensors, {model.n_bytes:,} bytes")


@cli.command("instr inspect model-Q4_K_M.gguf --tensors", "instr inspect imatrix.gguf")
def inspect(
    model: str = cli.argument(),
    tensors: bool = cli.flag("List every tensor, as JSON and HTML always do."),
    output: cli.ReportOutput = cli.REPORT,
) -> None:
    """Prints the architecture, the hyper-parameters, the tokenizer and the tensors of a GGUF file:
    their types by count, bytes and share, bits per weight by type, role and layer, and which
    tensors have a type other than the one that the file type defines, because its blocks do not
    divide their rows.

    Reads only the headers, however large the file is. MODEL is a GGUF file, which may be a LoRA
    adapter or a multimodal projector, the first part of a split model, or demo for the demo model.

    For an importance matrix (GGUF, or the older .dat) it prints the text and the chunks, what it
    has seen of each role, the experts that it never reached, and outlier channels: those whose mean
    square is above 100 times the median of the tensor.
    """
    from llamacpp_instr.converters.analyses import inspect as inspection
    from llamacpp_instr.converters.analyses.memory import chart_bits_by_layer, stored_in_file
    from llamacpp_instr.model.file import is_imatrix, load_any_file

    output.check(model)
    if is_imatrix(Path(model)):
        from llamacpp_instr.converters.analyses import imatrix as importance
        from llamacpp_instr.model.imatrix import load_imatrix

        matrix = load_imatrix(Path(model))
        every = importance.imatrix_tensors(matrix)
        reports = importance.imatrix_reports(matrix)
        if tensors or output.form in ("json", "html"):
            reports.append(every)
        output.write(reports, table=every, title=Path(model).name)
        return
    file = load_any_file(model)
    every = inspection.compute_tensors(file)
    reports = inspection.compute_inspection(file)
    if output.form in ("json", "html"):
        reports.append(every)
    elif tensors:
        reports.append(inspection.list_tensors(file))
    charts = []
    if output.form == "html" and file.weights:
        charts.append(chart_bits_by_layer(stored_in_file(file).tensors))
    output.write(reports, table=every, charts=charts, title=file.path.name)


@cli.command("instr ops model.gguf --tokens 512", "instr ops session.log -o ops.csv")
def ops(
    source: str = cli.argument(metavar="MODEL|LOG"),
    tokens: int | None = cli.option(
        "Tokens of the prefill of a model.  [default: 512]", "N", IntRange(1, cli.MOST_TOKENS)
    ),
    past: int | None = cli.PAST,
    lenient: bool = cli.LENIENT,
    output: cli.ReportOutput = cli.REPORT,
) -> None:
    """
    Prints, for a prefill and a decode, each op with its types, shapes and parameters, how often it
    occurs, the weights that it reads, its FLOPs and bytes, and the ONNX operators and the PyTorch
    function that compute the same.

    MODEL is a GGUF file, or demo for the demo model; its graph comes from a dry run, which reads no
    weights. LOG is a file, plain or compressed (.gz, .zst), or - for standard input.
    """
    from llamacpp_instr.converters.analyses import ops as inventory
    from llamacpp_instr.llama.engine import ContextOptions
    from llamacpp_instr.model.file import load_model_file
    from llamacpp_instr.recording.memory.plan import UbatchShape, dry_graphs

    output.check(source)
    if is_model(source):
        past = past or 0
        shapes = {"prefill": UbatchShape(tokens or 512, past), "decode": UbatchShape(1, past)}
        graphs = dry_graphs(load_model_file(source), ContextOptions(), list(shapes.values()))
        titles = [inventory.phase_title(phase, of.tokens) for phase, of in shapes.items()]
        counts = map(inventory.count_ops, graphs)
        reports = list(map(inventory.ops_report, titles, counts))
    elif tokens is not None or past is not None:
        raise UsageError(f"{source} is not a GGUF model; --tokens and --past are for models")
    else:
        (session,) = Logs((source,), lenient).sessions()
        reports = inventory.ops_of_log(session)
    output.write(reports)


@cli.command(
    "instr memory model-Q4_K_M.gguf --ctx 32768 --cache-type-k q8_0",
    "instr memory model.gguf --gpu-layers 20      # also what each device needs",
    "instr memory session.log -o memory.html",
)
def memory(
    sources: tuple[str, ...] = cli.argument(metavar="MODEL|LOG...", nargs=-1, required=True),
    context: ContextOptions = cli.CONTEXT,
    placement: Placement = cli.PLACEMENT,
    no_mmap: bool = cli.flag("Predict for a model that is read, not mapped."),
    room: int | None = cli.option(
        "Say whether MODEL fits into SIZE, such as 8GB.  [default: this machine's memory]",
        "--memory SIZE",
        callback=cli.bytes_of_size,
    ),
    lenient: bool = cli.LENIENT,
    output: cli.ReportOutput = cli.REPORT,
) -> None:
    """Prints the size of each tensor and its share of F16 and F32, also by type, role and layer,
    and the memory by kind: file, mapped, repacked, KV cache, compute buffers. Says whether a model
    fits: what stays in use counts, not mapped pages that the system can drop. With devices, says
    what each of them needs and has free.

    llama.cpp's own dry run, which reads no weights, predicts the memory of the context that instr
    run would create with the same options. For a log, the measured memory is printed as well, and
    differences are explained.

    MODEL is a GGUF file, the first part of a split model, or demo for the demo model. LOG is a
    file, plain or compressed, or - for standard input. The parts of a rotated log are one session;
    other logs are shown one after the other.
    """
    from llamacpp_instr.converters.analyses import memory as analysis
    from llamacpp_instr.llama.devices import ANYWHERE
    from llamacpp_instr.llama.engine import ContextOptions
    from llamacpp_instr.report.report import named_by
    from llamacpp_instr.run.memory import memory_of_model, memory_of_session

    output.check(*sources)
    source = next(filter(is_model, sources), sources[0])
    if is_model(source):
        if len(sources) > 1:
            raise UsageError(f"{source} is a model; one model or several logs can be shown")
        stored, contexts = memory_of_model(source, context, not no_mmap, room, placement)
        shown = [(stored, analysis.compression_reports(stored, contexts))]
    elif no_mmap or room or context != ContextOptions() or placement != ANYWHERE:
        raise UsageError(
            f"{source} is not a GGUF model, and a log has its own settings: leave out "
            "--ctx, --memory and the like"
        )
    else:
        sessions = Logs(sources, lenient).sessions()
        shown = []
        for session in sessions:
            for stored, contexts in memory_of_session(session):
                reports = analysis.compression_reports(stored, contexts)
                reports[0].notes.extend(session.log_end.notes())
                if len(sessions) > 1:
                    reports = named_by(session.path, reports)
                shown.append((stored, reports))
    models = [reports for _, reports in shown]
    table = analysis.joined_tensors(models)
    if output.form == "text" and output.path == "-":
        models = [analysis.shortened(reports) for reports in models]
    reports = [report for of_model in models for report in of_model]
    charts: list[Chart | Figure] = []
    for stored, of_model in shown[:MOST_CHARTS]:
        charts += [*analysis.draw_memory(of_model), analysis.chart_bits_by_layer(stored.tensors)]
    output.write(reports, table=table, charts=charts)


@cli.command(
    "instr validate model.gguf",
    'instr validate demo --prompt "Once upon a time" -o checked.html',
    "instr validate llama.gguf --reference Llama-3.2-1B",
)
def validate(
    model: str = cli.argument(),
    prompt: str | None = cli.option("The prompt.  [default: 32 tokens]", "-p --prompt TEXT"),
    n: int | None = cli.option(
        f"Decodes after it, to check ops.  [default: {_DECODES}]", "-n", IntRange(0, 1000)
    ),
    reference: Path | None = cli.option(
        "Compare the states of every layer with transformers, which runs this folder.",
        "FOLDER",
        cli.PATH,
    ),
    bound: float | None = cli.option(
        "With --reference: largest relative error that is ok.  [default: by the weights' type]",
        "X",
        FloatRange(0, min_open=True),
    ),
    threads: int | None = cli.THREADS,
    flash_attn: str | None = cli.option(
        "Flash attention.  [default: auto; off with --reference, as it rounds to F16]",
        type=Choice(["auto", "on", "off"]),
    ),
    output: cli.ReportOutput = cli.REPORT,
) -> None:
    """
    Runs a prefill and some decodes. After each op, ONNX Runtime computes the same from the inputs
    that the op had, with dequantized weights, in float32. The report has the largest error of each
    op beside the tolerance of llama.cpp's own test-backend-ops. It also compares the logits of the
    prompt with those of the whole graph in ONNX Runtime, and the logits of the decodes, which read
    the cache, with one pass over all tokens.

    With --reference it compares a prefill with transformers instead: the embeddings, the hidden
    states after every layer, and the logits of the same tokens. FOLDER is the Hugging Face folder
    that the model was converted from. The report names the first layer where they diverge. This
    needs the packages of llamacpp-instr[hf], and memory for the weights in float32.

    MODEL is a GGUF file, or demo for the demo model. Exits with status 1 if an error is beyond its
    tolerance.
    """
    from llamacpp_instr.llama.engine import ContextOptions
    from llamacpp_instr.llama.log import captured
    from llamacpp_instr.model.file import load_model_file
    from llamacpp_instr.recording.memory.plan import check_memory

    chosen = flash_attn or ("auto" if reference is None else "off")
    options = ContextOptions(threads=threads, flash_attn=chosen)
    options.check()
    if reference is None and bound is not None:
        raise UsageError("--bound is for --reference; the tolerances of ops are upstream's")
    if reference is not None and n is not None:
        raise UsageError("-n is the number of decodes; --reference compares a prefill only")
    need("onnx")  # the tables of --reference are those of the ops
    output.check(model)
    if reference is None:
        from llamacpp_instr.converters.validate.run import judge, validate_model

        file = load_model_file(model)
        check_memory(file, options)
        with captured() as log, progress_bar("Checking") as on_progress:
            n = _DECODES if n is None else n
            verdict = judge(validate_model(file, prompt, n, options, log, on_progress))
    else:
        from llamacpp_instr.converters.validate import against

        source = against.open_reference(reference)
        source.check_output(Path(output.path))
        need("hf")
        file = load_model_file(model)
        check_memory(file, options)
        why = "--bound"
        if bound is None:
            bound, type_ = against.default_bound(file)
            why = f"the bound for weights in {type_}"
        with captured() as log, progress_bar("Comparing") as on_progress:
            found = against.compare_with_transformers(
                file, source, prompt, threads, chosen, log, on_progress
            )
        verdict = against.judge_states(found, bound, why)
    output.write(verdict.reports, table=verdict.reports[0])
    if not verdict.passed:
        sys.exit(1)
