"""`instr to-onnx`: Write the graph of a model or a log as ONNX."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

from click import IntRange

from llamacpp_instr.base.errors import UsageError
from llamacpp_instr.base.system import need
from llamacpp_instr.base.terminal import counted, notice, progress_bar
from llamacpp_instr.cli import options as cli
from llamacpp_instr.cli.logs import Logs, is_model

if TYPE_CHECKING:
    from llamacpp_instr.model.file import ModelFile


@cli.command(
    "instr to-onnx model.gguf -o decode.onnx --past 500",
    "instr to-onnx model.gguf -o prefill.onnx --tokens 64 --no-weights",
)
def to_onnx(
    source: str = cli.argument(metavar="MODEL|LOG"),
    output: str = cli.option("The ONNX file.", "-o --output FILE", required=True),
    tokens: int | None = cli.option(
        "Tokens that the graph of a model computes; more than 1 is a prefill.  [default: 1]",
        "N",
        IntRange(1, cli.MOST_TOKENS),
    ),
    past: int | None = cli.PAST,
    step: int | None = cli.option("Step of a log.  [default: the last]", "N", IntRange(0)),
    no_weights: bool = cli.flag("Leave the weights out: they become inputs."),
    lenient: bool = cli.LENIENT,
    force: bool = cli.FORCE,
) -> None:
    """
    It is the graph that llama.cpp runs in a prefill or a decode, for Netron, ONNX Runtime and other
    tools. It has standard operators only. An op that none can express becomes an operator of the
    domain `ggml`, and is named in the output. Caches are inputs and outputs. Shapes are fixed:
    those of one graph, with its number of tokens and of cells in the cache.

    Weights are written beside it, to a file that ends with .data, dequantized to float32; F16 stays
    as it is. MODEL is a GGUF file, or demo for the demo model; its graph comes from a dry run,
    which reads no weights. A LOG must be recorded with --level verbose.
    """
    need("onnx", "onnx")
    from llamacpp_instr.base.output import check_output, open_output
    from llamacpp_instr.converters.analyses.memory import recorded_file
    from llamacpp_instr.converters.exports.onnx import export
    from llamacpp_instr.lab.weights.measure import LeafWeights
    from llamacpp_instr.llama.engine import ContextOptions
    from llamacpp_instr.model.file import load_model_file
    from llamacpp_instr.recording.memory.plan import UbatchShape, dry_graphs

    data = Path(output).with_suffix(".data")
    check_output(output, force, source)
    if not no_weights:
        if output == "-":
            raise UsageError("weights need a file beside the graph; name one, or add --no-weights")
        if str(data) == output:
            raise UsageError(f"{output}: the weights have this name; call the graph FILE.onnx")
        check_output(data, force, source)
    if is_model(source):
        if step is not None:
            raise UsageError(f"{source} is a model; --step is for logs")
        model: ModelFile | None
        model = dry = load_model_file(source)
        (graph,) = dry_graphs(dry, ContextOptions(), [UbatchShape(tokens or 1, past or 0)])
    else:
        if tokens is not None or past is not None:
            raise UsageError(f"{source} is not a GGUF model; --tokens and --past are for models")
        (session,) = Logs((source,), lenient).sessions()
        graph = export.graph_of_step(session, step)
        model = None
        if not no_weights:
            try:
                model = recorded_file(session, session.models[session.contexts[graph.ctx].model])
            except UsageError as error:
                raise UsageError(f"{error}; --no-weights needs no model file") from None
    exported = export.export_graph(graph)
    with ExitStack() as files:
        # the last to be opened gets its name first
        file = files.enter_context(open_output(output, force))
        if no_weights or model is None:
            whole = export.with_weights_as_inputs(exported, graph)
        else:
            stored = files.enter_context(open_output(data, force))
            on_progress = files.enter_context(progress_bar("Writing weights"))
            weights = LeafWeights(model)
            whole = export.with_external_weights(
                exported, graph, weights, data.name, stored, on_progress
            )
        file.write(whole.SerializeToString())
    n = len(exported.model.graph.node)
    notice(f"{output}: {counted(n, 'operator')}, {counted(len(exported.weights), 'weight')}")
    if exported.missing:
        named = ", ".join(f"{op} ({n})" for op, n in sorted(exported.missing.items()))
        notice(f"operators of the domain ggml, because no standard one is known: {named}")
