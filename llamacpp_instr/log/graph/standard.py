"""The standard operators that compute what ggml's ops compute: ONNX's and PyTorch's.

Invariant: one table. An op that no standard operators can express has none, never a guess.
https://onnx.ai/onnx/operators, https://docs.pytorch.org/docs/stable/nn.functional.html
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

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
    """Lines of `OP  Operator+Operator  function`; a dash is none."""
    found = {}
    for row in rows.strip().splitlines():
        op, onnx, torch = row.split()
        operators = () if onnx == "-" else tuple(onnx.split("+"))
        found[op] = Standard(operators, "" if torch == "-" else torch)
    return found


OPS = _table("""
ACC               ScatterElements                index_add
ADD               Add                            add
ADD1              Add                            add
ADD_ID            Gather+Add                     add
ARANGE            Range                          arange
ARGMAX            ArgMax                         argmax
ARGSORT           TopK                           argsort
CLAMP             Clip                           clamp
CONCAT            Concat                         cat
CONT              Identity                       Tensor.contiguous
CONV_2D           Conv                           nn.functional.conv2d
CONV_2D_DW        Conv                           nn.functional.conv2d
CONV_3D           Conv                           nn.functional.conv3d
CONV_TRANSPOSE_1D ConvTranspose                  nn.functional.conv_transpose1d
CONV_TRANSPOSE_2D ConvTranspose                  nn.functional.conv_transpose2d
COS               Cos                            cos
COUNT_EQUAL       Equal+Cast+ReduceSum           eq
CPY               Cast                           Tensor.copy_
CUMSUM            CumSum                         cumsum
DIAG              EyeLike+Mul                    diag_embed
DIAG_MASK_INF     Trilu+Where                    masked_fill
DIAG_MASK_ZERO    Trilu                          tril
DIV               Div                            div
DUP               Identity                       clone
FILL              ConstantOfShape                full
FLASH_ATTN_EXT    Attention                      nn.functional.scaled_dot_product_attention
GATED_DELTA_NET   Scan                           -
GATED_LINEAR_ATTN Scan                           -
GET_ROWS          Gather                         nn.functional.embedding
GROUP_NORM        GroupNormalization             nn.functional.group_norm
IM2COL            -                              nn.functional.unfold
L2_NORM           LpNormalization                nn.functional.normalize
LEAKY_RELU        LeakyRelu                      nn.functional.leaky_relu
LIGHTNING_INDEXER MatMul+Relu+Mul+ReduceSum+Add  -
LOG               Log                            log
MEAN              ReduceMean                     mean
MUL               Mul                            mul
MUL_MAT           MatMul                         matmul
MUL_MAT_ID        Gather+MatMul                  bmm
NORM              LayerNormalization             nn.functional.layer_norm
OUT_PROD          MatMul                         matmul
PAD               Pad                            nn.functional.pad
PAD_REFLECT_1D    Pad                            nn.functional.pad
PERMUTE           Transpose                      permute
REPEAT            Tile                           tile
RESHAPE           Reshape                        reshape
RMS_NORM          RMSNormalization               nn.functional.rms_norm
ROLL              Slice+Concat                   roll
ROPE              RotaryEmbedding                -
ROPE_BACK         RotaryEmbedding                -
RWKV_WKV6         Scan                           -
RWKV_WKV7         Scan                           -
SCALE             Mul                            mul
SET               ScatterElements                Tensor.copy_
SET_ROWS          ScatterND                      Tensor.index_copy_
SIN               Sin                            sin
SOFT_MAX          Mul+Add+Softmax                nn.functional.softmax
SOLVE_TRI         -                              linalg.solve_triangular
SQR               Mul                            square
SQRT              Sqrt                           sqrt
SSM_CONV          Conv                           nn.functional.conv1d
SSM_SCAN          Scan                           -
SUB               Sub                            sub
SUM               ReduceSum                      sum
SUM_ROWS          ReduceSum                      sum
TOP_K             TopK                           topk
TRANSPOSE         Transpose                      transpose
TRI               Trilu                          tril
UPSCALE           Resize                         nn.functional.interpolate
VIEW              Slice                          as_strided
""")

_UNARY = _table("""
ABS         Abs           abs
CEIL        Ceil          ceil
ELU         Elu           nn.functional.elu
EXP         Exp           exp
EXPM1       Exp+Sub       expm1
FLOOR       Floor         floor
GELU        Gelu          nn.functional.gelu
GELU_ERF    Gelu          nn.functional.gelu
GELU_QUICK  Mul+Sigmoid+Mul sigmoid
HARDSIGMOID HardSigmoid   nn.functional.hardsigmoid
HARDSWISH   HardSwish     nn.functional.hardswish
NEG         Neg           neg
RELU        Relu          relu
ROUND       Sign+Abs+Add+Floor+Mul -
SGN         Sign          sign
SIGMOID     Sigmoid       sigmoid
SILU        Sigmoid+Mul   nn.functional.silu
SOFTPLUS    Softplus      nn.functional.softplus
STEP        Greater+Cast  heaviside
TANH        Tanh          tanh
TRUNC       Cast          trunc
""")

_GLU = _table("""
GEGLU        Split+Gelu+Mul                        nn.functional.gelu
GEGLU_ERF    Split+Gelu+Mul                        nn.functional.gelu
GEGLU_QUICK  Split+Mul+Sigmoid+Mul+Mul             sigmoid
REGLU        Split+Relu+Mul                        relu
SWIGLU       Split+Sigmoid+Mul+Mul                 nn.functional.silu
SWIGLU_CLAMP Split+Clip+Sigmoid+Mul+Mul            nn.functional.silu
SWIGLU_OAI   Split+Clip+Mul+Sigmoid+Mul+Add+Mul    sigmoid
""")
