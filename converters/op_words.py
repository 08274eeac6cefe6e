"""What a kernel does, in words that a learner of transformers knows.

Invariant: pure, and one table; what is not known here is called by its op, never guessed at.
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
    cache = _cache_words(leafs)
    if cache and op in ("SET_ROWS", "CPY", "SET"):
        return f"write {cache}"
    if cache and op == "ROPE":
        return f"shift positions of {cache}"
    if cache and op in ("GET_ROWS", "CONT", "DUP"):
        return f"read {cache}"
    for of_op, pattern, words in _RULES:
        if op == of_op and re.search(pattern, " ".join((plain, *leafs))):
            return _with_cache(words, cache, op)
    if op in ("ROPE", "MUL_MAT", "RMS_NORM", "NORM", "SCALE", "SOFT_MAX") and layer >= 0:
        whose = _WHOSE.get(plain[:1].upper(), "") if re.match(r"[qkvQKV](cur|_|$)", plain) else ""
        return _with_cache(_OPS[op] + whose, cache, op)
    return _OPS.get(op, op.lower().replace("_", " "))


def _of_weight(weight: str) -> str | None:
    """What a matrix is for, None when its name does not tell."""
    inside = re.sub(r"^((enc|dec)\.)?(blk\.\d+\.)?", "", weight)
    for pattern, words in _MATRICES:
        if re.match(pattern, inside):
            return words
    return None


def _cache_words(leafs: Sequence[str]) -> str:
    kinds = sorted(
        {m[1] for leaf in leafs if (m := re.match(r"cache_(?:\w+_)?([kvrs])_l\d", leaf))}
    )
    if not kinds:
        return ""
    if kinds[0] in "rs":
        return "the recurrent state"
    what = " and ".join({"k": "keys", "v": "values"}[kind] for kind in kinds if kind in "kv")
    return f"{what} {_FROM}"


def _with_cache(words: str, cache: str, op: str) -> str:
    if not cache or op not in ("MUL_MAT", "FLASH_ATTN_EXT"):
        return words
    return f"{words}, reads {cache.replace(_FROM, 'from the KV cache')}"


_FROM = "to the KV cache"
_WHOSE = {"Q": " of the queries", "K": " of the keys", "V": " of the values"}

_MATRICES = (
    (r"(cross_)?attn_qkv", "query, key and value projection"),
    (r"attn_(q_a|kv_a|kv_a_mqa)\b", "projection to the small latent space"),
    (r"(cross_)?attn_(q|q_b)\b", "query projection"),
    (r"(cross_)?attn_(k|k_b)\b", "key projection"),
    (r"(cross_)?attn_(v|v_b)\b", "value projection"),
    (r"attn_kv_b\b", "key and value projection"),
    (r"(cross_)?attn_(output|out|o)\b", "attention output projection"),
    (r"attn_gate\b", "attention gate projection"),
    (r"ffn_gate_inp", "router: scores of the experts"),
    (r"ffn_gate(_exps|_chexps)\b", "gate projection of the chosen experts"),
    (r"ffn_up(_exps|_chexps)\b", "up projection of the chosen experts"),
    (r"ffn_gate_up_exps\b", "gate and up projection of the chosen experts"),
    (r"ffn_down(_exps|_chexps)\b", "down projection of the chosen experts"),
    (r"ffn_gate", "feed-forward gate projection"),
    (r"ffn_up", "feed-forward up projection"),
    (r"ffn_down", "feed-forward down projection"),
    (r"ssm_in\b", "input projection of the state space layer"),
    (r"ssm_out\b", "output projection of the state space layer"),
    (r"(output|token_embd)\.weight", "output: a score for every token of the vocabulary (logits)"),
    (r"output\.bias", "output projection"),
)  # fmt: skip

_RULES = (
    ("GET_ROWS", r"token_embd", "embedding lookup"),
    ("GET_ROWS", r"position_embd|pos_embd", "position embedding lookup"),
    ("GET_ROWS", r"token_types", "token type embedding lookup"),
    ("GET_ROWS", r"out_ids", "keep the rows whose logits are wanted"),
    ("SOFT_MAX", r"^(kq|attn|KQ)", "softmax of attention scores"),
    ("SOFT_MAX", r"moe|expert", "softmax of expert scores"),
    ("MUL_MAT", r"^kqv", "attention: sum of values, weighted by the scores"),
    ("MUL_MAT", r"^kq", "attention scores: queries by keys"),
    ("ADD", r"^(ffn_inp|l_out|attn_residual|ffn_residual|layer_out|sa_out)|_(residual|add)$",
     "residual add"),
    ("ADD", r"pos_embd|position_embd|^inpL$", "add the position embedding"),
    ("ADD", r"norm", "norm bias"),
    ("MUL", r"norm", "norm weight"),
    ("ARGSORT", r"moe|expert", "choose the best experts"),
    ("TOP_K", r"moe|expert", "choose the best experts"),
    ("GLU", r"", "gated activation of the feed-forward"),
    ("UNARY", r"ffn|moe", "activation of the feed-forward"),
    ("FLASH_ATTN_EXT", r"", "flash attention (scores, softmax and values in one kernel)"),
    ("SSM_CONV", r"", "convolution over the last positions"),
    ("SSM_SCAN", r"", "state space scan over the positions"),
)  # fmt: skip

_OPS = {
    "ADD": "sum",
    "ARGSORT": "sort",
    "CONCAT": "concatenate",
    "CONT": "copy into contiguous memory",
    "CPY": "copy",
    "DIV": "quotient, element by element",
    "GET_ROWS": "pick rows",
    "MUL": "product, element by element",
    "MUL_MAT": "matrix product",
    "MUL_MAT_ID": "matrix product with the chosen experts",
    "NORM": "layer norm (mean and variance)",
    "RMS_NORM": "root-mean-square norm",
    "L2_NORM": "norm to length one",
    "ROPE": "rotary position embedding",
    "SCALE": "scale by a number",
    "SOFT_MAX": "softmax",
    "SUB": "difference",
    "SUM_ROWS": "sum of each row",
    "UNARY": "function of each element",
}
