"""The commands about quantization: the importance of columns, quantizing, what it costs in outputs
and in weights, and where the difference begins."""

from __future__ import annotations

import math
import sys
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from click import Choice, IntRange

from llamacpp_instr.base.errors import NativeError, UsageError
from llamacpp_instr.base.system import need
from llamacpp_instr.base.terminal import counted, notice, progress_bar
from llamacpp_instr.cli import options as cli

if TYPE_CHECKING:
    from llamacpp_instr.model.types import GgmlType
    from llamacpp_instr.report.charts import Chart
    from llamacpp_instr.report.report import Report


@cli.command("instr imatrix model-F16.gguf --text calibration.txt -o imatrix.gguf")
def imatrix(
    model: str = cli.argument(),
    text: str = cli.option("Text to run MODEL on; - is standard input.", "FILE", required=True),
    output: str = cli.option(
        "The GGUF file to write; - is standard output.", "-o --output FILE", required=True
    ),
    ctx: int | None = cli.option("Length of a chunk.  [default: 512]", "TOKENS", int),
    chunks: int | None = cli.option(
        "Maximum chunks.  [default: the whole text]", "N", IntRange(1, cli.MOST_TOKENS)
    ),
    threads: int | None = cli.THREADS,
    batch: int | None = cli.option("Tokens computed at once.  [default: 512]", "TOKENS", int),
    force: bool = cli.FORCE,
) -> None:
    """
    For each column of a weight it writes the sum of the squares of the inputs that were multiplied
    by it, separately for each expert. `instr quantize --imatrix` rounds important columns more
    exactly. The file has llama-imatrix's format, and on the same text has its values within
    rounding. MODEL is a GGUF file, the first part of a split model, or demo for the demo model.
    """
    from llamacpp_instr.base.output import (
        begins_as_model,
        check_model_output,
        check_not_input,
        new_model,
        open_output,
    )
    from llamacpp_instr.base.system import temporary_directory
    from llamacpp_instr.lab.quality.logits import OutputOptions
    from llamacpp_instr.model.file import is_imatrix, load_model_file
    from llamacpp_instr.model.imatrix import load_imatrix, write_imatrix
    from llamacpp_instr.run.imatrix import compute_imatrix

    check_model_output(output, force)
    if output != "-" and begins_as_model(output) and not is_imatrix(Path(output)):
        raise UsageError(f"{output} is a model; name another file")
    check_not_input(output, text)
    file = load_model_file(model)
    source = "standard input" if text == "-" else text
    with progress_bar(f"Computing {file.path.name}") as on_progress:
        options = OutputOptions(ctx=ctx, chunks=chunks, batch=batch, threads=threads)
        computed = compute_imatrix(file, cli.read_text(text), options, on_progress)
    with ExitStack() as stack:
        if output == "-":
            path = stack.enter_context(temporary_directory("instr-imatrix-")) / "imatrix.gguf"
        else:
            path = stack.enter_context(new_model(Path(output), force))
        write_imatrix(path, computed, source)
        matrix = load_imatrix(path)
        if output == "-":
            with open_output(output) as out:
                out.write(path.read_bytes())
    n_tokens, n_tensors = computed.n_chunks * computed.chunk_size, len(matrix.entries)
    place = "standard output" if output == "-" else output
    notice(f"{place}: {counted(n_tensors, 'tensor')}, {n_tokens:,} tokens of {source}")
    for sentence in matrix.poor_coverage():
        notice(f"{place}: {sentence}")


