"""The graph of a compute under way: its nodes, where their values lie, which are still there; and
the tokens of the compute, read before it runs: later ops may use the memory of its inputs."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from llamacpp_instr.base.patterns import name_matches
from llamacpp_instr.debugger.ggml import Info, Tensor, ggml, tensor_at
from llamacpp_instr.debugger.tensors import Array, is_weight, read, shape_of
from llamacpp_instr.log.graph.ops import VIEW_OPS, Block, blocks_of, op_params
from llamacpp_instr.log.graph.words import describe
from llamacpp_instr.model.types import TYPES


@dataclass(frozen=True)
class Source:
    """A tensor that a node reads."""

    name: str
    kind: str
    """`node`, `weight`, `cache` or `input`"""
    node: int
    """the index of a node, -1 of a leaf"""
    address: int


@dataclass(frozen=True)
class Node:
    """A node of the graph."""

    index: int
    name: str
    op: str
    layer: int
    """-1 outside all layers"""
    block: Block
    type: str
    shape: tuple[int, ...]
    """numpy's order"""
    sources: tuple[Source, ...]
    purpose: str
    """what it does, in words"""
    params: dict[str, Any]
    runs: bool
    """whether a kernel runs for it; views only name memory"""
    address: int

    @property
    def ne(self) -> list[int]:
        """ggml's dimensions, all four."""
        return list(tensor_at(self.address).ne)

    def __str__(self) -> str:
        sources = ", ".join(source.name for source in self.sources)
        dims = "×".join(str(n) for n in self.shape)
        return f"{self.name} = {self.op}({sources})  {self.type} {dims}"


@dataclass(frozen=True)
class Ubatch:
    """Of the tokens that one compute gets. An array is None if the graph does not have it."""

    n_tokens: int
    tokens: Array | None
    """(n_tokens,) int32; None if the program gave embeddings"""
    positions: Array | None
    """(n_tokens,) int32; None if nothing in the graph depends on them"""
    outputs: Array | None
    """(n_outputs,) int32 those of the tokens whose logits or embeddings are wanted"""


