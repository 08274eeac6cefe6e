"""The kernels of a plan: what each is, where it belongs, how much it computes and moves.

Invariant: a fused kernel, which computes several nodes, is one entry. Data that passes between its
nodes does not count as moved.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, TypeVar

import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray

from llamacpp_instr.log.graph.attention import Attention, Ubatch, attention_work, attentions
from llamacpp_instr.log.graph.experts import Choice, Used, choices, used_by_node
from llamacpp_instr.log.graph.ops import (
    Block,
    blocks_of,
    bytes_moved,
    flops,
    is_adapter,
    tensor,
)
from llamacpp_instr.log.schema import Changes, Graph, Leaf, Nodes, Plan, Tensor

Int64 = NDArray[np.int64]
L = TypeVar("L")


@dataclass(frozen=True)
class Kernels:
    """Columns as long as the plan."""

    label: list[str]
    """ops joined by +, the weight's type behind matrix products: `MUL_MAT q4_K`"""
    block: list[Block]
    layer: Int64
    nodes: list[list[int]]
    """those that compute something: `kernel_nodes`"""
    weight: list[str | None]
    """the first that it reads directly, and its type: `weight_read`"""
    weight_type: list[str | None]
    flops: Int64
    """of attention over the whole window of the cache: see `work`"""
    bytes: Int64
    """with as many experts as the ids can name"""
    attention: dict[int, Attention]
    """by kernel"""
    choices: dict[int, Choice]
    """by kernel: among which experts a MUL_MAT_ID chooses"""

    def varies(self, kernel: int) -> bool:
        """Whether its work depends on the compute."""
        return kernel in self.attention or kernel in self.choices

    def work(self, ubatch: Ubatch | None) -> KernelWork:
        """The work of one compute. `ubatch` is what is known of it, None for nothing."""
        if not self.attention and not self.choices:
            return KernelWork(self.flops, self.bytes, np.zeros(len(self.flops), np.bool_))
        known = {of: attention_work(of, ubatch) for of in set(self.attention.values())}
        n_flops, n_bytes = self.flops.copy(), self.bytes.copy()
        bound = np.zeros(len(n_flops), np.bool_)
        for kernel, of in self.attention.items():
            n_flops[kernel], cells, bound[kernel] = known[of]
            n_bytes[kernel] -= (of.n_kv - cells) * of.cell_bytes
        used = ubatch.experts.by_node() if ubatch else {}
        for kernel, choice in self.choices.items():
            unread, bound[kernel] = choice.unread_of(used)
            n_bytes[kernel] -= unread
        return KernelWork(n_flops, n_bytes, bound)

    def works(self, ubatches: Sequence[Ubatch | None]) -> Work:
        """The work of several computes; `ubatches` is what is known of each."""
        shapes = {of: np.zeros((3, len(ubatches)), np.int64) for of in self.attention.values()}
        for of, work in shapes.items():
            for i, ubatch in enumerate(ubatches):
                n_flops, cells, bound = attention_work(of, ubatch)
                work[:, i] = n_flops, (of.n_kv - cells) * of.cell_bytes, bound
        varying = {
            kernel: (shapes[of][0], self.bytes[kernel] - shapes[of][1], shapes[of][2] > 0)
            for kernel, of in self.attention.items()
        }
        used = used_by_node([of.experts if of else Used() for of in ubatches])
        unknown = np.full(len(ubatches), -1, np.int64)
        for kernel, choice in self.choices.items():
            n = used.get(choice.node, unknown)
            n_bytes = self.bytes[kernel] - np.where(n < 0, 0, choice.unread(n))
            same = np.broadcast_to(self.flops[kernel], len(ubatches))
            varying[kernel] = same, n_bytes, (n < 0) & (not choice.certain)
        return Work(len(ubatches), self.flops, self.bytes, varying)


