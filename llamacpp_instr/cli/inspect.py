"""`instr inspect MODEL`: prints what is in a model file, from its headers alone."""

from __future__ import annotations

import click

from llamacpp_instr.cli.options import ReportOutput, command, report_options


@command("instr inspect model-Q4_K_M.gguf --tensors")
@click.argument("model")
@click.option("--tensors", is_flag=True, help="List every tensor, as JSON and HTML always do.")
@report_options
def inspect(model: str, tensors: bool, output: ReportOutput) -> None:
    """Print what is in a model file, from its headers alone.

    Prints the architecture, the hyper-parameters, the tokenizer and the tensors of a GGUF file:
    their types by count, bytes and share, bits per weight by type, role and layer, and which
    tensors have another type than the file type defines because its blocks do not divide their
    rows.

    Reads only the headers, however large the file is. MODEL is a GGUF file, also a LoRA adapter or
    a multimodal projector, the first part of a split model, or demo for the demo model.
    """
    from llamacpp_instr.converters.analyses.inspect import (
        compute_inspection,
        compute_tensors,
        list_tensors,
    )
    from llamacpp_instr.model.file import load_any_file

    output.check(model)
    file = load_any_file(model)
    every = compute_tensors(file)
    reports = compute_inspection(file)
    if output.form in ("json", "html"):
        reports.append(every)
    elif tensors:
        reports.append(list_tensors(file))
    charts = []
    if output.form == "html" and file.weights:
        # it draws with NumPy, which the headers do not need
        from llamacpp_instr.converters.analyses.memory.pictures import chart_bits_by_layer
        from llamacpp_instr.converters.analyses.stored_weights import stored_in_file

        charts.append(chart_bits_by_layer(stored_in_file(file).tensors))
    output.write(reports, table=every, charts=charts, title=file.path.name)
