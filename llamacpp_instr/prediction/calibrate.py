"""Costs of a probe, scaled to a log of the same machine.

The memory of a machine is faster on some days than on others: neighbours share its caches, and
where a file lies in memory changes how fast it is read. One factor for each kind of kernel follows
it. Types of weights keep their relations, because one log has few of them. A log of a machine whose
steps scatter, because other processes take its CPUs, widens the interval of every prediction.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from math import exp, hypot, log
from statistics import median
from typing import Literal

import numpy as np
from msgspec.structs import replace

from llamacpp_instr.base.errors import UsageError
from llamacpp_instr.log.session import Session
from llamacpp_instr.prediction.fit import Sample, samples
from llamacpp_instr.prediction.model import (
    ATTENTION,
    ONE,
    Other,
    Product,
    costs_of,
    with_threads,
)
from llamacpp_instr.prediction.probe.file import KernelModel, OtherCost, ProductCost

FEW = 4
"""tokens of a product, from which on it computes more than it reads"""
OWN_ERROR = 0.08
"""deviation of one model's kernels of a kind that no factor removes: the contents of the weights,
and where they lie in memory"""
LEAST_COMPUTES = 3
Kind = Literal["attention", "decode", "large", "prefill", "small"]
"""of kernels that share a factor: `decode` and `prefill`, products; `small` and `large`, other ops
of one token and of several; `attention`"""


def calibrate(model: KernelModel, session: Session) -> dict[Kind, float]:
    """A factor for the costs of each kind of kernel, with which `scaled` predicts the computes of a
    session: the median of measured over predicted times, and the closer to 1, the surer the probe
    was (`drawn`). Raises UsageError if the session has too few computes of one shape, or ran on a
    device."""
    ratios: dict[Kind, list[float]] = defaultdict(list)
    for sample in _samples(session):
        for kind, ratio in _ratios(sample, model).items():
            ratios[kind].append(ratio)
    spread = median(of.spread for of in model.overheads)
    return {kind: exp(drawn(median(of), spread)) for kind, of in sorted(ratios.items())}


def _samples(session: Session) -> list[Sample]:
    if session.device_ops:
        raise UsageError(f"{session.path}: parts ran on a device; only the CPU is predicted")
    found = [of for of in samples(session) if len(of.steps) >= LEAST_COMPUTES]
    if not found:
        raise UsageError(
            f"{session.path} has no {LEAST_COMPUTES} computes of one shape with their kernels;"
            " record some decodes with --level detailed"
        )
    return found


def drawn(ratio: float, spread: float) -> float:
    """A ratio in logarithms, drawn towards 0 by how sure the probe is. One far beyond its spread
    counts almost in full: the machine is not as it was then."""
    doubt = max(spread, abs(ratio)) ** 2
    return ratio * doubt / (doubt + OWN_ERROR**2)


def calibrated(model: KernelModel, session: Session) -> tuple[KernelModel, dict[Kind, float]]:
    """`model` scaled by the factors of `calibrate`, and these. The spread of its steps is at least
    as wide as those of the session scatter. Raises like `calibrate`."""
    factors = calibrate(model, session)
    found = scaled(model, factors)
    logs: list[float] = []
    for of in _samples(session):
        predicted = costs_of(of.features, with_threads(found, of.threads), of.threads)
        logs += np.abs(np.log(of.steps / predicted.total()[0])).tolist()
    spread = hypot(OWN_ERROR, float(np.quantile(logs, 0.95)) / 1.96)
    wider = [replace(of, spread=max(of.spread, spread)) for of in found.overheads]
    return replace(found, overheads=wider), factors


def _ratios(sample: Sample, model: KernelModel) -> dict[Kind, float]:
    """Measured over predicted times of a compute, in logarithms."""
    predicted = costs_of(sample.features, with_threads(model, sample.threads), sample.threads)
    measured: dict[Kind, float] = defaultdict(float)
    expected: dict[Kind, float] = defaultdict(float)
    for kernel, ns, guess in zip(sample.features.kernels, sample.ns, predicted.ns, strict=True):
        kind = _kind(kernel)
        measured[kind] += float(ns)
        expected[kind] += float(guess)
    return {kind: log(measured[kind] / expected[kind]) for kind in measured if expected[kind] > 0}


def _kind(of: Product | Other | ProductCost | OtherCost) -> Kind:
    if isinstance(of, Product | ProductCost):
        return "decode" if of.tokens < FEW else "prefill"
    if of.op.startswith(ATTENTION):
        return "attention"
    return "small" if of.op.endswith(ONE) else "large"


def scaled(model: KernelModel, factors: Mapping[Kind, float]) -> KernelModel:
    """`model` with each kind of kernel slower by its factor. Products of few tokens are so in
    computing and in reading."""

    def product(of: ProductCost) -> ProductCost:
        by = factors.get(_kind(of), 1.0)
        return replace(of, ns_per_mac=by * of.ns_per_mac, ns_per_dot=by * of.ns_per_dot)

    def other(of: OtherCost) -> OtherCost:
        by = factors.get(_kind(of), 1.0)
        return replace(
            of, ns=by * of.ns, ns_per_row=by * of.ns_per_row, ns_per_unit=by * of.ns_per_unit,
            ns_per_flop=by * of.ns_per_flop, cold_ns=by * of.cold_ns,
            cold_ns_per_byte=by * of.cold_ns_per_byte,
        )  # fmt: skip

    reading = factors.get("decode", 1.0)
    return KernelModel(
        model.architecture,
        [product(of) for of in model.products],
        [replace(of, bytes_per_second=of.bytes_per_second / reading) for of in model.streams],
        [other(of) for of in model.others],
        [replace(of, product_ns=reading * of.product_ns) for of in model.overheads],
    )