@cli.command("instr quantize model-F16.gguf --types Q8_0,Q4_K_M --dry-run")
def quantize(
    model: str = cli.argument(),
    types: str = cli.option(
        "File types, with llama-quantize's names: Q8_0, Q4_K_M, IQ4_XS, …",
        "TYPE,…",
        required=True,
        shell_complete=cli.complete_names,
    ),
    output: str = cli.option(
        "Write NAME-TYPE.gguf to this directory, or to FILE.gguf.  [default: .]",
        "-o --output DIR",
        default=".",
        show_default=False,
    ),
    tensor_types: tuple[str, ...] = cli.option(
        "Type of tensors whose names match: * is any text, re: begins a regular expression. "
        "May be repeated; the first match counts.",
        "--tensor-type PATTERN=TYPE",
        multiple=True,
        shell_complete=cli.complete_names,
    ),
    output_type: str | None = cli.option(
        "Type of output.weight.", "TYPE", shell_complete=cli.complete_names
    ),
    embedding_type: str | None = cli.option(
        "Type of token_embd.weight.", "TYPE", shell_complete=cli.complete_names
    ),
    imatrix: str | None = cli.option(
        "Importance matrix from `instr imatrix` or llama-imatrix.", "FILE"
    ),
    pure: bool = cli.flag("Give all tensors the same type, without a mixture."),
    allow_requantize: bool = cli.flag(
        "Quantize tensors that are already quantized; worse than starting from F16."
    ),
    strict: bool = cli.flag(
        "Write nothing and exit with status 1 if a tensor falls back to another type."
    ),
    dry_run: bool = cli.flag(
        "Only print the exact sizes, or write them with -o FILE.html, .md, .csv or .json."
    ),
    threads: int | None = cli.option("Threads.  [default: one per core]", type=IntRange(1, 512)),
    report: cli.ReportOutput = cli.FORM,
    force: bool = cli.FORCE,
) -> None:
    """
    llama.cpp's own quantizer writes one file per type. MODEL is a GGUF file, ideally in F16, BF16
    or F32, the first part of a split model, or demo for the demo model. A table lists the size of
    each file, and the tensors that could not get the intended type.

    An importance matrix that does not belong to MODEL is refused: it has tensors that MODEL lacks,
    or rows of another length. Warnings name the experts and tensors that it lacks.
    """
    from llamacpp_instr.converters.analyses.quality import list_tensors, quantization_reports
    from llamacpp_instr.lab.quantize.plan import QuantizeOptions, parse_tensor_type, quantized_paths
    from llamacpp_instr.lab.quantize.runner import Quantizer, doubts
    from llamacpp_instr.model.file import load_model_file
    from llamacpp_instr.report.render import SUFFIXES

    options = QuantizeOptions(
        tensor_types=[_override(text) for text in tensor_types],
        output_type=parse_tensor_type(output_type) if output_type else None,
        embedding_type=parse_tensor_type(embedding_type) if embedding_type else None,
        imatrix=Path(imatrix) if imatrix else None,
        pure=pure,
        allow_requantize=allow_requantize,
        threads=threads or 0,
    )
    is_report = dry_run and Path(output).suffix.lower() in SUFFIXES
    report = replace(report, path=output if is_report else "-", force=force)
    report.check(model, imatrix)
    source = load_model_file(model)
    paths = quantized_paths(source.path, types.split(","), "." if is_report else output)
    with Quantizer(source, options) as quantizer:
        plans = [quantizer.plan(file_type) for file_type in paths]
        files = list(paths.values())
        if not dry_run:
            quantizer.check_outputs(plans, files, force)
        for sentence in doubts(plans, quantizer.imatrix) if quantizer.imatrix else ():
            notice(f"{imatrix}: {sentence}")
        fallbacks = sum(len(plan.fallbacks) for plan in plans) if strict else 0
        written = not dry_run and not fallbacks
        if written:
            with progress_bar(f"Quantizing {source.path.name}") as on_progress:
                quantizer.write(plans, files, force=force, on_progress=on_progress)
    reports = quantization_reports(plans, files, written=written)
    every = list_tensors(plans)
    report.write([*reports, every] if report.form in ("json", "html") else reports)
    if fallbacks:
        notice(f"--strict: {counted(fallbacks, 'tensor')} would fall back; nothing was quantized")
        sys.exit(1)


