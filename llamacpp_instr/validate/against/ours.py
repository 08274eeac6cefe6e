"""The states of a model as llama.cpp computes them."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from llamacpp_instr.debugger.api import debug
from llamacpp_instr.debugger.graph import LiveGraph, Ubatch
from llamacpp_instr.debugger.residual import find_residual
from llamacpp_instr.debugger.rows import by_token, rows_of_nodes, token_numbers
from llamacpp_instr.debugger.stop import Stop
from llamacpp_instr.errors import UsageError
from llamacpp_instr.llama.engine import Context, ContextOptions, LoadedModel
from llamacpp_instr.temporary import temporary_directory
from llamacpp_instr.validate.against.compare import EMBEDDINGS, FINAL_NORM, LOGITS, Array, layer


class States:
    """Keeps the states of one compute; a follower of a `Debugger`."""

    def __init__(self) -> None:
        self.values: dict[str, Array] = {}
        """(tokens, width) by state"""
        self.nodes: dict[str, str] = {}
        """by state, the name of its node"""
        self._states: dict[int, list[str]] = {}

    def wants(self, graph: LiveGraph, _ubatch: Ubatch) -> Collection[int]:
        """Raises `UsageError` for a graph without logits or without one residual stream."""
        residual = find_residual(graph)
        places = {EMBEDDINGS: residual.begin.index}
        places |= {layer(number): node.index for number, node in residual.after.items()}
        if (norm := graph.by_name.get("result_norm")) is not None:
            places[FINAL_NORM] = norm
        places[LOGITS] = residual.logits.index
        rows = rows_of_nodes(graph)
        if any(rows[index] is None for index in places.values()):
            raise UsageError(
                "this architecture's residual stream does not have one row for each token, so its "
                "layers cannot be compared"
            )
        self._rows = rows
        for state, index in places.items():
            self._states.setdefault(index, []).append(state)
        self.nodes = {state: graph.nodes[index].name for state, index in places.items()}
        return self._states

    def passed(self, stop: Stop) -> None:
        rows = self._rows[stop.node.index]
        assert rows is not None
        values = by_token(stop, rows)
        assert token_numbers(rows, stop.ubatch) == list(range(stop.ubatch.n_tokens))
        for state in self._states[stop.node.index]:
            self.values[state] = values.copy()


def compute_states(
    model: LoadedModel, tokens: Sequence[int], threads: int | None, flash_attn: str
) -> States:
    """The states of one prefill, with a cache in F32, so that it rounds nothing. Raises
    `UsageError` for a model that has no logits or no residual stream."""
    n = len(tokens)
    options = ContextOptions(
        ctx=n, batch=n, ubatch=n, threads=threads, cache_type_k="f32", cache_type_v="f32",
        flash_attn=flash_attn,
    )  # fmt: skip
    states = States()
    with (
        temporary_directory("instr-validate-") as folder,
        debug(folder / "session.log") as debugging,
        Context(model, options) as context,
    ):
        debugging.debugger.followers.append(states)
        context.decode(tokens, all_logits=True)
    return states
