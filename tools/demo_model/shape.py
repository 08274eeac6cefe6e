"""The demo model's shape."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Shape:
    """The sizes of a small llama; every row of every matrix is a multiple of 256 long."""

    vocabulary: int = 1024
    width: int = 256
    layers: int = 4
    heads: int = 4
    kv_heads: int = 2
    head_size: int = 64
    feed_forward: int = 768
    context: int = 512
    rope_base: float = 10000.0
    norm_epsilon: float = 1e-5
