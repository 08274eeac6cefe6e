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


def write_llama(
    path: Path,
    tokenizer: str = "test",
    nan_in: str = "",
    part: int = 0,
    dtypes: Mapping[str, type] | None = None,
    layers: int = LAYERS,
) -> Path:
    """A decoder. The values of the tensor `nan_in` are NaN. `dtypes` has numpy's types of tensors
    that are not stored as float32. With `part` the model is split into files of so many tensors,
    `NAME-00001-of-….gguf`."""
    writer = _writer(path, "llama", tokenizer, part=part, layers=layers)
    writer.add_layer_norm_rms_eps(1e-5)
    return _finish(writer, path, _llama_tensors(VOCABULARY, layers), nan_in, dtypes)


def write_speaker(path: Path, pieces: Sequence[str]) -> Path:
    """A decoder whose vocabulary is the letter a, the byte ESC, and these pieces of text."""
    tokens = ["<unk>", "<s>", "</s>", "<0x0A>", "<0x1B>", "a", *pieces]
    writer = _writer(path, "llama", "llama", tokens)
    writer.add_token_scores([0.0] * len(tokens))
    special = [gguf.TokenType.UNKNOWN, *[gguf.TokenType.CONTROL] * 2, *[gguf.TokenType.BYTE] * 2]
    writer.add_token_types(special + [gguf.TokenType.NORMAL] * (len(tokens) - len(special)))
    writer.add_add_space_prefix(False)
    writer.add_layer_norm_rms_eps(1e-5)
    return _finish(writer, path, _llama_tensors(len(tokens)))


def _llama_tensors(vocabulary: int, layers: int = LAYERS) -> dict[str, tuple[int, ...]]:
    tensors: dict[str, tuple[int, ...]] = {
        "token_embd.weight": (vocabulary, WIDTH),
        "output_norm.weight": (WIDTH,),
    }
    for i in range(layers):
        tensors |= {f"blk.{i}.{name}.weight": shape for name, shape in _attention().items()}
        tensors |= {
            f"blk.{i}.attn_norm.weight": (WIDTH,),
            f"blk.{i}.ffn_norm.weight": (WIDTH,),
            f"blk.{i}.ffn_gate.weight": (FEED_FORWARD, WIDTH),
            f"blk.{i}.ffn_up.weight": (FEED_FORWARD, WIDTH),
            f"blk.{i}.ffn_down.weight": (WIDTH, FEED_FORWARD),
        }
    return tensors


def write_gpt2(path: Path) -> Path:
    """A decoder with learned positions."""
    writer = _writer(path, "gpt2")
    writer.add_layer_norm_eps(1e-5)
    tensors = {
        "token_embd.weight": (VOCABULARY, WIDTH),
        "position_embd.weight": (POSITIONS, WIDTH),
        "output_norm.weight": (WIDTH,),
        "output_norm.bias": (WIDTH,),
    }
    for i in range(LAYERS):
        tensors |= {
            f"blk.{i}.attn_norm.weight": (WIDTH,),
            f"blk.{i}.attn_norm.bias": (WIDTH,),
            f"blk.{i}.attn_qkv.weight": (3 * WIDTH, WIDTH),
            f"blk.{i}.attn_qkv.bias": (3 * WIDTH,),
            f"blk.{i}.attn_output.weight": (WIDTH, WIDTH),
            f"blk.{i}.attn_output.bias": (WIDTH,),
            f"blk.{i}.ffn_norm.weight": (WIDTH,),
            f"blk.{i}.ffn_norm.bias": (WIDTH,),
            f"blk.{i}.ffn_up.weight": (FEED_FORWARD, WIDTH),
            f"blk.{i}.ffn_up.bias": (FEED_FORWARD,),
            f"blk.{i}.ffn_down.weight": (WIDTH, FEED_FORWARD),
            f"blk.{i}.ffn_down.bias": (WIDTH,),
        }
    return _finish(writer, path, tensors)


def write_bert(path: Path) -> Path:
    """An encoder with mean pooling."""
    writer = _writer(path, "bert")
    writer.add_layer_norm_eps(1e-5)
    writer.add_causal_attention(False)
    writer.add_pooling_type(gguf.PoolingType.MEAN)
    writer.add_token_type_count(2)
    tensors = {
        "token_embd.weight": (VOCABULARY, WIDTH),
        "token_types.weight": (2, WIDTH),
        "position_embd.weight": (POSITIONS, WIDTH),
        "token_embd_norm.weight": (WIDTH,),
        "token_embd_norm.bias": (WIDTH,),
    }
    for i in range(LAYERS):
        tensors |= {f"blk.{i}.{name}.weight": shape for name, shape in _attention().items()}
        tensors |= {f"blk.{i}.attn_{name}.bias": (WIDTH,) for name in ("q", "k", "v", "output")}
        tensors |= {
            f"blk.{i}.attn_output_norm.weight": (WIDTH,),
            f"blk.{i}.attn_output_norm.bias": (WIDTH,),
            f"blk.{i}.ffn_up.weight": (FEED_FORWARD, WIDTH),
            f"blk.{i}.ffn_up.bias": (FEED_FORWARD,),
            f"blk.{i}.ffn_down.weight": (WIDTH, FEED_FORWARD),
            f"blk.{i}.ffn_down.bias": (WIDTH,),
            f"blk.{i}.layer_output_norm.weight": (WIDTH,),
            f"blk.{i}.layer_output_norm.bias": (WIDTH,),
        }
    return _finish(writer, path, tensors)


def write_t5(path: Path) -> Path:
    writer = _writer(path, "t5")
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_key_length(WIDTH // HEADS)
    writer.add_value_length(WIDTH // HEADS)
    writer.add_relative_attn_buckets_count(32)
    writer.add_decoder_start_token_id(0)
    tensors = {
        "token_embd.weight": (VOCABULARY, WIDTH),
        "enc.output_norm.weight": (WIDTH,),
        "dec.output_norm.weight": (WIDTH,),
    }
    for i in range(LAYERS):
        for side, parts in (("enc", ("attn",)), ("dec", ("attn", "cross_attn"))):
            at = f"{side}.blk.{i}"
            tensors[f"{at}.attn_rel_b.weight"] = (32, HEADS)
            for part in parts:
                tensors[f"{at}.{part}_norm.weight"] = (WIDTH,)
                tensors |= {f"{at}.{part}_{name}.weight": (WIDTH, WIDTH) for name in "qkvo"}
            tensors |= {
                f"{at}.ffn_norm.weight": (WIDTH,),
                f"{at}.ffn_up.weight": (FEED_FORWARD, WIDTH),
                f"{at}.ffn_down.weight": (WIDTH, FEED_FORWARD),
            }
    return _finish(writer, path, tensors)


def write_vocabulary(path: Path) -> Path:
    return _finish(_writer(path, "llama"), path, {})


def _attention() -> dict[str, tuple[int, ...]]:
    return {f"attn_{name}": (WIDTH, WIDTH) for name in ("q", "k", "v", "output")}


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
    tensors: dict[str, tuple[int, ...]],
    nan_in: str = "",
    dtypes: Mapping[str, type] | None = None,
) -> Path:
    random = np.random.default_rng(1)
    for name, shape in tensors.items():
        # weights of a norm are close to one
        mean = 1 if name.endswith("norm.weight") else 0
        values = random.normal(mean, 0.3, shape).astype(np.float32)
        if name == nan_in:
            values[:] = np.nan
        writer.add_tensor(name, values.astype((dtypes or {}).get(name, np.float32)))
    save(writer)
    return path
