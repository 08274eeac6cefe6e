"""Writes GGUF models of a few kilobytes with random weights, of kinds other than the demo model.

They use llama.cpp's "test" tokenizer: five bytes of text are one token, and a token's text is its
number in hexadecimal.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import gguf
import numpy as np

from tests.kit.gguf_files import save

WIDTH, HEADS, FEED_FORWARD, LAYERS, VOCABULARY, POSITIONS = 32, 2, 64, 2, 64, 256
TOKENS = tuple(f"<{i}>" for i in range(VOCABULARY))
ATTENTION = "attn_q attn_k attn_v attn_output"


def write_llama(
    path: Path,
    tokenizer: str = "test",
    nan_in: str = "",
    part: int = 0,
    dtypes: Mapping[str, type] | None = None,
    layers: int = LAYERS,
) -> Path:
    """A decoder. The values of the tensor `nan_in` are NaN. `dtypes` has numpy's types of tensors
    that are not stored as float32. With `part` the model is split into files of that many tensors,
    `NAME-00001-of-….gguf`."""
    writer = _writer(path, "llama", tokenizer, part=part, layers=layers)
    writer.add_layer_norm_rms_eps(1e-5)
    return _finish(writer, path, _llama_tensors(layers), nan_in, dtypes)


def write_speaker(path: Path, pieces: Sequence[str]) -> Path:
    """A decoder whose vocabulary is the letter a, the byte ESC, and these pieces of text."""
    tokens = ["<unk>", "<s>", "</s>", "<0x0A>", "<0x1B>", "a", *pieces]
    writer = _writer(path, "llama", "llama", tokens)
    writer.add_token_scores([0.0] * len(tokens))
    special = [gguf.TokenType.UNKNOWN, *[gguf.TokenType.CONTROL] * 2, *[gguf.TokenType.BYTE] * 2]
    writer.add_token_types(special + [gguf.TokenType.NORMAL] * (len(tokens) - len(special)))
    writer.add_add_space_prefix(False)
    writer.add_layer_norm_rms_eps(1e-5)
    return _finish(writer, path, _llama_tensors(), vocabulary=len(tokens))


def _llama_tensors(layers: int = LAYERS) -> list[str]:
    layer = _tensors(f"{ATTENTION} attn_norm ffn_norm ffn_gate ffn_up ffn_down")
    return [*_tensors("token_embd output_norm"), *_in_layers(layer, layers)]


def write_experts(path: Path, experts: int, used: int) -> Path:
    """A decoder with `experts` experts in its feed-forward, of which each token uses `used`."""
    writer = _writer(path, "llama")
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_expert_count(experts)
    writer.add_expert_used_count(used)
    layer = _tensors(f"{ATTENTION} attn_norm ffn_norm ffn_gate_inp")
    layer += _tensors("ffn_gate_exps ffn_up_exps ffn_down_exps")
    shapes: dict[str, tuple[int, ...]] = {
        "ffn_gate_inp": (experts, WIDTH),
        "ffn_gate_exps": (experts, FEED_FORWARD, WIDTH),
        "ffn_up_exps": (experts, FEED_FORWARD, WIDTH),
        "ffn_down_exps": (experts, WIDTH, FEED_FORWARD),
    }
    tensors = [*_tensors("token_embd output_norm"), *_in_layers(layer)]
    return _finish(writer, path, tensors, shapes=shapes)


def write_gemma3(path: Path, window: int = 16) -> Path:
    """A decoder in the shape of Gemma 3 with 270 million weights: one head of keys and values,
    longer than the embedding divided by the heads, norms of queries and keys, and a window that
    slides in the first layer."""
    writer = _writer(path, "gemma3")
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_head_count_kv(1)
    writer.add_key_length(WIDTH)
    writer.add_value_length(WIDTH)
    writer.add_sliding_window(window)
    layer = "attn_norm attn_q_norm attn_k_norm post_attention_norm ffn_norm post_ffw_norm"
    layer += f" {ATTENTION} ffn_gate ffn_up ffn_down"
    shapes = {"attn_q": (HEADS * WIDTH, WIDTH), "attn_output": (WIDTH, HEADS * WIDTH)}
    tensors = [*_tensors("token_embd output_norm"), *_in_layers(_tensors(layer))]
    return _finish(writer, path, tensors, shapes=shapes)


def write_gpt2(path: Path) -> Path:
    """A decoder with learned positions."""
    writer = _writer(path, "gpt2")
    writer.add_layer_norm_eps(1e-5)
    layer = "attn_norm attn_qkv attn_output ffn_norm ffn_up ffn_down"
    tensors = [
        *_tensors("token_embd position_embd"),
        *_tensors("output_norm", "weight", "bias"),
        *_in_layers(_tensors(layer, "weight", "bias")),
    ]
    return _finish(writer, path, tensors)


def write_bert(path: Path) -> Path:
    """An encoder with mean pooling."""
    writer = _writer(path, "bert")
    writer.add_layer_norm_eps(1e-5)
    writer.add_causal_attention(False)
    writer.add_pooling_type(gguf.PoolingType.MEAN)
    writer.add_token_type_count(2)
    layer = [*_tensors(ATTENTION), *_tensors(ATTENTION, "bias")]
    layer += _tensors("attn_output_norm ffn_up ffn_down layer_output_norm", "weight", "bias")
    tensors = [
        *_tensors("token_embd token_types position_embd"),
        *_tensors("token_embd_norm", "weight", "bias"),
        *_in_layers(layer),
    ]
    return _finish(writer, path, tensors)


def write_t5(path: Path) -> Path:
    writer = _writer(path, "t5")
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_key_length(WIDTH // HEADS)
    writer.add_value_length(WIDTH // HEADS)
    writer.add_relative_attn_buckets_count(32)
    writer.add_decoder_start_token_id(0)
    tensors = _tensors("token_embd enc.output_norm dec.output_norm")
    attention = "attn_rel_b attn_norm attn_q attn_k attn_v attn_o"
    cross = "cross_attn_norm cross_attn_q cross_attn_k cross_attn_v cross_attn_o"
    for i in range(LAYERS):
        for side, parts in (("enc", attention), ("dec", f"{attention} {cross}")):
            layer = _tensors(f"{parts} ffn_norm ffn_up ffn_down")
            tensors += [f"{side}.blk.{i}.{name}" for name in layer]
    return _finish(writer, path, tensors)


def write_vocabulary(path: Path) -> Path:
    return _finish(_writer(path, "llama"), path, [])


def _tensors(parts: str, *kinds: str) -> list[str]:
    """The names of tensors, of weights if no kind is given."""
    return [f"{part}.{kind}" for part in parts.split() for kind in kinds or ("weight",)]


def _in_layers(tensors: Sequence[str], layers: int = LAYERS) -> list[str]:
    return [f"blk.{i}.{name}" for i in range(layers) for name in tensors]


def _writer(
    path: Path,
    arch: str,
    tokenizer: str = "test",
    tokens: Sequence[str] = TOKENS,
    part: int = 0,
    layers: int = LAYERS,
) -> gguf.GGUFWriter:
    writer = gguf.GGUFWriter(path, arch, split_max_tensors=part)
    writer.add_context_length(POSITIONS)
    writer.add_embedding_length(WIDTH)
    writer.add_feed_forward_length(FEED_FORWARD)
    writer.add_block_count(layers)
    writer.add_head_count(HEADS)
    writer.add_vocab_size(len(tokens))
    writer.add_tokenizer_model(tokenizer)
    if tokenizer != "none":
        writer.add_token_list(tokens)
    return writer


def _finish(
    writer: gguf.GGUFWriter,
    path: Path,
    tensors: Sequence[str],
    nan_in: str = "",
    dtypes: Mapping[str, type] | None = None,
    vocabulary: int = VOCABULARY,
    shapes: Mapping[str, tuple[int, ...]] | None = None,
) -> Path:
    random = np.random.default_rng(1)
    # of the matrices that are not square; tests change WIDTH
    known = {
        "token_embd": (vocabulary, WIDTH),
        "position_embd": (POSITIONS, WIDTH),
        "token_types": (2, WIDTH),
        "attn_qkv": (3 * WIDTH, WIDTH),
        "attn_rel_b": (32, HEADS),
        "ffn_gate": (FEED_FORWARD, WIDTH),
        "ffn_up": (FEED_FORWARD, WIDTH),
        "ffn_down": (WIDTH, FEED_FORWARD),
        **(shapes or {}),
    }
    for name in tensors:
        *_, part, kind = name.split(".")
        shape: tuple[int, ...] = known.get(part, (WIDTH, WIDTH))
        if kind == "bias" or part.endswith("norm"):
            shape = shape[:1]
        # weights of a norm are close to one
        mean = 1 if name.endswith("norm.weight") else 0
        values = random.normal(mean, 0.3, shape).astype(np.float32)
        if name == nan_in:
            values[:] = np.nan
        writer.add_tensor(name, values.astype((dtypes or {}).get(name, np.float32)))
    save(writer)
    return path
