"""Measured kernels of recordings, with what their times depend on, and the fit of costs to them.

Invariants: pure. Errors are relative, so that small kernels are fitted as well as large ones. The
spread of each cost comes from samples that a second fit, to the other samples, had not seen; the
spread of steps from models that a fit to the others had not seen.
"""

from __future__ import annotations

import platform
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from llamacpp_instr.log.session import Session
from llamacpp_instr.prediction.model import (
    ATTENTION,
    ONE,
    Features,
    Floats,
    Other,
    Product,
    between,
    costs_of,
    features,
    other_ns,
    product_time,
)
from llamacpp_instr.prediction.probe.file import (
    KernelModel,
    OtherCost,
    Overhead,
    ProductCost,
    Stream,
)

QUIET = 0.25
"""the quantile of equal computes that counts: other processes only make them slower"""
TOGETHER = 32
"""consecutive positions whose decodes count as equal"""


@dataclass(frozen=True)
class Sample:
    """Equal computes of a recording."""

    threads: int
    tokens: int
    past: int
    features: Features
    ns: Floats
    """of each kernel, the barrier after it included"""
    step_ns: float
    """of the whole step"""
    steps: Floats
    """of each step, ns"""


def samples(session: Session, quantile: float = QUIET) -> list[Sample]:
    """The computes of a session at `detailed`, those with equal graphs and tokens together. The
    first of each is left out, because it builds the graph. `quantile` of them counts."""
    steps = session.steps.tuples("step", "pos", "begin", "end")
    of_step = {step: (past, end - begin) for step, past, begin, end in steps}
    computes = session.computes.tuples("compute", "n_threads", "n_tokens", "step")
    known = {compute: (*of, *of_step.get(step, (0, 0))) for compute, *of, step in computes}
    found = []
    for ops in session.ops:
        if ops.thread:
            continue
        rows: dict[tuple[int, int, int], list[int]] = defaultdict(list)
        for row, compute in enumerate(ops.compute.tolist()):
            if compute in known:
                threads, tokens, past, _ = known[compute]
                rows[threads, tokens, past // TOGETHER].append(row)
        for (threads, tokens, _), of_key in rows.items():
            same = of_key[1:] or of_key
            # the later one of a sequence takes longer: the quantile of times is that of pasts
            middle = int(ops.compute[same[int(quantile * (len(same) - 1))]])
            plan = session.plans[ops.plan]
            ubatch = session.ubatches.get(middle)
            ns = ops.dur[same].astype(np.float64)
            if ops.gap is not None:  # each up to the beginning of the next one
                ns[:, :-1] += ops.gap[same, 1:]
            lasted = np.array([known[int(n)][3] for n in ops.compute[same]], np.float64)
            sample = Sample(
                threads, tokens, known[middle][2],
                features(session.graphs[plan.graph], plan, ubatch, threads),
                ns=np.quantile(ns, quantile, axis=0, method="lower"),
                step_ns=float(np.quantile(lasted, quantile, method="lower")), steps=lasted,
            )  # fmt: skip
            found.append(sample)
    return found


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
    model = KernelModel(platform.machine(), [], [], [], [])
    for threads in sorted({sample.threads for sample in samples}):
        chosen = [sample for sample in samples if sample.threads == threads]
        measured, rest = _split(chosen)
        fitted = _fit_products(measured)
        spread = _spread_of_products(measured) if spreads else {}
        shares = dict(zip(fitted.types, fitted.of_stream.tolist(), strict=True))
        for key, rate in zip(fitted.keys, fitted.ns_per_mac.tolist(), strict=True):
            costs = (_round(rate), _round(shares[key[:2]]), _round(spread.get(key, 0.1)))
            model.products.append(ProductCost(*key, threads, *costs))
        model.streams += [
            Stream(threads, int(size), float(round(1e9 / rate)))
            for size, rate in zip(fitted.sizes.tolist(), fitted.ns_per_byte.tolist(), strict=True)
        ]
        kernels = rest | {name: _similar(rest, one=name == ONE) for name in ("", ONE)}
        model.others += [_fit_other(op, threads, of) for op, of in sorted(kernels.items())]
        outside = [of.step_ns - float(of.ns.sum()) for of in chosen if of.tokens == 1]
        step_ns = max(0.0, float(np.median(outside))) if outside else 0.0
        product_ns, per_input, blend = map(_round, fitted.shared)
        model.overheads.append(
            Overhead(threads, product_ns, per_input, blend, _round(step_ns), watts.get(threads))
        )
    return model


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


class _Fitted:
    """Costs of products by key, by type and by size of the working set, and what all share. `x` has
    their logarithms, one after the other."""

    def __init__(self, keys: list[Key], sizes: Floats, x: Floats) -> None:
        self.keys, self.sizes = keys, sizes
        self.types = list(dict.fromkeys(key[:2] for key in keys))
        n = len(keys) + len(self.types)
        self.ns_per_mac, self.of_stream, self.ns_per_byte, shared = np.split(
            np.exp(x), [len(keys), n, n + len(sizes)]
        )
        self.shared: list[float] = shared.tolist()
        """of each product, for each input, and how computing and reading overlap"""


class _Columns:
    """Measured products as columns."""

    def __init__(self, measured: Sequence[_Measured], keys: list[Key]) -> None:
        types = list(dict.fromkeys(key[:2] for key in keys))
        index = {key: i for i, key in enumerate(keys)}
        of = [m.product for m in measured]
        self.key = np.array([index[_key(p)] for p in of])
        self.type = np.array([types.index((p.type, p.repacked)) for p in of])
        self.macs = np.array([p.macs for p in of])
        self.inputs = np.array([p.inputs for p in of])
        self.bytes = np.array([p.bytes for p in of])
        self.ns = np.array([m.ns for m in measured])
        self.working_set = np.array([m.working_set for m in measured])

    def errors(self, fitted: _Fitted) -> Floats:
        """Predicted over measured times, in logarithms."""
        rate = between(fitted.sizes, fitted.ns_per_byte, self.working_set)
        read = self.bytes * rate / fitted.of_stream[self.type]
        compute = fitted.ns_per_mac[self.key] * self.macs
        found: Floats = np.log(product_time(compute, read, self.inputs, *fitted.shared) / self.ns)
        return found


def _fit_products(measured: Sequence[_Measured]) -> _Fitted:
    from scipy.optimize import least_squares
    from scipy.sparse import lil_matrix

    keys = sorted({_key(m.product) for m in measured})
    sizes = _sizes(measured)
    columns = _Columns(measured, keys)
    n, n_keys, n_sizes = len(measured), len(keys), len(sizes)
    n_types = len({key[:2] for key in keys})
    of_types = slice(n_keys, n_keys + n_types)
    per_mac = columns.ns / columns.macs
    rates = np.log([np.min(per_mac[columns.key == key]) for key in range(n_keys)])

    def start(rates: Floats, share: float, per_byte: float, shared: list[float]) -> Floats:
        logs = rates, np.full(n_types, share), np.full(n_sizes, np.log(per_byte)), np.log(shared)
        return np.concatenate(logs)

    low = start(rates - 4, -0.7, 1e-4, [1, 1e-4, 1.0])
    high = start(rates + 0.5, 0.7, 5.0, [5e4, 5, 12.0])
    first = np.clip(start(rates, 0.0, 0.05, [500.0, 0.1, 2.0]), low + 1e-6, high - 1e-6)
    weight = np.minimum(1, columns.ns / 5e3) ** 0.5

    def errors(x: Floats) -> Floats:
        logs = columns.errors(_Fitted(keys, sizes, x)) * weight
        return np.concatenate([logs, x[of_types] / FAR])

    depends = lil_matrix((n + n_types, len(first)), dtype=np.int8)
    depends[np.arange(n), columns.key] = 1
    depends[np.arange(n), n_keys + columns.type] = 1
    depends[:n, n_keys + n_types :] = 1
    depends[n + np.arange(n_types), n_keys + np.arange(n_types)] = 1
    found = least_squares(
        errors, first, bounds=(low, high), loss="soft_l1", f_scale=0.1, jac_sparsity=depends,
        max_nfev=60,
    ).x  # fmt: skip
    return _Fitted(keys, sizes, found)


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
    count = Counter(_key(m.product) for m in measured)
    seen: list[_Measured] = []
    unseen: list[_Measured] = []
    for i, m in enumerate(measured):
        (unseen if count[_key(m.product)] > 2 and i % FOLDS == 0 else seen).append(m)
    if not unseen or {_key(m.product) for m in unseen} - {_key(m.product) for m in seen}:
        return {}
    fitted = _fit_products(seen)
    logs = _Columns(unseen, fitted.keys).errors(fitted)
    whole = deviation(logs)
    errors: dict[Key, list[float]] = defaultdict(list)
    for m, error in zip(unseen, logs.tolist(), strict=True):
        errors[_key(m.product)].append(error)
    return {
        key: max(LEAST_SPREAD, deviation(np.array(of)) if len(of) > 2 else whole)
        for key, of in ((key, errors[key]) for key in count)
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
