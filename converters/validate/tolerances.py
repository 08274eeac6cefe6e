"""The error that llama.cpp itself allows for each op, and activations as ggml's CPU backend rounds
them before a product with quantized weights.

Invariant: the numbers are those of tests/test-backend-ops.cpp (`max_nmse_err`) of the pinned
upstream: 1e-7, unless the test of an op says otherwise. Of the rounding only the grid is ggml's:
blocks of 256 numbers for types in blocks of 256 (Q8_K), of 32 for others (Q8_0, Q8_1), each number
a multiple of the block's largest divided by 127 (`vec_dot_type` of ggml/src/ggml-cpu/ggml-cpu.c,
quantize_row_q8_K of ggml/src/ggml-quants.c).
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from llamacpp_instr.model.types import TYPES

DEFAULT = 1e-7
_OF_OP = {
    "CONV_2D": 5e-4,
    "CONV_2D_DW": 5e-4,
    "CONV_3D": 5e-4,
    "CONV_TRANSPOSE_2D": 5e-4,
    "FLASH_ATTN_EXT": 5e-4,
    "LIGHTNING_INDEXER": 1e-6,
    "MUL_MAT": 5e-4,
    "MUL_MAT_ID": 5e-4,
    "OUT_PROD": 5e-4,
    "SOFT_MAX": 1e-6,
}


TABLE = 1e-6
"""of GELU and its gates: ggml's CPU backend looks them up in a table of float16"""


def tolerance_of(op: str, kind: str = "") -> float:
    """The largest normalized mean squared error that is not a fault; `kind` is that of a function
    of elements or of a gate, such as GELU."""
    return (
        TABLE if kind in ("GELU", "GELU_QUICK", "GEGLU", "GEGLU_QUICK") else _OF_OP.get(op, DEFAULT)
    )


_BLOCKS = {type_.name.lower(): type_.block for type_ in TYPES.values() if type_.is_quantized}


def rounds(weight_type: str) -> bool:
    """Whether activations are rounded to 8 bits before a product with such weights."""
    return weight_type in _BLOCKS


def rounded(values: npt.NDArray[np.float32], weight_type: str) -> npt.NDArray[np.float32]:
    """The activations on the grid; rows have a multiple of the block's length."""
    block = 256 if _BLOCKS[weight_type] == 256 else 32
    rows = values.reshape(-1, block)
    step = np.abs(rows).max(axis=1, keepdims=True) / np.float32(127)
    with np.errstate(invalid="ignore", divide="ignore"):
        on_grid = np.where(step > 0, np.rint(rows / step) * step, 0)
    return on_grid.astype(np.float32).reshape(values.shape)
