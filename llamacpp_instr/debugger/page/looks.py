"""What the page asks for beside the protocol, because a console's text cannot be drawn: the logit
lens, attention, the next token, and which token each cell of the KV cache holds.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from typing import Annotated, Any

import msgspec
import numpy as np

from llamacpp_instr.base.errors import UsageError
from llamacpp_instr.debugger.attention import AttentionWeights, attention
from llamacpp_instr.debugger.commands import Commands
from llamacpp_instr.debugger.dap.requests import parse
from llamacpp_instr.debugger.figures import heat_map
from llamacpp_instr.debugger.ggml import tensor_at
from llamacpp_instr.debugger.graph import LiveGraph, Ubatch
from llamacpp_instr.debugger.lens import most_probable
from llamacpp_instr.debugger.stop import Stop
from llamacpp_instr.debugger.tensors import Array, read

Json = dict[str, Any]
MOST_TOKENS = 1024
"""tokens of a compute, or cells, in one answer: the last ones"""
SMALL, LARGE = (24, 48), (128, 256)
"""rows and columns of a picture of attention, of every head and of one"""
_DECIMALS = 6  # of a share of attention

Cells = dict[int, tuple[int, int]]
"""position and token by cell"""


class LensArguments(msgspec.Struct):
    token: int = -1
    top: Annotated[int, msgspec.Meta(ge=1, le=20)] = 5


class AttentionArguments(msgspec.Struct):
    layer: int | None = None
    head: int | None = None


class Looks:
    """Answers requests at a stop; a follower of a `Debugger`, which sees the tokens of every
    compute and stops nothing."""

    def __init__(self, commands: Commands) -> None:
        self._lens, self._text = commands.lens, commands.text
        self._caches: dict[int, Cells] = {}
        self._graph: LiveGraph | None = None
        self._writes: dict[int, tuple[int, int]] = {}
        commands.debugger.followers.append(self)
        self.requests: dict[str, Callable[[Stop, Any], Json]] = {
            "instr/tokens": self._tokens,
            "instr/lens": self._look_through,
            "instr/attention": self._attention,
            "instr/next": self._next,
        }

    # --- as a follower ---

    def wants(self, graph: LiveGraph, ubatch: Ubatch) -> Collection[int]:
        """No nodes; keeps into which cells the compute is going to write which tokens."""
        if graph is not self._graph:
            self._graph, self._writes = graph, _cache_writes(graph)
        if ubatch.tokens is None or ubatch.positions is None:
            return ()
        for number, address in dict(self._writes.values()).items():
            cells = read(address).reshape(-1)
            if len(cells) == ubatch.n_tokens:
                cache = self._caches.setdefault(number, {})
                entries = zip(cells, ubatch.positions, ubatch.tokens, strict=True)
                cache.update((int(cell), (int(at), int(token))) for cell, at, token in entries)
        return ()

    def passed(self, stop: Stop) -> None:
        """Never called."""

    # --- requests ---

    def _tokens(self, stop: Stop, _arguments: Any) -> Json:
        """`tokens` of the compute, and `cells` of the first cache: lists of number or cell,
        position, token, text."""
        ubatch = stop.ubatch
        known = ubatch.tokens if ubatch.tokens is not None else ()
        at = ubatch.positions if ubatch.positions is not None else range(len(known))
        tokens = [(i, int(p), int(t)) for i, (p, t) in enumerate(zip(at, known, strict=True))]
        cells = [(cell, *entry) for cell, entry in sorted(self._caches.get(0, {}).items())]
        return {
            "tokens": [[*row, self._text(row[-1])] for row in tokens[-MOST_TOKENS:]],
            "cells": [[*row, self._text(row[-1])] for row in cells[-MOST_TOKENS:]],
        }

    def _look_through(self, stop: Stop, arguments: Any) -> Json:
        """For each layer so far the most probable tokens: lists of token, text, probability."""
        wanted = parse("instr/lens", arguments, LensArguments)
        guesses = self._lens.look(stop, wanted.token)
        return {
            "layers": [
                {"layer": guess.layer, "best": self._best(guess.top(wanted.top))}
                for guess in guesses
            ]
        }

    def _attention(self, stop: Stop, arguments: Any) -> Json:
        """A picture of each head, or of one: rows are tokens, columns cells of the cache; each
        picture's cell is the largest share of those that it covers."""
        wanted = parse("instr/attention", arguments, AttentionArguments)
        seen = attention(stop, wanted.layer)
        heads = range(len(seen.weights))
        if wanted.head is not None and wanted.head not in heads:
            raise UsageError(f"there is no head {wanted.head}; there are 0 to {len(heads) - 1}")
        shown, size = (heads, SMALL) if wanted.head is None else ([wanted.head], LARGE)
        used = int(np.flatnonzero(seen.weights.any(axis=(0, 1))).max(initial=0)) + 1
        maps = [{"head": head, **_picture(seen.weights[head, :, :used], *size)} for head in shown]
        return {
            "layer": seen.layer, "computed": seen.computed, "sinks": seen.sinks,
            "heads": len(heads), "maps": maps, **self._axes(stop, seen, used),
        }  # fmt: skip

    def _axes(self, stop: Stop, seen: AttentionWeights, used: int) -> Json:
        """The texts of the rows' tokens and of the cells, null where they are not known."""
        text, tokens = self._text, stop.ubatch.tokens
        number, _ = self._writes.get(seen.layer, (-1, 0))
        cache = self._caches.get(number, {})
        rows = seen.weights.shape[1]
        known = tokens is not None and len(tokens) == rows
        return {
            "rows": [text(int(t)) for t in tokens]
            if known and tokens is not None
            else [None] * rows,
            "cells": [text(cache[cell][1]) if cell in cache else None for cell in range(used)],
        }

    def _next(self, stop: Stop, _arguments: Any) -> Json:
        """The most probable next tokens, at the logits."""
        values = stop.values() if stop.node.name == "result_output" else None
        if values is None or not values.size:
            raise UsageError("the logits have not been computed yet")
        return {"best": self._best(most_probable(np.atleast_2d(values)[-1], 10))}

    def _best(self, best: Iterable[tuple[int, float]]) -> list[list[Any]]:
        return [[token, self._text(token), share] for token, share in best]


def _cache_writes(graph: LiveGraph) -> dict[int, tuple[int, int]]:
    """By layer: the number of the cache that its keys go into, and the address of the tensor that
    has the cell of each token. Caches with several streams are left out: their cells are not
    those of a row of attention."""
    found: dict[int, tuple[int, int]] = {}
    numbers: dict[int, int] = {}
    for node in graph.nodes:
        if node.op != "SET_ROWS" or len(node.sources) != 3:
            continue
        cells, cache = node.sources[1:]
        if cache.name.startswith("cache_k") and tensor_at(cache.address).ne[2] == 1:
            number = numbers.setdefault(cells.address, len(numbers))
            found[node.layer] = (number, cells.address)
    return found


def _picture(weights: Array, rows: int, columns: int) -> Json:
    seen = heat_map(weights, rows, columns)
    return {
        "values": np.round(seen.cells, _DECIMALS).tolist(),
        "rowEdges": seen.row_edges.tolist(),
        "columnEdges": seen.column_edges.tolist(),
    }