def _override(text: str) -> tuple[str, GgmlType]:
    from llamacpp_instr.lab.quantize.plan import parse_tensor_type

    pattern, equals, name = text.rpartition("=")
    if not equals or not pattern:
        raise UsageError(f"--tensor-type {text!r} is not PATTERN=TYPE, such as *ffn_down*=Q6_K")
    return pattern, parse_tensor_type(name)


@cli.command(
    "instr quality model-F16.gguf model-Q8_0.gguf model-Q4_K_M.gguf",
    "instr quality model.gguf --cache-type-k q8_0,q4_0 --cache-type-v q8_0 --ctx 256",
)
def quality(
    reference: str = cli.argument(metavar="REF"),
    candidates: tuple[str, ...] = cli.argument(metavar="[CANDIDATE...]", nargs=-1),
    text: str | None = cli.option(
        "Text to predict; - is standard input.  [default: REF generates it]", "FILE"
    ),
    given: dict[str, Any] = cli.gathered(
        dict,
        ctx=cli.option("Length of a chunk.  [default: 512]", "TOKENS", int),
        chunks=cli.option(
            "Maximum chunks.  [default: the whole text; 16 if REF generates it]",
            "N",
            IntRange(1, cli.MOST_TOKENS),
        ),
        seed=cli.option("Seed of the text that REF generates.  [default: 1]", type=int),
        threads=cli.THREADS,
        batch=cli.option(
            "Tokens computed at once; each takes 4 bytes per model and token of the vocabulary.  "
            "[default: up to 512, within 64 MiB per model]",
            "TOKENS",
            int,
        ),
        cache_type_k=cli.option("Storage types of the K cache.  [default: f16]", "TYPE,…"),
        cache_type_v=cli.option("Storage types of the V cache.  [default: f16]", "TYPE,…"),
    ),
    only: str | None = cli.option(
        "Compare only these, not both.", type=Choice(["outputs", "weights"])
    ),
    tensors: bool = cli.flag("List every tensor, as JSON and HTML always do."),
    output: cli.ReportOutput = cli.REPORT,
) -> None:
    """Compares each CANDIDATE with REF: perplexity, KL divergence, the change in the probability of
    the text's own tokens (Δp), how often both have the same most probable token, and the error of
    each weight.

    With cache types, each CANDIDATE runs with each type of K combined with each type of V, and REF
    runs with f16; without CANDIDATE, REF is compared with itself. The differences are also listed
    by position in the context, with the memory and the speed of each cache.

    All models run side by side, so no logits are stored. On the same text the figures equal those
    of llama-perplexity. A model is a GGUF file, or demo for the demo model.
    """
    from llamacpp_instr.converters.analyses import caches as cache_analysis
    from llamacpp_instr.converters.analyses import quality as analysis
    from llamacpp_instr.converters.analyses.weights import draw_errors, weight_error_reports
    from llamacpp_instr.lab.quality.caches import parse_cache_types
    from llamacpp_instr.lab.quality.divergence import CacheTypes
    from llamacpp_instr.lab.quality.logits import OutputOptions, check_comparison, compare_outputs
    from llamacpp_instr.lab.weights.figures import Sums
    from llamacpp_instr.lab.weights.measure import compute_weight_errors
    from llamacpp_instr.llama.native import import_llama_cpp
    from llamacpp_instr.llama.threads import default_threads
    from llamacpp_instr.model.file import load_model_file

    threads = given.pop("threads")
    if text is not None and given["seed"] is not None:
        raise UsageError("--seed has no effect with --text; leave one out")
    for name, value in {"text": text, **given}.items():
        if only == "weights" and value is not None:
            option = name.replace("_", "-")
            raise UsageError(f"--{option} has no effect with --only weights; leave one out")
    types = parse_cache_types(given.pop("cache_type_k"), given.pop("cache_type_v"))
    if not candidates:  # REF itself has a cache of f16
        types = [of for of in types if of != CacheTypes()]
    if not candidates and not types:
        raise UsageError(
            "name a CANDIDATE, or a type of the cache other than f16, as in --cache-type-k q8_0"
        )
    output.check(reference, *candidates, text)
    files = [load_model_file(name) for name in (reference, *candidates)]
    compared, caches = files, []
    if types:
        pairs = [(file, of) for file in files[1:] or files for of in types]
        compared = [files[0], *(file for file, _ in pairs)]
        caches = [CacheTypes(), *(of for _, of in pairs)]
    chosen = {name: value for name, value in given.items() if value is not None}
    options = OutputOptions(threads=threads, **chosen)
    if only != "weights":
        check_comparison(files, options)
        try:  # before the weights are read, not after
            import_llama_cpp()
        except NativeError as error:
            raise NativeError(f"{error}, or use --only weights") from None
    # the weights first: they take less time, and show sooner that the models do not match
    errors = []
    for file in files[1:] if only != "outputs" else ():
        with progress_bar(f"Comparing the weights of {file.path.name}") as on_progress:
            errors.append(compute_weight_errors(files[0], file, threads, on_progress))
    names = analysis.short_names(files)
    reports: list[Report] = []
    charts: list[Chart] = []
    if only != "weights":
        words = None if text is None else cli.read_text(text)
        with progress_bar("Comparing outputs") as on_progress:
            outputs = compare_outputs(compared, words, options, on_progress, caches)
        weights = [sum((error.sums for error in its), start=Sums()) for its in errors]
        weights = [of_file for of_file in weights for _ in range(max(len(types), 1))]
        if caches:
            reports += cache_analysis.cache_reports(outputs, compared, threads or default_threads())
            charts += cache_analysis.draw_caches(outputs, compared)
        source = "standard input" if text == "-" else text
        reports += analysis.compute_quality(outputs, compared, source, weights)
        if candidates:
            charts.append(analysis.draw_divergence(outputs, compared))
    for name, its in zip(names[1:], errors, strict=False):  # empty if only outputs are compared
        of_model = weight_error_reports(its, names[0], name)
        # the last table is the one of tensors
        reports += of_model if tensors or output.form in ("json", "html") else of_model[:-1]
    if candidates:
        charts += draw_errors(dict(zip(names[1:], errors, strict=False)))
    what = f"Quality against {names[0]}" if candidates else f"KV caches of {names[0]}"
    output.write(reports, charts=charts, title=what)


