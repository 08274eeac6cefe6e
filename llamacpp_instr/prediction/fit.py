"""Fits the costs of kernels to recordings.

Invariant: pure. Errors are relative, so that small kernels are fitted as well as large ones. The
spread of each cost comes from samples that a second fit, to the other samples, had not seen; the
spread of steps from models that a fit to the others had not seen.
"""

from __future__ import annotations

import platform
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from llamacpp_instr.prediction.features import ATTENTION, ONE, Other, Product
from llamacpp_instr.prediction.model import between, costs_of, other_ns
from llamacpp_instr.prediction.probe.file import (
    KernelModel,
    OtherCost,
    Overhead,
    ProductCost,
    Stream,
)
from llamacpp_instr.prediction.samples import Sample

Floats = NDArray[np.float64]
Key = tuple[str, bool, bool, int]
FOLDS = 4
GROUPS = 3
"""of models, each left out of one fit"""
LEAST_SPREAD = 0.03
"""processes differ by about as much, also where samples of one agree"""
FAR = 0.5
"""as far as a kernel's own share of the bandwidth, in logarithms, costs as much as errors of 1"""


@dataclass(frozen=True)
class _Measured:
    product: Product
    working_set: float
    ns: float


@dataclass(frozen=True)
class _Fitted:
    """Columns by group, and what all share."""

    keys: list[Key]
    ns_per_mac: Floats
    types: list[tuple[str, bool]]
    of_stream: Floats
    sizes: Floats
    ns_per_byte: Floats
    product_ns: float
    ns_per_input: float
    blend: float


def fit(models: Sequence[Sequence[Sample]], watts: Mapping[int, float]) -> KernelModel:
    """The costs for every number of threads in the samples, which come by model; `watts` of the
    processors by threads."""
    found = _fit_all([sample for of in models for sample in of], watts)
    spread = _spread_of_steps(models, found)
    for overhead in found.overheads:
        overhead.spread = _round(spread.get(overhead.threads, 0.0))
    return found


def _spread_of_steps(models: Sequence[Sequence[Sample]], whole: KernelModel) -> dict[int, float]:
    """By threads: the deviation of steps from what a fit to other models predicts, without what
    `whole` says of the deviation of their kernels. Steps with kernels that the other models lack do
    not count."""
    errors: dict[int, list[float]] = defaultdict(list)
    kernels: dict[int, list[float]] = defaultdict(list)
    for left in range(min(GROUPS, len(models))):
        seen = [sample for i, of in enumerate(models) if i % GROUPS != left for sample in of]
        if not any(isinstance(k, Product) for sample in seen for k in sample.features.kernels):
            continue
        fitted = _fit_all(seen, {}, spreads=False)
        for sample in (sample for of in models[left::GROUPS] for sample in of):
            predicted = costs_of(sample.features, fitted, sample.threads)
            if not predicted.unknown:
                errors[sample.threads].append(float(np.log(sample.step_ns / predicted.total()[0])))
                ns, error = costs_of(sample.features, whole, sample.threads).total()
                kernels[sample.threads].append(error / ns)
    return {
        threads: max(0.0, deviation(np.array(of)) ** 2 - np.median(kernels[threads]) ** 2) ** 0.5
        for threads, of in errors.items()
    }


def _fit_all(
    samples: Sequence[Sample], watts: Mapping[int, float], spreads: bool = True
) -> KernelModel:
    products: list[ProductCost] = []
    streams: list[Stream] = []
    others: list[OtherCost] = []
    overheads: list[Overhead] = []
    for threads in sorted({sample.threads for sample in samples}):
        of = [sample for sample in samples if sample.threads == threads]
        measured, rest = _split(of)
        fitted = _fit_products(measured)
        spread = _spread_of_products(measured) if spreads else {}
        for key, rate in zip(fitted.keys, fitted.ns_per_mac.tolist(), strict=True):
            type_, repacked, experts, tokens = key
            share = float(fitted.of_stream[fitted.types.index((type_, repacked))])
            products.append(
                ProductCost(
                    type_, repacked, experts, tokens, threads,
                    _round(rate), _round(share), _round(spread.get(key, 0.1)),
                )
            )  # fmt: skip
        streams += [
            Stream(threads, int(size), float(round(1e9 / rate)))
            for size, rate in zip(fitted.sizes.tolist(), fitted.ns_per_byte.tolist(), strict=True)
        ]
        kernels = rest | {name: _similar(rest, one=name == ONE) for name in ("", ONE)}
        others += [_fit_other(op, threads, of_op) for op, of_op in sorted(kernels.items())]
        outside = [sample.step_ns - float(sample.ns.sum()) for sample in of if sample.tokens == 1]
        overheads.append(
            Overhead(
                threads,
                _round(fitted.product_ns),
                _round(fitted.ns_per_input),
                _round(fitted.blend),
                _round(max(0.0, float(np.median(outside))) if outside else 0.0),
                watts.get(threads),
            )
        )
    return KernelModel(platform.machine(), products, streams, others, overheads)


