"""The time of each kernel of a graph on a machine.

A matrix product takes (compute^p + read^p)^(1/p): `compute` from its multiplications, `read` from
the bytes of its weight and the bandwidth for the working set, p how much the two overlap. Every
other kernel has a fixed cost, and one for the rows, bytes and operations of its busiest thread.

Invariant: pure functions. The fit (`prediction.fit`) and the prediction use the same ones.
"""

from __future__ import annotations

import platform
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from llamacpp_instr.base.errors import UsageError
from llamacpp_instr.base.system import how_to_install
from llamacpp_instr.base.terminal import counted
from llamacpp_instr.log.graph.attention import Ubatch
from llamacpp_instr.log.graph.timeline import PlanTimeline
from llamacpp_instr.log.schema import Graph, Plan
from llamacpp_instr.prediction.features import ATTENTION, ONE, Features, Other, Product, features
from llamacpp_instr.prediction.other_threads import UNKNOWN, with_threads
from llamacpp_instr.prediction.probe.file import (
    KernelModel,
    OtherCost,
    Overhead,
    Probe,
    ProductCost,
)

Floats = NDArray[np.float64]
MOST_THREADS = 1024


@dataclass(frozen=True)
class Predicted:
    """One entry for each kernel of a plan."""

    ns: Floats
    spread: Floats
    """standard deviation, as a part of `ns`"""
    source: list[str]
    """what it was predicted from: kernels with the same source err together"""
    unknown: list[str]
    """types, ops and numbers of threads that were not measured, each once"""
    step_ns: float
    """of a step, outside its kernels"""
    step_spread: float
    """standard deviation of what all kernels of a step share, as a part of its time"""

    def total(self) -> tuple[float, float]:
        """Time of a step, ns, and its standard deviation, ns: errors of one source add up, those of
        different sources, and what all share, are independent."""
        error: dict[str, float] = {}
        for source, of in zip(self.source, self.ns * self.spread, strict=True):
            error[source] = error.get(source, 0.0) + float(of)
        ns = float(self.ns.sum()) + self.step_ns
        return ns, float(np.linalg.norm([self.step_spread * ns, *error.values()]))


@dataclass(frozen=True)
class PredictedStep:
    """A step that a dry run has planned, with the times of its kernels."""

    what: str
    """`prefill of 512` or `decode after 512`"""
    graph: Graph
    plan: Plan
    ubatch: Ubatch
    predicted: Predicted


@dataclass(frozen=True)
class Step:
    """A predicted step."""

    tokens: int
    predicted: Predicted
    timeline: PlanTimeline


@dataclass(frozen=True)
class Case:
    """A file type with a number of threads."""

    type: str
    threads: int
    prefill: Step
    decode: Step
    memory: int | None
    """bytes; None if it cannot be predicted"""
    watts: float | None
    """of the processors; None if the machine's file has none"""


def kernel_model(probe: Probe, threads: int) -> KernelModel:
    """The costs in a probe, with those for `threads`, which it need not have measured
    (`with_threads`). Raises UsageError if it has no costs, or those of another architecture."""
    model = probe.kernel_model
    if model is None:
        why = "it was measured without scipy"
        if probe.probe == 1:
            why = "an older `instr probe` wrote it"
        raise UsageError(
            f"the machine file has no costs of kernels, because {why}; run `instr probe` again"
            f" after {how_to_install('predict')}"
        )
    here = platform.machine()
    if model.architecture != here:
        raise UsageError(
            f"the machine file is of a processor with the architecture {model.architecture}, this "
            f"library is for {here} and would build other graphs; predict on such a machine"
        )
    if threads > MOST_THREADS:
        raise UsageError(f"{threads:,} threads are too many; at most {MOST_THREADS:,}")
    return with_threads(model, threads)


def predict_kernels(
    graph: Graph, plan: Plan, probe: Probe, threads: int, ubatch: Ubatch | None = None
) -> Predicted:
    """The time of each kernel of `plan`, the barrier after it included. `ubatch` is what its tokens
    see; None: the whole window of the cache. Raises UsageError like `kernel_model`."""
    model = kernel_model(probe, threads)
    found = costs_of(features(graph, plan, ubatch, threads), model, threads)
    assert probe.kernel_model is not None
    if threads not in probe.kernel_model.threads:
        found.unknown.append(counted(threads, "thread"))
    return found


