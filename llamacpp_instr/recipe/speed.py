"""The time of each tensor in a decode, in each type, as `instr predict` predicts it; and what a
context takes besides the weights."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from llamacpp_instr.base.system import temporary_directory
from llamacpp_instr.lab.quality.caches import options_of
from llamacpp_instr.lab.quality.divergence import CacheTypes
from llamacpp_instr.lab.quantize.plan import QuantizationPlan
from llamacpp_instr.model.file import ModelFile
from llamacpp_instr.prediction.model import Case
from llamacpp_instr.prediction.probe.file import Probe
from llamacpp_instr.prediction.steps import (
    DEFAULT_TOKENS,
    PlannedStep,
    planned_steps,
    predict_cases,
    trained_tokens,
    write_retyped,
)
from llamacpp_instr.recording.memory.plan import UbatchShape, plan_memory


@dataclass(frozen=True)
class Machine:
    """What predicts a decode."""

    probe: Probe
    threads: int


def planned_decode(model: ModelFile, cache: CacheTypes) -> PlannedStep:
    """A decode after DEFAULT_TOKENS tokens, or as many as the model allows."""
    past = min(DEFAULT_TOKENS, trained_tokens(model) - 1)
    options = replace(options_of(cache), ctx=past + 1)
    [step] = planned_steps(model, options, [UbatchShape(1, past)])
    return step


def predict_decode(
    source: ModelFile, plan: QuantizationPlan, machine: Machine, cache: CacheTypes
) -> float:
    """ns of a decode of the model that the plan describes."""
    with temporary_directory("instr-recipe-") as folder:
        step = planned_decode(write_retyped(source, plan, folder), cache)
    return step.predict(machine.probe, machine.threads).total()[0]


def tensor_times(
    source: ModelFile, plans: Sequence[QuantizationPlan], machine: Machine, cache: CacheTypes
) -> tuple[dict[str, dict[str, float]], float]:
    """ns of the kernels of a decode that read a tensor, by tensor and type, and of all others on
    average. The types are those of the plans and of the source."""
    times: dict[str, dict[str, float]] = {}
    rest = []
    with temporary_directory("instr-recipe-") as folder:
        for i, plan in enumerate([None, *plans]):
            model = source
            if plan is not None:
                own = folder / str(i)
                own.mkdir()
                model = write_retyped(source, plan, own)
            step = planned_decode(model, cache)
            predicted = step.predict(machine.probe, machine.threads)
            ns = predicted.ns.tolist()
            read = 0.0
            for kernel, node in enumerate(step.plan.node):
                for name in _weights(step, node):
                    of = times.setdefault(name, {}).setdefault(model.by_name[name].type.name, 0.0)
                    times[name][model.by_name[name].type.name] = of + ns[kernel]
                    read += ns[kernel]
            rest.append(predicted.total()[0] - read)
    return times, sum(rest) / len(rest)


def predict_types(source: ModelFile, names: Sequence[str], machine: Machine) -> list[Case]:
    """The speed and memory of llama.cpp's types of a model."""
    path = str(source.path)
    return predict_cases(path, names, machine.probe, [machine.threads], None, None)[0]


def _weights(step: PlannedStep, node: int) -> list[str]:
    """The weight that a product reads."""
    nodes = step.graph.whole
    if nodes.op[node] not in ("MUL_MAT", "MUL_MAT_ID") or nodes.src[node][0] >= 0:
        return []
    return [step.graph.leaf(nodes.src[node][0]).name]


def context_memory(
    source: ModelFile, plan: QuantizationPlan, ctx: int | None, cache: CacheTypes
) -> int:
    """Bytes that the model which the plan describes takes with a context of `ctx` tokens: weights,
    also repacked ones, cache, and buffers."""
    with temporary_directory("instr-recipe-") as folder:
        options = replace(options_of(cache), ctx=ctx)
        return plan_memory(write_retyped(source, plan, folder), options).n_bytes
