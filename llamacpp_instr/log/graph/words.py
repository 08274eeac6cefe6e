"""Describes what a kernel does, in words that a learner of transformers knows, and names the
standard operators, of ONNX and PyTorch, that compute what ggml's ops compute.

Invariant: pure functions and tables. An unknown kernel gets the name of its op, and an op that no
standard operators can express has none, never a guess.
https://onnx.ai/onnx/operators, https://docs.pytorch.org/docs/stable/nn.functional.html
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from llamacpp_instr.log.graph.ops import is_adapter


def describe(op: str, name: str, leafs: Sequence[str], layer: int) -> str:
    """What a node does: `query projection`, `write keys to the KV cache`, `residual add`. `leafs`
    are the weights, inputs and caches that it reads, through views too."""
    plain = re.sub(r"-\d+$", "", name.split(" (", 1)[0])
    for weight in leafs:
        matrix = _of_weight(weight)
        if matrix is None:
            continue
        if is_adapter(weight):
            return f"LoRA adapter of the {matrix}"
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
        if found := re.match(pattern, inside.removeprefix("cross_")):
            return cross + found.expand(words)
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
    (r"ffn_(gate|up|down)_shexp\b", r"\1 projection of the shared expert"),
    (r"ffn_(gate|up|down)(_exps|_chexps)\b", r"\1 projection of the chosen experts"),
    (r"ffn_gate_up_exps\b", "gate and up projection of the chosen experts"),
    (r"ffn_(gate|up|down)", r"feed-forward \1 projection"),
    (r"ssm_(in|out)\b", r"\1put projection of the state space layer"),
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
    ("CLAMP", r"^ffn_moe_weights", "keep the sum of the scores away from zero"),
    ("DIV", r"^ffn_moe_weights", "scores of the chosen experts, as shares of one"),
    ("MUL", r"^ffn_moe_weighted", "results of the experts, each times its score"),
    ("ADD", r"^ffn_moe_out", "sum of the results of the experts"),
    ("ADD", r"^ffn_out$", "sum of the parts of the feed-forward"),
    ("MUL", r"^ffn_shexp_gated", "gate the shared expert"),
    ("UNARY", r"^ffn_moe_probs", "probabilities of the experts"),
    ("SOFT_MAX", r"^(kq|attn|KQ)", "softmax of attention scores"),
    ("SOFT_MAX", r"moe|expert", "softmax of expert scores"),
    ("MUL_MAT", r"^kqv", "attention: sum of values, weighted by the scores"),
    ("MUL_MAT", r"^kq", "attention scores: queries times keys"),
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


OPSET = 23
"""of ONNX: the first with Attention, RMSNormalization and RotaryEmbedding"""


class Standard(NamedTuple):
    """What computes an op outside ggml."""

    onnx: tuple[str, ...]
    """operators of opset 23, in their order; empty if there are none"""
    torch: str
    """function below `torch` that does it, or its main part; empty if there is none"""


def standard_operator(op: str, params: Mapping[str, object]) -> Standard:
    """The operators for a node; `params` are those of `ops.op_params`."""
    if op in ("UNARY", "GLU"):
        return (_UNARY if op == "UNARY" else _GLU).get(str(params.get("kind")), _NONE)
    return OPS.get(op, _NONE)


_NONE = Standard((), "")


def _table(rows: str) -> dict[str, Standard]:
    """Lines of `OP,OP  Operator+Operator  function`; a dash is none."""
    found = {}
    for row in rows.strip().splitlines():
        ops, onnx, torch = row.split()
        operators = () if onnx == "-" else tuple(onnx.split("+"))
        for op in ops.split(","):
            found[op] = Standard(operators, "" if torch == "-" else torch)
    return dict(sorted(found.items()))


OPS = _table("""
ACC                ScatterElements               index_add
ADD,ADD1           Add                           add
ADD_ID             Gather+Add                    add
ARANGE             Range                         arange
ARGMAX             ArgMax                        argmax
ARGSORT            TopK                          argsort
CLAMP              Clip                          clamp
CONCAT             Concat                        cat
CONT               Identity                      Tensor.contiguous
CONV_2D,CONV_2D_DW Conv                          nn.functional.conv2d
CONV_3D            Conv                          nn.functional.conv3d
CONV_TRANSPOSE_1D  ConvTranspose                 nn.functional.conv_transpose1d
CONV_TRANSPOSE_2D  ConvTranspose                 nn.functional.conv_transpose2d
COS                Cos                           cos
COUNT_EQUAL        Equal+Cast+ReduceSum          eq
CPY                Cast                          Tensor.copy_
CUMSUM             CumSum                        cumsum
DIAG               EyeLike+Mul                   diag_embed
DIAG_MASK_INF      Trilu+Where                   masked_fill
DIAG_MASK_ZERO,TRI Trilu                         tril
DIV                Div                           div
DUP                Identity                      clone
FILL               ConstantOfShape               full
FLASH_ATTN_EXT     Attention                     nn.functional.scaled_dot_product_attention
GATED_DELTA_NET,GATED_LINEAR_ATTN,RWKV_WKV6,RWKV_WKV7,SSM_SCAN Scan                          -
GET_ROWS           Gather                        nn.functional.embedding
GROUP_NORM         GroupNormalization            nn.functional.group_norm
IM2COL             -                             nn.functional.unfold
L2_NORM            LpNormalization               nn.functional.normalize
LEAKY_RELU         LeakyRelu                     nn.functional.leaky_relu
LIGHTNING_INDEXER  MatMul+Relu+Mul+ReduceSum+Add -
LOG                Log                           log
MEAN               ReduceMean                    mean
MUL,SCALE          Mul                           mul
MUL_MAT,OUT_PROD   MatMul                        matmul
MUL_MAT_ID         Gather+MatMul                 bmm
NORM               LayerNormalization            nn.functional.layer_norm
PAD,PAD_REFLECT_1D Pad                           nn.functional.pad
PERMUTE            Transpose                     permute
REPEAT             Tile                          tile
RESHAPE            Reshape                       reshape
RMS_NORM           RMSNormalization              nn.functional.rms_norm
ROLL               Slice+Concat                  roll
ROPE,ROPE_BACK     RotaryEmbedding               -
SET                ScatterElements               Tensor.copy_
SET_ROWS           ScatterND                     Tensor.index_copy_
SIN                Sin                           sin
SOFT_MAX           Mul+Add+Softmax               nn.functional.softmax
SOLVE_TRI          -                             linalg.solve_triangular
SQR                Mul                           square
SQRT               Sqrt                          sqrt
SSM_CONV           Conv                          nn.functional.conv1d
SUB                Sub                           sub
SUM,SUM_ROWS       ReduceSum                     sum
TOP_K              TopK                          topk
TRANSPOSE          Transpose                     transpose
UPSCALE            Resize                        nn.functional.interpolate
VIEW               Slice                         as_strided
""")

_UNARY = _table("""
ABS           Abs                    abs
CEIL          Ceil                   ceil
ELU           Elu                    nn.functional.elu
EXP           Exp                    exp
EXPM1         Exp+Sub                expm1
FLOOR         Floor                  floor
GELU,GELU_ERF Gelu                   nn.functional.gelu
GELU_QUICK    Mul+Sigmoid+Mul        sigmoid
HARDSIGMOID   HardSigmoid            nn.functional.hardsigmoid
HARDSWISH     HardSwish              nn.functional.hardswish
NEG           Neg                    neg
RELU          Relu                   relu
ROUND         Sign+Abs+Add+Floor+Mul -
SGN           Sign                   sign
SIGMOID       Sigmoid                sigmoid
SILU          Sigmoid+Mul            nn.functional.silu
SOFTPLUS      Softplus               nn.functional.softplus
STEP          Greater+Cast           heaviside
TANH          Tanh                   tanh
TRUNC         Cast                   trunc
""")

_GLU = _table("""
GEGLU,GEGLU_ERF Split+Gelu+Mul                     nn.functional.gelu
GEGLU_QUICK     Split+Mul+Sigmoid+Mul+Mul          sigmoid
REGLU           Split+Relu+Mul                     relu
SWIGLU          Split+Sigmoid+Mul+Mul              nn.functional.silu
SWIGLU_CLAMP    Split+Clip+Sigmoid+Mul+Mul         nn.functional.silu
SWIGLU_OAI      Split+Clip+Mul+Sigmoid+Mul+Add+Mul sigmoid
""")
