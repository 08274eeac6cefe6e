"""The kernels of a plan on a timeline, for every trace format.

Invariant: pure functions that give the same for every compute of a plan; nothing here is a
measurement. Ops nest in runs of one block, and these in runs of one layer. A run is a range of
consecutive kernels.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from heapq import heappop, heappush
from typing import TypeAlias, TypeVar

from llamacpp_instr.log.graph.kernels import Kernels, node_backends, plan_kernels, runs
from llamacpp_instr.log.graph.ops import Block, bytes_written, op_params, role_of, tensor
from llamacpp_instr.log.graph.words import describe
from llamacpp_instr.log.schema import Graph, Nodes, Plan

Value: TypeAlias = "str | int | float"
K = TypeVar("K")
V = TypeVar("V")


@dataclass(frozen=True)
class OpSlice:
    """One kernel."""

    name: str
    """ops joined by +: `MUL_MAT`, `RMS_NORM+MUL`"""
    block: Block
    layer: int
    args: dict[str, Value]
    """its arguments, in the order of display"""
    flops: int
    bytes: int
    """read and written"""
    varies: bool = False
    """`flops` and `bytes` are of the largest compute, and not among `args`"""
    role: str = ""

    @property
    def title(self) -> str:
        """The name of its slice, the same in every layer: `MUL_MAT ffn_down`."""
        return f"{self.name} {self.role}".rstrip()


@dataclass(frozen=True)
class Run:
    """Consecutive kernels, `first` to `last` included."""

    name: str
    """`layer 0`, `no layer`; `attention`, `feed-forward`"""
    layer: int
    first: int
    last: int


@dataclass(frozen=True)
class PlanTimeline:
    """The slices of one plan."""

    ops: list[OpSlice]
    """as long as the plan"""
    layers: list[Run]
    blocks: list[Run]
    """each inside one of `layers`"""
    edges: list[tuple[int, int]]
    """(kernel, later kernel that reads its result), views looked through"""
    kernels: Kernels


@dataclass(frozen=True)
class Selection:
    """The part of a session to convert; None means everything."""

    steps: tuple[int, int] | None = None
    """first and last, both included"""
    layers: tuple[int, int] | None = None
    """first and last, both included"""
    ops: Collection[str] | None = None
    """names of ggml's ops; a fused kernel counts if any of its ops is named"""

    def has_step(self, step: int) -> bool:
        return self.steps is None or self.steps[0] <= step <= self.steps[1]

    def has_layer(self, layer: int) -> bool:
        return self.layers is None or self.layers[0] <= layer <= self.layers[1]

    def has_op(self, op: OpSlice) -> bool:
        chosen = self.ops is None or not set(self.ops).isdisjoint(op.name.split("+"))
        return chosen and self.has_layer(op.layer)


_MOST_TRIED = 16


class Lanes:
    """Distributes overlapping spans over lanes, so that spans in one lane do not overlap.

    Threads may report a span late. So a lane is free for spans that begin after its last span
    ended, not for spans that are reported after that.
    """

    def __init__(self) -> None:
        self.open: dict[int, tuple[int, int]] = {}
        """lane and start of those that have not ended"""
        self._free: list[int] = []
        """lanes without an open span, a heap"""
        self._free_from: list[int] = []
        """of every lane"""

    def begin(self, key: int, t: int) -> int:
        """The lane of the span `key` that begins at `t`: the first that was free then, or a new
        one. Only the first few free lanes are tried, so that many late spans take no longer."""
        busy: list[int] = []
        lane = len(self._free_from)
        while self._free and len(busy) < _MOST_TRIED:
            first = heappop(self._free)
            if self._free_from[first] <= t:
                lane = first
                break
            busy.append(first)
        for other in busy:
            heappush(self._free, other)
        if lane == len(self._free_from):
            self._free_from.append(t)
        self.open[key] = lane, t
        return lane

    def end(self, key: int, t: int) -> tuple[int, int]:
        """The lane and the start of the span that ends at `t`. Raises KeyError if it is unknown."""
        lane, begin = self.open.pop(key)
        self._free_from[lane] = max(begin, t)
        heappush(self._free, lane)
        return lane, begin


def remember(known: dict[K, V], key: K, value: V, most: int) -> None:
    """Keeps the `most` latest values, because a log may be larger than memory."""
    known[key] = value
    if len(known) > most:
        del known[next(iter(known))]


def layer_name(layer: int) -> str:
    """`layer 3`, or `no layer` before the first layer and after the last."""
    return f"layer {layer}" if layer >= 0 else "no layer"