def _similar(rest: dict[str, list[tuple[Other, float]]], one: bool) -> list[tuple[Other, float]]:
    """All kernels that are neither products nor attention."""
    plain = {op: kernels for op, kernels in rest.items() if not op.startswith(ATTENTION)}
    same = [kernel for op, of in plain.items() if op.endswith(ONE) == one for kernel in of]
    return same or [kernel for of in (plain or rest).values() for kernel in of]


def _round(value: float) -> float:
    return float(f"{value:.5g}")


def _split(
    samples: Sequence[Sample],
) -> tuple[list[_Measured], dict[str, list[tuple[Other, float]]]]:
    """The products, equal ones of a compute once with their median, and the others by op."""
    products: list[_Measured] = []
    others: dict[str, list[tuple[Other, float]]] = defaultdict(list)
    for sample in samples:
        same: dict[Product | Other, list[float]] = defaultdict(list)
        for kernel, ns in zip(sample.features.kernels, sample.ns.tolist(), strict=True):
            same[kernel].append(ns)
        for kernel, times in same.items():
            ns = max(1.0, float(np.quantile(times, 0.5, method="lower")))
            if isinstance(kernel, Product):
                products.append(_Measured(kernel, sample.features.working_set, ns))
            else:
                others[kernel.op].append((kernel, ns))
    return products, others


def _key(of: Product) -> Key:
    return of.type, of.repacked, of.experts, of.tokens


class _Columns:
    """Measured products as columns."""

    def __init__(self, measured: Sequence[_Measured], keys: list[Key], sizes: Floats) -> None:
        index = {key: i for i, key in enumerate(keys)}
        self.types = list(dict.fromkeys((key[0], key[1]) for key in keys))
        of = [m.product for m in measured]
        self.key = np.array([index[_key(p)] for p in of])
        self.type = np.array([self.types.index((p.type, p.repacked)) for p in of])
        self.macs = np.array([p.macs for p in of])
        self.inputs = np.array([p.inputs for p in of])
        self.bytes = np.array([p.bytes for p in of])
        self.ns = np.array([m.ns for m in measured])
        self.working_set = np.array([m.working_set for m in measured])
        self.sizes = sizes

    def predicted(self, x: Floats, n_keys: int) -> Floats:
        rate = np.exp(x[:n_keys])
        n_types, n_sizes = len(self.types), len(self.sizes)
        share = np.exp(x[n_keys : n_keys + n_types])
        per_byte = np.exp(x[n_keys + n_types : n_keys + n_types + n_sizes])
        fixed, per_input, p = np.exp(x[n_keys + n_types + n_sizes :])
        compute = rate[self.key] * self.macs
        read = self.bytes * between(self.sizes, per_byte, self.working_set) / share[self.type]
        most = np.maximum(compute, read)
        blended = most * ((compute / most) ** p + (read / most) ** p) ** (1 / p)
        result: Floats = fixed + per_input * self.inputs + blended
        return result


def _fit_products(measured: Sequence[_Measured]) -> _Fitted:
    from scipy.optimize import least_squares
    from scipy.sparse import lil_matrix

    keys = sorted({_key(m.product) for m in measured})
    sizes = _sizes(measured)
    columns = _Columns(measured, keys, sizes)
    n_keys, n_types, n_sizes = len(keys), len(columns.types), len(sizes)
    rates = np.log([_fastest(columns, i) for i in range(n_keys)])
    first = np.concatenate(
        [rates, np.zeros(n_types), np.full(n_sizes, np.log(0.05)), np.log([500.0, 0.1, 2.0])]
    )
    low = np.concatenate(
        [rates - 4, np.full(n_types, -0.7), np.full(n_sizes, np.log(1e-4)), np.log([1, 1e-4, 1.0])]
    )
    high = np.concatenate(
        [rates + 0.5, np.full(n_types, 0.7), np.full(n_sizes, np.log(5.0)), np.log([5e4, 5, 12.0])]
    )
    weight = np.minimum(1, columns.ns / 5e3) ** 0.5
    n = len(columns.ns)

    def errors(x: Floats) -> Floats:
        logs = np.log(columns.predicted(x, n_keys) / columns.ns) * weight
        found: Floats = np.concatenate([logs, x[n_keys : n_keys + n_types] / FAR])
        return found

    depends = lil_matrix((n + n_types, len(first)), dtype=np.int8)
    depends[np.arange(n), columns.key] = 1
    depends[np.arange(n), n_keys + columns.type] = 1
    depends[:n, n_keys + n_types :] = 1
    depends[n + np.arange(n_types), n_keys + np.arange(n_types)] = 1
    found = least_squares(
        errors, np.clip(first, low + 1e-6, high - 1e-6), bounds=(low, high),
        loss="soft_l1", f_scale=0.1, jac_sparsity=depends, max_nfev=60,
    ).x  # fmt: skip
    fixed, per_input, p = np.exp(found[-3:]).tolist()
    return _Fitted(
        keys,
        np.exp(found[:n_keys]),
        columns.types,
        np.exp(found[n_keys : n_keys + n_types]),
        sizes,
        np.exp(found[n_keys + n_types : -3]),
        fixed, per_input, p,
    )  # fmt: skip


