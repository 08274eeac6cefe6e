"""Writes a Llama of transformers in the layout in which Meta publishes it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch

LAYERS = {
    "attention.wq": "self_attn.q_proj",
    "attention.wk": "self_attn.k_proj",
    "attention.wv": "self_attn.v_proj",
    "attention.wo": "self_attn.o_proj",
    "feed_forward.w1": "mlp.gate_proj",
    "feed_forward.w2": "mlp.down_proj",
    "feed_forward.w3": "mlp.up_proj",
    "attention_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
}


def as_neighbors(weight: torch.Tensor, n_heads: int) -> torch.Tensor:
    """Rows in Meta's order: row i of the first half of a head, then row i of its second half."""
    width = weight.shape[0] // n_heads
    order = [
        head * width + half * width // 2 + row
        for head in range(n_heads) for row in range(width // 2) for half in (0, 1)
    ]  # fmt: skip
    return weight[order]


def write_meta(
    folder: Path,
    model: Any,
    tokenizer: Path,
    n_shards: int,
    *,
    by_words: bool = False,
    **params: Any,
) -> None:
    """Write the weights of a model of transformers, its parameters, and a tokenizer's file."""
    folder.mkdir()
    state = model.state_dict()
    tensors = {
        "tok_embeddings.weight": state["model.embed_tokens.weight"],
        "norm.weight": state["model.norm.weight"],
        "output.weight": state["lm_head.weight"],
        "rope.freqs": torch.ones(8),
    }
    for layer in range(2):
        for ours, theirs in LAYERS.items():
            weight = state[f"model.layers.{layer}.{theirs}.weight"]
            if ours in ("attention.wq", "attention.wk"):
                weight = as_neighbors(weight, 4 if ours.endswith("q") else 2)
            tensors[f"layers.{layer}.{ours}.weight"] = weight
    for shard in range(n_shards):
        torch.save(
            {
                name: part(name, tensor, shard, n_shards, by_words)
                for name, tensor in tensors.items()
            },
            folder / f"consolidated.{shard:02}.pth",
        )
    known = {
        "dim": 64, "n_layers": 2, "n_heads": 4, "n_kv_heads": 2, "vocab_size": -1,
        "multiple_of": 32, "norm_eps": 1e-5,
    }  # fmt: skip
    (folder / "params.json").write_text(json.dumps(known | params))
    shutil.copyfile(tokenizer, folder / "tokenizer.model")


def part(
    name: str, tensor: torch.Tensor, shard: int, n_shards: int, by_words: bool
) -> torch.Tensor:
    """As Meta's model-parallel layers split a tensor; Llama 3 splits its embedding by words."""
    if tensor.dim() == 1:
        return tensor
    columns = name.endswith(("wo.weight", "w2.weight"))
    if name == "tok_embeddings.weight":
        columns = not by_words
    return tensor.chunk(n_shards, dim=int(columns))[shard].clone()
