"""Knowledge of ggml's ops and llama.cpp's names: blocks, parameters, work, traffic.

Invariant: pure functions of an op, its names and its shapes, as in a log. An unknown op or name
gives "other", no parameters or no count, never a guess. Shapes are in ggml's order: the length of a
row first, trailing ones may be missing.
"""

from __future__ import annotations

import math
import re
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from math import prod
from typing import Any, Literal, NamedTuple, get_args

import numpy as np
from numpy.typing import NDArray

from llamacpp_instr.log.schema import Graph
from llamacpp_instr.model.file import without_kind
from llamacpp_instr.model.types import type_named

Block = Literal[
    "embedding", "attention", "feed-forward", "norm", "kv", "output", "adapter", "other"
]  # fmt: skip
BLOCKS: tuple[Block, ...] = get_args(Block)


def blocks_of(
    op: Sequence[str],
    name: Sequence[str],
    layer: Sequence[int],
    src: Sequence[Sequence[int]],
    leafs: Sequence[str],
) -> list[Block]:
    """The block of every node of a graph, from its columns and the names of its leafs.

    A node without a meaningful name (`node_21`, a CONT, a reshaped bias) belongs to the block of
    what it reads, else to that of the previous node. Outside all layers, nodes before the first
    layer are the embedding, and nodes after the last are the output. What LoRA adapters add is a
    block of its own, wherever it is.
    """
    in_layers = [i for i, il in enumerate(layer) if il >= 0]
    first, last = (in_layers[0], in_layers[-1]) if in_layers else (len(op), len(op))
    blocks: list[Block] = []
    for i in range(len(op)):
        # a view is read as its source, whose name is the beginning of its own
        read_names = [
            leafs[-1 - s] if s < 0 else name[s] for s in src[i] if s < 0 or op[s] in VIEW_OPS
        ]
        block = block_of(op[i], name[i], read_names, layer[i])
        if block == "other" and layer[i] >= 0:
            read = [blocks[s] for s in src[i] if 0 <= s < i and layer[s] == layer[i]]
            main: list[Block] = [b for b in read if b in ("attention", "feed-forward")]
            block = main[0] if main else blocks[i - 1] if i and layer[i - 1] == layer[i] else block
            block = "other" if block in ("norm", "kv", "embedding", "output") else block
        elif block == "other" and i < first:
            block = "embedding"
        elif block == "other" and i > last:
            block = "output"
        blocks.append(block)
    for i in _of_adapters(op, src, leafs):
        blocks[i] = "adapter"
    return blocks


def _of_adapters(
    op: Sequence[str], src: Sequence[Sequence[int]], leafs: Sequence[str]
) -> Iterator[int]:
    """The nodes that adapters add to a graph: the products with their matrices, the scaling, and
    the sum with what the weight gives (`build_lora_mm` in src/llama-graph.cpp)."""
    last: dict[int, str] = {}
    for i, sources in enumerate(src):
        added = last.get(sources[-1], "") if sources else ""
        if (
            any(is_adapter(leafs[-1 - s]) for s in sources if s < 0)
            or (op[i] == "SCALE" and added.startswith("MUL_MAT"))
            or (op[i] == "ADD" and added == "SCALE")
        ):
            last[i] = op[i]
            yield i


def block_of(op: str, name: str, weight_names: Sequence[str], layer: int) -> Block:
    """The block of a transformer that a node belongs to, as far as the node itself shows.

    `weight_names` are the leafs that it reads: weights, caches, inputs, or views of them.
    Everything that mixes positions counts as "attention". Recurrent and convolutional mixers (SSM,
    RWKV time mixing, linear attention, short convolutions) take the place of attention and answer
    the same question: which share of the time goes into looking back? Everything that works on one
    position counts as "feed-forward": dense layers, experts and their router, RWKV channel mixing.
    "kv" is writing and moving the cache or the recurrent state. Reading keys and values for
    attention is attention. A residual sum belongs to the block whose result it adds.
    """
    # also the ROPE of the K-shift, which rotates the keys of the cache in place
    in_place = is_cache(name) and op not in VIEW_OPS and not op.startswith("MUL_MAT")
    if in_place or (op in _MOVES and any(map(is_cache, weight_names))):
        return "kv"
    if op in _NORM_OPS:
        return "norm"
    for weight in weight_names:
        if block := _block_of_weight(op, weight):
            return block
    if op in _MIXER_OPS:
        return "attention"
    if block := _first(_NAMES, _plain_name(name)):
        return block
    if op in ("ROPE", "SOFT_MAX") and layer >= 0:
        return "attention"
    if op in ("GLU", "MUL_MAT_ID"):
        return "feed-forward"
    return "other"


