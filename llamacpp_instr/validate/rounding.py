"""Activations as ggml's CPU backend rounds them before a product with quantized weights.

Invariant: only the grid is ggml's: blocks of 256 numbers for types in blocks of 256 (Q8_K), of 32
for others (Q8_0, Q8_1), each number a multiple of the block's largest divided by 127
(`vec_dot_type` of ggml/src/ggml-cpu/ggml-cpu.c, quantize_row_q8_K of ggml/src/ggml-quants.c).
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from llamacpp_instr.model.types import TYPES

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