def _fastest(columns: _Columns, key: int) -> float:
    of = columns.key == key
    return float(np.min(columns.ns[of] / columns.macs[of]))


def _sizes(measured: Sequence[_Measured]) -> Floats:
    """Working sets of dense models for one token: at most six, each over twice the one before."""
    found: list[float] = []
    for size in sorted(
        {m.working_set for m in measured if m.product.tokens == 1 and not m.product.experts}
    ):
        if not found or size > 2 * found[-1]:
            found.append(size)
    return np.array(found[:6] or [measured[0].working_set])


def _spread_of_products(measured: Sequence[_Measured]) -> dict[Key, float]:
    """Standard deviation of measured over predicted, of products that a fit had not seen."""
    errors: dict[Key, list[float]] = defaultdict(list)
    count: dict[Key, int] = defaultdict(int)
    for m in measured:
        count[_key(m.product)] += 1
    seen: list[_Measured] = []
    unseen: list[_Measured] = []
    for i, m in enumerate(measured):
        often = count[_key(m.product)] > 2
        (unseen if often and i % FOLDS == 0 else seen).append(m)
    if not unseen or {_key(m.product) for m in unseen} - {_key(m.product) for m in seen}:
        return {}
    fitted = _fit_products(seen)
    columns = _Columns(unseen, fitted.keys, fitted.sizes)
    x = np.log(
        np.concatenate(
            [fitted.ns_per_mac, fitted.of_stream, fitted.ns_per_byte,
             [fitted.product_ns, fitted.ns_per_input, fitted.blend]]
        )
    )  # fmt: skip
    logs = np.log(columns.ns / columns.predicted(x, len(fitted.keys)))
    for m, error in zip(unseen, logs.tolist(), strict=True):
        errors[_key(m.product)].append(error)
    whole = deviation(logs)
    return {
        key: max(LEAST_SPREAD, deviation(np.array(of)) if len(of) > 2 else whole)
        for key in count
        for of in [errors.get(key, [])]
    }


def deviation(errors: Floats) -> float:
    """A standard deviation around 0 that outliers do not move: 1.48 times the median."""
    return float(1.4826 * np.median(np.abs(errors))) if len(errors) else 0.0


def _fit_other(op: str, threads: int, kernels: Sequence[tuple[Other, float]]) -> OtherCost:
    cost = _non_negative(op, threads, kernels)
    seen = [of for i, of in enumerate(kernels) if i % FOLDS]
    unseen = [of for i, of in enumerate(kernels) if i % FOLDS == 0]
    tried = _non_negative(op, threads, seen) if len(seen) > 4 else cost
    errors = np.array([np.log(ns / max(1.0, other_ns(kernel, tried))) for kernel, ns in unseen])
    cost.spread = _round(max(LEAST_SPREAD, deviation(errors)))
    return cost


def _non_negative(op: str, threads: int, kernels: Sequence[tuple[Other, float]]) -> OtherCost:
    from scipy.optimize import nnls

    rows = np.array([[1.0, of.rows, of.units, of.flops] for of, _ in kernels])
    ns = np.array([time for _, time in kernels])
    scale = np.maximum(rows.max(axis=0), 1e-12)
    off = np.zeros(len(ns))
    for _ in range(3):  # outliers, disturbed by other processes, lose weight
        weight = 1 / ns / np.maximum(1, off / 0.1) ** 0.5
        costs, _ = nnls(rows / scale * weight[:, None], ns * weight)
        costs = costs / scale
        off = np.abs(np.log(np.maximum(rows @ costs, 1.0) / ns))
    fixed, per_row, per_unit, per_flop = (_round(float(cost)) for cost in costs)
    return OtherCost(op, threads, fixed, per_row, per_unit, per_flop, spread=0.0)
