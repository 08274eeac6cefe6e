"""`instr weights MODEL [PATTERN]`: prints, shows or exports the weights of a model."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from llamacpp_instr.base.errors import UsageError
from llamacpp_instr.base.system import need
from llamacpp_instr.base.terminal import progress_bar
from llamacpp_instr.cli.options import ReportOutput, command, given_options, report_options
from llamacpp_instr.cli.serving import Serving, serving_options

if TYPE_CHECKING:
    from llamacpp_instr.lab.weights.measure import WeightReader
    from llamacpp_instr.model.file import ModelFile


@command(
    "instr weights model-Q4_K_M.gguf 'blk.*.ffn_down.weight'",
    "instr weights model-Q4_K_M.gguf --view --reference model-F16.gguf",
    "instr weights model-Q4_K_M.gguf 'blk.0.*' -o block.npz",
)
@click.argument("model")
@click.argument("pattern", default="*")
@click.option(
    "--reference", metavar="FILE", help="The model that MODEL was quantized from: also the errors."
)
@click.option("--view", is_flag=True, help="Show every weight as a page in the browser.")
@serving_options(" of --view")
@click.option("--raw", is_flag=True, help="Export the stored bytes, not the numbers in them.")
@report_options
def weights(
    model: str,
    pattern: str,
    reference: str | None,
    view: bool,
    serving: Serving,
    raw: bool,
    output: ReportOutput,
) -> None:
    """Print, show or export the weights of a model.

    Prints for each tensor whose name matches PATTERN its shape, distribution and norms, and the
    rows and columns whose weights are unusually large; an HTML page has maps of them by layer and
    role. In PATTERN, * is any text and ? any character; re: begins a regular expression. MODEL is
    a GGUF file, the first part of a split model, or demo for the demo model.

    --view serves a page on 127.0.0.1 until Ctrl-C that shows any tensor as a picture, from the
    whole to single weights. -o FILE.npz or FILE.safetensors exports the tensors as float32.
    """
    from llamacpp_instr.base.output import open_output
    from llamacpp_instr.lab.weights.export import (
        SUFFIXES,
        check_export,
        is_export,
        write_npz,
        write_safetensors,
    )  # fmt: skip
    from llamacpp_instr.lab.weights.measure import WeightReader, choose_weights
    from llamacpp_instr.model.file import load_model_file

    export = is_export(output.path) and output.flag is None
    if view and (output.flag is not None or output.path != "-"):
        raise UsageError("--view serves a page; it writes no file")
    if not view and given_options("port", "no_browser"):
        raise UsageError("--port and --no-browser are options of --view")
    if raw and not export:
        raise UsageError("--raw is for an export: name it with -o FILE.npz or FILE.safetensors")
    if export and reference is not None:
        raise UsageError("--reference is for reports and --view; an export has one model's tensors")
    output.check(model, reference, exports=SUFFIXES)
    file = choose_weights(load_model_file(model), pattern)
    original = load_model_file(reference) if reference is not None else None
    reader = WeightReader(file)
    if view:
        _show(file, original, reader, serving)
    elif export:
        check_export(output.path, reader, file.weights, raw)
        with (
            progress_bar(f"Writing {output.path}") as on_progress,
            open_output(output.path, output.force) as out,
        ):
            if output.path.lower().endswith(".npz"):
                write_npz(out, reader, file.weights, raw, on_progress)
            else:
                write_safetensors(Path(out.name), reader, file.weights, raw, on_progress)
    else:
        _report(file, choose_weights(original, pattern) if original else None, reader, output)


def _report(
    file: ModelFile, original: ModelFile | None, reader: WeightReader, output: ReportOutput
) -> None:
    from llamacpp_instr.converters.analyses.weight_errors import weight_error_reports
    from llamacpp_instr.converters.analyses.weights import weight_maps, weight_reports
    from llamacpp_instr.lab.weights.measure import compute_weight_errors

    with progress_bar(f"Reading {file.path}") as on_progress:
        stats = list(reader.measure(file.weights, on_progress=on_progress))
    reports = weight_reports(stats, file.path.name)
    table = reports[1]
    if original is not None:
        with progress_bar(f"Comparing with {original.path}") as on_progress:
            errors = compute_weight_errors(original, file, on_progress=on_progress)
        reports += weight_error_reports(errors, original.path.name, file.path.name)
    charts = weight_maps(stats) if output.form == "html" else []
    output.write(reports, table=table, charts=charts)


def _show(
    file: ModelFile,
    original: ModelFile | None,
    reader: WeightReader,
    serving: Serving,
) -> None:
    """Serve the page until Ctrl-C."""
    need("live")
    from llamacpp_instr.lab.view.server import WeightsServer
    from llamacpp_instr.lab.view.tensors import Tensors
    from llamacpp_instr.lab.weights.measure import WeightReader
    from llamacpp_instr.llama.threads import usable_cpus

    other = (original, WeightReader(original)) if original is not None else None
    tensors = Tensors((file, reader), other, usable_cpus())
    server = WeightsServer(tensors, serving.port or 0)
    server.run(lambda: serving.show(server.address))