@cli.command(
    "instr diverge model-F16.gguf model-Q4_K_M.gguf",
    "instr diverge model-F16.gguf model-Q4_K_M.gguf --tokens 64 --why -o diverge.html",
)
def diverge(
    a: str = cli.argument(metavar="A"),
    b: str = cli.argument(metavar="B"),
    text: str | None = cli.option(
        "Text to run both on; - is standard input.  [default: A writes it]", "FILE"
    ),
    tokens: int = cli.option("Maximum tokens.", type=IntRange(1, cli.MOST_TOKENS), default=512),
    ctx: int | None = cli.option(
        "Length of a chunk.  [default: 512 of a text; an eighth of the tokens if A writes them]",
        "TOKENS",
        IntRange(2, cli.MOST_TOKENS),
    ),
    bound: float = cli.option(
        "Name the first op whose relative error is larger.", type=float, default=0.01
    ),
    memory: int = cli.option(
        "Memory for values of ops, besides what both models take.",
        "MIB",
        IntRange(1, 1 << 30),
        default=512,
    ),
    why: bool = cli.flag("Exchange weights, to find their shares in the KL divergence."),
    threads: int | None = cli.THREADS,
    output: cli.ReportOutput = cli.REPORT,
) -> None:
    """
    Runs both models on the same tokens. Reports the error of every tensor of B against A: along the
    layers, the first op beyond --bound, the ops that add the most error because they read a weight
    that differs, outlier channels, and the positions that suffer. JSON, HTML and CSV have every
    tensor.

    --why lists the weights instead of the ops: it exchanges weights of A with those of B, by groups
    and then one by one, and measures the KL divergence of each. This takes about two passes over
    the tokens for each layer, and more for its weights.

    A and B are GGUF files with the same architecture and vocabulary, or demo for the demo model.
    """
    from llamacpp_instr.diverge.report import all_tensors, divergence_charts, divergence_reports
    from llamacpp_instr.diverge.run import DivergeOptions, compare_models
    from llamacpp_instr.llama.engine import ContextOptions
    from llamacpp_instr.model.file import load_model_file
    from llamacpp_instr.recording.memory.plan import check_memory

    if not (math.isfinite(bound) and bound >= 0):
        raise UsageError(f"--bound is {bound:g}; it must be 0 or larger")
    output.check(a, b, text)
    one, other = load_model_file(a), load_model_file(b)
    for file in (one, other):
        check_memory(file, ContextOptions(ctx=ctx, threads=threads))
    read = None if text is None else cli.read_text(text)
    options = DivergeOptions(tokens, ctx, memory * 2**20, threads)
    with progress_bar("Comparing") as on_progress, progress_bar("Exchanging") as on_exchange:
        found = compare_models(one, other, read, options, why, on_progress, on_exchange)
    reports = divergence_reports(
        found, one.path, other.path, bound, every_row=output.form in ("json", "html")
    )
    output.write(
        reports,
        table=all_tensors(found.errors),
        charts=divergence_charts(found) if output.form == "html" else [],
        title=f"{other.path.name} against {one.path.name}",
    )


