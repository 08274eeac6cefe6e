"""`instr inspect MODEL`: prints what a model file says of itself, read from its headers alone."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from converters.page import Picture
    from converters.report import Report
    from llamacpp_instr.model_file import ModelFile


@click.command(
    "inspect",
    short_help="Say what is in a model, and how large.",
    epilog="\b\nExample:\n  instr inspect model-Q4_K_M.gguf --tensors",
)
@click.argument("model")
@click.option("--tensors", is_flag=True, help="List every tensor too, as JSON and HTML always do.")
@click.option("--json", "form", flag_value="json", help="Print JSON: numbers in bytes and bits.")
@click.option("--csv", "form", flag_value="csv", help="Print CSV: the tensors, in bytes.")
@click.option("--md", "form", flag_value="md", help="Print Markdown.")
@click.option("--html", "form", flag_value="html", help="Print one HTML page.")
@click.option("-o", "--output", default="-", metavar="FILE", help="Write here, not to stdout.")
@click.option("--force", is_flag=True, help="Overwrite FILE if it exists.")
def inspect(model: str, tensors: bool, form: str | None, output: str, force: bool) -> None:
    """Print the architecture, the hyper-parameters, the tokenizer and the tensors of a GGUF file:
    their types by count, bytes and share, bits per weight by type, role and layer, and which
    tensors have another type than was asked for because its blocks do not divide their rows.

    Reads the headers only, however large the file. MODEL is a GGUF file, of a split model its
    first part, or demo for the demo model.
    """
    from converters.inspect import compute_inspection, compute_tensors, list_tensors
    from converters.page import render_page
    from converters.render import render_csv, render_markdown
    from converters.report import render_text
    from llamacpp_instr.model_file import load_model_file
    from llamacpp_instr.output import check_output, open_output

    check_output(output, force)
    model_file = load_model_file(model)
    if form == "csv":
        text = render_csv(compute_tensors(model_file))
    else:
        reports = compute_inspection(model_file)
        if form in ("json", "html"):
            reports.append(compute_tensors(model_file))
        elif tensors:
            reports.append(list_tensors(model_file))
        if form == "json":
            text = json.dumps([report.to_json() for report in reports], indent=2) + "\n"
        elif form == "md":
            text = render_markdown(reports)
        elif form == "html":
            text = render_page(model_file.path.name, _with_chart(model_file, reports))
        else:
            text = render_text(reports)
    with open_output(output, force) as file:
        file.write(text.encode())


def _with_chart(model: ModelFile, reports: list[Report]) -> list[Report | Picture]:
    """The reports with the chart before those of roles and layers; a note, where it cannot be."""
    from converters.charts import missing_note
    from converters.inspect import chart_bits_by_layer
    from converters.page import Picture

    sections: list[Report | Picture] = list(reports)
    if model.weights:
        at = next(i for i, report in enumerate(reports) if report.title == "Roles")
        note = missing_note()
        if note:
            reports[at - 1].notes.append(note)
        else:
            chart = chart_bits_by_layer(model)
            sections.insert(at, Picture(chart.title, chart.svg()))
    return sections
