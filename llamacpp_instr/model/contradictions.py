"""What a header says against the tensors of its file, or against itself.

Invariant: silent where a key is missing, and where an architecture may give it another meaning. The
random models of all architectures have no contradiction.
"""

from __future__ import annotations

import re

from llamacpp_instr.model.file import ModelFile


def find_contradictions(model: ModelFile) -> list[str]:
    """A sentence for each, with both values."""

    def number(key: str) -> int:
        value = model.hyper_parameter(key)
        return value if isinstance(value, int) else 0

    def length(tensor: str, dimension: int) -> int:
        weight = model.by_name.get(f"{tensor}.weight")
        return weight.ne[dimension] if weight and len(weight.ne) > dimension else 0

    layers = [int(of[1]) for name in model.by_name if (of := re.match(r"blk\.(\d+)\.", name))]
    vocabulary = model.arrays.get("tokenizer.ggml.tokens")
    tokens = vocabulary.count if vocabulary else 0
    width, heads = number("embedding_length"), number("attention.head_count")
    groups = number("attention.head_count_kv")
    head = number("attention.key_length") or (width // heads if heads else 0)
    alike = head and not number("attention.key_length_swa")  # the heads of all layers
    keys = length("blk.0.attn_k", 1) / head if alike else 0
    claims = [
        ("block_count", number("block_count"), "layers", max(layers, default=-1) + 1),
        ("embedding_length", width, "columns in token_embd", length("token_embd", 0)),
        ("vocab_size", number("vocab_size"), "tokens", tokens),
        ("the number of tokens", tokens, "embeddings in token_embd", length("token_embd", 1)),
        ("attention.head_count_kv", groups, "heads in blk.0.attn_k", keys),
    ]
    found = [
        f"{one} is {a:,}, but the file has {b:,g} {many}"
        for one, a, many, b in claims
        if a and b and a != b
    ]
    if heads and groups and heads % groups:
        found.append(f"attention.head_count_kv is {groups:,} and does not divide {heads:,} heads")
    return found
