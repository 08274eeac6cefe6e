"""Describes what a kernel does, in words that a learner of transformers knows.

Invariant: pure functions and one table. An unknown kernel gets the name of its op, never a guess.
"""

from __future__ import annotations

import re
from collections.abc import Sequence


def describe(op: str, name: str, leafs: Sequence[str], layer: int) -> str:
    """What a node does: `query projection`, `write keys to the KV cache`, `residual add`.

    `name` is the tensor's, `leafs` are the names of the weights, inputs and caches that the node
    reads, through views too.
    """
    plain = re.sub(r"-\d+$", "", name.split(" (", 1)[0])
    for weight in leafs:
        matrix = _of_weight(weight)
        if matrix is None:
            continue
        if op in ("MUL_MAT", "MUL_MAT_ID"):
            return matrix
        if op in ("ADD", "ADD_ID"):
            return f"bias of the {matrix}"
        if op == "MUL" and weight.endswith(".scale"):
            return f"scale of the {matrix}"
    cache = _cached(leafs)
    if cache == _STATE and op == "SCALE":
        return f"clear {cache} of new sequences"
    if cache and op in ("SET_ROWS", "CPY", "SET"):
        return _placed("write", cache, "to")
    if cache and op == "ROPE":
        return _placed("shift positions of", cache, "in")
    if cache and op in ("GET_ROWS", "CONT", "DUP"):
        return _placed("read", cache, "from")
    for of_op, pattern, words in _RULES:
        if op == of_op and re.search(pattern, " ".join((plain, *leafs))):
            return _with_cache(words, cache, op)
    if op in ("ROPE", "MUL_MAT", "RMS_NORM", "NORM", "SOFT_MAX") and layer >= 0:
        whose = _WHOSE.get(plain[:1].upper(), "") if re.match(r"[qkvQKV](cur|_|$)", plain) else ""
        return _with_cache(_OPS[op] + whose, cache, op)
    return _OPS.get(op, op.lower().replace("_", " "))


def _of_weight(weight: str) -> str | None:
    """The purpose of a matrix, None if its name does not say."""
    inside = re.sub(r"^((enc|dec)\.)?(blk\.\d+\.)?", "", weight)
    cross = "cross-attention: " if inside.startswith("cross_") else ""
    for pattern, words in _MATRICES:
        if re.match(pattern, inside.removeprefix("cross_")):
            return cross + words
    return None


def _cached(leafs: Sequence[str]) -> str:
    """What a node reads from or writes to the caches, empty if nothing."""
    kinds = sorted(
        {m[1] for leaf in leafs if (m := re.match(r"cache_(?:\w+_)?([kvrs])_l\d", leaf))}
    )
    if not kinds:
        return ""
    if kinds[0] in "rs":
        return _STATE
    return " and ".join({"k": "keys", "v": "values"}[kind] for kind in kinds if kind in "kv")


def _with_cache(words: str, cache: str, op: str) -> str:
    if not cache or op not in ("MUL_MAT", "FLASH_ATTN_EXT"):
        return words
    return f"{words}, {_placed('reads', cache, 'from')}"


def _placed(does: str, cache: str, preposition: str) -> str:
    return f"{does} {cache}" + ("" if cache == _STATE else f" {preposition} the KV cache")


_STATE = "the recurrent state"
_WHOSE = {"Q": " of the queries", "K": " of the keys", "V": " of the values"}

_MATRICES = (
    (r"attn_qkv", "query, key and value projection"),
    (r"attn_(q_a|kv_a|kv_a_mqa)\b", "projection to the small latent space"),
    (r"attn_(q|q_b)\b", "query projection"),
    (r"attn_k_b\b", "key projection, applied to the queries instead"),
    (r"attn_v_b\b", "value projection out of the small latent space"),
    (r"attn_k\b", "key projection"),
    (r"attn_v\b", "value projection"),
    (r"attn_kv_b\b", "key and value projection"),
    (r"attn_(output|out|o)\b", "attention output projection"),
    (r"attn_gate\b", "attention gate projection"),
    (r"ffn_gate_inp_shexp", "gate of the shared expert"),
    (r"ffn_gate_inp", "router: scores of the experts"),
    (r"exp_probs_b\b", "choice of experts"),
    (r"ffn_gate_shexp\b", "gate projection of the shared expert"),
    (r"ffn_up_shexp\b", "up projection of the shared expert"),
    (r"ffn_down_shexp\b", "down projection of the shared expert"),
    (r"ffn_gate(_exps|_chexps)\b", "gate projection of the chosen experts"),
    (r"ffn_up(_exps|_chexps)\b", "up projection of the chosen experts"),
    (r"ffn_gate_up_exps\b", "gate and up projection of the chosen experts"),
    (r"ffn_down(_exps|_chexps)\b", "down projection of the chosen experts"),
    (r"ffn_gate", "feed-forward gate projection"),
    (r"ffn_up", "feed-forward up projection"),
    (r"ffn_down", "feed-forward down projection"),
    (r"ssm_in\b", "input projection of the state space layer"),
    (r"ssm_out\b", "output projection of the state space layer"),
    (r"ssm_conv1d", "convolution"),
    (r"ssm_x\b", "projection to step size, input and output weights of the state (dt, B, C)"),
    (r"ssm_dt\b", "projection of the step size (dt)"),
    (r"ssm_ba\b", "projection to learning rate and decay of the state (beta, alpha)"),
    (r"(output|token_embd)\.weight", "output: a score for every token of the vocabulary (logits)"),
    (r"output\.bias", "output projection"),
)  # fmt: skip

