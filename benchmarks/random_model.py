"""A Llama with random F16 weights and the demo model's vocabulary.

The time of a decode depends on the shapes, not on the values, so this represents a model of about
100 million parameters without a download.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

N_LAYER, N_EMBD, N_FF, N_HEAD, N_HEAD_KV = 14, 768, 2048, 12, 4
N_VOCAB = 16000


def write_random_model(path: Path) -> Path:
    """Write the model unless it exists; 105.6 million parameters, 211 MB."""
    if path.exists():
        return path
    from gguf import GGMLQuantizationType, GGUFWriter

    rng = np.random.default_rng(0)
    part = path.with_suffix(".part")
    writer = GGUFWriter(part, "llama")
    writer.add_context_length(1024)
    writer.add_embedding_length(N_EMBD)
    writer.add_block_count(N_LAYER)
    writer.add_feed_forward_length(N_FF)
    writer.add_head_count(N_HEAD)
    writer.add_head_count_kv(N_HEAD_KV)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(N_VOCAB)
    writer.add_file_type(1)
    writer.add_tokenizer_model("no_vocab")

    def weight(name: str, *shape: int) -> None:
        values = (rng.standard_normal(shape, dtype=np.float32) * 0.02).astype(np.float16)
        writer.add_tensor(name, values, raw_dtype=GGMLQuantizationType.F16)

    def norm(name: str) -> None:
        writer.add_tensor(name, np.ones(N_EMBD, dtype=np.float32))

    kv = N_EMBD // N_HEAD * N_HEAD_KV
    weight("token_embd.weight", N_VOCAB, N_EMBD)
    norm("output_norm.weight")
    for i in range(N_LAYER):
        norm(f"blk.{i}.attn_norm.weight")
        weight(f"blk.{i}.attn_q.weight", N_EMBD, N_EMBD)
        weight(f"blk.{i}.attn_k.weight", kv, N_EMBD)
        weight(f"blk.{i}.attn_v.weight", kv, N_EMBD)
        weight(f"blk.{i}.attn_output.weight", N_EMBD, N_EMBD)
        norm(f"blk.{i}.ffn_norm.weight")
        weight(f"blk.{i}.ffn_gate.weight", N_FF, N_EMBD)
        weight(f"blk.{i}.ffn_up.weight", N_FF, N_EMBD)
        weight(f"blk.{i}.ffn_down.weight", N_EMBD, N_FF)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    part.rename(path)
    return path
