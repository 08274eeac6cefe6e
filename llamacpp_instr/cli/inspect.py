"""`instr inspect MODEL`: prints what a model file says of itself, read from its headers alone."""

from __future__ import annotations

import json

import click


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
    from converters.inspect import compute_inspection, compute_tensors
    from converters.render import render_csv, render_html, render_markdown
    from converters.report import render_text
    from llamacpp_instr.model_file import load_model_file
    from llamacpp_instr.output import check_output, open_output

    check_output(output, force)
    model_file = load_model_file(model)
    if form == "csv":
        text = render_csv(compute_tensors(model_file))
    else:
        reports = compute_inspection(model_file)
        if tensors or form in ("json", "html"):
            reports.append(compute_tensors(model_file))
        if form == "json":
            text = json.dumps([report.to_json() for report in reports], indent=2) + "\n"
        elif form == "md":
            text = render_markdown(reports)
        elif form == "html":
            text = render_html(reports)
        else:
            text = render_text(reports)
    with open_output(output, force) as file:
        file.write(text.encode())
