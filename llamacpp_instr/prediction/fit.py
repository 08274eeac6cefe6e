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
from math import hypot
from typing import Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from llamacpp_instr.log.session import Session
from llamacpp_instr.prediction.model import (
    ATTENTION,
    ONE,
    Features,
    Floats,
    Other,
    Product,
    between,
    coldness,
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

NEAR = 64
"""the most tokens in the cache with which products still count"""
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


def samples(session: Session) -> list[Sample]:
    """The computes of a session at `detailed`, grouped by equal graphs and tokens, with their
    medians. The first of each group is left out, because it builds the graph."""
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
            # later computes of a sequence take longer: the median time is at the median past
            middle = int(ops.compute[same[(len(same) - 1) // 2]])
            plan = session.plans[ops.plan]
            ubatch = session.ubatches.get(middle)
            ns = ops.dur[same].astype(np.float64)
            if ops.gap is not None:  # each lasts until the next one begins
                ns[:, :-1] += ops.gap[same, 1:]
            lasted = np.array([known[int(n)][3] for n in ops.compute[same]], np.float64)
            each = np.quantile(ns, 0.5, axis=0, method="lower")
            # the sum of medians is below the median of sums: a kernel is late more often than early
            whole = float(np.quantile(ns.sum(axis=1), 0.5, method="lower"))
            sample = Sample(
                threads, tokens, known[middle][2],
                features(session.graphs[plan.graph], plan, ubatch, threads),
                ns=each * (whole / max(1.0, float(each.sum()))),
                step_ns=float(np.quantile(lasted, 0.5, method="lower")), steps=lasted,
            )  # fmt: skip
            found.append(sample)
    return found


Key = tuple[str, bool, bool, int]
FOLDS = 4
GROUPS = 3
"""of models, each left out of one fit"""
OWN_ERROR = 0.08
"""deviation of one model's kernels that nothing else explains: the contents of the weights, and
where they lie in memory"""
LEAST_SPREAD = 0.03
"""about how much processes differ, even if the samples of each one agree"""
OF_FUNCTIONS = 3
"""costs that each function has"""
FAR = 1.0
"""a function's own share of the bandwidth, in logarithms, that costs as much as an error of 1"""


K = TypeVar("K", Product, Other)


@dataclass(frozen=True)
class _Measured(Generic[K]):
    kernel: K
    working_set: float
    ns: float


Products = Sequence[_Measured[Product]]
Others = Sequence[_Measured[Other]]


def fit(models: Sequence[Sequence[Sample]], watts: Mapping[int, float]) -> KernelModel:
    """The costs for every number of threads in the samples, which are grouped by model; `watts` is
    the power of the processors, by threads."""
    found = _fit_all([sample for of in models for sample in of], watts)
    spread = _spread_of_steps(models, found)
    for overhead in found.overheads:
        overhead.spread = _round(hypot(spread.get(overhead.threads, 0.0), OWN_ERROR))
    return found


def _spread_of_steps(models: Sequence[Sequence[Sample]], whole: KernelModel) -> dict[int, float]:
    """By threads: the deviation of steps from what a fit to other models predicts, less the
    deviation of their kernels according to `whole`. Steps with kernels that the other models lack
    do not count."""
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
        for key, rate in zip(fitted.keys, fitted.ns_per_mac.tolist(), strict=True):
            i = fitted.functions.index(_function(key))
            costs = (
                rate, float(fitted.of_stream[i]), spread.get(key, 0.1),
                float(fitted.ns_per_dot[i]), float(fitted.ns_per_input[i]),
            )  # fmt: skip
            model.products.append(ProductCost(*key, threads, *map(_round, costs)))
        model.streams += [
            Stream(threads, int(size), float(round(1e9 / rate)))
            for size, rate in zip(fitted.sizes.tolist(), fitted.ns_per_byte.tolist(), strict=True)
        ]
        kernels = rest | {name: _similar(rest, one=name == ONE) for name in ("", ONE)}
        model.others += [_fit_other(op, threads, of, fitted) for op, of in sorted(kernels.items())]
        step_ns, cold_step_ns = _fit_outside(chosen, fitted)
        product_ns, blend, start = map(_round, fitted.shared)
        model.overheads.append(Overhead(
            threads, product_ns, blend, step_ns, watts.get(threads), cold_step_ns=cold_step_ns,
            start_ns_per_byte=start if any(m.kernel.start for m in measured) else 0.0,
        ))  # fmt: skip
    return model


def _similar(rest: Mapping[str, Others], one: bool) -> Others:
    """All kernels that are neither products nor attention."""
    plain = {op: kernels for op, kernels in rest.items() if not op.startswith(ATTENTION)}
    same = [kernel for op, of in plain.items() if op.endswith(ONE) == one for kernel in of]
    return same or [kernel for of in (plain or rest).values() for kernel in of]


def _fit_outside(samples: Sequence[Sample], fitted: _Fitted) -> tuple[float, float]:
    """What a decode takes outside its kernels, ns: in the smallest working set, and how much more
    in the largest."""
    decodes = [of for of in samples if of.tokens == 1]
    if not decodes:
        return 0.0, 0.0
    ns = np.array([of.step_ns - float(of.ns.sum()) for of in decodes])
    cold = fitted.coldness(np.array([of.features.working_set for of in decodes]))
    costs = _least_squares(np.column_stack([np.ones(len(ns)), cold]), np.maximum(ns, 1.0))
    return _round(float(costs[0])), _round(float(costs[1]))


def _round(value: float) -> float:
    return float(f"{value:.5g}")


def _split(
    samples: Sequence[Sample],
) -> tuple[list[_Measured[Product]], dict[str, list[_Measured[Other]]]]:
    """The products, with equal ones of a compute merged into their median; and the others by op.
    Products after many tokens do not count, because small models have much attention between small
    weights; nor do those of the last token of a prefill, whose weights are then further away."""
    products: list[_Measured[Product]] = []
    others: dict[str, list[_Measured[Other]]] = defaultdict(list)
    for sample in samples:
        same: dict[Product | Other, list[float]] = defaultdict(list)
        for kernel, ns in zip(sample.features.kernels, sample.ns.tolist(), strict=True):
            same[kernel].append(ns)
        for kernel, times in same.items():
            ns = max(1.0, float(np.quantile(times, 0.5, method="lower")))
            if isinstance(kernel, Product):
                last = kernel.tokens == 1 < sample.tokens and not kernel.experts
                if sample.past > NEAR or last:
                    continue
                products.append(_Measured(kernel, sample.features.working_set, ns))
            elif not kernel.bound:
                others[kernel.op].append(_Measured(kernel, sample.features.working_set, ns))
    return products, others


def _key(of: Product) -> Key:
    return of.type, of.repacked, of.experts, of.tokens


Function = tuple[str, bool, bool]


def _function(key: Key) -> Function:
    """A type has one function that multiplies one token by one row after the other, and, for some
    types, another one that multiplies several tokens by several rows at once, which reads weights
    from memory more slowly (ggml/src/ggml-cpu/llamafile/sgemm.cpp)."""
    type_, repacked, _, tokens = key
    return type_, repacked, tokens == 1


class _Fitted:
    """Costs of products by key, by function and by size of the working set, and what all share. `x`
    has their logarithms, one after the other."""

    def __init__(self, keys: list[Key], sizes: Floats, x: Floats) -> None:
        self.keys, self.sizes = keys, sizes
        self.functions = list(dict.fromkeys(map(_function, keys)))
        ends = np.cumsum([len(keys), *[len(self.functions)] * OF_FUNCTIONS, len(sizes)])
        self.ns_per_mac, *of_functions, steps, shared = np.split(np.exp(x), ends)
        self.of_stream, self.ns_per_dot, self.ns_per_input = of_functions
        self.ns_per_byte: Floats = np.cumsum(steps)
        """by size: never less than for a smaller one"""
        self.shared: list[float] = shared.tolist()
        """ns of each product, how computing and reading overlap, and ns for each byte at the start
        of a file"""

    def coldness(self, working_set: Floats) -> Floats:
        found: Floats = coldness(self.sizes, self.ns_per_byte, working_set)
        return found


class _Columns:
    """Measured products as columns."""

    def __init__(self, measured: Products, keys: list[Key]) -> None:
        functions = list(dict.fromkeys(map(_function, keys)))
        index = {key: i for i, key in enumerate(keys)}
        of = [m.kernel for m in measured]
        self.key = np.array([index[_key(p)] for p in of])
        self.function = np.array([functions.index(_function(_key(p))) for p in of])
        self.macs = np.array([p.macs for p in of])
        self.dots = np.array([p.dots for p in of])
        self.inputs = np.array([p.inputs for p in of])
        self.bytes = np.array([p.bytes for p in of])
        self.start = np.array([p.start for p in of])
        self.ns = np.array([m.ns for m in measured])
        self.working_set = np.array([m.working_set for m in measured])

    def errors(self, fitted: _Fitted) -> Floats:
        """Predicted over measured times, in logarithms."""
        per_byte = between(fitted.sizes, fitted.ns_per_byte, self.working_set)
        read = self.bytes * per_byte / fitted.of_stream[self.function]
        dots = fitted.ns_per_dot[self.function] * self.dots
        product_ns, blend, start = fitted.shared
        fixed = product_ns + fitted.ns_per_input[self.function] * self.inputs + start * self.start
        ns = product_time(fitted.ns_per_mac[self.key] * self.macs + dots, read, fixed, blend)
        found: Floats = np.log(ns / self.ns)
        return found


def _fit_products(measured: Products) -> _Fitted:
    from scipy.optimize import least_squares
    from scipy.sparse import lil_matrix

    keys = sorted({_key(m.kernel) for m in measured})
    sizes = _sizes(measured)
    columns = _Columns(measured, keys)
    n, n_keys, n_sizes = len(measured), len(keys), len(sizes)
    n_functions = len({_function(key) for key in keys})
    shares = slice(n_keys, n_keys + n_functions)
    per_mac = columns.ns / columns.macs
    rates = np.log([np.min(per_mac[columns.key == key]) for key in range(n_keys)])

    def start(
        rates: Floats, of_function: Sequence[float], per_byte: float, shared: Sequence[float]
    ) -> Floats:
        same = np.concatenate([np.repeat(of_function, n_functions), np.full(n_sizes, per_byte)])
        return np.concatenate([rates, np.log(same), np.log(shared)])

    low = start(rates - 4, (0.2, 1e-3, 1e-4), 1e-6, (1, 1, 1e-6))
    high = start(rates + 0.5, (5, 100, 10), 5, (5e4, 12, 0.1))
    first = start(rates, (1, 1, 0.1), 0.02, (500, 2, 1e-4))
    first = np.clip(first, low + 1e-6, high - 1e-6)
    weight = np.minimum(1, columns.ns / 5e3) ** 0.5

    def errors(x: Floats) -> Floats:
        logs = columns.errors(_Fitted(keys, sizes, x)) * weight
        return np.concatenate([logs, x[shares] / FAR])

    depends = lil_matrix((n + n_functions, len(first)), dtype=np.int8)
    depends[np.arange(n), columns.key] = 1
    for i in range(OF_FUNCTIONS):
        depends[np.arange(n), n_keys + i * n_functions + columns.function] = 1
    depends[:n, n_keys + OF_FUNCTIONS * n_functions :] = 1
    depends[n + np.arange(n_functions), n_keys + np.arange(n_functions)] = 1
    found = least_squares(
        errors, first, bounds=(low, high), loss="soft_l1", f_scale=0.1, jac_sparsity=depends,
        max_nfev=60,
    ).x  # fmt: skip
    return _Fitted(keys, sizes, found)


def _sizes(measured: Products) -> Floats:
    """Working sets of dense models for one token: at most six, each over twice the previous one."""
    found: list[float] = []
    for size in sorted(
        {m.working_set for m in measured if m.kernel.tokens == 1 and not m.kernel.experts}
    ):
        if not found or size > 2 * found[-1]:
            found.append(size)
    return np.array(found[:6] or [measured[0].working_set])


def _spread_of_products(measured: Products) -> dict[Key, float]:
    """Standard deviation of measured over predicted, of products that a fit had not seen."""
    count = Counter(_key(m.kernel) for m in measured)
    seen: list[_Measured[Product]] = []
    unseen: list[_Measured[Product]] = []
    for i, m in enumerate(measured):
        (unseen if count[_key(m.kernel)] > 2 and i % FOLDS == 0 else seen).append(m)
    if not unseen or {_key(m.kernel) for m in unseen} - {_key(m.kernel) for m in seen}:
        return {}
    fitted = _fit_products(seen)
    logs = _Columns(unseen, fitted.keys).errors(fitted)
    whole = deviation(logs)
    errors: dict[Key, list[float]] = defaultdict(list)
    for m, error in zip(unseen, logs.tolist(), strict=True):
        errors[_key(m.kernel)].append(error)
    return {
        key: max(LEAST_SPREAD, deviation(np.array(of)) if len(of) > 2 else whole)
        for key, of in ((key, errors[key]) for key in count)
    }


def deviation(errors: Floats) -> float:
    """A standard deviation around 0 that outliers do not move: 1.48 times the median."""
    return float(1.4826 * np.median(np.abs(errors))) if len(errors) else 0.0


def _fit_other(op: str, threads: int, kernels: Others, fitted: _Fitted) -> OtherCost:
    of = [measured.kernel for measured in kernels]
    ns = np.array([measured.ns for measured in kernels])
    cold = fitted.coldness(np.array([measured.working_set for measured in kernels]))
    far = cold * np.array([kernel.is_short for kernel in of])
    columns = np.column_stack([
        np.ones(len(of)), *np.transpose([(k.rows, k.units, k.flops) for k in of]),
        far, far * [kernel.bytes for kernel in of],
    ])  # fmt: skip
    unseen = np.arange(len(of)) % FOLDS == 0

    def fit(rows: NDArray[np.bool_]) -> OtherCost:
        fixed, row, unit, flop, cold_ns, cold_byte = _least_squares(columns[rows], ns[rows])
        return OtherCost(op, threads, fixed, row, unit, flop, 0.0, cold_ns, cold_byte)

    cost = fit(np.full(len(of), True))
    tried = fit(~unseen) if np.count_nonzero(~unseen) > 4 else cost
    errors = [
        np.log(ns[i] / max(1.0, other_ns(of[i], tried, cold[i]))) for i in np.flatnonzero(unseen)
    ]
    cost.spread = _round(max(LEAST_SPREAD, deviation(np.array(errors))))
    return cost


def _least_squares(columns: Floats, ns: Floats) -> list[float]:
    """The costs, none negative, whose sum by `columns` has the least relative errors from `ns`."""
    from scipy.optimize import nnls

    scale = np.maximum(columns.max(axis=0), 1e-12)
    off = np.zeros(len(ns))
    for _ in range(3):  # outliers, disturbed by other processes, lose weight
        weight = 1 / ns / np.maximum(1, off / 0.1) ** 0.5
        costs, _ = nnls(columns / scale * weight[:, None], ns * weight)
        costs = costs / scale
        off = np.abs(np.log(np.maximum(columns @ costs, 1.0) / ns))
    return [_round(float(cost)) for cost in costs]