def role_of(op: str, name: str, weight: str | None) -> str:
    """What a node is in every layer: `ffn_down`, `Qcur`, `cache_k`; empty if no name shows it."""
    if weight and op != "ROPE":  # which reads the frequencies for queries and keys
        inside = _WEIGHT.match(weight)
        return without_kind(inside[1] if inside else weight)
    plain = re.sub(r"_l\d+$", "", _plain_name(name))
    return "" if re.match(r"(node|leaf)_\d+$", plain) else plain


def is_adapter(leaf: str) -> bool:
    """Whether a leaf of that name is a matrix of a LoRA adapter: `blk.0.attn_q.weight.lora_a`."""
    return leaf.endswith((".lora_a", ".lora_b"))


def is_cache(leaf: str) -> bool:
    """Whether a leaf of that name is a KV cache or a recurrent state."""
    return _CACHE.match(leaf) is not None


def op_params(op: str, words: Sequence[int]) -> dict[str, int | float | str]:
    """An op's parameters by name, from the int32 words of `ggml_tensor::op_params`, whose trailing
    zeros may be missing (ggml/src/ggml.c, `ggml_<op>_impl`). Empty if they are unknown."""
    decoded: dict[str, int | float | str] = {}
    for at, name, kind in _layout(op):
        word = words[at] if at < len(words) else 0
        if kind == "f":
            decoded[name] = struct.unpack("<f", struct.pack("<I", word & 0xFFFFFFFF))[0]
        else:
            decoded[name] = word if kind == "i" else _KINDS[kind].get(word, str(word))
    return decoded


@cache
def _layout(op: str) -> list[tuple[int, str, str]]:
    """The word, the name and the kind of each parameter."""
    rows = (row.split() for row in _PARAMS[op].split(", ")) if op in _PARAMS else ()
    return [(int(at), name, kind) for at, name, kind in rows]


def flops(op: str, ne: Sequence[int], src_ne: Sequence[Sequence[int]]) -> int:
    """Floating point operations of a node: a multiplication and an addition count as two.

    MUL_MAT [K,N]x[K,M] -> [N,M]: 2*M*N*K. MUL_MAT_ID: the same for the experts that each token
    uses. FLASH_ATTN_EXT: both products over all of `n_kv`, masked positions included, as its shape
    says; `graph.attention` has what was computed. The softmax is left out. Elementwise sums and
    products: one for each element. 0 for ops that move data and for ops without an agreed count.
    """
    if op in ("MUL_MAT", "MUL_MAT_ID") and src_ne:
        return 2 * _dim(src_ne[0], 0) * prod(ne)
    if op == "OUT_PROD" and src_ne:
        return 2 * _dim(src_ne[0], 1) * prod(ne)
    if op == "FLASH_ATTN_EXT" and len(src_ne) >= 3:
        q, k, v = src_ne[:3]
        heads = _dim(q, 2) * _dim(q, 3)
        return 2 * _dim(q, 1) * _dim(k, 1) * heads * (_dim(q, 0) + _dim(v, 0))
    if op == "SSM_CONV" and len(src_ne) >= 2:
        return 2 * _dim(src_ne[1], 0) * prod(ne)
    if op in _ELEMENTWISE:
        return prod(ne)
    return 0