def plan_timeline(graph: Graph, plan: Plan) -> PlanTimeline:
    """The slices of `plan`; `graph` is its graph and must have its nodes."""
    nodes = graph.whole
    kernels = plan_kernels(graph, plan)
    reads, backends = _reads(nodes), node_backends(graph)
    layers, n_flops, n_bytes = (of.tolist() for of in (kernels.layer, kernels.flops, kernels.bytes))
    ops: list[OpSlice] = []
    for i, inside in enumerate(kernels.nodes):
        args = _args(graph, kernels, i, reads, backends[inside[0]])
        role = role_of(nodes.op[inside[0]], nodes.name[inside[-1]], kernels.weight[i])
        of = kernels.block[i], layers[i], args, n_flops[i], n_bytes[i], kernels.varies(i)
        ops.append(OpSlice("+".join(nodes.op[node] for node in inside), *of, role))
    of_layers = runs([op.layer for op in ops])
    of_blocks = runs([(op.layer, op.block) for op in ops])
    kernel_of = {node: i for i, computed in enumerate(plan.kernels) for node in computed}
    edges: dict[tuple[int, int], None] = {}
    for node, i in kernel_of.items():
        for source in reads[node]:
            if (producer := kernel_of.get(source, i)) < i:
                edges[producer, i] = None
    return PlanTimeline(
        ops,
        [Run(layer_name(layer), layer, first, end - 1) for layer, first, end in of_layers],
        [Run(block, layer, first, end - 1) for (layer, block), first, end in of_blocks],
        list(edges),
        kernels,
    )


def thread_spans(
    timeline: PlanTimeline, selection: Selection, gaps: bool
) -> Iterator[tuple[int, int, int | None]]:
    """What one of ggml's threads does in a compute: begin, end and kernel of each op, None for the
    wait at the barrier between two of them and after the last, where the log has these (`gaps`).

    Begin and end are numbers of times: from 0 on the starts of all n kernels, from n on their ends,
    and at 2n the time when all threads are done.
    """
    n = len(timeline.ops)
    for i, op in enumerate(timeline.ops):
        if selection.has_op(op):
            if gaps and i:
                yield n + i - 1, i, None
            yield i, n + i, i
            if gaps and i == n - 1:
                yield n + i, 2 * n, None


_OF_ADAPTER = {
    "SCALE": "scale what a LoRA adapter adds",
    "ADD": "add what a LoRA adapter gives",
}
_OFF_AT_ZERO = frozenset({"max_bias", "logit_softcap", "n_kv_max"})
"""parameters of attention that few models use"""


def _reads(nodes: Nodes) -> list[list[int]]:
    """What each node reads, nodes or leafs, views looked through."""
    real: list[int] = []
    for node, sources in enumerate(nodes.src):
        below = node if nodes.exec[node] or not sources else sources[0]
        # in a graph of ggml, a view always comes after its source
        real.append(below if below < 0 else real[below] if below < node else node)
    return [[real[s] if s >= 0 else s for s in sources] for sources in nodes.src]


def _args(
    graph: Graph, kernels: Kernels, kernel: int, reads: list[list[int]], backend: str | None
) -> dict[str, Value]:
    nodes, inside = graph.whole, kernels.nodes[kernel]
    first, last = inside[0], inside[-1]
    descriptions = []
    for node in inside:
        leafs = [graph.leaf(source).name for source in reads[node] if source < 0]
        words = describe(nodes.op[node], nodes.name[node], leafs, nodes.layer[node])
        if kernels.block[kernel] == "adapter":
            words = _OF_ADAPTER.get(nodes.op[node], words)
        descriptions.append(words)
    args: dict[str, Value] = {
        "what": ", ".join(descriptions),
        "tensor": nodes.name[last] or f"node_{last}",
        "op": "+".join(nodes.op[node] for node in inside),
    }
    for node in inside:
        for name, value in op_params(nodes.op[node], nodes.params[node]).items():
            # neither defaults of ggml nor disabled parameters
            if value not in ("UNDEFINED", "NONE") and (value or name not in _OFF_AT_ZERO):
                args.setdefault(name, value)
    args["layer"] = nodes.layer[first]
    args["block"] = kernels.block[kernel]
    args["output"] = _shaped(nodes.type[last], nodes.ne[last])
    sources = [s for node in inside for s in nodes.src[node] if s not in inside]
    for i, source in enumerate(sources):
        read = tensor(graph, source)
        args[f"source_{i}"] = f"{read.name} {_shaped(read.type, read.ne)}"
    weight, weight_type = kernels.weight[kernel], kernels.weight_type[kernel]
    if weight is not None and weight_type is not None:
        args |= {"weight": weight, "weight_type": weight_type}
    varies = kernels.varies(kernel)
    if (n_bytes := int(kernels.bytes[kernel])) and not varies:
        made, shapes = tensor(graph, last), [tensor(graph, s).ne for s in nodes.src[last]]
        written = bytes_written(nodes.op[last], made.ne, made.bytes, shapes)
        read_bytes = max(0, n_bytes - written)
        args |= {"bytes": n_bytes, "bytes_read": read_bytes, "bytes_written": written}
    if (n_flops := int(kernels.flops[kernel])) and not varies:
        args["flops"] = n_flops
    if len(inside) > 1:
        args["fused_with"] = ", ".join(f"{nodes.op[n]} {nodes.name[n]}" for n in inside[1:])
    if backend is not None:
        args["backend"] = backend
    if 0 <= nodes.buffer[last] < len(graph.buffers):
        args["buffer"] = graph.buffers[nodes.buffer[last]]
    return args


def _shaped(kind: str, ne: list[int]) -> str:
    return f"{kind} [{', '.join(map(str, ne))}]"
