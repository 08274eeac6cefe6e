"""`instr predict MODEL`: the time of a prefill and a decode, without running them."""

from __future__ import annotations

import click

from llamacpp_instr.base.errors import UsageError
from llamacpp_instr.cli import completion
from llamacpp_instr.cli.options import MOST_TOKENS, ReportOutput, command, report_options


def _threads(_ctx: click.Context, _param: click.Parameter, text: str | None) -> list[int]:
    if text is None:
        return []
    try:
        counts = list(dict.fromkeys(int(word) for word in text.split(",")))
    except ValueError:
        counts = []
    if not counts or min(counts) < 1:
        raise UsageError(f"--threads is {text!r}; it must be numbers such as 1,2,4")
    return counts


@command(
    "instr predict model-F16.gguf --types Q8_0,Q4_K_M --threads 1,2",
    "instr predict model.gguf --machine faster.json --ctx 256",
)
@click.argument("model")
@click.option(
    "--machine",
    metavar="FILE",
    help="A file of `instr probe`, also an edited one.  [default: the one in the user's cache]",
)
@click.option(
    "--types",
    shell_complete=completion.file_types,
    metavar="TYPE,...",
    help="File types to predict, as llama.cpp would quantize MODEL.  [default: MODEL as it is]",
)
@click.option(
    "--threads",
    metavar="N,...",
    callback=_threads,
    help="Numbers of threads.  [default: all that were measured]",
)
@click.option(
    "--batch",
    type=click.IntRange(1, MOST_TOKENS),
    help="Tokens of the prefill, in one graph.  [default: 512, or as many as the model allows]",
)
@click.option(
    "--ctx",
    type=click.IntRange(0, 1 << 24),
    help="Tokens in the cache before the decode.  [default: 512, or as many as the model allows]",
)
@report_options
def predict(
    model: str,
    machine: str | None,
    types: str | None,
    threads: list[int],
    batch: int | None,
    ctx: int | None,
    output: ReportOutput,
) -> None:
    """Predict how fast a model runs, without running it.

    Prints the time of a prefill and of a decode, tokens per second, and memory, for each file type
    and number of threads; and for the first of them the time by op, layer and block. llama.cpp
    builds the graphs in a dry run. Their kernels cost what `instr probe` measured; the uncertainty
    is one standard deviation.

    With --types nothing is quantized. To ask for another machine, edit a copy of the file that
    `instr probe -o FILE` writes, and name it with --machine.

    MODEL is a GGUF file, the first part of a split model, or demo for the demo model.
    """
    from llamacpp_instr.converters.analyses.predict import predict_reports
    from llamacpp_instr.lab.quantize.plan import parse_file_type
    from llamacpp_instr.model.file import load_model_file
    from llamacpp_instr.prediction.model import kernel_model
    from llamacpp_instr.prediction.probe.file import read_probe
    from llamacpp_instr.prediction.steps import predict_cases, trained_tokens

    output.check(model, machine)
    probe = read_probe(machine)
    counts = threads or (probe.kernel_model.threads if probe.kernel_model else [1])
    for n in counts:
        kernel_model(probe, n)
    source = load_model_file(model)
    names = list(dict.fromkeys(map(parse_file_type, types.split(",")))) if types else []
    trained = trained_tokens(source)
    tokens = _length(model, "--batch", batch, 1, trained)
    past = _length(model, "--ctx", ctx, 0, trained)
    cases = predict_cases(source, names, probe, counts, tokens, past)
    output.write(predict_reports(cases, past, probe), title="Prediction")


def _length(model: str, option: str, tokens: int | None, least: int, trained: int) -> int:
    """The value of an option, or its default. Raises `UsageError` for one beyond the model's."""
    from llamacpp_instr.prediction.steps import DEFAULT_TOKENS

    most = trained + least - 1  # what is in the cache leaves room for the token that is decoded
    if tokens is None:
        return max(least, min(DEFAULT_TOKENS, most))
    if tokens > most:
        raise UsageError(
            f"{option} is {tokens:,}, but {model} was trained on contexts of {trained:,} tokens"
        )
    return tokens