@cli.command("instr blocks model-Q4_K_M.gguf blk.0.ffn_down.weight --reference model-F16.gguf")
def blocks(
    model: str = cli.argument(),
    tensor: str = cli.argument(),
    block: int | None = cli.option("Print only block N, in full.", "N", IntRange(min=0)),
    reference: str | None = cli.option("The model to compare TENSOR with.", "FILE"),
    heat_map: str | None = cli.option(
        "Draw the scales, or errors, to FILE.png or FILE.svg.", "FILE"
    ),
    output: cli.ReportOutput = cli.REPORT,
) -> None:
    """
    Prints the bits of each field, the scales and minima, how often each quant occurs, and how many
    are at the end of their range. With --reference also the errors and the worst blocks.

    With --block, prints everything about one block: bytes, scales, quants, values. MODEL is a GGUF
    file.
    """
    from llamacpp_instr.base.output import check_output, open_output
    from llamacpp_instr.converters.analyses import blocks as reports
    from llamacpp_instr.lab.weights import blocks as weights
    from llamacpp_instr.lab.weights.statistics import compute_block_stats
    from llamacpp_instr.model.file import load_model_file

    output.check(model, reference)
    if heat_map is not None:
        reports.check_heat_map(heat_map)
        check_output(heat_map, output.force, model, reference)
        if Path(heat_map).resolve() == Path(output.path).resolve():
            raise UsageError(f"{output.path} cannot contain both the report and the heat map")
    file = load_model_file(model)
    weight = weights.find_weight(file, tensor)
    weights.check_openable(file, weight)
    theirs = None
    if reference is not None:
        theirs = weights.find_reference(load_model_file(reference), weight)

    if block is None or heat_map is not None:
        with progress_bar(f"Reading {tensor}") as on_progress:
            stats = compute_block_stats(weight, theirs, on_progress)
    if block is not None:
        one = weights.load_block(weight, block, theirs)
        shown, table = reports.block_reports(one, reference), reports.elements_report(one)
    else:
        most_codes = None if output.form == "json" else reports.MOST_CODES
        shown = reports.tensor_reports(stats, reference, most_codes)
        table = reports.histogram_report(stats)
    if heat_map is not None:
        with open_output(heat_map, output.force) as picture:
            reports.write_heat_map(picture, stats, heat_map)
    output.write(shown, table=table)


