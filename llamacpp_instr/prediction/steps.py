"""A prefill and a decode of a model file, predicted for file types and numbers of threads.

A model in another file type has no weights: its file, for llama.cpp's dry run, has the source's
metadata and tensors, in the types of the quantization's plan, and its data is a hole.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from llamacpp_instr.base.errors import UsageError
from llamacpp_instr.base.system import temporary_directory
from llamacpp_instr.base.terminal import progress_bar
from llamacpp_instr.lab.quantize.plan import QuantizationPlan, QuantizeOptions, parse_file_type
from llamacpp_instr.lab.quantize.runner import Quantizer
from llamacpp_instr.llama.engine import ContextOptions
from llamacpp_instr.log.devices import other_backends
from llamacpp_instr.log.graph.attention import Ubatch
from llamacpp_instr.log.graph.kernels import cpu_plan
from llamacpp_instr.log.graph.timeline import plan_timeline
from llamacpp_instr.log.schema import Graph, Plan
from llamacpp_instr.model.file import ModelFile, load_model_file
from llamacpp_instr.model.header import Header
from llamacpp_instr.model.types import GgmlType
from llamacpp_instr.prediction.model import (
    Case,
    Predicted,
    PredictedStep,
    Step,
    kernel_model,
    predict_kernels,
    ubatch_of,
)
from llamacpp_instr.prediction.probe.file import Probe
from llamacpp_instr.recording.memory.plan import UbatchShape, dry_graphs, plan_memory, window

DEFAULT_TOKENS = 512
"""of a prefill, and in the cache before a decode, if the model allows that many"""
MOST_TOKENS = 1 << 16
"""of a prefill, if a model file does not say what it was trained on"""


def trained_tokens(model: ModelFile) -> int:
    """The length of the contexts that the model was trained on, or MOST_TOKENS."""
    return model.trained_tokens or MOST_TOKENS


@dataclass(frozen=True)
class PlannedStep:
    """A step that a dry run has planned."""

    shape: UbatchShape
    graph: Graph
    plan: Plan

    def ubatch(self, threads: int) -> Ubatch:
        """What its tokens see."""
        return ubatch_of(self.shape.tokens, self.shape.past, threads, window(self.shape))

    def predict(self, probe: Probe, threads: int) -> Predicted:
        """Raises `UsageError` like `predict_kernels`."""
        return predict_kernels(self.graph, self.plan, probe, threads, self.ubatch(threads))


def usual_steps(path: str, probe: Probe) -> tuple[PredictedStep, PredictedStep]:
    """The decode after DEFAULT_TOKENS tokens and the prefill of as many, or of as many as the model
    at `path` allows, on one thread. Raises `UsageError` for a file that is not a model, and like
    `planned_steps` and `predict_kernels`."""
    model = load_model_file(path)
    trained = trained_tokens(model)
    past, tokens = min(DEFAULT_TOKENS, trained - 1), min(DEFAULT_TOKENS, trained)
    decode, prefill = (
        PredictedStep(what, of.graph, of.plan, of.ubatch(1), of.predict(probe, 1))
        for what, of in zip(
            (f"decode after {past}", f"prefill of {tokens}"),
            planned_steps(model, ContextOptions(), [UbatchShape(1, past), UbatchShape(tokens)]),
            strict=True,
        )
    )
    return decode, prefill


def planned_steps(
    model: ModelFile, options: ContextOptions, shapes: list[UbatchShape]
) -> list[PlannedStep]:
    """The steps of these shapes, in the graphs that llama.cpp would build. Raises like
    `dry_graphs`, and `UsageError` for a graph that does not run on the CPU alone."""
    found = []
    for shape, graph in zip(shapes, dry_graphs(model, options, shapes), strict=True):
        if others := other_backends(graph):
            raise UsageError(
                f"{model.path}: parts would run on {', '.join(others)}; only the CPU is predicted"
            )
        found.append(PlannedStep(shape, graph, cpu_plan(graph)))
    return found


def predict_tokens(
    path: Path, threads: int, tokens: Sequence[tuple[int, int]], probe: Probe
) -> list[float]:
    """The time in ns of a step of the model at `path`, for each pair of tokens computed and tokens
    before them. Raises like `predict_shapes`."""
    return predict_shapes(path, threads, [UbatchShape(*of) for of in tokens], probe)


def predict_shapes(
    path: Path,
    threads: int,
    shapes: list[UbatchShape],
    probe: Probe,
    options: ContextOptions | None = None,
) -> list[float]:
    """The time in ns of a step of each shape, for the model at `path`. Raises like `planned_steps`,
    and `UsageError` for a file that is not a model or a probe without the times of kernels."""
    steps = planned_steps(load_model_file(path), options or ContextOptions(), shapes)
    return [step.predict(probe, threads).total()[0] for step in steps]


def write_retyped(source: ModelFile, plan: QuantizationPlan, folder: Path) -> ModelFile:
    """The model that the plan describes; its files are in `folder`, named like the source's. The
    quantizer would write one file, and the same weights."""
    for path, header in source.headers.items():
        own = [of for of in plan.tensors if of.weight.path == path]
        infos = [(of.name, of.weight.ne, of.type, of.n_bytes) for of in own]
        start, n_bytes = start_of_model(path, header, infos)
        with (folder / path.name).open("wb") as file:
            file.write(start)
            file.truncate(len(start) + n_bytes)
    return load_model_file(folder / source.path.name)


def start_of_model(
    path: Path, header: Header, tensors: Iterable[tuple[str, Sequence[int], GgmlType, int]]
) -> tuple[bytes, int]:
    """What precedes the data in a file with the metadata of the one at `path`, which has `header`,
    and with these tensors (name, shape, type, bytes); and the bytes of the data, with padding."""
    with path.open("rb") as file:
        infos = bytearray(file.read(header.infos_start))
    end = 0
    for name, ne, type_, n_bytes in tensors:
        infos += struct.pack("<Q", len(name.encode())) + name.encode() + struct.pack("<I", len(ne))
        infos += struct.pack(f"<{len(ne)}QIQ", *ne, type_.number, end)
        end += -(-n_bytes // header.alignment) * header.alignment
    return bytes(infos).ljust(-(-len(infos) // header.alignment) * header.alignment, b"\0"), end


def predict_cases(
    model: str,
    types: Sequence[str],
    probe: Probe,
    threads: Sequence[int],
    batch: int | None,
    ctx: int | None,
) -> tuple[list[Case], int]:
    """A prefill of `batch` tokens and a decode after `ctx` tokens, for each file type and number of
    threads; and the tokens before the decode. Without types, for the model as it is; without
    numbers, for all that were measured. Nothing is quantized. Raises `UsageError` for a type that
    the model cannot have, for more tokens than it was trained on, and like `planned_steps`."""
    counts = threads or (probe.kernel_model.threads if probe.kernel_model else [1])
    for n in counts:
        kernel_model(probe, n)
    source = load_model_file(model)
    types = list(dict.fromkeys(map(parse_file_type, types)))
    trained = trained_tokens(source)

    def length(option: str, given: int | None, least: int) -> int:
        most = trained + least - 1  # what is in the cache leaves room for the token that is decoded
        if given is not None and given > most:
            raise UsageError(
                f"{option} is {given:,}, but {model} was trained on contexts of {trained:,} tokens"
            )
        return max(least, min(DEFAULT_TOKENS, most)) if given is None else given

    tokens, past = length("--batch", batch, 1), length("--ctx", ctx, 0)
    options = ContextOptions(ctx=max(tokens, past + 1), batch=tokens, ubatch=tokens)
    shapes = [UbatchShape(tokens or 1), UbatchShape(1, past)]
    cases: list[Case] = []
    with ExitStack() as stack:
        made = [] if types else [(source.file_type or "as it is", source)]
        if types:
            choice = QuantizeOptions(allow_requantize=True)
            quantizer = stack.enter_context(Quantizer(source, choice))
            for name in types:
                folder = stack.enter_context(temporary_directory("instr-predict-"))
                made.append((name, write_retyped(source, quantizer.plan(name), folder)))
        on_progress = stack.enter_context(progress_bar("Predicting"))
        for done, (name, file) in enumerate(made):
            on_progress(done, len(made))
            steps = planned_steps(file, options, shapes)
            memory = plan_memory(file, options).n_bytes
            timelines = [plan_timeline(step.graph, step.plan) for step in steps]
            for n in counts:
                prefill, decode = (
                    Step(step.shape.tokens, step.predict(probe, n), timeline)
                    for step, timeline in zip(steps, timelines, strict=True)
                )
                (overhead,) = (of for of in kernel_model(probe, n).overheads if of.threads == n)
                cases.append(Case(name, n, prefill, decode, memory, overhead.watts))
    return cases, past
