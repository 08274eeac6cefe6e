"""The time of each kernel of a graph on a machine, from what it depends on.

A matrix product takes (compute^p + read^p)^(1/p): `compute` follows from its multiplications,
`read` from the bytes of its weight and the bandwidth for the working set; p is how much the two
overlap. Every other kernel has a fixed cost, and one for the rows, bytes and operations of its
busiest thread.

For a number of threads that was not measured, each cost follows a power law of the number of
threads: between two measured numbers, the one through both; beyond them, that of the nearest two,
within limits (`_GROWTH`).

Invariant: pure functions. Recordings and dry runs, the fit (`prediction.fit`) and the prediction
use the same ones.
"""

from __future__ import annotations

import platform
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from math import hypot, log, log2, prod
from typing import Any

import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray

from llamacpp_instr.base.errors import UsageError
from llamacpp_instr.base.system import how_to_install
from llamacpp_instr.base.terminal import counted
from llamacpp_instr.log.graph.attention import Seen, Span, Ubatch
from llamacpp_instr.log.graph.kernels import plan_kernels
from llamacpp_instr.log.graph.ops import Tensor, op_params, tensor
from llamacpp_instr.log.graph.timeline import PlanTimeline
from llamacpp_instr.log.schema import Graph, Plan
from llamacpp_instr.prediction.probe.file import KernelModel, OtherCost, Probe, ProductCost

Floats = NDArray[np.float64]

REPACKED = "CPU_REPACK"
ATTENTION = "FLASH_ATTN_EXT"
SHORT, LONG, SHORT_WINDOW = " short", " long", 256
"""windows of attention, and the cells of the longest short one"""
ONE = ", one token"
"""ends the names of ops that were measured while one token was decoded"""
ALONE = " alone"
"""the same for attention, whose keys and values then come from further away"""
APART, FAR_APART, WIDE = " apart", 1024, 256
"""follows `ALONE` if the keys of several heads in one cell take at least 1,024 bytes, and those of
one head at least 256: the next cell of a head is then too far away to be read ahead"""
EMBEDDING, START = "token_embd.weight", 48 << 20
"""the weight with which files begin, and how many of its bytes lie in small pieces of memory,
measured with Linux 6.18 and a read-ahead of 8 MiB"""


@dataclass(frozen=True)
class Product:
    """MUL_MAT and MUL_MAT_ID with a weight."""

    type: str
    """of the weight, in capitals"""
    repacked: bool
    experts: bool
    tokens: int
    """that one matrix multiplies; for experts, on average"""
    macs: float
    """multiplications"""
    inputs: float
    """elements of the activations, which ggml converts before it multiplies"""
    bytes: float
    """of the weights that are read"""
    dots: float
    """results, each the product of a row of the weight and one of the activations"""
    start: float = 0.0
    """bytes, at the start of its file, of an embedding that is also the output. Linux begins to
    read a file in small steps, each into its own piece of memory"""


@dataclass(frozen=True)
class Other:
    """Any other kernel."""

    op: str
    """ops joined by +, with the function of some, and whether there is only one token, because its
    data has then left the caches: `ADD`, `ADD, one token`, `GLU SWIGLU`; attention with the length
    of a key, and whether the keys that a head reads fit into the nearest cache:
    `FLASH_ATTN_EXT 64 short`, `FLASH_ATTN_EXT 64 long tiled`, `FLASH_ATTN_EXT 64 long alone`"""
    rows: float
    """of the result, or of all heads, that the busiest thread computes"""
    units: float
    """bytes that it moves; for tiled attention, cells of the window that it looks at"""
    flops: float
    """of products without a weight, and of attention"""
    bytes: float
    """that are far away while one token is decoded, because the weights have passed through the
    caches since they were used; else 0"""
    bound: bool = False
    """whether `flops` is an upper bound"""

    @property
    def is_short(self) -> bool:
        """Whether it is so short, in a decode of one token, that it matters how far away its data
        and its instructions are."""
        return self.op.endswith(ONE) or SHORT + ALONE in self.op