@dataclass(frozen=True)
class Work:
    """What the kernels of several computes of one plan computed and moved."""

    n: int
    """computes"""
    flops: Int64
    """by kernel, of those whose work is the same in each compute"""
    bytes: Int64
    varying: dict[int, tuple[Int64, Int64, NDArray[np.bool_]]]
    """the other kernels: FLOPs, bytes, and whether they are upper bounds, by compute"""

    def of_kernel(self, kernel: int) -> tuple[Int64, Int64, NDArray[np.bool_]]:
        """FLOPs, bytes, and whether these are upper bounds, by compute."""
        if kernel in self.varying:
            return self.varying[kernel]
        n_flops, n_bytes = self.flops[kernel], self.bytes[kernel]
        return np.full(self.n, n_flops), np.full(self.n, n_bytes), np.zeros(self.n, np.bool_)

    def total(self, computes: Any) -> KernelWork:
        """By kernel, summed over the computes that an index selects; a bound if one of them is."""
        n = len(np.arange(self.n)[computes])
        n_flops, n_bytes = self.flops * n, self.bytes * n
        bound = np.zeros(len(n_flops), np.bool_)
        for kernel, of in self.varying.items():
            n_flops[kernel], n_bytes[kernel] = of[0][computes].sum(), of[1][computes].sum()
            bound[kernel] = of[2][computes].any()
        return KernelWork(n_flops, n_bytes, bound)

    def cells(self) -> KernelWork:
        """A row for each compute, a column for each kernel."""
        shape = (self.n, len(self.flops))
        n_flops, n_bytes = (np.broadcast_to(of, shape).copy() for of in (self.flops, self.bytes))
        bound = np.zeros(shape, np.bool_)
        for kernel, of in self.varying.items():
            n_flops[:, kernel], n_bytes[:, kernel], bound[:, kernel] = of
        return KernelWork(n_flops, n_bytes, bound)

    def of_computes(self) -> KernelWork:
        """By compute, summed over its kernels."""
        same = np.ones(len(self.flops), np.bool_)
        same[list(self.varying)] = False
        n_flops = np.full(self.n, self.flops[same].sum())
        n_bytes = np.full(self.n, self.bytes[same].sum())
        bound = np.zeros(self.n, np.bool_)
        for of_kernel in self.varying.values():
            n_flops += of_kernel[0]
            n_bytes += of_kernel[1]
            bound |= of_kernel[2]
        return KernelWork(n_flops, n_bytes, bound)


@dataclass(frozen=True)
class KernelWork:
    """FLOPs and bytes moved, by kernel, by compute, or by both."""

    flops: Int64
    bytes: Int64
    bound: NDArray[np.bool_]
    """whether `flops` and `bytes` are upper bounds"""


def leaf_of(weight: Tensor) -> Leaf:
    """A weight as a graph reads it."""
    return Leaf(**{name: getattr(weight, name) for name in Leaf.__struct_fields__})


def is_weight(leaf: Leaf) -> bool:
    """Whether a leaf is given by the id of its weight alone."""
    return leaf.tensor >= 0 and not leaf.name


def whole_graph(graph: Graph, weights: Mapping[int, Leaf], known: Mapping[int, Any]) -> Graph:
    """A graph with all its columns and with its weights; `known` has the graphs that it may be
    like, as `.event`. Raises KeyError for an unknown weight or graph, ValueError for what does not
    fit."""
    if any(map(is_weight, graph.leafs)):
        leafs = [weights[of.tensor] if is_weight(of) else of for of in graph.leafs]
        graph = replace(graph, leafs=leafs)
    if graph.like is not None:
        return graph_like(graph, known[graph.like].event)
    if graph.nodes is not None and graph.changes is not None:
        return replace(graph, nodes=with_changes(graph.nodes, graph.changes), changes=None)
    return graph


def graph_like(graph: Graph, other: Graph) -> Graph:
    """A graph that the log gives by what differs from `other`, with all its columns. Raises
    ValueError if it does not fit."""
    nodes = other.nodes
    if nodes is None or graph.n_nodes != other.n_nodes:
        raise ValueError("the numbers of nodes differ")
    leafs = list(other.leafs)
    for at, leaf in zip(graph.leafs_at, graph.leafs, strict=True):
        if at >= len(leafs):
            raise ValueError(f"leaf {at} is not in the other graph")
        leafs[at] = leaf
    return replace(
        graph,
        buffers=other.buffers,
        leafs=leafs,
        nodes=with_changes(nodes, graph.changes or Changes()),
        like=None,
        leafs_at=[],
        changes=None,
    )


def with_changes(nodes: Nodes, changes: Changes) -> Nodes:
    """The nodes with the columns of `changes`. Raises ValueError for a place without a value."""
    columns = {}
    for name in Changes.__struct_fields__:
        if (column := getattr(changes, name)) is not None:
            places = column.at
            if places is None:
                first: dict[str, int] = {}
                entries = map(str, getattr(nodes, name) or ())
                places = [first.setdefault(entry, len(first)) for entry in entries]
            if max(places, default=0) >= len(column.values):
                raise ValueError(f"`{name}` has too few values")
            columns[name] = [column.values[place] for place in places]
    return replace(nodes, **columns)


