"""The residual stream of a graph: where it is after each layer, what each block adds to it, and the
logit lens: what the model would say if it ended after a layer.

The stream is found by structure. Every path from the tokens to the logits goes through it, so after
each layer there is a node that no path avoids. An architecture that has no such node (because it
carries several streams, or values of the first layer, past its layers) is refused with one line.
"""

from __future__ import annotations

import ctypes
from collections.abc import Collection, Iterator, Sequence, Set
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from math import prod
from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from llamacpp_instr.base.errors import InstrError, NativeError, UsageError
from llamacpp_instr.debugger.graph import LiveGraph, Node, Ubatch
from llamacpp_instr.debugger.stop import OfGraph, Stop
from llamacpp_instr.debugger.tensors import MAX_SRC, Array, Tensor, ggml, tensor_at
from llamacpp_instr.llama.native import InitParams
from llamacpp_instr.llama.threads import default_threads
from llamacpp_instr.model.types import TYPES

_LOGITS = "result_output"  # what llama.cpp calls the logits, in almost every architecture
_HEADS = ("output.weight", "token_embd.weight")

Part = Literal["attention", "feed-forward"]


class Residual(NamedTuple):
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
    """The residual stream of a graph that computes logits. Raises `UsageError` if it computes none,
    or if a layer has no node that all paths share."""
    last = graph.nodes[-1]
    index = graph.by_name.get(_LOGITS, last.index)
    is_head = last.op == "MUL_MAT" and last.sources[0].name in _HEADS
    if _LOGITS not in graph.by_name and not is_head:
        raise UsageError("this graph computes no logits")
    on_path = _between_tokens_and(graph, index)
    cuts = _cuts(graph, on_path)
    layers = [i for i in on_path if graph.nodes[i].layer >= 0]
    if not layers:
        raise UsageError("this graph has no layers")
    last_of = {graph.nodes[i].layer: i for i in layers}
    begin = [cut for cut in cuts if cut < layers[0]]
    if not begin:
        raise UsageError("the tokens reach the first layer in several ways, not as one stream")
    after: dict[int, Node] = {}
    for layer in sorted(last_of):
        reached = max(last_of[of] for of in last_of if of <= layer)
        cut = next((cut for cut in cuts if cut >= reached), index)
        if cut >= next((i for i in layers if i > reached), index):
            raise UsageError(
                f"layer {layer} does not end in one node that all later ones read, so this "
                "architecture has no residual stream that could be shown"
            )
        after[layer] = graph.nodes[cut]
    return Residual(graph.nodes[begin[-1]], after, tuple(cuts), graph.nodes[index])


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
    blocks = {graph.nodes[i].block for i in _needed(graph, begin, index, stream)}
    return "attention" if "attention" in blocks else "feed-forward"


def _between_tokens_and(graph: LiveGraph, index: int) -> list[int]:
    """The nodes that depend on the tokens, and that node `index` depends on, in order."""
    fed: set[int] = set()
    for i in _needed(graph, -1, index):
        if _reads_tokens(graph.nodes[i]) or any(s.node in fed for s in graph.nodes[i].sources):
            fed.add(i)
    return sorted(fed)


def _needed(graph: LiveGraph, begin: int, index: int, known: Set[int] = frozenset()) -> list[int]:
    """The nodes after `begin` that node `index`, the last of them, needs besides known ones."""
    needed = {index}
    for i in range(index, begin, -1):
        if i in needed and i not in known:
            needed |= {source.node for source in graph.nodes[i].sources}
    return sorted(i for i in needed if i > begin and i not in known)


def _reads_tokens(node: Node) -> bool:
    return any(of.node < 0 and of.name in ("inp_tokens", "inp_embd") for of in node.sources)


def _cuts(graph: LiveGraph, on_path: Sequence[int]) -> list[int]:
    """The nodes that no edge bypasses: an edge that begins before a node and ends after it is a
    path around it."""
    last_reader = {source.node: i for i in on_path for source in graph.nodes[i].sources}
    cuts = []
    reach = max((i for i in on_path if _reads_tokens(graph.nodes[i])), default=-1)
    for i in on_path:
        if i >= reach:
            cuts.append(i)
        reach = max(reach, last_reader.get(i, i))
    return cuts