@dataclass(frozen=True)
class Features:
    """One entry for each kernel of a plan."""

    kernels: list[Product | Other]
    working_set: float
    """bytes that a compute reads and writes: weights, cache, activations"""


def features(graph: Graph, plan: Plan, ubatch: Ubatch | None, threads: int) -> Features:
    """What the times of the kernels of `plan` depend on; `graph` must have its nodes."""
    nodes = graph.whole
    kernels = plan_kernels(graph, plan)
    work = kernels.work(ubatch)
    found: list[Product | Other] = []
    tokens = max(
        (prod(nodes.ne[node][1:]) for node in plan.node if nodes.op[node] == "MUL_MAT"), default=1
    )
    for i, first in enumerate(plan.node):
        op, sources = nodes.op[first], nodes.src[first]
        if op in ("MUL_MAT", "MUL_MAT_ID") and sources[0] < 0:
            found.append(_product(graph, first, int(kernels.bytes[i])))
            continue
        label = _with_kind(kernels.label[i].split(" ")[0], nodes.params[first])
        rows, units = prod(nodes.ne[first][1:]), float(work.bytes[i])
        if i in kernels.attention:
            of = kernels.attention[i]
            window = SHORT if of.n_kv <= SHORT_WINDOW else LONG
            label += f" {tensor(graph, sources[0]).ne[0]}{window}{' tiled' * of.tiled}"
            if tokens == 1:
                label += ALONE + APART * _is_apart(tensor(graph, sources[1]))
            rows = of.rows * of.heads * of.streams
            # without tiles, masked cells are skipped
            units = float(rows * of.n_kv) if of.tiled else 0.0
        elif tokens == 1:
            label += ONE
        at_once = -(-rows // threads) / max(1, rows)  # the share of the busiest thread
        flops = float(work.flops[i]) if i in kernels.attention or op.startswith("MUL_MAT") else 0.0
        far = float(work.bytes[i]) * at_once if label.endswith(ONE) else 0.0
        bound = i in kernels.attention and bool(work.bound[i])
        found.append(Other(label, rows * at_once, units * at_once, flops * at_once, far, bound))
    return Features(found, float(work.bytes.sum()))


def _is_apart(keys: Tensor) -> bool:
    cells, heads = (*keys.ne, 1, 1)[1:3]
    of_cell = keys.bytes / max(1, cells)
    return heads > 1 and of_cell >= FAR_APART and of_cell / heads >= WIDE


def _with_kind(op: str, params: Sequence[int]) -> str:
    """The op, and which function it computes where some take several times as long as others."""
    if op not in ("GLU", "UNARY", "ROPE"):
        return op
    of = op_params(op, params)
    return f"{op} {of.get('kind') or of.get('mode') or ''}".rstrip()


def _product(graph: Graph, node: int, moved: int) -> Product:
    nodes = graph.whole
    sources = nodes.src[node]
    weight, experts = graph.leaf(sources[0]), nodes.op[node] == "MUL_MAT_ID"
    tokens = prod(nodes.ne[node][1:])
    if experts:
        tokens = max(1, round(tokens / max(1, weight.ne[2])))
    n_bytes = float(moved - sum(tensor(graph, of).bytes for of in (*sources[1:], node)))
    repacked = weight.buffer == REPACKED  # a copy, which lies nowhere in a file
    return Product(
        type=weight.type.upper(), repacked=repacked, experts=experts,
        tokens=tokens, macs=float(weight.ne[0] * prod(nodes.ne[node])),
        inputs=float(prod(tensor(graph, sources[1]).ne)),
        bytes=n_bytes, dots=float(prod(nodes.ne[node])),
        start=min(n_bytes, START) if weight.name == EMBEDDING and not repacked else 0.0,
    )  # fmt: skip


def ubatch_of(tokens: int, past: int, threads: int, cells: int) -> Ubatch:
    """What is known of the masks of consecutive tokens of one sequence, in a cache of `cells`."""
    seen = Seen(past + tokens, (Span(past, tokens),), True, True, cells)
    return Ubatch(threads, tokens, (Span(0, tokens),), (seen,), True, 0, True)


UNKNOWN = 0.5
"""spread of what was not measured and is predicted from something similar"""
_GROWTH: dict[str, tuple[float, float]] = {
    "ns_per_mac": (-1.0, 0.0), "ns_per_dot": (-1.0, 0.0), "of_stream": (0.0, 0.0),
    "bytes_per_second": (0.0, 1.0), "ns": (0.0, 1.0), "ns_per_row": (0.0, 1.0),
    "ns_per_unit": (0.0, 1.0), "ns_per_flop": (0.0, 1.0), "cold_ns": (0.0, 1.0),
    "cold_ns_per_byte": (0.0, 1.0), "product_ns": (0.0, 1.0), "ns_per_input": (-1.0, 1.0),
    "start_ns_per_byte": (-1.0, 0.0), "blend": (0.0, 0.0), "step_ns": (0.0, 1.0),
    "cold_step_ns": (0.0, 1.0), "watts": (0.0, 1.0),
}  # fmt: skip
"""the least and the largest power of each cost; with a single measured number, the first is used"""


def with_threads(model: KernelModel, threads: int) -> KernelModel:
    """`model` itself if it has costs for `threads`, else a model with only those. Each
    doubling from the nearest measured number adds UNKNOWN to a step's spread, in quadrature."""
    known = model.threads
    if threads in known:
        return model
    nearest = sorted(sorted(known, key=lambda n: abs(log(n / threads)))[:2])
    away = min(abs(log2(n / threads)) for n in known)

    def scaled(entries: Iterable[Any], same: Callable[[Any], object]) -> list[Any]:
        """One entry for those of the two nearest numbers that are the `same` but for threads."""
        pairs: dict[object, list[Any]] = {}
        for entry in sorted(entries, key=lambda of: of.threads):
            if entry.threads in nearest:
                pairs.setdefault(same(entry), []).append(entry)
        return [_scaled(entries, threads) for entries in pairs.values()]

    overheads = scaled(model.overheads, lambda _: None)
    return KernelModel(
        model.architecture,
        scaled(model.products, lambda of: (of.type, of.repacked, of.experts, of.tokens)),
        scaled(model.streams, lambda of: of.bytes),
        scaled(model.others, lambda of: of.op),
        [replace(of, spread=hypot(of.spread, UNKNOWN * away)) for of in overheads],
    )


def _scaled(entries: list[Any], threads: int) -> Any:
    """One or two entries, ascending by threads, as one for `threads`."""
    first, last = entries[0], entries[-1]
    base = min(entries, key=lambda of: abs(log(of.threads / threads)))
    changed: dict[str, Any] = {"threads": threads}
    for cost, (least, most) in _GROWTH.items():
        value = getattr(base, cost, None)
        if not value:
            continue
        power, before = least, getattr(first, cost)
        if first is not last and before:
            power = log(getattr(last, cost) / before) / log(last.threads / first.threads)
        if not first.threads < threads < last.threads:
            power = min(max(power, least), most)
        changed[cost] = value * (threads / base.threads) ** power
    if hasattr(base, "spread"):
        changed["spread"] = max(of.spread for of in entries)
    return replace(base, **changed)


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
            f"the machine file has no kernel costs, because {why}; run `instr probe` again"
            f" after {how_to_install('predict')}"
        )
    here = platform.machine()
    if model.architecture != here:
        raise UsageError(
            f"the machine file is for a processor with the architecture {model.architecture}, but "
            f"this library is for {here} and would build other graphs; predict on such a machine"
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
    of_step = costs.overhead.step_ns + costs.cold * costs.overhead.cold_step_ns
    return Predicted(
        np.array(ns, np.float64), np.array(spread, np.float64), list(source),
        list(dict.fromkeys(unknown)), of_step, costs.overhead.spread,
    )  # fmt: skip


class _Costs:
    """The costs for a number of threads and a working set."""

    def __init__(self, model: KernelModel, threads: int, working_set: float) -> None:
        (self.overhead,) = (of for of in model.overheads if of.threads == threads)
        streams = sorted(
            (of.bytes, of.bytes_per_second) for of in model.streams if of.threads == threads
        )
        sizes, rates = (np.array(column, np.float64) for column in zip(*streams, strict=True))
        self.ns_per_byte = 1e9 / float(between(sizes, rates, max(1.0, working_set)))
        self.cold = float(coldness(sizes, 1e9 / rates, max(1.0, working_set)))
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
            return (
                other_ns(kernel, cost, self.cold),
                cost.spread if known else UNKNOWN,
                kernel.op,
                known,
            )
        name = f"{kernel.type}{' repacked' * kernel.repacked}{' experts' * kernel.experts}"
        costs, known = self._similar(kernel)
        tokens = np.array([of.tokens for of in costs], np.float64)
        ns_per_mac = between(tokens, np.array([of.ns_per_mac for of in costs]), kernel.tokens)
        nearest = min(costs, key=lambda of: abs(of.tokens - kernel.tokens))
        compute = float(ns_per_mac) * kernel.macs + nearest.ns_per_dot * kernel.dots
        read = kernel.bytes * self.ns_per_byte / nearest.of_stream
        per_input = nearest.ns_per_input + self.overhead.ns_per_input
        fixed = self.overhead.product_ns + per_input * kernel.inputs
        fixed += self.overhead.start_ns_per_byte * kernel.start
        ns = product_time(compute, read, fixed, self.overhead.blend)
        return ns, nearest.spread if known else UNKNOWN, name, known

    def _like(self, op: str) -> OtherCost:
        """The cost of an op that was not measured: attention with the nearest length of keys, the
        same op with another function, or the average of all other ops."""
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
        one = ONE if op.endswith(ONE) else ""
        kind = op.removesuffix(one).split(" ")[0]
        same = [
            name
            for name in self.others
            if name.endswith(ONE) == bool(one) and name.removesuffix(one).split(" ")[0] == kind
        ]
        return self.others[min(same, default=one)]

    def _similar(self, kernel: Product) -> tuple[list[ProductCost], bool]:
        """The costs of the kernel's type, or of a similar one, and whether the type is its own."""
        exact = kernel.type, kernel.repacked, kernel.experts
        dense = kernel.type, kernel.repacked, False
        for key in (exact, dense, (kernel.type, not kernel.repacked, False)):
            if key in self.products:
                return self.products[key], key in (exact, dense)
        others = [costs for key, costs in self.products.items() if not key[2]]
        return max(others, key=lambda costs: costs[0].ns_per_mac), False


_TINY = np.finfo(np.float64).tiny
"""replaces 0 as a divisor"""


def product_time(compute: Any, read: Any, fixed: Any, p: float) -> Any:
    """Time of matrix products, ns, numbers or arrays; see the module."""
    most = np.maximum(np.maximum(compute, read), _TINY)
    blended = most * ((compute / most) ** p + (read / most) ** p) ** (1 / p)
    return fixed + blended


def other_ns(kernel: Other, cost: OtherCost, cold: float) -> float:
    """Time of any other kernel, ns; `cold` as `coldness` returns it."""
    variable = cost.ns_per_row * kernel.rows + cost.ns_per_unit * kernel.units
    far = cost.cold_ns + cost.cold_ns_per_byte * kernel.bytes if kernel.is_short else 0.0
    return cost.ns + variable + cost.ns_per_flop * kernel.flops + cold * far


def coldness(sizes: Floats, ns_per_byte: Floats, working_set: Any) -> Any:
    """How far what a decode used a step ago has moved away from the processor: 0 as in the smallest
    working set of `sizes`, 1 as in the largest, by the time of reading."""
    whole = float(ns_per_byte[-1] - ns_per_byte[0])
    if whole <= 0:
        return np.zeros_like(np.asarray(working_set, np.float64))
    return (between(sizes, ns_per_byte, working_set) - ns_per_byte[0]) / whole


def between(at: Floats, values: Floats, x: float | Floats | Sequence[float]) -> Floats:
    """Interpolation in logarithms of both; beyond the ends, the value at the end."""
    found: Floats = np.exp(np.interp(np.log(x), np.log(at), np.log(values)))
    return found
