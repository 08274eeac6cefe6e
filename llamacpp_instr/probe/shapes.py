"""The shape of one attention, whose parts `probe.parts` times, and the names of the parts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Part = Literal["DOT_PRODUCTS", "MAXIMUM", "EXPONENTIALS", "NORMALIZATION", "WEIGHTED_SUM"]
SOFT_MAX_PARTS: tuple[Part, ...] = ("MAXIMUM", "EXPONENTIALS", "NORMALIZATION")
ATTENTION_PARTS: tuple[Part, ...] = ("DOT_PRODUCTS", *SOFT_MAX_PARTS, "WEIGHTED_SUM")


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


PartTimes = dict[Part, float]
"""ns of each part, of all heads together, on one thread"""
