"""The graph of a compute under way: its nodes, where their values lie, which values are still in
memory, which tokens their rows stand for, and a listing; and the tokens of the compute, read before
it runs, because later ops may use the memory of its inputs.
"""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Any, Literal, NamedTuple

import numpy as np

from llamacpp_instr.base.patterns import name_matches
from llamacpp_instr.debugger import tensors
from llamacpp_instr.debugger.tensors import Array, name_of, tensor_at
from llamacpp_instr.log.graph.ops import VIEW_OPS, Block, blocks_of, op_params
from llamacpp_instr.log.graph.words import describe
from llamacpp_instr.model.types import TYPES


class Source(NamedTuple):
    """A tensor that a node reads."""

    name: str
    kind: str
    """`node`, `weight`, `cache` or `input`"""
    node: int
    """the index of a node, -1 for a leaf"""
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

    @property
    def reads(self) -> tuple[str, ...]:
        """The names of its sources."""
        return tuple(source.name for source in self.sources)

    def __str__(self) -> str:
        dims = "×".join(str(n) for n in self.shape)
        return f"{self.name} = {self.op}({', '.join(self.reads)})  {self.type} {dims}"


class Ubatch(NamedTuple):
    """The tokens that one compute gets. An array is None if the graph does not have it."""

    n_tokens: int
    tokens: Array | None
    """(n_tokens,) int32; None if the program gave embeddings"""
    positions: Array | None
    """(n_tokens,) int32; None if nothing in the graph depends on them"""
    outputs: Array | None
    """(n_outputs,) int32 the numbers of the tokens whose logits or embeddings are wanted"""

    def numbered(self) -> list[tuple[int, int, int]]:
        """The number, position and id of each token; the number stands for an unknown position."""
        tokens = self.tokens if self.tokens is not None else ()
        at = self.positions if self.positions is not None else range(len(tokens))
        return [(i, int(p), int(t)) for i, (p, t) in enumerate(zip(at, tokens, strict=True))]