_RULES = (
    ("GET_ROWS", r"token_embd", "embedding lookup"),
    ("GET_ROWS", r"position_embd|pos_embd", "position embedding lookup"),
    ("GET_ROWS", r"token_types", "token type embedding lookup"),
    ("GET_ROWS", r"out_ids", "keep the rows whose logits are wanted"),
    ("GET_ROWS", r"attn_rel_b", "relative position bias lookup"),
    ("GET_ROWS", r"^ffn_moe_weights", "scores of the chosen experts"),
    ("SUM_ROWS", r"^ffn_moe_weights", "sum of the scores of the chosen experts"),
    ("CLAMP", r"^ffn_moe_weights", "keep the sum of the scores from zero"),
    ("DIV", r"^ffn_moe_weights", "scores of the chosen experts, as shares of one"),
    ("MUL", r"^ffn_moe_weighted", "results of the experts, each by its score"),
    ("ADD", r"^ffn_moe_out", "sum of the results of the experts"),
    ("ADD", r"^ffn_out$", "sum of the parts of the feed-forward"),
    ("MUL", r"^ffn_shexp_gated", "gate the shared expert"),
    ("UNARY", r"^ffn_moe_probs", "probabilities of the experts"),
    ("SOFT_MAX", r"^(kq|attn|KQ)", "softmax of attention scores"),
    ("SOFT_MAX", r"moe|expert", "softmax of expert scores"),
    ("MUL_MAT", r"^kqv", "attention: sum of values, weighted by the scores"),
    ("MUL_MAT", r"^kq", "attention scores: queries by keys"),
    ("ADD", r"^(ffn_inp|cross_inp|l_out|layer_out|sa_out|result_embd)|_(residual|add)$",
     "residual add"),
    ("ADD", r"pos_embd|position_embd|^inpL$", "add the position embedding"),
    ("ADD", r"^kq_", "add the position bias to the scores"),
    ("ADD", r"norm", "norm bias"),
    ("MUL", r"norm", "norm weight"),
    ("ARGSORT", r"moe|expert", "choose the best experts"),
    ("TOP_K", r"moe|expert", "choose the best experts"),
    ("GLU", r"ffn|moe|mlp", "gated activation of the feed-forward"),
    ("UNARY", r"ffn|moe", "activation of the feed-forward"),
    ("UNARY", r"softplus", "make positive (softplus)"),
    ("UNARY", r"sigmoid", "gate between 0 and 1 (sigmoid)"),
    ("UNARY", r"silu", "activation (SiLU)"),
    ("MUL", r"^attn_gated", "gate the attention's result"),
    ("MUL", r"\bssm_d$", "input of the scan, weighted to be added to its result"),
    ("MUL", r"\bssm_a$", "decay of the state"),
    ("CONCAT", r"^[QK]cur", "join the parts without and with a position"),
    ("CONCAT", r"^conv_input", "last positions before the new ones"),
    ("SCALE", r"^inp_scaled", "scale of the embedding"),
    ("SCALE", r"^[qQ](cur|_)", "scale of the queries"),
    ("SCALE", r"^[kK](cur|_)", "scale of the keys"),
    ("CPY", r"^Kcur", "copy of the keys as attention reads them"),
    ("CPY", r"^Vcur", "copy of the values as attention reads them"),
    ("FLASH_ATTN_EXT", r"", "flash attention (scores, softmax and values in one kernel)"),
    ("SSM_CONV", r"", "convolution over the last positions"),
    ("SSM_SCAN", r"", "state space scan over the positions"),
    ("GATED_DELTA_NET", r"", "gated delta rule over the positions"),
)  # fmt: skip

_OPS = {
    "ADD": "sum",
    "ARGSORT": "sort",
    "CLAMP": "keep within bounds",
    "CONCAT": "concatenate",
    "CONT": "copy into contiguous memory",
    "CPY": "copy",
    "DIV": "quotient, element by element",
    "GET_ROWS": "pick rows",
    "GLU": "gated activation",
    "MUL": "product, element by element",
    "MUL_MAT": "matrix product",
    "MUL_MAT_ID": "matrix product with the chosen experts",
    "NORM": "layer norm (mean and variance)",
    "REPEAT": "repeat to a larger shape",
    "RMS_NORM": "root-mean-square norm",
    "L2_NORM": "norm to length one",
    "ROPE": "rotary position embedding",
    "SCALE": "scale by a number",
    "SOFT_MAX": "softmax",
    "SUB": "difference",
    "SUM_ROWS": "sum of each row",
    "UNARY": "function of each element",
}
