"""The residual stream of a graph: where it is after each layer, and what each block adds to it.

It is found by structure. Every path from the tokens to the logits goes through the stream, so after
each layer there is a node that no path avoids. An architecture that has no such node (because it
carries several streams, or values of the first layer, past its layers) is refused with one line.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from llamacpp_instr.base.errors import UsageError
from llamacpp_instr.debugger.graph import LiveGraph, Node

_LOGITS = "result_output"
"""what llama.cpp calls the logits, in almost every architecture"""
_HEADS = ("output.weight", "token_embd.weight")

Part = Literal["attention", "feed-forward"]


@dataclass(frozen=True)
class Residual:
    """The residual stream of one graph."""

    begin: Node
    """the stream before the first layer"""
    after: dict[int, Node]
    """the stream after each layer"""
    cuts: tuple[int, ...]
    """the indexes of all nodes through which every path from the tokens to the logits goes"""
    logits: Node

    @property
    def end(self) -> Node:
        """The stream after the last layer."""
        return self.after[max(self.after)]

    def before(self, layer: int) -> Node:
        """The stream that a layer reads."""
        return self.after.get(layer - 1, self.begin)


def find_residual(graph: LiveGraph) -> Residual:
    """The residual stream of a graph that computes logits.

    Raises `UsageError` if it computes none, or if a layer has no node that all paths share.
    """
    index = _logits(graph)
    on_path = _between_tokens_and(graph, index)
    cuts = _cuts(graph, on_path)
    layers = [i for i in on_path if graph.nodes[i].layer >= 0]
    if not layers:
        raise UsageError("this graph has no layers")
    last_of: dict[int, int] = {}
    for i in layers:
        last_of[graph.nodes[i].layer] = i
    begin = [cut for cut in cuts if cut < layers[0]]
    if not begin:
        raise UsageError("the tokens reach the first layer in several ways; there is no one stream")
    after: dict[int, Node] = {}
    for layer in sorted(last_of):
        reached = max(last_of[of] for of in last_of if of <= layer)
        following = next((i for i in layers if i > reached), index)
        cut = next((cut for cut in cuts if cut >= reached), index)
        if cut >= following:
            raise UsageError(
                f"layer {layer} does not end in one node that all later ones read, so this "
                "architecture has no residual stream that could be shown"
            )
        after[layer] = graph.nodes[cut]
    return Residual(graph.nodes[begin[-1]], after, tuple(cuts), graph.nodes[index])


def _logits(graph: LiveGraph) -> int:
    index = graph.by_name.get(_LOGITS)
    if index is None:
        last = graph.nodes[-1]
        if last.op != "MUL_MAT" or last.sources[0].name not in _HEADS:
            raise UsageError("this graph computes no logits")
        index = last.index
    return index


def block_outputs(graph: LiveGraph, residual: Residual, layer: int) -> dict[Part, list[Node]]:
    """The nodes that the blocks of a layer add to the stream, by block. Raises `UsageError` if the
    graph has no such layer."""
    if layer not in residual.after:
        layers = sorted(residual.after)
        raise UsageError(f"there is no layer {layer}; the layers are {layers[0]} to {layers[-1]}")
    begin, end = residual.before(layer).index, residual.after[layer].index
    stream = {begin, *(cut for cut in residual.cuts if begin <= cut <= end)}
    found: dict[Part, list[Node]] = {}
    for node in graph.nodes[begin + 1 : end + 1]:
        read = [source.node for source in node.sources]
        if node.op == "ADD" and len({i in stream for i in read}) == 2:
            stream.add(node.index)
            (added,) = (i for i in read if i not in stream)
            for part, output in _parts(graph, added, begin, stream):
                found.setdefault(part, []).append(output)
        elif read and read[0] in stream and node.op in _PASSING:
            stream.add(node.index)
    return found


_PASSING = frozenset({"GET_ROWS", "SCALE", "CONT", "VIEW", "RESHAPE"})
"""ops between the stream and the sum that a block's output is added in"""


def _parts(
    graph: LiveGraph, added: int, begin: int, stream: set[int]
) -> Iterator[tuple[Part, Node]]:
    """What is added, taken apart where attention and feed-forward are added to each other first."""
    if added < 0:
        return
    node = graph.nodes[added]
    summands = [source.node for source in node.sources]
    if node.op == "ADD" and all(i > begin for i in summands):
        parts = {_part(graph, i, begin, stream) for i in summands}
        if len(parts) > 1:
            for i in summands:
                yield from _parts(graph, i, begin, stream)
            return
    yield _part(graph, added, begin, stream), node


def _part(graph: LiveGraph, index: int, begin: int, stream: set[int]) -> Part:
    """Whether something mixes tokens on the way from the stream."""
    seen, todo = set(), [index]
    while todo:
        i = todo.pop()
        if i <= begin or i in stream or i in seen:
            continue
        seen.add(i)
        if graph.nodes[i].block == "attention":
            return "attention"
        todo += [source.node for source in graph.nodes[i].sources]
    return "feed-forward"


def _between_tokens_and(graph: LiveGraph, index: int) -> list[int]:
    """The nodes that depend on the tokens, and that node `index` depends on, in order."""
    needed = {index}
    for i in range(index, -1, -1):
        if i in needed:
            needed |= {source.node for source in graph.nodes[i].sources if source.node >= 0}
    fed: set[int] = set()
    for i in sorted(needed):
        if _reads_tokens(graph.nodes[i]) or any(s.node in fed for s in graph.nodes[i].sources):
            fed.add(i)
    return sorted(fed)


def _reads_tokens(node: Node) -> bool:
    return any(of.node < 0 and of.name in ("inp_tokens", "inp_embd") for of in node.sources)


def _cuts(graph: LiveGraph, on_path: Sequence[int]) -> list[int]:
    """The nodes that no edge passes by: of those between, an edge that begins before a node and
    ends after it is a path around it."""
    inside = set(on_path)
    furthest: dict[int, int] = {}
    for i in on_path:
        for source in graph.nodes[i].sources:
            if source.node in inside:
                furthest[source.node] = i
    cuts = []
    reach = max((i for i in on_path if _reads_tokens(graph.nodes[i])), default=-1)
    for i in on_path:
        if i >= reach:
            cuts.append(i)
        reach = max(reach, furthest.get(i, i))
    return cuts
