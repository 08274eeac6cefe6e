"""`instr predict MODEL`: the time of a prefill and a decode, without running them."""

from __future__ import annotations

from contextlib import ExitStack
from typing import TYPE_CHECKING

import click

from llamacpp_instr.base.errors import UsageError
from llamacpp_instr.cli.options import MOST_TOKENS, ReportOutput, command, report_options

if TYPE_CHECKING:
    from llamacpp_instr.converters.analyses.predict import Case
    from llamacpp_instr.llama.engine import ContextOptions
    from llamacpp_instr.model.file import ModelFile
    from llamacpp_instr.prediction.probe.file import Probe


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
    from llamacpp_instr.base.progress import progress_bar
    from llamacpp_instr.converters.analyses.predict import predict_reports
    from llamacpp_instr.lab.quantize.plan import parse_file_type
    from llamacpp_instr.llama.engine import ContextOptions
    from llamacpp_instr.model.file import load_model_file
    from llamacpp_instr.prediction.model import kernel_model
    from llamacpp_instr.prediction.probe.file import read_probe

    output.check(model, machine)
    probe = read_probe(machine)
    counts = threads or (probe.kernel_model.threads if probe.kernel_model else [1])
    for n in counts:
        kernel_model(probe, n)
    source = load_model_file(model)
    names = list(dict.fromkeys(map(parse_file_type, types.split(",")))) if types else []
    tokens = _length(source, "--batch", batch, 1)
    past = _length(source, "--ctx", ctx, 0)
    options = ContextOptions(ctx=max(tokens, past + 1), batch=tokens, ubatch=tokens)
    cases: list[Case] = []
    with ExitStack() as stack, progress_bar("Predicting") as on_progress:
        made = _made(source, names, stack)
        for done, (name, file) in enumerate(made):
            on_progress(done, len(made))
            cases += _cases(name, file, probe, counts, options, past)
    output.write(predict_reports(cases, past, probe), title="Prediction")


def _length(model: ModelFile, option: str, tokens: int | None, least: int) -> int:
    """The value of an option, or its default. Raises `UsageError` for one beyond the model's."""
    from llamacpp_instr.prediction.steps import DEFAULT_TOKENS, trained_tokens

    trained = trained_tokens(model)
    most = trained + least - 1  # what is in the cache leaves room for the token that is decoded
    if tokens is None:
        return max(least, min(DEFAULT_TOKENS, most))
    if tokens > most:
        raise UsageError(
            f"{option} is {tokens:,}, but {model.path} was trained on contexts of {trained:,}"
            " tokens"
        )
    return tokens


def _made(source: ModelFile, names: list[str], stack: ExitStack) -> list[tuple[str, ModelFile]]:
    """The model in each file type, as it is if none was named."""
    from llamacpp_instr.base.temporary import temporary_directory
    from llamacpp_instr.lab.quantize.plan import QuantizeOptions
    from llamacpp_instr.lab.quantize.runner import Quantizer
    from llamacpp_instr.prediction.retyped import write_retyped

    if not names:
        return [(source.file_type or "as it is", source)]
    quantizer = stack.enter_context(Quantizer(source, QuantizeOptions(allow_requantize=True)))
    made = []
    for name in names:
        folder = stack.enter_context(temporary_directory("instr-predict-"))
        made.append((name, write_retyped(source, quantizer.plan(name), folder)))
    return made


def _cases(
    name: str,
    file: ModelFile,
    probe: Probe,
    counts: list[int],
    options: ContextOptions,
    past: int,
) -> list[Case]:
    from llamacpp_instr.converters.analyses.predict import Case, Step
    from llamacpp_instr.log.graph.timeline import plan_timeline
    from llamacpp_instr.prediction.model import kernel_model
    from llamacpp_instr.prediction.steps import planned_steps
    from llamacpp_instr.recording.memory.dry_graph import UbatchShape
    from llamacpp_instr.recording.memory.plan import plan_memory

    shapes = [UbatchShape(options.batch or 1), UbatchShape(1, past)]
    steps = planned_steps(file, options, shapes)
    memory = plan_memory(file, options).n_bytes
    timelines = [plan_timeline(step.graph, step.plan) for step in steps]

    found = []
    for n in counts:
        prefill, decode = (
            Step(step.shape.tokens, step.predict(probe, n), timeline)
            for step, timeline in zip(steps, timelines, strict=True)
        )
        (overhead,) = (of for of in kernel_model(probe, n).overheads if of.threads == n)
        found.append(Case(name, n, prefill, decode, memory, overhead.watts))
    return found