@cli.command(
    "instr weights model-Q4_K_M.gguf 'blk.*.ffn_down.weight'",
    "instr weights model-Q4_K_M.gguf --view --reference model-F16.gguf",
    "instr weights model-Q4_K_M.gguf 'blk.0.*' -o block.npz",
)
def weights(
    model: str = cli.argument(),
    pattern: str = cli.argument(default="*"),
    reference: str | None = cli.option(
        "The model that MODEL was quantized from; adds the errors.", "FILE"
    ),
    view: bool = cli.flag("Show every weight as a page in the browser."),
    serving: cli.Serving = cli.serving_options(" of --view"),
    raw: bool = cli.flag("Export the stored bytes, not the numbers in them."),
    output: cli.ReportOutput = cli.REPORT,
) -> None:
    """Prints for each tensor whose name matches PATTERN its shape, distribution and norms, and the
    rows and columns whose weights are unusually large; an HTML page has maps of them by layer and
    role. In PATTERN, * is any text and ? any character; re: begins a regular expression. MODEL is
    a GGUF file, the first part of a split model, or demo for the demo model.

    --view serves a page on 127.0.0.1 until Ctrl-C that shows any tensor as a picture, from the
    whole to single weights. -o FILE.npz or FILE.safetensors exports the tensors as float32.
    """
    from llamacpp_instr.base.output import open_output
    from llamacpp_instr.converters.analyses import weights as analysis
    from llamacpp_instr.lab.weights import export
    from llamacpp_instr.lab.weights.measure import (
        WeightReader,
        choose_weights,
        compute_weight_errors,
    )
    from llamacpp_instr.model.file import load_model_file

    exports = export.is_export(output.path) and output.flag is None
    if view and (output.flag is not None or output.path != "-"):
        raise UsageError("--view serves a page; it writes no file")
    if not view and cli.given_options("port", "no_browser"):
        raise UsageError("--port and --no-browser are options of --view")
    if raw and not exports:
        raise UsageError("--raw is for an export: name it with -o FILE.npz or FILE.safetensors")
    if exports and reference is not None:
        raise UsageError("--reference is for reports and --view; an export has one model's tensors")
    output.check(model, reference, exports=export.SUFFIXES)
    file = choose_weights(load_model_file(model), pattern)
    original = load_model_file(reference) if reference is not None else None
    reader = WeightReader(file)
    if view:
        need("live")
        from llamacpp_instr.base.machine import usable_cpus
        from llamacpp_instr.lab.view.tensors import Tensors, WeightsServer

        other = (original, WeightReader(original)) if original is not None else None
        tensors = Tensors((file, reader), other, usable_cpus())
        server = WeightsServer(tensors, serving.port or 0)
        server.run(lambda: serving.show(server.address))
        return
    if exports:
        export.check_export(output.path, reader, file.weights, raw)
        with (
            progress_bar(f"Writing {output.path}") as on_progress,
            open_output(output.path, output.force) as out,
        ):
            if output.path.lower().endswith(".npz"):
                export.write_npz(out, reader, file.weights, raw, on_progress)
            else:
                target = Path(out.name)
                export.write_safetensors(target, reader, file.weights, raw, on_progress)
        return
    original = choose_weights(original, pattern) if original else None
    with progress_bar(f"Reading {file.path}") as on_progress:
        stats = list(reader.measure(file.weights, on_progress=on_progress))
    reports = analysis.weight_reports(stats, file.path.name)
    table = reports[1]
    if original is not None:
        with progress_bar(f"Comparing with {original.path}") as on_progress:
            errors = compute_weight_errors(original, file, on_progress=on_progress)
        reports += analysis.weight_error_reports(errors, original.path.name, file.path.name)
    charts = analysis.weight_maps(stats) if output.form == "html" else []
    output.write(reports, table=table, charts=charts)
