"""`instr quality REF CANDIDATE…`: compares quantized models with the model they come from."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import click

from llamacpp_instr.base.errors import NativeError, UsageError
from llamacpp_instr.cli.options import (
    MOST_TOKENS,
    ReportOutput,
    command,
    read_text,
    report_options,
    threads_option,
)

if TYPE_CHECKING:
    from llamacpp_instr.report.charts import Chart
    from llamacpp_instr.report.report import Report


@command("instr quality model-F16.gguf model-Q8_0.gguf model-Q4_K_M.gguf")
@click.argument("reference", metavar="REF")
@click.argument("candidates", metavar="CANDIDATE...", nargs=-1, required=True)
@click.option(
    "--text",
    metavar="FILE",
    help="Text to predict; - is standard input.  [default: REF generates it]",
)
@click.option("--ctx", type=int, metavar="TOKENS", help="Length of a chunk.  [default: 512]")
@click.option(
    "--chunks",
    type=click.IntRange(1, MOST_TOKENS),
    metavar="N",
    help="Chunks at most.  [default: the whole text; 16 if REF generates it]",
)
@click.option("--seed", type=int, help="Seed of the text that REF generates.  [default: 1]")
@threads_option
@click.option(
    "--batch",
    type=int,
    metavar="TOKENS",
    help="Tokens computed at once; each takes 4 bytes per model and token of the vocabulary.  "
    "[default: up to 512, within 64 MiB per model]",
)
@click.option(
    "--only", type=click.Choice(["outputs", "weights"]), help="Compare only these, not both."
)
@click.option("--tensors", is_flag=True, help="List every tensor, as JSON and HTML always do.")
@report_options
def quality(
    reference: str,
    candidates: tuple[str, ...],
    text: str | None,
    threads: int | None,
    only: str | None,
    tensors: bool,
    output: ReportOutput,
    **given: int | None,
) -> None:
    """Compare quantized models with the model they come from.

    Compares each CANDIDATE with REF: perplexity, KL divergence, the change of the probability of
    the text's own tokens (Δp), how often both have the same most probable token, and the error of
    each weight.

    All models run side by side, so no logits are stored. On the same text the figures equal those
    of llama-perplexity. A model is a GGUF file, or demo for the demo model.
    """
    from llamacpp_instr.base.terminal import progress_bar
    from llamacpp_instr.converters.analyses.error_charts import draw_errors
    from llamacpp_instr.converters.analyses.quality import (
        compute_quality,
        draw_divergence,
        short_names,
    )
    from llamacpp_instr.converters.analyses.weight_errors import weight_error_reports
    from llamacpp_instr.lab.quality.logits import OutputOptions, check_comparison, compare_outputs
    from llamacpp_instr.lab.weights.error import Sums
    from llamacpp_instr.lab.weights.measure import compute_weight_errors
    from llamacpp_instr.model.file import load_model_file

    _check_effect({"text": text, **given}, only)
    output.check(reference, *candidates, text)
    files = [load_model_file(name) for name in (reference, *candidates)]
    chosen = {name: value for name, value in given.items() if value is not None}
    options = OutputOptions(threads=threads, **chosen)
    if only != "weights":
        check_comparison(files, options)
        _check_library()
    # the weights first: they take less time, and show sooner that the models do not match
    errors = []
    for file in files[1:] if only != "outputs" else ():
        with progress_bar(f"Comparing the weights of {file.path.name}") as on_progress:
            errors.append(compute_weight_errors(files[0], file, threads, on_progress))
    names = short_names(files)
    reports: list[Report] = []
    charts: list[Chart] = []
    if only != "weights":
        words = None if text is None else read_text(text)
        with progress_bar("Comparing outputs") as on_progress:
            outputs = compare_outputs(files, words, options, on_progress)
        weights = [sum((error.sums for error in its), start=Sums()) for its in errors]
        source = "standard input" if text == "-" else text
        reports += compute_quality(outputs, files, source, weights)
        charts.append(draw_divergence(outputs, files))
    for name, its in zip(names[1:], errors, strict=False):  # empty if only outputs are compared
        of_model = weight_error_reports(its, names[0], name)
        # the last table is the one of tensors
        reports += of_model if tensors or output.form in ("json", "html") else of_model[:-1]
    charts += draw_errors(dict(zip(names[1:], errors, strict=False)))
    output.write(reports, charts=charts, title=f"Quality against {names[0]}")


def _check_effect(given: Mapping[str, object], only: str | None) -> None:
    if given["text"] is not None and given["seed"] is not None:
        raise UsageError("--seed has no effect with --text; leave one out")
    for name, value in given.items():
        if only == "weights" and value is not None:
            raise UsageError(f"--{name} has no effect with --only weights; leave one out")


def _check_library() -> None:
    """Raise `NativeError` before the weights are read, not after."""
    from llamacpp_instr.llama.native import import_llama_cpp

    try:
        import_llama_cpp()
    except NativeError as error:
        raise NativeError(f"{error}, or use --only weights") from None
