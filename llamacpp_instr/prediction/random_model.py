"""Random models whose layers have different types, to measure all types in one decode.

The time of a kernel depends on shapes and types, not on values. Each weight repeats a few rows that
ggml quantized from random numbers, so a model of hundreds of megabytes is written in a second.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llamacpp_instr.model.types import BY_NAME
from llamacpp_instr.prediction.probe.ggml import Ggml

ROWS = 32
"""that are quantized, and repeated"""
CONTEXT = 4096


@dataclass(frozen=True)
class Shape:
    """A Llama, or a Mixtral if it has experts."""

    width: int
    feed_forward: int
    heads: int
    kv_heads: int
    vocabulary: int = 2048
    experts: int = 0
    used: int = 0
    """experts for each token"""


def write_random_layers(path: Path, shape: Shape, types: list[str]) -> Path:
    """A model with a layer in each of `types`; its embeddings have the first."""
    from gguf import GGMLQuantizationType, GGUFWriter

    writer = GGUFWriter(path, "llama")
    writer.add_context_length(CONTEXT)
    writer.add_embedding_length(shape.width)
    writer.add_block_count(len(types))
    writer.add_feed_forward_length(shape.feed_forward)
    writer.add_head_count(shape.heads)
    writer.add_head_count_kv(shape.kv_heads)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(shape.vocabulary)
    if shape.experts:
        writer.add_expert_count(shape.experts)
        writer.add_expert_used_count(shape.used)
    writer.add_tokenizer_model("no_vocab")
    rows = _Rows()

    def weight(name: str, type_: str, *ne: int) -> None:
        data = rows.tensor(type_, *ne)
        writer.add_tensor(f"{name}.weight", data, raw_dtype=GGMLQuantizationType[type_])

    def norm(name: str) -> None:
        writer.add_tensor(f"{name}.weight", np.ones(shape.width, np.float32))

    width, feed_forward = shape.width, shape.feed_forward
    kv = width // shape.heads * shape.kv_heads
    weight("token_embd", types[0], shape.vocabulary, width)
    weight("output", types[-1], shape.vocabulary, width)
    norm("output_norm")
    for i, type_ in enumerate(types):
        norm(f"blk.{i}.attn_norm")
        norm(f"blk.{i}.ffn_norm")
        for name, n_rows in (("q", width), ("k", kv), ("v", kv), ("output", width)):
            weight(f"blk.{i}.attn_{name}", type_, n_rows, width)
        experts = (shape.experts,) if shape.experts else ()
        ending = "_exps" if experts else ""
        for name, ne in (("gate", (feed_forward, width)), ("up", (feed_forward, width)),
                         ("down", (width, feed_forward))):  # fmt: skip
            weight(f"blk.{i}.ffn_{name}{ending}", type_, *experts, *ne)
        if experts:
            weight(f"blk.{i}.ffn_gate_inp", "F32", shape.experts, width)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


class _Rows:
    """A few quantized rows, others for each tensor: with equal ones, scores of attention would be
    so large that the processor computes with denormal numbers, which takes several times longer."""

    def __init__(self) -> None:
        self._lib: Any = Ggml().lib
        self._random = np.random.default_rng(0)

    def tensor(self, type_: str, *ne: int) -> NDArray[np.uint8]:
        """Bytes of a tensor; `ne` in numpy's order, the length of a row last."""
        *above, n = ne
        rows = self._quantized(type_, n)
        data: NDArray[np.uint8] = np.resize(rows, (*above, rows.shape[1]))
        return data

    def _quantized(self, name: str, n: int) -> NDArray[np.uint8]:
        values = self._random.standard_normal((ROWS, n), np.float32) * np.float32(0.02)
        if name == "F32":
            plain: NDArray[np.uint8] = values.view(np.uint8)
            return plain
        type_ = BY_NAME[name]
        data = np.zeros((ROWS, type_.row_bytes(n)), np.uint8)
        at = values.ctypes.data, data.ctypes.data
        self._lib.ggml_quantize_chunk(type_.number, *at, 0, ROWS, n, None)
        return data
