"""The shapes of kernels whose parts `probe.parts` times, and the names of the parts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Part = Literal[
    "DOT_PRODUCTS", "MAXIMUM", "EXPONENTIALS", "NORMALIZATION", "WEIGHTED_SUM", "RMS_NORM", "MUL"
]
SOFT_MAX_PARTS: tuple[Part, ...] = ("MAXIMUM", "EXPONENTIALS", "NORMALIZATION")
ATTENTION_PARTS: tuple[Part, ...] = ("DOT_PRODUCTS", *SOFT_MAX_PARTS, "WEIGHTED_SUM")
SCALED_NORM_PARTS: tuple[Part, ...] = ("RMS_NORM", "MUL")
"""the ops of the only kernel that ggml's CPU backend fuses"""


@dataclass(frozen=True)
class AttentionShape:
    """One attention of all heads."""

    tokens: int
    heads: int
    kv_heads: int
    cells: int
    """of the cache that are attended"""
    key: int
    """length of a key"""
    value: int
    """length of a value"""
    type_k: str
    type_v: str
    """of the cache, in ggml's words"""
    fused: bool
    """flash attention; else only the passes of its soft-max are timed, which SOFT_MAX runs"""


@dataclass(frozen=True)
class ScaledNormShape:
    """RMS_NORM and the MUL by its weight, which ggml fuses."""

    elements: int
    """of a row"""
    rows: int


KernelShape = AttentionShape | ScaledNormShape
PartTimes = dict[Part, float]
"""ns of each part, of all heads or rows together, on one thread"""
