"""Writes models of any size quickly: their data section is a hole in a sparse file."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from pathlib import Path

import gguf

from llamacpp_instr.model.file import load_model_file


def write_sparse_llama(path: Path, layers: int, width: int, feed_forward: int) -> Path:
    """A llama in F16 with nine tensors per layer and three more."""
    writer = gguf.GGUFWriter(path, "llama")
    for name, value in (
        ("block_count", layers), ("context_length", 131072), ("embedding_length", width),
        ("feed_forward_length", feed_forward), ("attention.head_count", 32),
    ):  # fmt: skip
        writer.add_uint32(f"llama.{name}", value)
    writer.add_float32("llama.attention.layer_norm_rms_epsilon", 1e-5)
    writer.add_uint32("llama.vocab_size", 32000)
    writer.add_tokenizer_model("none")
    shapes: dict[str, tuple[int, ...]] = {
        "token_embd": (32000, width), "output_norm": (width,), "output": (32000, width),
    }  # fmt: skip
    for i in range(layers):
        shapes |= {f"blk.{i}.attn_{name}": (width, width) for name in ("q", "k", "v", "output")}
        shapes |= {f"blk.{i}.{name}": (width,) for name in ("attn_norm", "ffn_norm")}
        shapes |= {f"blk.{i}.{name}": (feed_forward, width) for name in ("ffn_gate", "ffn_up")}
        shapes[f"blk.{i}.ffn_down"] = (width, feed_forward)
    end = 0
    for name, shape in shapes.items():
        norm = len(shape) == 1
        type_ = gguf.GGMLQuantizationType.F32 if norm else gguf.GGMLQuantizationType.F16
        n_bytes = 4 * shape[0] if norm else 2 * shape[0] * shape[1]
        writer.add_tensor_info(f"{name}.weight", shape, type_.value, n_bytes, type_)  # type: ignore[arg-type]
        end += -(-n_bytes // 32) * 32
    return _saved(writer, path, end)


def write_large_header(
    path: Path, layers: int, names: Sequence[str], row: int, *, merges: bool = False
) -> Path:
    """A model of square tensors in F16, with a vocabulary of 128,000 tokens; with `merges` also
    their types and as many merges."""
    n_tokens, n_bytes, f16 = 128_000, 2 * row * row, gguf.GGMLQuantizationType.F16
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(layers)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list([f"token{i}" for i in range(n_tokens)])
    if merges:
        writer.add_token_types([1] * n_tokens)
        writer.add_token_merges([f"tok en{i}" for i in range(n_tokens)])
        writer.add_bos_token_id(n_tokens - 2)
        writer.add_eos_token_id(n_tokens - 1)
    for name in names:
        writer.add_tensor_info(name, [row, row], "float16", n_bytes, f16)  # type: ignore[arg-type]
    return _saved(writer, path, len(names) * n_bytes)


def _saved(writer: gguf.GGUFWriter, path: Path, n_bytes: int) -> Path:
    """Write the header of a file, and a hole for its data."""
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    writer.close()
    with path.open("r+b") as file:
        file.truncate(-(-path.stat().st_size // 32) * 32 + n_bytes)
    return path


def write_with_more_rows(source: Path, path: Path, tensor: str, n_bytes: int) -> Path:
    """The model in `source` with a tensor of at least `n_bytes`; its new rows are a hole."""
    model = load_model_file(source)
    grown = model.by_name[tensor]
    data = bytearray(source.read_bytes())

    def entry(name: str) -> int:
        """Offset of a tensor's entry after its name."""
        key = struct.pack("<Q", len(name)) + name.encode()
        return data.index(key) + len(key)

    row = grown.n_bytes // grown.ne[1]
    rows = -(-n_bytes // (32 * row)) * 32  # so that offsets stay multiples of 32
    more = rows * row - grown.n_bytes
    struct.pack_into("<IQQ", data, entry(tensor), 2, grown.ne[0], rows)
    for weight in model.weights:
        if weight.offset > grown.offset:
            at = entry(weight.name)
            at += 4 + 8 * struct.unpack_from("<I", data, at)[0] + 4
            struct.pack_into("<Q", data, at, struct.unpack_from("<Q", data, at)[0] + more)
    end = grown.offset + grown.n_bytes
    with path.open("wb") as file:
        file.write(data[:end])
        file.seek(more, 1)
        file.write(data[end:])
    return path