def costs_of(of_plan: Features, model: KernelModel, threads: int) -> Predicted:
    """The time of each kernel with these features; `model` has costs for `threads`."""
    costs = _Costs(model, threads, of_plan.working_set)
    rows = [costs.of(kernel) for kernel in of_plan.kernels]
    ns, spread, source, known = zip(*rows, strict=True) if rows else ((), (), (), ())
    unknown = [name for name, is_known in zip(source, known, strict=True) if not is_known]
    return Predicted(
        np.array(ns, np.float64),
        np.array(spread, np.float64),
        list(source),
        list(dict.fromkeys(unknown)),
        costs.overhead.step_ns,
        costs.overhead.spread,
    )


class _Costs:
    """The costs for a number of threads and a working set."""

    def __init__(self, model: KernelModel, threads: int, working_set: float) -> None:
        (self.overhead,) = (of for of in model.overheads if of.threads == threads)
        streams = sorted(
            (of.bytes, of.bytes_per_second) for of in model.streams if of.threads == threads
        )
        sizes, rates = (np.array(column, np.float64) for column in zip(*streams, strict=True))
        self.ns_per_byte = 1e9 / float(between(sizes, rates, max(1.0, working_set)))
        self.products: dict[tuple[str, bool, bool], list[ProductCost]] = {}
        for product in sorted(model.products, key=lambda of: of.tokens):
            if product.threads == threads:
                key = product.type, product.repacked, product.experts
                self.products.setdefault(key, []).append(product)
        self.others = {of.op: of for of in model.others if of.threads == threads}

    def of(self, kernel: Product | Other) -> tuple[float, float, str, bool]:
        """Time, spread, source, and whether it was measured."""
        if isinstance(kernel, Other):
            cost = self.others.get(kernel.op)
            known = cost is not None
            cost = cost or self._like(kernel.op)
            return other_ns(kernel, cost), cost.spread if known else UNKNOWN, kernel.op, known
        name = f"{kernel.type}{' repacked' * kernel.repacked}{' experts' * kernel.experts}"
        costs, known = self._similar(kernel)
        tokens = np.array([of.tokens for of in costs], np.float64)
        ns_per_mac = between(tokens, np.array([of.ns_per_mac for of in costs]), kernel.tokens)
        nearest = min(costs, key=lambda of: abs(of.tokens - kernel.tokens))
        compute = float(ns_per_mac) * kernel.macs
        read = kernel.bytes * self.ns_per_byte / nearest.of_stream
        ns = product_ns(compute, read, kernel.inputs, self.overhead)
        return ns, nearest.spread if known else UNKNOWN, name, known

    def _like(self, op: str) -> OtherCost:
        """The cost of an op that was not measured: attention with the next length of keys, or the
        average of all other ops."""
        if op.startswith(ATTENTION):
            _, length, *seen = op.split(" ")
            measured = [
                (of[2:] != seen, of[2] != seen[0], abs(np.log(int(of[1]) / int(length))), name)
                for name in self.others
                if name.startswith(ATTENTION)
                for of in [name.split(" ")]
            ]
            if measured:
                return self.others[min(measured)[3]]
        return self.others[ONE if op.endswith(ONE) else ""]

    def _similar(self, kernel: Product) -> tuple[list[ProductCost], bool]:
        """The costs of the kernel's type, or of one that is like it, and whether it is that."""
        of = kernel.type, kernel.repacked, kernel.experts
        if of in self.products:
            return self.products[of], True
        for repacked, experts in ((kernel.repacked, False), (not kernel.repacked, False)):
            if (kernel.type, repacked, experts) in self.products:
                return self.products[kernel.type, repacked, experts], repacked == kernel.repacked
        dense = [costs for key, costs in self.products.items() if not key[2]]
        slowest = max(dense, key=lambda costs: costs[0].ns_per_mac)
        return slowest, False


def product_ns(compute: float, read: float, inputs: float, overhead: Overhead) -> float:
    """Time of a matrix product, ns; see the module."""
    p = overhead.blend
    most = max(compute, read)
    blended = most * ((compute / most) ** p + (read / most) ** p) ** (1 / p) if most else 0.0
    return overhead.product_ns + overhead.ns_per_input * inputs + blended


def other_ns(kernel: Other, cost: OtherCost) -> float:
    """Time of any other kernel, ns."""
    variable = cost.ns_per_row * kernel.rows + cost.ns_per_unit * kernel.units
    return cost.ns + variable + cost.ns_per_flop * kernel.flops


def between(at: Floats, values: Floats, x: float | Floats | Sequence[float]) -> Floats:
    """Interpolation in logarithms of both; beyond the ends, the value at the end."""
    found: Floats = np.exp(np.interp(np.log(x), np.log(at), np.log(values)))
    return found
