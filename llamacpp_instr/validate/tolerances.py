"""The error that llama.cpp itself allows for each op.

Invariant: the numbers are those of tests/test-backend-ops.cpp (`max_nmse_err`) of the pinned
upstream: 1e-7, unless the test of an op says otherwise.
"""

from __future__ import annotations

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
