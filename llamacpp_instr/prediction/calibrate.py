"""Costs of a probe, scaled to match a log of the same machine.

The memory of a machine is faster on some days than on others: neighbours share its caches, and
where a file lies in memory changes how fast it is read. One factor for each kind of kernel adjusts
for this. The ratios between types of weights stay the same, because one log has few types. If the
steps of a log scatter, because other processes take CPUs, the interval of every prediction widens.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from math import exp, hypot, log
from statistics import median
from typing import Any, Literal

import numpy as np
from msgspec.structs import replace

from llamacpp_instr.base.errors import UsageError
from llamacpp_instr.log.session import Session
from llamacpp_instr.prediction.fit import OWN_ERROR, Sample, samples
from llamacpp_instr.prediction.model import (
    ATTENTION,
    ONE,
    Floats,
    Other,
    Product,
    costs_of,
    with_threads,
)
from llamacpp_instr.prediction.probe.file import KernelModel, OtherCost, Overhead, ProductCost

FEW = 4
"""tokens with which a product starts to compute more than it reads"""
LEAST_COMPUTES = 3
Kind = Literal["attention", "decode", "large", "prefill", "reading", "small"]
"""of kernels that share a factor: `decode` and `prefill`, products; `small` and `large`, other ops
of one token and of several; `attention`; and `reading` the weights of a decode"""
TIMES = 6
"""iterations for both factors of a decode's products"""
TINY = 1e-3
"""in place of a spread of 0"""
STEP = 0.01
"""of a factor, in logarithms, for its derivative"""
SEEN = 0.1
"""of the time of a decode's products: a log in which reading takes less says nothing about it"""


def _factors(model: KernelModel, found: Sequence[Sample]) -> dict[Kind, float]:
    """For each kind of kernel the median of measured over predicted times, drawn closer to 1 the
    more certain the probe is (`drawn`)."""
    ratios: dict[Kind, list[float]] = defaultdict(list)
    for sample in found:
        for kind, ratio in _ratios(sample, model).items():
            ratios[kind].append(ratio)
    spread = median(of.spread for of in model.overheads)
    factors = {kind: exp(drawn(median(of), spread)) for kind, of in sorted(ratios.items())}
    return factors | _of_decodes(found, model, log(factors.get("decode", 1.0)), spread)


def _of_decodes(
    found: Sequence[Sample], model: KernelModel, common: float, spread: float
) -> dict[Kind, float]:
    """The factors for computing and for reading that give the products of decodes the smallest
    errors, weighted by their time (Gauss-Newton method). The prior of both is `common`, in
    logarithms, with a deviation of `spread`. If the threads move to other CPUs, one may grow while
    the other shrinks."""
    factors = np.full(2, common)

    def logs(of: Floats) -> tuple[Floats, Floats]:
        """The logarithms of measured over predicted times; the share of each in the total time."""
        by: dict[Kind, float] = {"decode": exp(of[0]), "reading": exp(of[1])}
        pairs = np.array([pair for one in found for pair in _products(one, scaled(model, by))])
        measured, predicted = pairs.reshape(-1, 2).T
        return np.log(measured / predicted), measured / measured.sum()

    if not any(True for one in found for _ in _products(one, model)):
        return {}
    for i in range(TIMES):
        ratios, share = logs(factors)
        slopes = np.column_stack([(ratios - logs(factors + d)[0]) / STEP for d in STEP * np.eye(2)])
        if not i and share @ slopes[:, 1] < SEEN:
            return {}
        # as if all products together were one figure with this error
        weighted = slopes.T * share / OWN_ERROR**2
        prior = np.eye(2) / max(spread, TINY) ** 2
        factors = factors + np.linalg.solve(
            weighted @ slopes + prior, weighted @ ratios + prior @ (common - factors)
        )
    return {"decode": exp(factors[0]), "reading": exp(factors[1])}


def _products(of: Sample, model: KernelModel) -> Iterator[tuple[float, float]]:
    """Measured and predicted times of the products of a decode, ns."""
    predicted = costs_of(of.features, with_threads(model, of.threads), of.threads)
    for kernel, ns, guess in zip(of.features.kernels, of.ns, predicted.ns, strict=True):
        if _kind(kernel) == "decode":
            yield ns, guess


def _samples(session: Session) -> list[Sample]:
    if session.device_ops:
        raise UsageError(f"{session.path}: parts ran on a device; only the CPU is predicted")
    found = [of for of in samples(session) if len(of.steps) >= LEAST_COMPUTES]
    if not found:
        raise UsageError(
            f"{session.path} lacks {LEAST_COMPUTES} computes of the same shape with their kernels;"
            " record some decodes with --level detailed"
        )
    return found


def drawn(ratio: float, spread: float) -> float:
    """The logarithm of a ratio, drawn towards 0 the more certain the probe is. One far beyond the
    spread counts almost in full: the machine has changed since."""
    doubt = max(spread, abs(ratio)) ** 2
    return ratio * doubt / (doubt + OWN_ERROR**2)


def calibrated(model: KernelModel, session: Session) -> tuple[KernelModel, dict[Kind, float]]:
    """`model` scaled to the computes of a session, and the factor of each kind of kernel. A session
    on one thread says nothing about several, and the reverse. The spread of steps is at least as
    wide as the scatter of the session's steps. Raises UsageError if the session has too few
    computes of one shape, or ran on a device."""
    found = _samples(session)
    factors = _factors(model, found)
    several = {of.threads > 1 for of in found}
    nearer = scaled(model, factors, [n for n in model.threads if (n > 1) in several])
    logs: list[float] = []
    for of in found:
        predicted = costs_of(of.features, with_threads(nearer, of.threads), of.threads)
        logs += np.abs(np.log(of.steps / predicted.total()[0])).tolist()
    spread = hypot(OWN_ERROR, float(np.quantile(logs, 0.95)) / 1.96)
    wider = [
        replace(of, spread=max(of.spread, spread)) if (of.threads > 1) in several else of
        for of in nearer.overheads
    ]
    return replace(nearer, overheads=wider), factors


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


def scaled(
    model: KernelModel, factors: Mapping[Kind, float], threads: Collection[int] | None = None
) -> KernelModel:
    """`model` with each kind of kernel slower by its factor, for these numbers of threads, or for
    all. Without a factor for reading, that of a decode's products is used."""
    computing = factors.get("decode", 1.0)
    reading = factors.get("reading", computing)

    def each(entries: Iterable[Any], change: Callable[[Any], Any]) -> list[Any]:
        return [change(of) if threads is None or of.threads in threads else of for of in entries]

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

    def shared(of: Overhead) -> Overhead:
        return replace(
            of, product_ns=computing * of.product_ns,
            start_ns_per_byte=reading * of.start_ns_per_byte,
        )  # fmt: skip

    return KernelModel(
        model.architecture,
        each(model.products, product),
        each(model.streams, lambda of: replace(of, bytes_per_second=of.bytes_per_second / reading)),
        each(model.others, other),
        each(model.overheads, shared),
    )
