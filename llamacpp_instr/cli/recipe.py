"""The command `instr recipe`."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from click import FloatRange, IntRange

from llamacpp_instr.base.errors import UsageError
from llamacpp_instr.cli import options as cli


@cli.command(
    "instr recipe model-F16.gguf                            # which type?",
    "instr recipe model-F16.gguf --bpw 4.8 -o model.gguf    # a mixture of types",
    "instr recipe model-F16.gguf --recipe model.json -o again.gguf",
)
def recipe(
    model: str = cli.argument(),
    size: int | None = cli.option(
        "Maximum size of the file, such as 4.5GB.", "SIZE", callback=cli.bytes_of_size
    ),
    bpw: float | None = cli.option(
        "Maximum bits per weight.", "BITS", FloatRange(0, 64, min_open=True)
    ),
    memory: int | None = cli.option(
        "Maximum memory, with a context of --ctx tokens.",
        "SIZE",
        callback=cli.bytes_of_size,
    ),
    ctx: int | None = cli.option(
        "Size of that context.  [default: that of `instr run`]",
        "TOKENS",
        IntRange(1, 1 << 24),
    ),
    cache_type_k: str | None = cli.option(
        "Storage types of the K cache of that context, to choose from.  [default: f16]", "TYPE,…"
    ),
    cache_type_v: str | None = cli.option(
        "Storage types of the V cache of that context, to choose from.  [default: f16]", "TYPE,…"
    ),
    speed: float | None = cli.option(
        "Minimum decode speed in tokens per second, as `instr predict` predicts it.",
        "TOKENS",
        FloatRange(0, min_open=True),
    ),
    machine: str | None = cli.option(
        "A file from `instr probe`, for speeds.  [default: the one in the user's cache]", "FILE"
    ),
    from_recipe: str | None = cli.option(
        "Rebuild the model of this recipe; measure nothing.", "--recipe FILE"
    ),
    imatrix: str | None = cli.option("Importance matrix for the quantizer.", "FILE"),
    text: str | None = cli.option(
        "Text to measure on: effects on its first half, results on its second; - is standard "
        "input.  [default: MODEL generates both]",
        "FILE",
    ),
    chunks: int = cli.option(
        "Maximum chunks of 512 tokens from each text.", "N", IntRange(1, 1024), default=8
    ),
    threads: int | None = cli.THREADS,
    output: str | None = cli.option(
        "With a bound or --recipe: the model to write. Otherwise: the report.", "-o --output FILE"
    ),
    report: cli.ReportOutput = cli.FORM,
    force: bool = cli.FORCE,
) -> None:
    """Without a bound, it compares llama.cpp's own types of MODEL: size, speed, memory, KL
    divergence from MODEL and perplexity. It marks the types that another one beats in everything,
    and recommends one. Speed and memory are predictions, if `instr probe` has measured this
    machine.

    With a bound it finds the types of the tensors that cost the least KL divergence. It measures
    the error of each tensor in each type, and the effect of groups of tensors on the output. The
    model is written to FILE.gguf, the types to FILE.types.txt, which llama-quantize
    --tensor-type-file reads, and everything needed to rebuild the model to FILE.json. Then the
    model is compared with llama.cpp's own types of about its size, on text not used for the choice.

    Measurements are kept: another bound, or a run after Ctrl-C, does not repeat them.

    MODEL is a GGUF file, ideally in F16, BF16 or F32, the first part of a split model, or demo for
    the demo model.
    """
    from llamacpp_instr.base.output import check_model_output, check_not_input, check_output
    from llamacpp_instr.lab.quality.caches import parse_cache_types
    from llamacpp_instr.lab.quality.divergence import CacheTypes
    from llamacpp_instr.llama.threads import default_threads
    from llamacpp_instr.model.file import load_model_file
    from llamacpp_instr.prediction.probe.file import known_probe, read_probe
    from llamacpp_instr.recipe.make import read_recipe
    from llamacpp_instr.recipe.report import recipe_reports, size_chart, type_reports
    from llamacpp_instr.recipe.run import (
        Limits,
        beside,
        compare_types,
        find_recipe,
        make_again,
        options_for,
    )
    from llamacpp_instr.recipe.speed import Machine, predict_types
    from llamacpp_instr.recipe.verify import STANDARD, split_text

    bounds = cli.given_options("size", "bpw", "memory", "speed")
    makes = bool(bounds) or from_recipe is not None
    if bounds and from_recipe is not None:
        raise UsageError(f"{bounds[0]} has no effect with --recipe; leave one out")
    if makes and (output is None or not output.endswith(".gguf")):
        raise UsageError("name the model to write with -o FILE.gguf")
    if from_recipe is not None and (text is not None or report.flag is not None):
        raise UsageError("--recipe makes a model and reports nothing; leave out --text and formats")
    given = {"ctx": ctx, "cache-type-k": cache_type_k, "cache-type-v": cache_type_v}
    for name, value in given.items():
        if value is not None and memory is None:
            raise UsageError(f"--{name} is for the context of --memory; give both")
    caches = parse_cache_types(cache_type_k, cache_type_v) or [CacheTypes()]
    probe = read_probe(machine) if machine is not None or speed is not None else known_probe()
    predictor = Machine(probe, threads or default_threads()) if probe is not None else None
    report = replace(report, path="-" if makes or output is None else output, force=force)
    inputs = (model, imatrix, text, from_recipe, machine)
    report.check(*inputs)
    if output is not None and makes:
        check_not_input(output, *inputs)
        check_model_output(output, force)
        for path in beside(Path(output)) if bounds else ():
            check_output(path, force, *inputs)
    source = load_model_file(model)
    options = options_for(source, Path(imatrix) if imatrix else None, threads)
    if from_recipe is not None:
        make_again(source, read_recipe(Path(from_recipe)), options, Path(str(output)), force)
        return
    words = None if text is None else cli.read_text(text)
    texts = split_text(source, words, chunks, threads)
    where = "the second half of " + ("standard input" if text == "-" else str(text))
    if text is None:
        where = f"text that {source.path.name} wrote"
    note = f"Measured on {where}, at most {chunks} chunks of {texts[1].ctx} tokens."
    if not makes:
        found = compare_types(source, options, texts[1])
        cases = [] if predictor is None else predict_types(source, STANDARD, predictor)
        reports = type_reports(found.models, found.perplexity, cases, note)
        chart = size_chart(found.models, f"Types of {source.path.name}")
    else:
        limits = Limits(size, bpw, memory, ctx, speed, predictor)
        found = find_recipe(source, options, texts, limits, Path(str(output)), force, caches)
        assert found.measured is not None
        reports = recipe_reports(found, found.measured, note)
        chart = size_chart(found.models, f"{Path(str(output)).name} and types of llama.cpp")
    report.write(reports, charts=[chart], title=f"Recipe of {source.path.name}")
