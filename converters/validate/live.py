"""A model that runs, as validations see it: prompt, graphs as events of a log, and their inputs.

Invariant: nodes and leafs of an event have the numbers that a log gives them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from llamacpp_instr.base.errors import UsageError
from llamacpp_instr.base.system import temporary_directory
from llamacpp_instr.debugger.graph import LiveGraph
from llamacpp_instr.debugger.stop import Stop, debug
from llamacpp_instr.debugger.tensors import Array, Tensor, ggml, is_weight, read, tensor_at
from llamacpp_instr.lab.weights.measure import WeightReader
from llamacpp_instr.llama.engine import ContextOptions, LoadedModel, ModelContext
from llamacpp_instr.log.graph.kernels import is_copy, without_copies
from llamacpp_instr.log.schema import Graph, Leaf, Nodes
from llamacpp_instr.model.file import ModelFile
from llamacpp_instr.model.types import TYPES

TOKENS = 32
"""of the prompt, if none is given"""


def check_only_decodes(model: LoadedModel) -> None:
    """Raises `UsageError` for a model with an encoder."""
    if model.has_encoder or not model.has_decoder:
        raise UsageError(f"{model.path} has an encoder; only decoder models can be validated")


def prompt_tokens(model: LoadedModel, prompt: str | None) -> list[int]:
    """The tokens of a prompt; without one, TOKENS of the vocabulary, which any model has."""
    return vocabulary(model, TOKENS) if prompt is None else list(model.tokenize(prompt))


def vocabulary(model: LoadedModel, n: int) -> list[int]:
    return [(7 * i + 3) % model.n_vocab for i in range(n)]


def weight_reader(file: ModelFile) -> Callable[[str], Array]:
    """Reads a weight by its name. Raises `UsageError` for a weight whose type has no conversion to
    numbers."""
    reader = WeightReader(file)
    for of in file.weights:
        reader.check(of)
    return lambda name: np.concatenate(list(reader.pieces(file.by_name[name])))


@contextmanager
def followed(
    model: LoadedModel, options: ContextOptions, *followers: Any, witnesses: Sequence[Any] = ()
) -> Iterator[ModelContext]:
    """A context whose computes these followers see."""
    with (
        temporary_directory("instr-validate-") as folder,
        debug(folder / "session.log") as debugging,
        ModelContext(model, options) as context,
    ):
        debugging.debugger.followers += followers
        debugging.debugger.witnesses += witnesses
        yield context


def as_event(live: LiveGraph) -> Graph:
    """The graph with strides; its ids and splits are not those of a log. Copies are left out: each
    has the value of its source."""
    tensors = [tensor_at(address) for address in live.addresses]
    numbers = {address: -1 - i for i, address in enumerate(live.leaf_addresses)}
    numbers |= {address: i for i, address in enumerate(live.addresses)}
    shapes = [without_last(tensor.ne, 1) or [1] for tensor in tensors]
    lib = ggml()
    nodes = Nodes(
        name=[node.name for node in live.nodes],
        op=[node.op for node in live.nodes],
        layer=[node.layer for node in live.nodes],
        type=[_type(tensor) for tensor in tensors],
        ne=shapes,
        bytes=[int(lib.ggml_nbytes(address)) for address in live.addresses],
        src=[[numbers[int(a)] for a in tensor.src if a] for tensor in tensors],
        buffer=[-1] * len(tensors),
        params=[without_last(tensor.op_params, 0) for tensor in tensors],
        exec=[int(node.runs) for node in live.nodes],
        nb=[list(map(int, t.nb[: len(ne)])) for t, ne in zip(tensors, shapes, strict=True)],
    )
    leafs = [_leaf(address, i) for i, address in enumerate(live.leaf_addresses)]
    event = Graph(
        t=0, graph=live.id, ctx=0, uid=0, source="decode", why="first", n_nodes=len(tensors),
        n_exec=sum(nodes.exec), splits=[], leafs=leafs, nodes=nodes,
    )  # fmt: skip
    return without_copies(event)


class Inputs:
    """The leafs of a graph that are not weights, each read once, when its value is ready. Caches
    and inputs are ready before the first op. A copy of another backend's value is ready when its
    part of the graph begins, and its memory may be reused after its last reader."""

    def __init__(self, graph: Graph, wanted: Collection[int] | None = None) -> None:
        """`wanted` are the leafs to read, as nodes name them; by default all."""
        chosen = range(-len(graph.leafs), 0) if wanted is None else wanted
        self._first = [
            -1 - i
            for i, leaf in enumerate(graph.leafs)
            if leaf.tensor < 0 and not is_copy(leaf.name) and -1 - i in chosen
        ]
        self._copies = {
            node: [leaf for leaf in leafs if leaf in chosen]
            for node, leafs in _copies_by_reader(graph).items()
        }
        self._started = False

    @property
    def readers(self) -> Collection[int]:
        """The nodes at which copies are read."""
        return self._copies.keys()

    def read(self, stop: Stop) -> dict[int, Array]:
        """The values that have become ready since the previous stop."""
        there = [*([] if self._started else self._first), *self._copies.get(stop.node.index, ())]
        self._started = True
        return {leaf: read(stop.graph.address_of(leaf)) for leaf in there}


def _copies_by_reader(graph: Graph) -> dict[int, list[int]]:
    """For each node, the copies that it is the first to read."""
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
    ne = without_last(tensor.ne, 1) or [1]
    return Leaf(name=name, type=_type(tensor), ne=ne, bytes=n_bytes, tensor=weight)


def _type(tensor: Tensor) -> str:
    return TYPES[tensor.type].name.lower()


def without_last(numbers: Iterable[int], value: int) -> list[int]:
    """The numbers up to the last one that is not `value`."""
    kept = list(map(int, numbers))
    while kept and kept[-1] == value:
        kept.pop()
    return kept