# --- the logit lens ---

TOKENS_KEPT = 64  # at the end of each compute; these and the tokens with logits can be looked at
_F32 = 0  # GGML_TYPE_F32
_CPU = 0  # GGML_BACKEND_DEVICE_TYPE_CPU
_MAX_BYTES = 2**31
_ROWS = "out_ids"  # the input that selects the rows of the tokens whose logits are wanted


class Tail:
    """The end of a graph, from the last layer's output to the logits, computed again for other
    rows; `close` frees it.

    The ops are cloned into a graph of their own, with the model's own weights where they lie, so
    what is computed is what the model computes: output norm, head, scaling and capping of any
    architecture. Invariant: what cannot be cloned is refused: ggml ends the process on misuse.
    """

    def __init__(self, graph: LiveGraph, residual: Residual) -> None:
        """Raises `UsageError` if it cannot be computed apart from the rest."""
        with ExitStack() as memory:
            lib, end = ggml(), residual.end
            nodes = [graph.nodes[i] for i in _needed(graph, end.index, residual.logits.index)]
            _check_tail(nodes, end)
            room = (len(nodes) + 8) * lib.ggml_tensor_overhead() + lib.ggml_graph_overhead()
            self._ctx = lib.ggml_init(InitParams(room, None, True))
            if not self._ctx:
                raise NativeError("ggml could not allocate a graph")
            memory.callback(lib.ggml_free, self._ctx)
            clones: dict[int, int] = {}
            self._input = clones[end.address] = self._clone(
                tensor_at(end.address), {}, is_leaf=True
            )
            rows = graph.leafs.get(_ROWS)
            if rows:
                clones[rows] = self._clone(tensor_at(rows), {}, is_leaf=True)
            for node in nodes:
                clones[node.address] = self._clone(tensor_at(node.address), clones)
            self._output = clones[residual.logits.address]
            first, last = tensor_at(self._input), tensor_at(self._output)
            self.width, self._n_in = int(first.ne[0]), int(first.ne[1])
            self.n_vocab, self._n = int(last.ne[0]), int(last.ne[1])
            if self._n > self._n_in or last.ne[2] * last.ne[3] != 1:
                raise UsageError("the logits are not rows of the stream after the last layer")
            device = _device_of_weights(nodes)
            for node in nodes:
                if not lib.ggml_backend_dev_supports_op(device, clones[node.address]):
                    raise UsageError(
                        f"the device of the output weights cannot compute {node.op} alone"
                    )
            self._backend = lib.ggml_backend_dev_init(device, None)
            if not self._backend:
                raise NativeError("ggml could not start a backend for the output weights")
            memory.callback(lib.ggml_backend_free, self._backend)
            if lib.ggml_backend_dev_type(device) == _CPU:
                lib.ggml_backend_cpu_set_n_threads(self._backend, default_threads())
            buffer = lib.ggml_backend_alloc_ctx_tensors(self._ctx, self._backend)
            if not buffer:
                raise NativeError("ggml could not allocate the logits")
            memory.callback(lib.ggml_backend_buffer_free, buffer)
            if rows:  # the rows that the model would select are the first ones here
                first_rows = np.arange(self._n, dtype=np.int32)
                lib.ggml_backend_tensor_set(
                    clones[rows], first_rows.ctypes.data, 0, first_rows.nbytes
                )
            self._graph = lib.ggml_new_graph(self._ctx)
            lib.ggml_build_forward_expand(self._graph, self._output)
            self.close = memory.pop_all().close
            """frees the graph"""

    def logits(self, rows: Array) -> npt.NDArray[np.float32]:
        """(rows, vocabulary) the logits if the last layer gave `rows`, (rows, width)."""
        return np.concatenate(
            [self._compute(rows[i : i + self._n]) for i in range(0, len(rows), self._n)]
        )

    def _compute(self, rows: Array) -> npt.NDArray[np.float32]:
        """At most as many rows as the graph has; the others are zero."""
        lib = ggml()
        full = np.zeros((self._n_in, self.width), np.float32)
        full[: len(rows)] = rows
        lib.ggml_backend_tensor_set(self._input, full.ctypes.data, 0, full.nbytes)
        # not in this thread: a recorder times every kernel of the thread that computes
        with ThreadPoolExecutor(1) as thread:
            computed = thread.submit(lib.ggml_backend_graph_compute, self._backend, self._graph)
        if computed.result() != 0:
            raise InstrError("ggml could not compute the end of the graph")
        out = np.empty((self._n, self.n_vocab), np.float32)
        lib.ggml_backend_tensor_get(self._output, out.ctypes.data, 0, out.nbytes)
        return out[: len(rows)]

    def _clone(self, of: Tensor, clones: dict[int, int], is_leaf: bool = False) -> int:
        """A tensor that is computed as `of` is, from the clones of its sources."""
        ne = [max(1, n) for n in of.ne]  # a ubatch without outputs has no rows
        address: int = ggml().ggml_new_tensor(self._ctx, of.type, 4, (ctypes.c_int64 * 4)(*ne))
        clone = tensor_at(address)
        clone.name = of.name
        if is_leaf:
            return address
        clone.op, clone.op_params = of.op, of.op_params
        for i in range(MAX_SRC):
            if of.src[i]:
                clone.src[i] = clones.get(of.src[i], of.src[i])
        if of.view_src:
            # a view of a view has the first tensor as its source
            clone.nb = of.nb
            clone.view_src = clones.get(of.view_src, of.view_src)
            clone.view_offs = of.view_offs
        return address


