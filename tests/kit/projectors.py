"""Multimodal projectors of a few kilobytes with random weights, and images."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np

from tests.kit.gguf_files import save

WIDTH, FEED_FORWARD, HEADS, LAYERS, PATCH, SIZE = 32, 64, 2, 2, 14, 56
TOKENS = (SIZE // PATCH) ** 2
"""embeddings of an image: each is squeezed into a square"""


def write_projector(path: Path, width: int) -> Path:
    """One in the shape of LLaVA's, for a model with embeddings of that width."""
    writer = gguf.GGUFWriter(path, "clip")
    writer.add_type(gguf.GGUFType.MMPROJ)
    writer.add_clip_has_vision_encoder(True)
    writer.add_clip_projector_type("mlp")
    writer.add_vision_use_gelu(True)
    writer.add_vision_image_size(SIZE)
    writer.add_vision_patch_size(PATCH)
    writer.add_vision_embedding_length(WIDTH)
    writer.add_vision_feed_forward_length(FEED_FORWARD)
    writer.add_vision_block_count(LAYERS)
    writer.add_vision_head_count(HEADS)
    writer.add_vision_projection_dim(width)
    writer.add_vision_attention_layernorm_eps(1e-5)
    writer.add_vision_image_mean([0.5, 0.5, 0.5])
    writer.add_vision_image_std([0.5, 0.5, 0.5])
    shapes: dict[str, tuple[int, ...]] = {
        "v.patch_embd.weight": (WIDTH, 3, PATCH, PATCH),
        "v.position_embd.weight": (TOKENS, WIDTH),
        "mm.0.weight": (width, WIDTH),
        "mm.0.bias": (width,),
        "mm.2.weight": (width, width),
        "mm.2.bias": (width,),
    }
    of_layer = {
        "ffn_up": (FEED_FORWARD, WIDTH), "ffn_down": (WIDTH, FEED_FORWARD), "ln1": (WIDTH,),
        "ln2": (WIDTH,), **dict.fromkeys(("attn_q", "attn_k", "attn_v", "attn_out"), (WIDTH,) * 2),
    }  # fmt: skip
    for i in range(LAYERS):
        for name, shape in of_layer.items():
            shapes[f"v.blk.{i}.{name}.weight"] = shape
            shapes[f"v.blk.{i}.{name}.bias"] = shape[:1]
    random = np.random.default_rng(1)
    for name, shape in shapes.items():
        writer.add_tensor(name, random.normal(0, 0.1, shape).astype(np.float32))
    save(writer)
    return path


def image(seed: int, width: int = 40, height: int = 24) -> bytes:
    """Random pixels as a file (PPM)."""
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8)
    return b"P6 %d %d 255\n" % (width, height) + pixels.tobytes()