class LiveGraph:
    """The nodes of one graph, in the order in which they run, as ggml holds them in memory."""

    def __init__(self, info: Info) -> None:
        lib = ggml()
        n = info.n_nodes
        self.id = int(info.graph_id)
        self.is_encoder = bool(info.encoder)
        self.addresses = [int(lib.ggml_graph_node(info.graph, i)) for i in range(n)]
        self._tensors = [tensor_at(address) for address in self.addresses]
        layers = list(info.layers[:n])
        index = {address: i for i, address in enumerate(self.addresses)}
        leafs: dict[int, int] = {}
        src: list[list[int]] = []
        for own, tensor in zip(self.addresses, self._tensors, strict=True):
            # a cast names itself as what it copies to
            of = [int(address) for address in tensor.src if address and address != own]
            src.append(
                [index[a] if a in index else -1 - leafs.setdefault(a, len(leafs)) for a in of]
            )
        self.leaf_addresses = list(leafs)
        """weights, caches and inputs, in the order in which nodes name them"""
        ops = [lib.ggml_op_name(tensor.op).decode() for tensor in self._tensors]
        names = [_name(tensor) for tensor in self._tensors]
        leaf_names = [_name(tensor_at(address)) for address in self.leaf_addresses]
        blocks = blocks_of(ops, names, layers, src, leaf_names)
        sources = [Source(_name(tensor_at(a)), _kind(a), -1, a) for a in self.leaf_addresses]
        self.nodes: list[Node] = []
        for i, tensor in enumerate(self._tensors):
            of_node = tuple(
                sources[-1 - s] if s < 0 else Source(names[s], "node", s, self.addresses[s])
                for s in src[i]
            )
            self.nodes.append(
                Node(
                    i, names[i], ops[i], layers[i], blocks[i], TYPES[tensor.type].name,
                    shape_of(tensor), of_node,
                    describe(ops[i], names[i], self._named_leafs(of_node), layers[i]),
                    op_params(ops[i], list(tensor.op_params)),
                    ops[i] not in VIEW_OPS and 0 not in list(tensor.ne),
                    self.addresses[i],
                )
            )  # fmt: skip

    def _named_leafs(self, sources: Sequence[Source]) -> list[str]:
        """The names of the leafs that a node reads, through views too."""
        found = []
        for source in sources:
            while source.node >= 0 and self.nodes[source.node].op in VIEW_OPS:
                source = self.nodes[source.node].sources[0]
            if source.node < 0:
                found.append(source.name)
        return found

    def __len__(self) -> int:
        return len(self.nodes)

    @cached_property
    def by_name(self) -> dict[str, int]:
        """The index of every node by its name; of several with one name, the last that runs."""
        found: dict[str, int] = {}
        for node in self.nodes:
            if node.runs or node.name not in found:
                found[node.name] = node.index
        return found

    @cached_property
    def leafs(self) -> dict[str, int]:
        """The addresses of weights, caches and inputs by name."""
        return {_name(tensor_at(address)): address for address in self.leaf_addresses}

    def address_of(self, number: int) -> int:
        """Of a node, or of leaf -1 - `number`."""
        return self.addresses[number] if number >= 0 else self.leaf_addresses[-1 - number]

    def ubatch(self, n_tokens: int) -> Ubatch:
        """The inputs of a compute that is about to begin."""

        def of(name: str, count: int | None = None) -> Array | None:
            address = self.leafs.get(name)
            # models with several kinds of positions (M-RoPE) have the first kind first
            return read(address).reshape(-1)[:count] if address else None

        return Ubatch(n_tokens, of("inp_tokens", n_tokens), of("inp_pos", n_tokens), of("out_ids"))

    def is_at(self, info: Info) -> bool:
        """Whether this is the graph of `info`: it has as many nodes, at the same addresses."""
        n = len(self.addresses)
        node = ggml().ggml_graph_node
        return n == info.n_nodes and all(
            int(node(info.graph, i)) == self.addresses[i] for i in {0, n // 2, n - 1}
        )

    def why_no_op(self, pattern: str) -> str:
        """The end of a message that no op has such a name: a view has it, or the nearest names."""
        for name, index in self.by_name.items():
            node = self.nodes[index]
            if node.op in VIEW_OPS and name_matches(name, pattern):
                while node.op in VIEW_OPS and node.sources[:1] and node.sources[0].node >= 0:
                    node = self.nodes[node.sources[0].node]
                of = node.sources[0].name if node.op in VIEW_OPS and node.sources else node.name
                return f"; {name} is only a view of {of}"
        ops = [name for name, index in self.by_name.items() if self.nodes[index].op not in VIEW_OPS]
        near = difflib.get_close_matches(pattern.strip("*"), ops, 3, 0.5)
        return f"; the nearest are {', '.join(near)}" if near else ""

    def nearest(self, name: str) -> list[str]:
        """At most three names that look like `name`."""
        return difflib.get_close_matches(name, [*self.by_name, *self.leafs], 3, 0.5)

    def intact(self, address: int, at: int) -> bool:
        """Whether the value of a node, or of a leaf, is still in memory after node `at` ran: no
        kernel has written over it since. A node that has not run yet has none."""
        node = self._position.get(address, -1)
        if node > at:
            return False
        if node >= 0 and not self.nodes[node].runs:
            # a view shows memory of another tensor, which must be intact
            source = self.nodes[node].sources
            return not source or self.intact(source[0].address, at)
        tensor = tensor_at(address)
        begin = int(tensor.data or 0)
        begins, ends = self._written
        later = slice(node + 1, at + 1)
        overlaps = (begins[later] < begin + int(ggml().ggml_nbytes(address))) & (
            ends[later] > begin
        )
        return begin != 0 and (not bool(overlaps.any()) or _kind(address) in ("weight", "cache"))

    @cached_property
    def _position(self) -> dict[int, int]:
        return {address: i for i, address in enumerate(self.addresses)}

    @cached_property
    def _written(self) -> tuple[Any, Any]:
        """(n_nodes,) the first byte that each node writes and the one after the last."""
        lib = ggml()
        begins, sizes = np.zeros((2, len(self)), np.uint64)
        for node, tensor in zip(self.nodes, self._tensors, strict=True):
            if node.runs:
                begins[node.index] = tensor.data or 0
                sizes[node.index] = lib.ggml_nbytes(node.address)
        return begins, begins + sizes


def _name(tensor: Tensor) -> str:
    return bytes(tensor.name).decode(errors="replace")


def _kind(address: int) -> str:
    tensor = tensor_at(address)
    if _name(tensor).startswith("cache_") and not tensor.view_src:
        return "cache"
    return "weight" if is_weight(tensor) else "input"