def _check_tail(nodes: Sequence[Node], end: Node) -> None:
    """Raises `UsageError` unless the nodes after `end` can be cloned."""
    inside = {end.address, *(node.address for node in nodes)}
    tensor = tensor_at(end.address)
    if tensor.type != _F32 or prod(tensor.ne[2:]) != 1 or tensor.view_src:
        raise UsageError(f"{end.name}, the stream after the last layer, is not a matrix")
    size = 0
    for node in nodes:
        of = tensor_at(node.address)
        size += TYPES[of.type].row_bytes(int(prod(max(1, n) for n in of.ne)))
        if node.runs and of.view_src:
            raise UsageError(f"{node.name} writes into another tensor; it cannot be repeated")
        if of.view_src and of.view_src not in inside:
            raise UsageError(f"{node.name} is a view of a tensor before the last layer's output")
        for source in node.sources:
            if source.node >= 0 and source.address not in inside:
                raise UsageError(
                    f"{node.name} reads {source.name} besides the stream after the last layer; "
                    "the logit lens cannot tell what other layers would have in its place"
                )
            if source.node < 0 and source.kind != "weight" and source.name != _ROWS:
                raise UsageError(
                    f"{node.name} reads {source.name}, an input, after the last layer; the "
                    "logit lens reads only weights there"
                )
    if size > _MAX_BYTES:
        raise UsageError(
            f"the logits of this compute take {size:,} bytes; ask for those of fewer tokens"
        )


def _device_of_weights(nodes: Sequence[Node]) -> int:
    """The device of the weights that the nodes read. Raises `UsageError` for several."""
    lib = ggml()
    cpu = int(lib.ggml_backend_dev_by_type(_CPU))
    devices: dict[int, str] = {}
    for source in (s for node in nodes for s in node.sources if s.kind == "weight"):
        kind = lib.ggml_backend_buffer_get_type(tensor_at(source.address).buffer)
        # memory of the host belongs to the device that shares it, but the CPU computes there
        is_host = lib.ggml_backend_buft_is_host(kind)
        devices[(not is_host and lib.ggml_backend_buft_get_device(kind)) or cpu] = source.name
    if len(devices) > 1:
        raise UsageError(
            "the logit lens needs all weights after the last layer on one device; "
            f"{' and '.join(devices.values())} are on several"
        )
    return next(iter(devices), cpu)


