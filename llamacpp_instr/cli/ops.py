"""`instr ops MODEL|LOG`: prints the inventory of the ops of a model."""

from __future__ import annotations

import click

from llamacpp_instr.base.errors import UsageError
from llamacpp_instr.cli.logs import Logs, is_model
from llamacpp_instr.cli.options import (
    MOST_TOKENS,
    ReportOutput,
    command,
    lenient_option,
    past_option,
    report_options,
)


@command(
    "instr ops model.gguf --tokens 512",
    "instr ops session.log -o ops.csv",
)
@click.argument("source", metavar="MODEL|LOG")
@click.option(
    "--tokens",
    type=click.IntRange(1, MOST_TOKENS),
    metavar="N",
    help="Tokens of the prefill of a model.  [default: 512]",
)
@past_option
@lenient_option
@report_options
def ops(
    source: str, tokens: int | None, past: int | None, lenient: bool, output: ReportOutput
) -> None:
    """Print every distinct op of a model or a log.

    Prints, for a prefill and a decode, each op with its types, shapes and parameters, how often it
    occurs, the weights that it reads, its FLOPs and bytes, and the ONNX operators and the PyTorch
    function that compute the same.

    MODEL is a GGUF file, or demo for the demo model; its graph comes from a dry run, which reads no
    weights. LOG is a file, plain or compressed (.gz, .zst), or - for standard input.
    """
    from llamacpp_instr.converters.analyses.ops import (
        count_ops,
        ops_of_log,
        ops_report,
        phase_title,
    )
    from llamacpp_instr.llama.engine import ContextOptions
    from llamacpp_instr.model.file import load_model_file
    from llamacpp_instr.recording.memory.plan import UbatchShape, dry_graphs

    output.check(source)
    if is_model(source):
        past = past or 0
        shapes = {"prefill": UbatchShape(tokens or 512, past), "decode": UbatchShape(1, past)}
        graphs = dry_graphs(load_model_file(source), ContextOptions(), list(shapes.values()))
        reports = [
            ops_report(phase_title(phase, shape.tokens), count_ops(graph))
            for (phase, shape), graph in zip(shapes.items(), graphs, strict=True)
        ]
    elif tokens is not None or past is not None:
        raise UsageError(f"{source} is not a GGUF model; --tokens and --past are for models")
    else:
        (session,) = Logs((source,), lenient).sessions()
        reports = ops_of_log(session)
    output.write(reports)