class LiveGraph:
    """The nodes of one graph, in the order in which they run, as ggml holds them in memory."""

    def __init__(self, info: tensors.Info) -> None:
        lib = tensors.ggml()
        n = info.n_nodes
        self.id = int(info.graph_id)
        self.is_encoder = bool(info.encoder)
        self.addresses = [int(lib.ggml_graph_node(info.graph, i)) for i in range(n)]
        self._tensors = [tensor_at(address) for address in self.addresses]
        layers = list(info.layers[:n])
        ops = [lib.ggml_op_name(tensor.op).decode() for tensor in self._tensors]
        names = [name_of(tensor) for tensor in self._tensors]
        self._sources = known = {
            address: Source(name, "node", i, address)
            for i, (address, name) in enumerate(zip(self.addresses, names, strict=True))
        }
        sources: list[tuple[Source, ...]] = []
        for own, tensor in zip(self.addresses, self._tensors, strict=True):
            # a cast names itself as what it copies to
            read = [int(address) for address in tensor.src if address and address != own]
            for a in read:
                if a not in known:
                    known[a] = Source(name_of(tensor_at(a)), _kind(a), -1, a)
            sources.append(tuple(known[a] for a in read))
        leafs = [source for source in known.values() if source.node < 0]
        self.leaf_addresses = [leaf.address for leaf in leafs]
        """weights, caches and inputs, in the order in which nodes name them"""
        self.leafs = {leaf.name: leaf.address for leaf in leafs}
        """the addresses of weights, caches and inputs by name"""
        numbers = {leaf.address: -1 - i for i, leaf in enumerate(leafs)}
        src = [[numbers.get(s.address, s.node) for s in of_node] for of_node in sources]
        blocks = blocks_of(ops, names, layers, src, [leaf.name for leaf in leafs])
        self.nodes: list[Node] = []
        for i, tensor in enumerate(self._tensors):
            read_leafs = [of.name for of in map(self._behind, sources[i]) if of.node < 0]
            self.nodes.append(
                Node(
                    i, names[i], ops[i], layers[i], blocks[i], TYPES[tensor.type].name,
                    tensors.shape_of(tensor), sources[i],
                    describe(ops[i], names[i], read_leafs, layers[i]),
                    op_params(ops[i], list(tensor.op_params)),
                    ops[i] not in VIEW_OPS and 0 not in list(tensor.ne),
                    self.addresses[i],
                )
            )  # fmt: skip

    def _behind(self, source: Source) -> Source:
        """What a source is a view of; itself if it is none."""
        while source.node >= 0 and self.nodes[source.node].op in VIEW_OPS:
            source = self.nodes[source.node].sources[0]
        return source

    def __len__(self) -> int:
        return len(self.nodes)

    @cached_property
    def by_name(self) -> dict[str, int]:
        """The index of every node by name; of several with the same name, the last that runs."""
        found: dict[str, int] = {}
        for node in self.nodes:
            if node.runs or node.name not in found:
                found[node.name] = node.index
        return found

    @cached_property
    def listing(self) -> Listing:
        """The graph as a text."""
        return Listing(self)

    @cached_property
    def rows(self) -> list[Rows | None]:
        """What the rows of every node stand for."""
        return rows_of_nodes(self)

    def address_of(self, number: int) -> int:
        """The address of node `number` or, if negative, of leaf -1 - `number`."""
        return self.addresses[number] if number >= 0 else self.leaf_addresses[-1 - number]

    def ubatch(self, n_tokens: int) -> Ubatch:
        """The inputs of a compute that is about to begin."""

        def of(name: str, count: int | None = None) -> Array | None:
            address = self.leafs.get(name)
            # models with several kinds of positions (M-RoPE) have the first kind first
            return tensors.read(address).reshape(-1)[:count] if address else None

        return Ubatch(n_tokens, of("inp_tokens", n_tokens), of("inp_pos", n_tokens), of("out_ids"))

    def is_at(self, info: tensors.Info) -> bool:
        """Whether this is the graph of `info`: it has as many nodes, at the same addresses."""
        n = len(self.addresses)
        node = tensors.ggml().ggml_graph_node
        return n == info.n_nodes and all(
            int(node(info.graph, i)) == self.addresses[i] for i in {0, n // 2, n - 1}
        )

    def why_no_op(self, pattern: str) -> str:
        """The end of a message that no op has such a name: a view has it, or the nearest names."""
        for name, index in self.by_name.items():
            node = self.nodes[index]
            if node.op in VIEW_OPS and name_matches(name, pattern):
                of = self._behind(Source(name, "node", index, node.address)).name
                return f"; {name} is only a view of {of}"
        ops = [name for name, index in self.by_name.items() if self.nodes[index].op not in VIEW_OPS]
        return self.nearest(pattern.strip("*"), ops)

    def nearest(self, name: str, names: Sequence[str] = ()) -> str:
        """The end of a message that no tensor has a name, or none of `names`: those like it."""
        near = difflib.get_close_matches(name, names or [*self.by_name, *self.leafs], 3, 0.5)
        return f"; the nearest are {', '.join(near)}" if near else ""

    def intact(self, address: int, at: int) -> bool:
        """Whether the value of a node, or of a leaf, is still in memory after node `at` ran: no
        kernel has written over it since. A node that has not run yet has none."""
        source = self._sources.get(address)
        node = source.node if source else -1
        if node > at:
            return False
        if node >= 0 and not self.nodes[node].runs:
            # a view shows memory of another tensor, which must be intact
            sources = self.nodes[node].sources
            return not sources or self.intact(sources[0].address, at)
        tensor = tensor_at(address)
        begin = int(tensor.data or 0)
        begins, ends = self._written
        later = slice(node + 1, at + 1)
        overlaps = (begins[later] < begin + int(tensors.ggml().ggml_nbytes(address))) & (
            ends[later] > begin
        )
        return begin != 0 and (not bool(overlaps.any()) or _kind(address) in ("weight", "cache"))

    @cached_property
    def _written(self) -> tuple[Any, Any]:
        """(n_nodes,) the first byte that each node writes and the one after the last."""
        lib = tensors.ggml()
        begins, sizes = np.zeros((2, len(self)), np.uint64)
        for node, tensor in zip(self.nodes, self._tensors, strict=True):
            if node.runs:
                begins[node.index] = tensor.data or 0
                sizes[node.index] = lib.ggml_nbytes(node.address)
        return begins, begins + sizes


def _kind(address: int) -> str:
    tensor = tensor_at(address)
    if name_of(tensor).startswith("cache_") and not tensor.view_src:
        return "cache"
    return "weight" if tensors.is_weight(tensor) else "input"


# --- which tokens the rows of a node stand for ---


class Rows(NamedTuple):
    """A node has a row for each of these, along dimension `axis` in ggml's order."""

    axis: int
    of: Literal["tokens", "outputs"]
    """all tokens of the ubatch, or those whose logits are wanted"""


def rows_of_nodes(graph: LiveGraph) -> list[Rows | None]:
    """The rows of every node of a graph, derived from how the graph computes it; None for a node
    whose dimensions are not tokens, and for an op whose result is not understood here. A shape
    alone is ambiguous: with four tokens and four heads it looks the same both ways."""
    found: list[Rows | None] = []
    counts: dict[str, int] = {}
    for node in graph.nodes:
        rows = _rows(node, found)
        if rows is not None:
            n = node.ne[rows.axis]
            rows = rows if counts.setdefault(rows.of, n) == n else None
        found.append(rows)
    return found


def token_numbers(rows: Rows, ubatch: Ubatch) -> list[int]:
    """For each row the number of its token in the ubatch."""
    if rows.of == "tokens" or ubatch.outputs is None:
        return list(range(ubatch.n_tokens))
    return [int(number) for number in ubatch.outputs]


_COPIES = frozenset({"CPY", "CONT", "DUP", "RESHAPE"})
"""ops that keep the values and their order, and may take the dimensions apart in another way"""
_SAME = frozenset(
    {
        "ADD", "SUB", "MUL", "DIV", "ADD1", "ADD_ID", "SCALE", "SQR", "SQRT", "LOG", "SIN", "COS",
        "CLAMP", "UNARY", "GLU", "NORM", "RMS_NORM", "L2_NORM", "SOFT_MAX", "ROPE", "ARGSORT",
        "TOP_K", "SUM_ROWS", "MEAN",
    }
)  # fmt: skip
"""ops that compute each row on its own, and keep its place"""


def _rows(node: Node, found: Sequence[Rows | None]) -> Rows | None:
    known = [found[source.node] if source.node >= 0 else None for source in node.sources]
    ne = node.ne
    leafs = [source.name for source in node.sources if source.node < 0]
    if node.op == "GET_ROWS" and len(known) > 1:
        if "out_ids" in leafs:
            return Rows(1, "outputs") if known[0] else None
        return Rows(1, "tokens") if "inp_tokens" in leafs else None
    if node.op == "MUL_MAT" and len(known) > 1:
        return known[1] if known[1] and known[1].axis > 0 else None
    if node.op == "MUL_MAT_ID" and len(known) > 1:
        return known[1] and Rows(2, known[1].of)
    if node.op == "FLASH_ATTN_EXT":
        return known[0] and Rows(2, known[0].of) if ne[3] == 1 else None
    read_rows = [(rows, of) for rows, of in zip(known, node.sources, strict=True) if rows]
    if not read_rows:
        return None
    rows, first = read_rows[0]
    source = tensor_at(first.address)
    if node.op == "PERMUTE":
        return Rows(tensor_at(node.address).op_params[rows.axis], rows.of)
    if node.op == "TRANSPOSE":
        return Rows((1, 0, 2, 3)[rows.axis], rows.of)
    if node.op == "VIEW":
        return _of_view(rows, source, tensor_at(node.address))
    if node.op == "CONCAT":
        return rows if node.params.get("dim") != rows.axis else None
    if node.op in _COPIES:
        return _reshaped(rows, list(source.ne), ne)
    if node.op in _SAME and source.ne[rows.axis] == ne[rows.axis]:
        return rows
    return None


def _of_view(rows: Rows, source: tensors.Tensor, view: tensors.Tensor) -> Rows | None:
    """The dimension of a view that steps from row to row of its source, through all of them."""
    n, step = source.ne[rows.axis], source.nb[rows.axis]
    for axis in range(4):
        is_sure = n > 1 or prod(view.ne[:axis]) > 1 or axis == rows.axis
        if is_sure and view.ne[axis] == n and view.nb[axis] == step:
            return Rows(axis, rows.of)
    return None


def _reshaped(rows: Rows, before: Sequence[int], after: Sequence[int]) -> Rows | None:
    """The dimension after a reshape: what is inside it and its length are the same."""
    if list(before) == list(after):
        return rows
    inner, n = prod(before[: rows.axis]), before[rows.axis]
    for axis in range(4):
        if prod(after[:axis]) == inner and after[axis] == n and (axis > 0 or rows.axis == 0):
            return Rows(axis, rows.of)
    return None


_DEFAULTS = (0, "UNDEFINED", "NONE")


class Listing:
    """The graph as a text, the source text that an editor shows: one line for each op that runs
    (views do not), counted from 1, under headings for layers and blocks."""

    def __init__(self, graph: LiveGraph) -> None:
        self.reference = 0
        """its number among the listings that a client knows"""
        self.nodes: dict[int, Node] = {}
        """by line"""
        self.line_of: dict[int, int] = {}
        """line by index of a node; for a view, the line of the next node that runs"""
        lines: list[str] = []
        part: tuple[int, str] | None = None
        width = max((len(_statement(node)) for node in graph.nodes if node.runs), default=0)
        waiting: list[int] = []
        for node in graph.nodes:
            waiting.append(node.index)
            if not node.runs:
                continue
            if (node.layer, node.block) != part:
                part = node.layer, node.block
                layer = f"layer {node.layer}: " if node.layer >= 0 else ""
                lines.append(f"# {layer}{node.block}")
            lines.append(f"{_statement(node):<{min(width, 100)}}  # {node.purpose}")
            self.nodes[len(lines)] = node
            self.line_of |= dict.fromkeys(waiting, len(lines))
            waiting = []
        self.line_of |= dict.fromkeys(waiting, len(lines))
        self.lines = tuple(lines)

    @property
    def name(self) -> str:
        return f"graph-{self.reference}"


def _statement(node: Node) -> str:
    params = [
        f"{key}={value:g}" if isinstance(value, float) else f"{key}={value}"
        for key, value in node.params.items()
        if value not in _DEFAULTS
    ]
    given = ", ".join((", ".join(node.reads), *params))
    shape = "×".join(str(n) for n in node.shape)
    return f"    {node.name}: {node.type}[{shape}] = {node.op}({given})"
