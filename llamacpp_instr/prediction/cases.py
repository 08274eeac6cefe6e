"""A model in several file types and with several numbers of threads, each predicted."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager

from llamacpp_instr.base.system import temporary_directory
from llamacpp_instr.base.terminal import progress_bar
from llamacpp_instr.lab.quantize.plan import QuantizeOptions
from llamacpp_instr.lab.quantize.runner import Quantizer
from llamacpp_instr.llama.engine import ContextOptions
from llamacpp_instr.log.graph.timeline import plan_timeline
from llamacpp_instr.model.file import ModelFile
from llamacpp_instr.prediction.model import Case, Step, kernel_model
from llamacpp_instr.prediction.probe.file import Probe
from llamacpp_instr.prediction.retyped import write_retyped
from llamacpp_instr.prediction.steps import planned_steps
from llamacpp_instr.recording.memory.plan import UbatchShape, plan_memory


def predict_cases(
    source: ModelFile,
    types: Sequence[str],
    probe: Probe,
    counts: Sequence[int],
    tokens: int,
    past: int,
) -> list[Case]:
    """A prefill of `tokens` and a decode after `past` tokens, for each file type and number of
    threads; without types, of the model as it is. Nothing is quantized.

    Raises `UsageError` for a type that the model cannot have, and like `planned_steps`.
    """
    options = ContextOptions(ctx=max(tokens, past + 1), batch=tokens, ubatch=tokens)
    cases: list[Case] = []
    with _in_types(source, types) as made, progress_bar("Predicting") as on_progress:
        for done, (name, file) in enumerate(made):
            on_progress(done, len(made))
            cases += _cases(name, file, probe, counts, options, past)
    return cases


@contextmanager
def _in_types(source: ModelFile, types: Sequence[str]) -> Iterator[list[tuple[str, ModelFile]]]:
    """The model in each file type, without data; as it is if there is none."""
    if not types:
        yield [(source.file_type or "as it is", source)]
        return
    with ExitStack() as stack:
        quantizer = stack.enter_context(Quantizer(source, QuantizeOptions(allow_requantize=True)))
        made = []
        for name in types:
            folder = stack.enter_context(temporary_directory("instr-predict-"))
            made.append((name, write_retyped(source, quantizer.plan(name), folder)))
        yield made


def _cases(
    name: str,
    file: ModelFile,
    probe: Probe,
    counts: Sequence[int],
    options: ContextOptions,
    past: int,
) -> list[Case]:
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
