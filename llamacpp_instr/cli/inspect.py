"""`instr inspect MODEL`: prints what a model file says of itself, read from its headers alone."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from converters.report.charts import Chart
    from llamacpp_instr.model.file import ModelFile


@click.command(
    "inspect",
    epilog="\b\nExample:\n  instr inspect model-Q4_K_M.gguf --tensors",
)
@click.argument("model")
@click.option("--tensors", is_flag=True, help="List every tensor too, as JSON and HTML always do.")
@click.option("--json", "flag", flag_value="json", help="Print JSON: numbers in bytes and bits.")
@click.option("--csv", "flag", flag_value="csv", help="Print CSV: the tensors, in bytes.")
@click.option("--md", "flag", flag_value="md", help="Print Markdown.")
@click.option("--html", "flag", flag_value="html", help="Print one HTML page.")
@click.option("-o", "--output", default="-", metavar="FILE", help="Write here, not to stdout.")
@click.option("--force", is_flag=True, help="Overwrite FILE if it exists.")
def inspect(model: str, tensors: bool, flag: str | None, output: str, force: bool) -> None:
    """Print what is in a model file, from its headers alone.

    Prints the architecture, the hyper-parameters, the tokenizer and the tensors of a GGUF file:
    their types by count, bytes and share, bits per weight by type, role and layer, and which
    tensors have another type than was asked for because its blocks do not divide their rows.

    Reads the headers only, however large the file. MODEL is a GGUF file, of a split model its
    first part, or demo for the demo model.
    """
    from converters.analyses.inspect import compute_inspection, compute_tensors, list_tensors
    from converters.report.render import form_of, render
    from llamacpp_instr.model.file import load_model_file
    from llamacpp_instr.output import check_not_input, check_output, open_output

    check_output(output, force)
    check_not_input(output, model)
    form = form_of(flag, output)
    file = load_model_file(model)
    every = compute_tensors(file)
    reports = compute_inspection(file)
    if form in ("json", "html"):
        reports.append(every)
    elif tensors:
        reports.append(list_tensors(file))
    charts = _charts(file) if form == "html" else []
    text = render(form, reports, table=every, charts=charts, title=file.path.name)
    with open_output(output, force) as out:
        out.write(text.encode())


def _charts(model: ModelFile) -> list[Chart]:
    from converters.analyses.layer_chart import chart_bits_by_layer
    from converters.analyses.stored_weights import stored_in_file

    return [chart_bits_by_layer(stored_in_file(model).tensors)] if model.weights else []
