"""`instr quality REF CANDIDATE…`: says how far quantized models are from the one they came from."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from llamacpp_instr.errors import UsageError

if TYPE_CHECKING:
    from converters.report import Report
    from llamacpp_instr.logits import OutputOptions
    from llamacpp_instr.model_file import ModelFile


@click.command(
    "quality",
    short_help="Judge quantized models by their outputs and weights.",
    epilog="\b\nExample:\n  instr quality model-F16.gguf model-Q8_0.gguf model-Q4_K_M.gguf",
)
@click.argument("reference", metavar="REF")
@click.argument("candidates", metavar="CANDIDATE...", nargs=-1, required=True)
@click.option(
    "--text",
    metavar="FILE",
    help="Text to predict; - is standard input.  [default: what REF writes itself]",
)
@click.option("--ctx", type=int, metavar="TOKENS", help="Length of a chunk.  [default: 512]")
@click.option(
    "--chunks",
    type=int,
    metavar="N",
    help="Chunks at most.  [default: the whole text; 16 when REF writes it]",
)
@click.option("--seed", default=1, show_default=True, help="Of the text that REF writes.")
@click.option("--threads", type=int, metavar="N", help="Default: as many as physical cores.")
@click.option(
    "--batch",
    type=int,
    metavar="TOKENS",
    help="Tokens computed at once: each keeps 4 bytes by token of the vocabulary and model.  "
    "[default: up to 512, within 64 MiB a model]",
)
@click.option(
    "--only", type=click.Choice(["outputs", "weights"]), help="Compare only these, not both."
)
@click.option("--json", "form", flag_value="json", help="Print JSON.")
@click.option("--csv", "form", flag_value="csv", help="Print CSV: the first table.")
@click.option("--md", "form", flag_value="md", help="Print Markdown.")
@click.option("--html", "form", flag_value="html", help="Print one HTML page.")
@click.option("-o", "--output", default="-", metavar="FILE", help="Write here, not to stdout.")
@click.option("--force", is_flag=True, help="Overwrite FILE if it exists.")
def quality(
    reference: str,
    candidates: tuple[str, ...],
    text: str | None,
    ctx: int | None,
    chunks: int | None,
    seed: int,
    threads: int | None,
    batch: int | None,
    only: str | None,
    form: str | None,
    output: str,
    force: bool,
) -> None:
    """Compare quantized models, CANDIDATE..., with REF, the one they were made of: perplexity, KL
    divergence, change of the text's own tokens' probabilities (Δp) and how often both find the
    same token the most probable; then the error of each weight.

    All models run side by side, so no logits are stored; on the same text the figures are those
    of llama-perplexity. A model is a GGUF file, or demo for the demo model.
    """
    from converters.render import render_csv, render_html, render_markdown
    from converters.report import render_text
    from llamacpp_instr.logits import OutputOptions, check_comparison
    from llamacpp_instr.model_file import load_model_file
    from llamacpp_instr.output import check_output, open_output

    check_output(output, force)
    files = [load_model_file(name) for name in (reference, *candidates)]
    options = OutputOptions(ctx, chunks, batch, threads, seed)
    if only != "weights":
        check_comparison(files, options)
    # the weights take less time, and tell sooner when the models do not match
    reports = [] if only == "outputs" else _compare_weights(files, threads)
    if only != "weights":
        reports = [*_compare_outputs(files, text, options), *reports]
    if form == "json":
        shown = json.dumps([report.to_json() for report in reports], indent=2) + "\n"
    elif form == "csv":
        shown = render_csv(reports[0])
    elif form == "md":
        shown = render_markdown(reports)
    elif form == "html":
        shown = render_html(reports)
    else:
        shown = render_text(reports)
    with open_output(output, force) as file:
        file.write(shown.encode())


def _compare_outputs(
    files: list[ModelFile], text_file: str | None, options: OutputOptions
) -> list[Report]:
    from converters.quality import compute_quality
    from llamacpp_instr.logits import compare_outputs
    from llamacpp_instr.progress import progress_bar

    text = None if text_file is None else _read_text(text_file)
    with progress_bar("Comparing outputs") as on_progress:
        outputs = compare_outputs(files, text, options, on_progress)
    return compute_quality(outputs, files, "standard input" if text_file == "-" else text_file)


def _compare_weights(files: list[ModelFile], threads: int | None) -> list[Report]:
    from converters.quality import short_names
    from converters.weight_errors import weight_error_reports
    from llamacpp_instr.progress import progress_bar
    from llamacpp_instr.weights import compute_weight_errors

    shown = short_names(files)
    reports: list[Report] = []
    for file, name in zip(files[1:], shown[1:], strict=True):
        with progress_bar(f"Comparing the weights of {name}") as on_progress:
            errors = compute_weight_errors(files[0], file, threads, on_progress)
        reports += weight_error_reports(errors, shown[0], name)
    return reports


def _read_text(name: str) -> str:
    """The text of a file, without the newline at its end, as llama-perplexity reads it."""
    source = "standard input" if name == "-" else name
    try:
        data = sys.stdin.buffer.read() if name == "-" else Path(name).read_bytes()
        return data.decode().removesuffix("\n")
    except OSError as error:
        raise UsageError(f"the text {source} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise UsageError(f"{source} is not UTF-8: byte {error.start} is wrong") from None
