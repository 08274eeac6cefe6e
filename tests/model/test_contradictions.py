"""What a header says against the file, with the values that agree beside those that do not."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest

from llamacpp_instr.model.file import load_model_file
from llamacpp_instr.model.hyper_parameters import find_contradictions
from tests.kit.gguf_files import save

TRUE = {
    "block_count": 2, "embedding_length": 8, "vocab_size": 3, "attention.head_count": 4,
    "attention.head_count_kv": 2,
}  # fmt: skip


def found(path: Path, tokens: int = 3, **changes: int | None) -> list[str]:
    """For two layers with four heads of 2, two heads of keys, and a vocabulary of three."""
    path.unlink(missing_ok=True)
    writer = gguf.GGUFWriter(path, "llama")
    for key, value in (TRUE | {key.replace("__", "."): of for key, of in changes.items()}).items():
        if value is not None:
            writer.add_uint32(f"llama.{key}", value)
    if tokens:
        writer.add_token_list([str(i) for i in range(tokens)])
    for name, shape in (
        ("token_embd", (3, 8)), ("blk.0.attn_k", (4, 8)), ("blk.1.attn_k", (4, 8))
    ):  # fmt: skip
        writer.add_tensor(f"{name}.weight", np.zeros(shape, np.float32))
    save(writer)
    return find_contradictions(load_model_file(path))


@pytest.mark.parametrize(
    "changes",
    [
        {},
        # a missing key says nothing
        *({key.replace(".", "__"): None} for key in TRUE),
        # heads of other layers have another length
        {"attention__key_length": 1, "attention__key_length_swa": 2},
        {"attention__key_length": 2},
        {"attention__head_count": None, "embedding_length": None},
        {"attention__head_count": None, "attention__head_count_kv": 1},
    ],
)
def test_what_agrees_is_silent(changes: dict[str, int | None], tmp_path: Path) -> None:
    assert found(tmp_path / "m.gguf", **changes) == []
    assert found(tmp_path / "m.gguf", tokens=0, **changes) == []


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"block_count": 3}, ["block_count is 3, but the file has 2 layers"]),
        ({"embedding_length": 16, "attention__key_length": 2},
         ["embedding_length is 16, but the file has 8 columns in token_embd"]),
        ({"vocab_size": 1500}, ["vocab_size is 1,500, but the file has 3 tokens"]),
        ({"attention__head_count_kv": 1},
         ["attention.head_count_kv is 1, but the file has 2 heads in blk.0.attn_k"]),
        ({"attention__key_length": 4},
         ["attention.head_count_kv is 2, but the file has 1 heads in blk.0.attn_k"]),
        ({"attention__head_count": 8, "attention__head_count_kv": 3, "attention__key_length": 2},
         ["attention.head_count_kv is 3, but the file has 2 heads in blk.0.attn_k",
          "attention.head_count_kv is 3 and does not divide 8 heads"]),
    ],
)  # fmt: skip
def test_what_differs_is_named_with_both(
    changes: dict[str, int], words: list[str], tmp_path: Path
) -> None:
    assert found(tmp_path / "m.gguf", **changes) == words


def test_a_part_of_a_head_is_named(tmp_path: Path) -> None:
    words = ["attention.head_count_kv is 1, but the file has 1.33333 heads in blk.0.attn_k"]
    changes = {"attention__head_count_kv": 1, "attention__key_length": 3}
    assert found(tmp_path / "m.gguf", **changes) == words


def test_a_file_without_layers_or_tokens_says_nothing_of_them(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama")
    for key, value in TRUE.items():
        writer.add_uint32(f"llama.{key}", value)
    writer.add_tensor("token_embd.weight", np.zeros(8, np.float32))
    writer.add_tensor("other.blk.7.weight", np.zeros(8, np.float32))
    save(writer)
    assert find_contradictions(load_model_file(tmp_path / "m.gguf")) == []


def test_tokens_are_as_many_as_their_embeddings(tmp_path: Path) -> None:
    words = ["vocab_size is 3, but the file has 4 tokens",
             "the number of tokens is 4, but the file has 3 embeddings in token_embd"]  # fmt: skip
    assert found(tmp_path / "m.gguf", tokens=4) == words