def graph_problems(graph: Graph) -> Iterator[str]:
    """Why a graph is invalid (columns, sources, splits), one message each."""
    nodes, whole = graph.nodes, True
    for name in nodes.__struct_fields__ if nodes else ():
        column = getattr(nodes, name)
        if column is not None and len(column) != graph.n_nodes:
            whole = False
            yield f"column `{name}` has {len(column)} entries, `n_nodes` is {graph.n_nodes}"
    n_leafs = len(graph.leafs)
    for i, sources in enumerate(nodes.src if nodes and whole else ()):
        for source in sources:
            if not -n_leafs <= source < graph.n_nodes:
                what = f"node {source}" if source >= 0 else f"leaf {-1 - source}"
                has = f"{graph.n_nodes} nodes, {n_leafs} leafs"
                yield f"node {i} reads {what}, the graph has {has}"
    at = 0
    for i, split in enumerate(graph.splits):
        # otherwise every node could be in every split
        if split.start != at or split.end < split.start:
            yield f"split {i} is {split.start}..{split.end}, the previous one ends at {at}"
        at = split.end
    if graph.splits and at != graph.n_nodes:
        yield f"the splits end at node {at}, the graph at {graph.n_nodes}"


def plan_problems(plan: Plan, graph: Graph) -> Iterator[str]:
    """Why a plan is invalid, one message each; `graph` is the one that it names."""
    if len(plan.counts) != len(plan.node):
        yield f"column `n` has {len(plan.counts)} entries, `node` has {len(plan.node)}"
    if graph.nodes is None:
        yield f"graph {plan.graph} was given without its nodes"
    free = 0
    for first, n in zip(plan.node, plan.counts, strict=False):
        # otherwise every kernel could contain every node
        if first < free:
            yield f"node {first} is repeated or out of order"
            return
        free = first + n
    if free > graph.n_nodes:
        yield f"node {free - 1} of graph {plan.graph}, which has {graph.n_nodes}"


def plan_kernels(graph: Graph, plan: Plan) -> Kernels:
    """The kernels of `plan`, in its order; `graph` is its graph and must have its nodes."""
    nodes = graph.whole
    n = len(plan.node)
    blocks = blocks_of(nodes.op, nodes.name, nodes.layer, nodes.src, [f.name for f in graph.leafs])
    work = [node_work(graph, i) for i in range(graph.n_nodes)]
    label: list[str] = []
    n_flops, n_bytes = np.zeros(n, np.int64), np.zeros(n, np.int64)
    computed = kernel_nodes(graph, plan)
    weights = [weight_read(graph, inside) for inside in computed]
    for i, inside in enumerate(plan.kernels):
        label.append("+".join(_label(graph, node) for node in inside if nodes.exec[node]))
        n_flops[i] = sum(work[node][0] for node in inside)
        passed = sum(tensor(graph, node).bytes for node in inside[:-1] if nodes.exec[node])
        n_bytes[i] = sum(work[node][1] for node in inside) - 2 * passed
    shapes, experts = attentions(graph, node_backends(graph)), choices(graph)
    alone = {i: of.start for i, of in enumerate(plan.kernels) if len(of) == 1}
    return Kernels(
        label=label,
        block=[blocks[node] for node in plan.node],
        layer=np.array([nodes.layer[node] for node in plan.node], np.int64),
        nodes=computed,
        weight=[name for name, _ in weights],
        weight_type=[type_ for _, type_ in weights],
        flops=n_flops,
        bytes=n_bytes,
        attention={i: shapes[node] for i, node in alone.items() if node in shapes},
        choices={i: experts[node] for i, node in alone.items() if node in experts},
    )


def kernel_nodes(graph: Graph, plan: Plan) -> list[list[int]]:
    """The nodes of each kernel of `plan` that compute something; the graph must have its nodes."""
    executed = graph.whole.exec
    return [[node for node in of if executed[node]] or [of.start] for of in plan.kernels]


def runs(labels: Iterable[L]) -> list[tuple[L, int, int]]:
    """Each run of equal labels: the label, the first index, and the one after the last."""
    found, at = [], 0
    for label, group in groupby(labels):
        n = len(list(group))
        found.append((label, at, at + n))
        at += n
    return found


def node_backends(graph: Graph) -> list[str | None]:
    """The backend of every node, by the graph's splits; None for a node in none."""
    backends: list[str | None] = [None] * graph.n_nodes
    for split in graph.splits:
        backends[split.start : split.end] = [split.backend] * (split.end - split.start)
    return backends


