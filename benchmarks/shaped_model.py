"""Llamas of chosen shapes with random weights, and a tokenizer that takes any text.

The time of a decode depends on shapes and types, not on values, so these models
take as long as real ones of their shapes, without a download. Five bytes of text are one token.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np


@dataclass(frozen=True)
class Shape:
    """Of a Llama; with experts, of a mixture."""

    layers: int
    width: int
    heads: int
    kv_heads: int
    feed_forward: int
    experts: int = 0
    used: int = 0
    vocabulary: int = 1024


LLAMA_100M = Shape(layers=14, width=768, heads=12, kv_heads=4, feed_forward=2048, vocabulary=16000)
"""100.4 million parameters, 201 MB in F16"""
LLAMA_1B_BLOCK = Shape(layers=1, width=2048, heads=32, kv_heads=8, feed_forward=8192)
"""one block of Llama-3.2-1B: hidden size 2048, 32 heads of 64, 8 heads of keys and values"""


def write_model(path: Path, shape: Shape, kind: Literal["F16", "Q8_0"] = "F16") -> Path:
    """Write the model unless it exists."""
    if path.exists():
        return path
    from gguf import GGMLQuantizationType, GGUFWriter
    from gguf.quants import quantize

    rng = np.random.default_rng(0)
    part = path.with_suffix(".part")
    writer = GGUFWriter(part, "llama")
    writer.add_context_length(4096)
    writer.add_embedding_length(shape.width)
    writer.add_block_count(shape.layers)
    writer.add_feed_forward_length(shape.feed_forward)
    writer.add_head_count(shape.heads)
    writer.add_head_count_kv(shape.kv_heads)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(shape.vocabulary)
    writer.add_tokenizer_model("test")
    writer.add_token_list([f"<{i}>" for i in range(shape.vocabulary)])
    if shape.experts:
        writer.add_expert_count(shape.experts)
        writer.add_expert_used_count(shape.used)
    stored = GGMLQuantizationType[kind]

    def weight(name: str, *dimensions: int) -> None:
        values = rng.standard_normal(dimensions, dtype=np.float32) * 0.02
        rows = values.reshape(-1, dimensions[-1])
        data = quantize(rows, stored)
        writer.add_tensor(name, data.reshape(*dimensions[:-1], -1), raw_dtype=stored)

    def norm(name: str) -> None:
        writer.add_tensor(name, np.ones(shape.width, dtype=np.float32))

    kv = shape.width // shape.heads * shape.kv_heads
    experts, suffix = ((shape.experts,), "_exps") if shape.experts else ((), "")
    weight("token_embd.weight", shape.vocabulary, shape.width)
    norm("output_norm.weight")
    for i in range(shape.layers):
        norm(f"blk.{i}.attn_norm.weight")
        weight(f"blk.{i}.attn_q.weight", shape.width, shape.width)
        weight(f"blk.{i}.attn_k.weight", kv, shape.width)
        weight(f"blk.{i}.attn_v.weight", kv, shape.width)
        weight(f"blk.{i}.attn_output.weight", shape.width, shape.width)
        norm(f"blk.{i}.ffn_norm.weight")
        if shape.experts:
            weight(f"blk.{i}.ffn_gate_inp.weight", shape.experts, shape.width)
        for name in ("gate", "up"):
            weight(f"blk.{i}.ffn_{name}{suffix}.weight", *experts, shape.feed_forward, shape.width)
        weight(f"blk.{i}.ffn_down{suffix}.weight", *experts, shape.width, shape.feed_forward)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    part.rename(path)
    return path