def bytes_moved(
    op: str,
    ne: Sequence[int],
    n_bytes: int,
    src_ne: Sequence[Sequence[int]],
    src_bytes: Sequence[int],
) -> int:
    """Bytes that a node reads and writes at least once each; views move nothing."""
    if op in VIEW_OPS or not src_ne:
        return 0
    read = sum(bytes_read(op, k, src_ne, size) for k, size in enumerate(src_bytes))
    return read + bytes_written(op, ne, n_bytes, src_ne)


def bytes_read(op: str, k: int, src_ne: Sequence[Sequence[int]], n_bytes: int) -> int:
    """The part of `bytes_moved` that a node reads of its source `k`, which has `n_bytes`.

    GET_ROWS reads only the rows it fetches; SET_ROWS and CPY do not read what they overwrite.
    MUL_MAT_ID reads the experts that are used: here as many as its ids can name, because shapes say
    no more. `graph.experts` has what a compute used.
    """
    if (op, k) in (("SET_ROWS", 2), ("CPY", 1)):
        return 0
    if op == "GET_ROWS" and k == 0 and len(src_ne) >= 2:
        return min(n_bytes, prod(src_ne[1]) * _row_bytes(src_ne[0], n_bytes))
    if op == "MUL_MAT_ID" and k == 0 and len(src_ne) >= 3:
        n_experts = _dim(src_ne[0], 2)
        return n_bytes * min(n_experts, prod(src_ne[2])) // max(1, n_experts)
    return n_bytes


def bytes_written(op: str, ne: Sequence[int], n_bytes: int, src_ne: Sequence[Sequence[int]]) -> int:
    """The part of `bytes_moved` that a node writes: its result, or the given rows of SET_ROWS."""
    if op in VIEW_OPS or not src_ne:
        return 0
    if op == "SET_ROWS":
        return prod(src_ne[0][1:]) * _row_bytes(ne, n_bytes)
    return n_bytes


class Tensor(NamedTuple):
    """A node or a leaf."""

    name: str
    type: str
    ne: list[int]
    bytes: int
    """of its elements; a log has the span of a view, with what lies between its elements"""


def tensor(graph: Graph, number: int) -> Tensor:
    """A node, or leaf -1 - `number`; the graph must have its nodes."""
    if number < 0:
        leaf = graph.leaf(number)
        return Tensor(leaf.name, leaf.type, leaf.ne, _bytes(leaf.type, leaf.ne, leaf.bytes))
    nodes = graph.whole
    type_, ne = nodes.type[number], nodes.ne[number]
    return Tensor(nodes.name[number], type_, ne, _bytes(type_, ne, nodes.bytes[number]))


