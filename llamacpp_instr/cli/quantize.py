"""`instr quantize MODEL --types …`: quantizes a model, or predicts the sizes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import click

from llamacpp_instr.cli import completion
from llamacpp_instr.cli.options import ReportOutput, command, force_option, form_options

if TYPE_CHECKING:
    from llamacpp_instr.model.types import GgmlType


@command("instr quantize model-F16.gguf --types Q8_0,Q4_K_M --dry-run")
@click.argument("model")
@click.option(
    "--types",
    required=True,
    shell_complete=completion.file_types,
    metavar="TYPE,…",
    help="File types, with llama-quantize's names: Q8_0, Q4_K_M, IQ4_XS, …",
)
@click.option(
    "-o",
    "--output",
    default=".",
    metavar="DIR",
    help="Write NAME-TYPE.gguf to this directory, or to FILE.gguf.  [default: .]",
)
@click.option(
    "--tensor-type",
    "tensor_types",
    multiple=True,
    shell_complete=completion.tensor_types,
    metavar="PATTERN=TYPE",
    help="Type of tensors whose names match: * is any text, re: begins a regular expression. "
    "May be repeated; the first match counts.",
)
@click.option(
    "--output-type",
    shell_complete=completion.tensor_types,
    metavar="TYPE",
    help="Type of output.weight.",
)
@click.option(
    "--embedding-type",
    shell_complete=completion.tensor_types,
    metavar="TYPE",
    help="Type of token_embd.weight.",
)
@click.option("--imatrix", metavar="FILE", help="Importance matrix from llama-imatrix.")
@click.option("--pure", is_flag=True, help="Give all tensors the same type, without a mixture.")
@click.option(
    "--allow-requantize",
    is_flag=True,
    help="Quantize tensors that are already quantized; worse than starting from F16.",
)
@click.option(
    "--dry-run",
    is_flag=True,
    help="Only print the exact sizes, or write them with -o FILE.html, .md, .csv or .json.",
)
@click.option("--threads", type=click.IntRange(1, 512), help="Threads.  [default: one per core]")
@form_options
@force_option
def quantize(
    model: str,
    types: str,
    output: str,
    tensor_types: tuple[str, ...],
    output_type: str | None,
    embedding_type: str | None,
    imatrix: str | None,
    pure: bool,
    allow_requantize: bool,
    dry_run: bool,
    threads: int | None,
    report: ReportOutput,
    force: bool,
) -> None:
    """Quantize a model, or print the sizes that it would have.

    llama.cpp's own quantizer writes one file per type. MODEL is a GGUF file, ideally in F16, BF16
    or F32, the first part of a split model, or demo for the demo model. A table lists the size of
    each file, and the tensors that could not get the intended type.
    """
    from llamacpp_instr.base.terminal import progress_bar
    from llamacpp_instr.converters.analyses.quantization import list_tensors, quantization_reports
    from llamacpp_instr.lab.quantize.plan import QuantizeOptions, parse_tensor_type, quantized_paths
    from llamacpp_instr.lab.quantize.runner import Quantizer
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
            with progress_bar(f"Quantizing {source.path.name}") as on_progress:
                quantizer.write(plans, files, force=force, on_progress=on_progress)
    reports = quantization_reports(plans, files, written=not dry_run)
    every = list_tensors(plans)
    report.write([*reports, every] if report.form in ("json", "html") else reports)


def _override(text: str) -> tuple[str, GgmlType]:
    from llamacpp_instr.base.errors import UsageError
    from llamacpp_instr.lab.quantize.plan import parse_tensor_type

    pattern, equals, name = text.rpartition("=")
    if not equals or not pattern:
        raise UsageError(f"--tensor-type {text!r} is not PATTERN=TYPE, such as *ffn_down*=Q6_K")
    return pattern, parse_tensor_type(name)
