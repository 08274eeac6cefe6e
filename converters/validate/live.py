"""A graph in memory as the log's event, from which the ONNX graph is made.

Invariant: nodes and leafs have the numbers that a log gives them.
"""

from __future__ import annotations

from collections.abc import Collection

from llamacpp_instr.debugger.ggml import Tensor, ggml, tensor_at
from llamacpp_instr.debugger.graph import LiveGraph
from llamacpp_instr.debugger.stop import Stop
from llamacpp_instr.debugger.tensors import Array, is_weight, read
from llamacpp_instr.log.graph.kernels import is_copy
from llamacpp_instr.log.schema import Graph, Leaf, Nodes
from llamacpp_instr.model.types import TYPES


def as_event(live: LiveGraph) -> Graph:
    """The graph with strides; its ids and splits are not those of a log."""
    tensors = [tensor_at(address) for address in live.addresses]
    leafs = live.leaf_addresses
    numbers = {address: -1 - i for i, address in enumerate(leafs)}
    numbers |= {address: i for i, address in enumerate(live.addresses)}
    lib = ggml()
    nodes = Nodes(
        name=[node.name for node in live.nodes],
        op=[node.op for node in live.nodes],
        layer=[node.layer for node in live.nodes],
        type=[_type(tensor) for tensor in tensors],
        ne=[_ne(tensor) for tensor in tensors],
        bytes=[int(lib.ggml_nbytes(address)) for address in live.addresses],
        src=[[numbers[int(a)] for a in tensor.src if a] for tensor in tensors],
        buffer=[-1] * len(tensors),
        params=[_words(tensor) for tensor in tensors],
        exec=[int(node.runs) for node in live.nodes],
        nb=[[int(n) for n in tensor.nb[: len(_ne(tensor))]] for tensor in tensors],
    )
    return Graph(
        t=0, graph=live.id, ctx=0, uid=0, source="decode", why="first", n_nodes=len(tensors),
        n_exec=sum(nodes.exec), splits=[], leafs=[_leaf(address, i) for i, address in
        enumerate(leafs)], nodes=nodes,
    )  # fmt: skip


class Inputs:
    """The leafs of a graph that are not weights, each read once, when its value is there.

    Caches and inputs are there before the first op. A copy of another backend's value is there when
    its part of the graph begins, and its memory may be used again behind its last reader."""

    def __init__(self, graph: Graph, wanted: Collection[int] | None = None) -> None:
        """`wanted` are the leafs to read, as nodes name them; by default all."""
        self._first = [
            -1 - i
            for i, leaf in enumerate(graph.leafs)
            if leaf.tensor < 0 and not is_copy(leaf.name) and _in(-1 - i, wanted)
        ]
        self._copies = {
            node: [leaf for leaf in leafs if _in(leaf, wanted)]
            for node, leafs in _copies_by_reader(graph).items()
        }
        self._started = False

    @property
    def readers(self) -> Collection[int]:
        """The nodes at which copies are read."""
        return self._copies.keys()

    def read(self, stop: Stop) -> dict[int, Array]:
        """The values that are there since the stop before."""
        there = [*([] if self._started else self._first), *self._copies.get(stop.node.index, ())]
        self._started = True
        return {leaf: read(stop.graph.address_of(leaf)) for leaf in there}


def _in(leaf: int, wanted: Collection[int] | None) -> bool:
    return wanted is None or leaf in wanted


def _copies_by_reader(graph: Graph) -> dict[int, list[int]]:
    """By node: the copies whose first reader it is."""
    found: dict[int, list[int]] = {}
    seen: set[int] = set()
    for i, sources in enumerate(graph.whole.src):
        for leaf in sources:
            if leaf < 0 and leaf not in seen and is_copy(graph.leaf(leaf).name):
                reader = i
                # a view only names the copy; what reads the view runs
                while not graph.whole.exec[reader] and reader + 1 < graph.n_nodes:
                    reader += 1
                found.setdefault(reader, []).append(leaf)
            seen.add(leaf)
    return found


def _leaf(address: int, number: int) -> Leaf:
    tensor = tensor_at(address)
    name = bytes(tensor.name).decode(errors="replace")
    weight = number if is_weight(tensor) else -1
    n_bytes = int(ggml().ggml_nbytes(address))
    return Leaf(name=name, type=_type(tensor), ne=_ne(tensor), bytes=n_bytes, tensor=weight)


def _type(tensor: Tensor) -> str:
    return TYPES[tensor.type].name.lower()


def _ne(tensor: Tensor) -> list[int]:
    ne = [int(n) for n in tensor.ne]
    while len(ne) > 1 and ne[-1] == 1:
        ne.pop()
    return ne


def _words(tensor: Tensor) -> list[int]:
    words = list(tensor.op_params)
    while words and not words[-1]:
        words.pop()
    return words
