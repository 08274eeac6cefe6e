"""The logit lens: what the model would say if it ended after each layer.

The residual stream after a layer goes through the output norm and the head, which `tail` computes
as the model does. After the last layer that gives the model's own logits.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from llamacpp_instr.base.errors import UsageError
from llamacpp_instr.debugger.comparison import log_soft_max
from llamacpp_instr.debugger.graph import LiveGraph, Ubatch
from llamacpp_instr.debugger.output_head import Tail
from llamacpp_instr.debugger.residual import Residual, find_residual
from llamacpp_instr.debugger.rows import by_token, rows_of_nodes, token_numbers
from llamacpp_instr.debugger.stop import Stop
from llamacpp_instr.debugger.tensors import Array

TOKENS_KEPT = 64
"""of each compute, the last so many tokens and those with logits can be looked at"""


@dataclass(frozen=True)
class Guess:
    """What the model would say after a layer, about the token that follows one of the ubatch."""

    layer: int
    logits: npt.NDArray[np.float32]
    """(vocabulary,)"""

    def top(self, n: int = 10) -> list[tuple[int, float]]:
        """The `n` most probable tokens with their probabilities."""
        return most_probable(self.logits, n)


class Lens:
    """Keeps the residual stream of the compute under way; a follower of a `Debugger`."""

    def __init__(self) -> None:
        self._graph: LiveGraph | None = None
        self._residual: Residual | None = None
        self._refused: UsageError | None = None
        self._tail: Tail | None = None
        self._layers: dict[int, int] = {}
        self._kept: dict[int, dict[int, npt.NDArray[np.float32]]] = {}

    def wants(self, graph: LiveGraph, _ubatch: Ubatch) -> Collection[int]:
        """The nodes after each layer. Forgets the compute before."""
        self._kept = {}
        if graph is not self._graph:
            self.close()
            self._graph, self._refused = graph, None
            try:
                self._residual = find_residual(graph)
                self._rows = rows_of_nodes(graph)
                self._layers = self._readable(self._residual)
                if not self._layers:
                    raise UsageError(
                        "this architecture's residual stream has several rows for a token, so "
                        "there is nothing that the output norm and the head could read"
                    )
            except UsageError as error:
                self._residual, self._refused, self._layers = None, error, {}
        return self._layers

    def passed(self, stop: Stop) -> None:
        """Keep a row of each token."""
        node = stop.node
        rows = self._rows[node.index]
        assert rows is not None
        values = by_token(stop, rows)
        numbers = token_numbers(rows, stop.ubatch)
        first = stop.ubatch.n_tokens - TOKENS_KEPT
        outputs = stop.ubatch.outputs
        wanted = (
            set(map(int, outputs)) if outputs is not None and len(outputs) <= TOKENS_KEPT else ()
        )
        self._kept[self._layers[node.index]] = {
            number: values[i].copy()
            for i, number in enumerate(numbers)
            if number >= first or number in wanted
        }

    def look(self, stop: Stop, token: int = -1) -> list[Guess]:
        """A guess for each layer that the compute has passed, about what follows `token`: its
        number in the ubatch, or, from the end, a negative one.

        Raises `UsageError` if the architecture has no residual stream, or the token was not kept.
        """
        if self._refused is not None:
            raise self._refused
        if self._graph is not stop.graph or self._residual is None:
            raise UsageError("the logit lens has not followed this compute")
        number = token + stop.ubatch.n_tokens if token < 0 else token
        if not 0 <= number < stop.ubatch.n_tokens:
            raise UsageError(f"there is no token {token}; this compute has {stop.ubatch.n_tokens}")
        kept = {layer: rows[number] for layer, rows in self._kept.items() if number in rows}
        if not kept:
            why = "no layer is complete yet" if not self._kept else f"token {token} was not kept"
            raise UsageError(f"the logit lens shows nothing: {why}")
        if self._tail is None:
            self._tail = Tail(stop.graph, self._residual)
        logits = self._tail.logits(np.stack(list(kept.values())))
        return [Guess(layer, row) for layer, row in zip(kept, logits, strict=True)]

    def close(self) -> None:
        """Free what the lens computes with."""
        if self._tail is not None:
            self._tail.close()
            self._tail = None

    def _readable(self, residual: Residual) -> dict[int, int]:
        """The layers by the nodes that end them, those of the last layer's width."""
        width = residual.end.ne[0]
        return {
            node.index: layer
            for layer, node in residual.after.items()
            if self._rows[node.index] is not None and node.ne[0] == width
        }


def most_probable(logits: Array, n: int) -> list[tuple[int, float]]:
    """The `n` most probable tokens with their probabilities."""
    probabilities = np.exp(log_soft_max(logits))
    best = np.argsort(-probabilities, kind="stable")[:n]
    return [(int(token), float(probabilities[token])) for token in best]
