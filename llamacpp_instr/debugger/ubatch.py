"""The tokens of a compute, read before it runs: later ops may use the memory of its inputs."""

from __future__ import annotations

from dataclasses import dataclass

from llamacpp_instr.debugger.graph import LiveGraph
from llamacpp_instr.debugger.tensors import Array, read


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


def read_ubatch(graph: LiveGraph, n_tokens: int) -> Ubatch:
    """The inputs of a compute that is about to begin."""

    def of(name: str, count: int | None = None) -> Array | None:
        address = graph.leafs.get(name)
        # models with several kinds of positions (M-RoPE) have the first kind first
        return read(address).reshape(-1)[:count] if address else None

    return Ubatch(n_tokens, of("inp_tokens", n_tokens), of("inp_pos", n_tokens), of("out_ids"))
