"""`instr blocks MODEL TENSOR`: prints the scales, quants and worst blocks of a quantized tensor."""

from __future__ import annotations

from pathlib import Path

import click

from llamacpp_instr.cli.options import ReportOutput, command, report_options


@command("instr blocks model-Q4_K_M.gguf blk.0.ffn_down.weight --reference model-F16.gguf")
@click.argument("model")
@click.argument("tensor")
@click.option("--block", type=click.IntRange(min=0), metavar="N", help="Print all of block N only.")
@click.option("--reference", metavar="FILE", help="The model to compare TENSOR with.")
@click.option(
    "--heat-map", metavar="FILE", help="Draw the scales, or errors, to FILE.png or FILE.svg."
)
@report_options
def blocks(
    model: str,
    tensor: str,
    block: int | None,
    reference: str | None,
    heat_map: str | None,
    output: ReportOutput,
) -> None:
    """Print the blocks of a quantized tensor of a model.

    Prints the bits of each field, the scales and minima, how often each quant occurs, and how many
    are at the end of their range. With --reference also the errors and the worst blocks.

    With --block, prints everything about one block: bytes, scales, quants, values. MODEL is a GGUF
    file.
    """
    from llamacpp_instr.base.errors import UsageError
    from llamacpp_instr.base.output import check_output, open_output
    from llamacpp_instr.base.terminal import progress_bar
    from llamacpp_instr.converters.analyses import blocks as reports
    from llamacpp_instr.converters.analyses.block_heat_map import check_heat_map, write_heat_map
    from llamacpp_instr.lab.weights.blocks import (
        check_openable,
        find_reference,
        find_weight,
        load_block,
    )
    from llamacpp_instr.lab.weights.statistics import compute_block_stats
    from llamacpp_instr.model.file import load_model_file

    output.check(model, reference)
    if heat_map is not None:
        check_heat_map(heat_map)
        check_output(heat_map, output.force, model, reference)
        if Path(heat_map).resolve() == Path(output.path).resolve():
            raise UsageError(f"{output.path} cannot contain both the report and the heat map")
    file = load_model_file(model)
    weight = find_weight(file, tensor)
    check_openable(file, weight)
    theirs = find_reference(load_model_file(reference), weight) if reference is not None else None

    stats, most_codes = None, None if output.form == "json" else reports.MOST_CODES
    if block is None or heat_map is not None:
        with progress_bar(f"Reading {tensor}") as on_progress:
            stats = compute_block_stats(weight, theirs, on_progress)
    if block is not None:
        one = load_block(weight, block, theirs)
        shown, table = reports.block_reports(one, reference), reports.elements_report(one)
    else:
        assert stats is not None
        shown = reports.tensor_reports(stats, reference, most_codes)
        table = reports.histogram_report(stats)
    if heat_map is not None and stats is not None:
        with open_output(heat_map, output.force) as picture:
            write_heat_map(picture, stats, heat_map)
    output.write(shown, table=table)