class Guess(NamedTuple):
    """What the model would say after a layer, about the token that follows one of the ubatch."""

    layer: int
    logits: npt.NDArray[np.float32]
    """(vocabulary,)"""

    def top(self, n: int = 10) -> list[tuple[int, float]]:
        """The `n` most probable tokens with their probabilities."""
        return most_probable(self.logits, n)


class Lens(OfGraph):
    """Keeps the residual stream of the compute under way; a follower of a `Debugger`. After the
    last layer a guess is what the model itself says."""

    def __init__(self) -> None:
        self._found: Residual | UsageError = UsageError("no compute was followed")
        self._tail: Tail | None = None
        self._layers: dict[int, int] = {}
        """by the node that ends them, those of the last layer's width"""
        self._kept: dict[int, dict[int, npt.NDArray[np.float32]]] = {}

    def wants(self, graph: LiveGraph, ubatch: Ubatch) -> Collection[int]:
        """The nodes after each layer. Forgets the previous compute."""
        self._kept = {}
        return super().wants(graph, ubatch)

    def choose(self, graph: LiveGraph) -> Collection[int]:
        self.close()
        self._layers = {}
        try:
            self._found = residual = find_residual(graph)
            self._layers = {
                node.index: layer
                for layer, node in residual.after.items()
                if graph.rows[node.index] is not None and node.ne[0] == residual.end.ne[0]
            }
            if not self._layers:
                raise UsageError(
                    "this architecture's residual stream has several rows for a token, so there is "
                    "nothing that the output norm and the head could read"
                )
        except UsageError as error:
            self._found = error
        return self._layers

    def passed(self, stop: Stop) -> None:
        """Keep a row of each token."""
        values, numbers = stop.by_token()
        first = stop.ubatch.n_tokens - TOKENS_KEPT
        outputs = stop.ubatch.outputs
        wanted = set(map(int, outputs if outputs is not None else ()))
        wanted = wanted if len(wanted) <= TOKENS_KEPT else set()
        self._kept[self._layers[stop.node.index]] = {
            number: values[i].copy()
            for i, number in enumerate(numbers)
            if number >= first or number in wanted
        }

    def look(self, stop: Stop, token: int = -1) -> list[Guess]:
        """A guess for each layer that the compute has passed, about what follows `token`: its
        number in the ubatch, or, from the end, a negative one. Raises `UsageError` if the
        architecture has no residual stream, or the token was not kept."""
        if self.graph is not stop.graph:
            raise UsageError("the logit lens has not followed this compute")
        if isinstance(self._found, UsageError):
            raise self._found
        number = token + stop.ubatch.n_tokens if token < 0 else token
        if not 0 <= number < stop.ubatch.n_tokens:
            raise UsageError(f"there is no token {token}; this compute has {stop.ubatch.n_tokens}")
        kept = {layer: rows[number] for layer, rows in self._kept.items() if number in rows}
        if not kept:
            why = "no layer is complete yet" if not self._kept else f"token {token} was not kept"
            raise UsageError(f"the logit lens shows nothing: {why}")
        if self._tail is None:
            self._tail = Tail(stop.graph, self._found)
        logits = self._tail.logits(np.stack(list(kept.values())))
        return [Guess(layer, row) for layer, row in zip(kept, logits, strict=True)]

    def close(self) -> None:
        """Free what the lens computes with."""
        if self._tail is not None:
            self._tail.close()
            self._tail = None


def most_probable(logits: Array, n: int) -> list[tuple[int, float]]:
    """The `n` most probable tokens with their probabilities."""
    probabilities = np.exp(log_soft_max(logits))
    best = np.argsort(-probabilities, kind="stable")[:n]
    return [(int(token), float(probabilities[token])) for token in best]


def log_soft_max(logits: Array) -> npt.NDArray[np.float64]:
    """Logarithms of the probabilities, in float64."""
    shifted = logits.astype(np.float64) - float(logits.max())
    return np.asarray(shifted - np.log(np.exp(shifted).sum()))