def _label(graph: Graph, node: int) -> str:
    op, sources = graph.whole.op[node], graph.whole.src[node]
    named = op.startswith("MUL_MAT") and sources
    return f"{op} {tensor(graph, sources[0]).type}" if named else op


def node_work(graph: Graph, node: int) -> tuple[int, int]:
    """FLOPs and bytes moved of one node, as `ops` counts them; the graph must have its nodes."""
    nodes = graph.whole
    sources = [tensor(graph, source) for source in nodes.src[node]]
    shapes, sizes = [of.ne for of in sources], [of.bytes for of in sources]
    op, made = nodes.op[node], tensor(graph, node)
    return flops(op, made.ne, shapes), bytes_moved(op, made.ne, made.bytes, shapes, sizes)


def weight_read(graph: Graph, nodes: Iterable[int]) -> tuple[str | None, str | None]:
    """Name and type of the first weight, also of an adapter, that nodes of the graph read directly
    or as a scheduler's copy, or None, None."""
    for node in nodes:
        for leaf in (graph.leaf(source) for source in graph.whole.src[node] if source < 0):
            if leaf.tensor >= 0 or is_adapter(leaf.name):
                return leaf.name, leaf.type
            if (copy := _COPY.fullmatch(leaf.name)) and copy[1].endswith(".weight"):
                return copy[1], leaf.type
    return None, None


def cpu_plan(graph: Graph) -> Plan:
    """The plan that ggml's CPU backend makes of `graph`, which must have its nodes: the plan that a
    recording of the graph has. The rules are those of `ggml_graph_compute_thread` and
    `ggml_cpu_try_fuse_ops` in ggml/src/ggml-cpu/ggml-cpu.c."""
    nodes = graph.whole
    uses = Counter(source for sources in nodes.src for source in sources)
    first: list[int] = []
    count: list[int] = []
    node = 0
    while node < graph.n_nodes:
        n = 2 if nodes.exec[node] and _is_scaled_norm(graph, nodes, uses, node) else 1
        if nodes.exec[node]:
            first.append(node)
            count.append(n)
        node += n
    n_nodes = count if any(n > 1 for n in count) else None
    return Plan(t=graph.t, plan=0, graph=graph.graph, node=first, n=n_nodes)


def _is_scaled_norm(graph: Graph, nodes: Nodes, uses: Counter[int], norm: int) -> bool:
    """Whether ggml computes this RMS_NORM together with the MUL that follows: nothing else reads
    the norm, all is F32, and the factor has a value for each element of a row."""
    product = norm + 1
    if nodes.op[norm] != "RMS_NORM" or product >= graph.n_nodes or uses[norm] != 1:
        return False
    sources = nodes.src[product]
    if nodes.op[product] != "MUL" or norm not in sources or nodes.ne[product] != nodes.ne[norm]:
        return False
    factor = tensor(graph, sources[1] if sources[0] == norm else sources[0])
    types = {tensor(graph, nodes.src[norm][0]).type, nodes.type[product], factor.type}
    return types == {"f32"} and factor.ne[:1] == nodes.ne[norm][:1]


_COPY = re.compile(r"[^#]+#(.+)#\d+")


def is_copy(name: str) -> bool:
    """Whether a leaf of that name is a scheduler's copy."""
    return _COPY.fullmatch(name) is not None


def without_copies(graph: Graph) -> Graph:
    """The graph, which must have its nodes, whose nodes read the sources of a scheduler's copies.

    Where a graph is split among backends, a part reads copies of what other parts have computed,
    and of inputs. ggml names a copy after its backend and its source, `RPC0[host:port]#inp_pos#0`
    (`ggml_backend_sched_split_graph` in ggml/src/ggml-backend.cpp), and cuts names at 63 bytes. A
    copy whose source the graph does not have remains, as those of inputs do.
    """
    nodes = graph.whole
    copies = {
        -1 - i: (found[1], leaf)
        for i, leaf in enumerate(graph.leafs)
        if (found := _COPY.fullmatch(leaf.name))
    }
    if not copies:
        return graph
    leafs = {leaf.name: -1 - i for i, leaf in enumerate(graph.leafs)}
    latest: dict[str, int] = {}
    src = []
    for i, sources in enumerate(nodes.src):
        src.append(list(sources))
        for k, source in enumerate(sources):
            if source in copies:
                name, leaf = copies[source]
                named = latest.get(name, leafs.get(name, source))
                there = tensor(graph, named)
                if (there.type, list(there.ne)) == (leaf.type, list(leaf.ne)):
                    src[i][k] = named
        latest[nodes.name[i]] = i
    return replace(graph, nodes=replace(nodes, src=src))
