"""What each token attends to: the weights of every head over the cells of the cache, at a stop.

Without flash attention they are the soft-max node's own values. With it no node has them, so they
are computed here in float64 from what the kernel reads: queries, keys, mask and sinks. The formula
is ggml's (`ggml_compute_forward_flash_attn_ext_f16_one_chunk` and `ggml_compute_forward_soft_max`
in ggml/src/ggml-cpu/ops.cpp).
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from llamacpp_instr.base.errors import UsageError
from llamacpp_instr.debugger.graph import LiveGraph, Node, Source
from llamacpp_instr.debugger.stop import Stop
from llamacpp_instr.debugger.tensors import Array, read, tensor_at
from llamacpp_instr.log.graph.ops import VIEW_OPS
from llamacpp_instr.model.types import TYPES


class AttentionWeights(NamedTuple):
    """The attention of one layer; each row sums to 1, less what a sink of the head takes."""

    layer: int
    weights: npt.NDArray[np.float64]
    """(heads, tokens, cells); if each sequence has its own cache, the cells of the token's own"""
    computed: bool
    """from queries and keys, because flash attention has no node with these values"""
    sinks: bool
    """the heads have attention sinks, which take the rest of each row"""

    @property
    def used(self) -> int:
        """How many cells there are up to the last one that a token looks at."""
        return int(np.flatnonzero(self.weights.any(axis=(0, 1))).max(initial=0)) + 1


def attention_node(graph: LiveGraph, layer: int) -> Node:
    """The node of a layer at which its attention can be seen: FLASH_ATTN_EXT, or the SOFT_MAX of
    queries and keys. Raises `UsageError` if the layer has none."""
    for node in graph.nodes:
        if node.layer == layer and (
            node.op == "FLASH_ATTN_EXT" or _is_soft_max_of_keys(graph, node)
        ):
            return node
    raise UsageError(f"layer {layer} has no attention over a cache that could be shown")


def attention(stop: Stop, layer: int | None = None) -> AttentionWeights:
    """The attention of a layer, by default of the one where the compute stopped; outside all
    layers, of the previous one. Raises `UsageError` if the layer has none, or if it is not in
    memory: not computed yet or, some ops later, overwritten."""
    stop.address()  # raises if the compute has gone on
    if layer is None:
        passed = (node.layer for node in reversed(stop.graph.nodes[: stop.node.index + 1]))
        layer = next((of for of in passed if of >= 0), 0)
    node = attention_node(stop.graph, layer)
    if node.index > stop.node.index:
        raise UsageError(f"{node.name} has not been computed yet; run to it first")
    sources = tensor_at(node.address).src  # by place: a missing mask is a gap
    needed = [node.address] if node.op == "SOFT_MAX" else [at for at in sources[:5] if at]
    if not all(stop.graph.intact(int(address), stop.node.index) for address in needed):
        raise UsageError(f"the attention of layer {layer} is gone; stop at {node.name} to see it")
    if node.op == "SOFT_MAX":
        return AttentionWeights(layer, _by_head(_four(read(node.address))), False, bool(sources[2]))
    queries, keys = (_four(read(int(address))) for address in sources[:2])
    if TYPES[tensor_at(int(sources[1])).type].name == "F16":
        queries = queries.astype(np.float16)  # as the kernel does
    mask = _four(read(int(sources[3]))) if sources[3] else None
    sinks = read(int(sources[4])) if sources[4] else None
    scale, bias, cap = (float(node.params[key]) for key in ("scale", "max_bias", "logit_softcap"))
    weights = flash_attention(queries, keys, mask, sinks, scale, bias, cap)
    return AttentionWeights(layer, _by_head(weights), True, sinks is not None)


def flash_attention(
    queries: Array,
    keys: Array,
    mask: Array | None,
    sinks: Array | None,
    scale: float,
    max_bias: float,
    softcap: float,
) -> npt.NDArray[np.float64]:
    """(streams, heads, tokens, cells) the weights that FLASH_ATTN_EXT gives to the values.

    `queries` (streams, heads, tokens, width), `keys` (streams, heads of keys, cells, width): each
    serves equally many consecutive heads. `mask` (streams or 1, heads or 1, tokens or more,
    cells) is added, times the head's slope if `max_bias` (ALiBi) is not 0. `sinks` (heads,) are
    logits that take part in the soft-max and have no value. `softcap` bounds the logits by tanh.
    """
    streams, heads, tokens, _ = queries.shape
    shared = heads // keys.shape[1]
    weights = np.empty((streams, heads, tokens, keys.shape[2]))
    slopes = alibi_slopes(heads, max_bias)
    for stream, head in np.ndindex(streams, heads):
        key = keys[stream * keys.shape[0] // streams, head // shared].astype(np.float64)
        logits = queries[stream, head].astype(np.float64) @ key.T * scale
        if softcap:
            logits = softcap * np.tanh(logits / softcap)
        if mask is not None:
            added = mask[stream % mask.shape[0], head % mask.shape[1], :tokens]
            logits += slopes[head] * added.astype(np.float64)
        weights[stream, head] = _soft_max(logits, None if sinks is None else float(sinks[head]))
    return weights


def alibi_slopes(heads: int, max_bias: float) -> npt.NDArray[np.float64]:
    """(heads,) what the mask is multiplied by; all 1 without ALiBi."""
    if max_bias <= 0:
        return np.ones(heads)
    power = 2 ** math.floor(math.log2(heads))
    first, second = 2 ** (-max_bias / power), 2 ** (-max_bias / 2 / power)
    return np.array(
        [first ** (h + 1) if h < power else second ** (2 * (h - power) + 1) for h in range(heads)]
    )


def _soft_max(logits: Array, sink: float | None) -> Array:
    most = logits.max(axis=-1, keepdims=True)
    if sink is not None:
        most = np.maximum(most, sink)
    most = np.where(np.isneginf(most), 0.0, most)  # a row that sees nothing
    powers = np.exp(logits - most)
    total = powers.sum(axis=-1, keepdims=True)
    if sink is not None:
        total = total + np.exp(sink - most)
    return np.asarray(np.divide(powers, total, out=np.zeros_like(powers), where=total != 0))


def _by_head(weights: Array) -> npt.NDArray[np.float64]:
    """(heads, tokens of all streams, cells)"""
    streams, heads, tokens, cells = weights.shape
    rows = weights.transpose(1, 0, 2, 3).reshape(heads, streams * tokens, cells)
    return np.asarray(rows, np.float64)


def _four(values: Array) -> Array:
    return values.reshape((1,) * (4 - values.ndim) + values.shape)


def _is_soft_max_of_keys(graph: LiveGraph, node: Node) -> bool:
    """A router's soft-max has neither a mask nor a product of two activations."""
    if node.op != "SOFT_MAX":
        return False
    if tensor_at(node.address).src[1]:
        return True
    at: Source = node.sources[0]
    while at.node >= 0:
        found = graph.nodes[at.node]
        if found.op == "MUL_MAT":
            return all(source.kind != "weight" for source in found.sources)
        if found.op not in VIEW_OPS and found.op not in ("SCALE", "UNARY", "ADD"):
            return False
        at = found.sources[0]
    return False