def _bytes(type_: str, ne: list[int], span: int) -> int:
    """Elements may also overlap; then the span is smaller, and counts."""
    known = type_named(type_)
    return span if known is None else min(span, prod(ne) * known.block_bytes // known.block)


VIEW_OPS = frozenset({"NONE", "VIEW", "RESHAPE", "PERMUTE", "TRANSPOSE"})
"""ops for which no kernel runs"""


def _dim(ne: Sequence[int], i: int) -> int:
    return ne[i] if i < len(ne) else 1


def _row_bytes(ne: Sequence[int], n_bytes: int) -> int:
    return n_bytes // max(1, prod(ne[1:]))


# --- blocks ---

_NORM_OPS = frozenset({"NORM", "RMS_NORM", "GROUP_NORM", "L2_NORM"})
_MIXER_OPS = frozenset({
    "FLASH_ATTN_EXT", "SSM_CONV", "SSM_SCAN", "RWKV_WKV6", "RWKV_WKV7", "GATED_LINEAR_ATTN",
    "GATED_DELTA_NET", "SOLVE_TRI", "LIGHTNING_INDEXER",
})  # fmt: skip
_MOVES = frozenset({"SET_ROWS", "CPY", "GET_ROWS", "CONT", "DUP", "SCALE", "CONCAT", "SET"})
_ELEMENTWISE = frozenset({"ADD", "ADD1", "ADD_ID", "ACC", "SUB", "MUL", "DIV", "SCALE", "SQR"})

# cache_k_l0, cache_v_l0 (tagged: cache_idx_k_l0), cache_r_l0 and cache_s_l0 of recurrent models,
# dsv4_hca_state_kv_l0: src/llama-kv-cache*.cpp, src/llama-memory-recurrent.cpp
_CACHE = re.compile(r"^(cache_(\w+_)?[kvrs]_l\d+|dsv4_\w+_state_\w+_l\d+)")


def _rules(*rules: tuple[str, Block]) -> list[tuple[re.Pattern[str], Block]]:
    """The first pattern that is found decides."""
    return [(re.compile(pattern), block) for pattern, block in rules]


# `blk.3.attn_q.weight`, `enc.blk.0.ffn_up.weight`, `posnet.2.attn_q.weight`
_WEIGHT = re.compile(r"^(?:(?:enc|dec)\.)?(?:blk|posnet|convnext)\.\d+\.(.*)$")
_WEIGHTS = _rules(
    (r"(^|[_.])norm\d?([_.]|$)|^norm|time_mix_ln", "norm"),
    (r"^nextn\.(shared_head_head)", "output"),
    (r"^nextn\.embed_tokens", "embedding"),
    (r"^(ffn|exp_probs|channel_mix|hc_ffn|vis_(up|down|gate)|layer_out)", "feed-forward"),
    (r"^(attn|cross_attn|vis_attn|hc_attn|indexer|ssm|time_mix|shortconv)", "attention"),
)


# what a leaf outside the layers says about the node that reads it
_OUTSIDE = _rules(
    (r"^out_ids$", "output"),  # picks the rows whose logits are wanted
    (r"^(rope_freqs|rope_factors|KQ_mask|attn_inp)", "attention"),
    (r"^((enc|dec)\.)?(output|token_embd|per_layer_proj|cls)[._]\w*norm", "norm"),
    (r"^(token_embd|per_layer_token_embd|position_embd|token_types)", "embedding"),
    (r"^((dec|enc)\.)?(output|cls|dense_\d)\b", "output"),
    (r"^(per_layer_model_proj|inp_tokens)", "embedding"),
)


def _block_of_weight(op: str, weight: str) -> Block | None:
    """What a leaf says about the node that reads it, or None."""
    inside = _WEIGHT.match(weight)
    block = _first(_WEIGHTS, inside[1]) if inside else _first(_OUTSIDE, weight)
    # tied embeddings: the same weight is the output matrix
    tied = op == "MUL_MAT" and block == "embedding" and weight.startswith("token_embd")
    return "output" if tied else block


def _first(rules: Iterable[tuple[re.Pattern[str], Block]], name: str) -> Block | None:
    return next((block for pattern, block in rules if pattern.search(name)), None)


def _plain_name(name: str) -> str:
    """`mtp_Qcur-3 (view) (cont)` -> `Qcur`."""
    return re.sub(r"-\d+$|^(mtp|enc|dec)_", "", name.split(" (", 1)[0])


_NAMES = _rules(
    # residual sums come first, because they are named after the next block
    (r"^(ffn|post_ffn|post_moe|moe|mlp)_?(inp|residual)$|^attn_(residual|add)", "attention"),
    (r"^ffn_moe_(?!norm)", "feed-forward"),
    (r"^(ffn|attn|inp|result|embd|post_attn|post_ffn|post_mlp|pre_ffn)_(\w+_)?norm", "norm"),
    (r"^(norm|operator_norm|final_norm_out|loop_norm|stack_norm)\b|norm(ed)?$", "norm"),
    (r"ffn|ffw|moe|mlp|shexp|shared_expert|expert|router|cmix|channel_mix", "feed-forward"),
    (r"^(l_out|layer_out|l_last)$", "feed-forward"),
    (r"^(result|lmhead|logits|output$|h_nextn|out_scaled|final_output|cls)|_logits$", "output"),
    (r"^[QKVqkv](cur)?(_|$)|^(kq|qk|wqkv|kv|sa_out|mla|lid|KQ|pos_bias)|^wo$", "attention"),
    (r"attn|attention|indexer|^(csa|hca|msa)_", "attention"),
    (r"^(mamba|ssm|dnet|kda|linear_attn|conv|state|time_mix|tmix|wkv|g_)", "attention"),
    (r"new_state|decay|^(beta|alpha|z|gate|a_softplus)(_|$)", "attention"),
    (r"^(inp|embd|embedding|pos_embd|model\.(input_embed|embed_tokens)|tok)", "embedding"),
)


# --- parameters: word, name, and f for a float, i for an integer, or a list of kinds ---

_ROPE = (
    "1 n_dims i, 2 mode rope, 4 n_ctx_orig i, 5 freq_base f, 6 freq_scale f, 7 ext_factor f,"
    " 8 attn_factor f, 9 beta_fast f, 10 beta_slow f, 15 n_offs i"
)
_PARAMS = {
    "ROPE": _ROPE,
    "ROPE_BACK": _ROPE,
    "SOFT_MAX": "0 scale f, 1 max_bias f",
    "FLASH_ATTN_EXT": "0 scale f, 1 max_bias f, 2 logit_softcap f, 3 prec prec, 4 n_kv_max i",
    "MUL_MAT": "0 prec prec, 1 hint hint, 3 src1_prec prec",
    "MUL_MAT_ID": "0 prec prec, 3 src1_prec prec",
    "NORM": "0 eps f",
    "RMS_NORM": "0 eps f",
    "L2_NORM": "0 eps f",
    "GROUP_NORM": "0 n_groups i, 1 eps f",
    "SCALE": "0 scale f, 1 bias f",
    "CLAMP": "0 min f, 1 max f",
    "LEAKY_RELU": "0 negative_slope f",
    "CONCAT": "0 dim i",
    "ARGSORT": "0 order order",
    "GLU": "0 kind glu, 1 swapped i",
    "UNARY": "0 kind unary",
}


def _numbered(names: str) -> dict[int, str]:
    return dict(enumerate(names.split()))


_KINDS: dict[str, dict[int, str]] = {
    # GGML_ROPE_TYPE_*, ggml_prec, ggml_op_hint, ggml_sort_order, ggml_glu_op, ggml_unary_op:
    # ggml/include/ggml.h
    "rope": {0: "NORMAL", 2: "NEOX", 8: "MROPE", 24: "VISION", 40: "IMROPE"},
    "prec": {0: "UNDEFINED", 10: "F32", 15: "BF16", 20: "F16", 30: "Q8", 40: "Q4"},
    "hint": _numbered("NONE SRC0_IS_HADAMARD"),
    "order": _numbered("ASC DESC"),
    "glu": _numbered("REGLU GEGLU SWIGLU SWIGLU_OAI GEGLU_ERF GEGLU_QUICK SWIGLU_CLAMP"),
    "unary": _numbered(
        "ABS SGN NEG STEP TANH ELU RELU SIGMOID GELU GELU_QUICK SILU HARDSWISH HARDSIGMOID EXP"
        " EXPM1 SOFTPLUS GELU_ERF XIELU FLOOR CEIL ROUND TRUNC"
    ),
}


def yarn(params: Mapping[str, Any]) -> tuple[NDArray[np.float64], float]:
    """For each pair, the share of its frequency that is kept and not scaled by `freq_scale`; and
    the factor of the result. `params` are those of the op, by name. The formulas are those of
    `rope_yarn` and `ggml_rope_yarn_corr_dims` (ggml/src/ggml-cpu/ops.cpp, ggml/src/ggml.c)."""
    n, base = int(params["n_dims"]), float(params["freq_base"])
    pairs = np.arange(n // 2)
    if not params["ext_factor"]:
        return np.zeros(n // 2), float(params["attn_factor"])

    def dim(turns: float) -> float:
        return n * math.log(params["n_ctx_orig"] / (turns * 2 * math.pi)) / (2 * math.log(base))

    low = max(0.0, math.floor(dim(params["beta_fast"])))
    high = min(n - 1.0, math.ceil(dim(params["beta_slow"])))
    ramp = 1 - np.clip((pairs - low) / max(0.001, high - low), 0, 1)
    magnitude = params["attn_factor"] * (1 + 0.1 * math.log(1 / params["freq_scale"]))
    return ramp * params["ext_factor"], magnitude
