"""Llama 3 in Meta's layout becomes the file that its Hugging Face folder becomes.

Its tokenizer is a list of ranks; the vocabulary is the real one. Not part of `make test`: it needs
PyTorch. `make test-all PARTS=peers` runs it.
"""

from __future__ import annotations

import base64
import copy
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from gguf import GGUFReader
from transformers.convert_slow_tokenizer import bytes_to_unicode
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from llamacpp_instr.lab.importer import meta
from llamacpp_instr.lab.importer.source import import_model, open_source
from tests.parts.peers import peer_models
from tests.parts.peers.meta_folder import write_meta

N_RANKS = 128000
SCALING = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}  # fmt: skip


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The real vocabulary of Llama 3, as in Meta's tokenizer.model."""
    tokens, _ = peer_models.real_bpe("llama-bpe")
    byte_of = {character: byte for byte, character in bytes_to_unicode().items()}
    path = tmp_path_factory.mktemp("ranks") / "tokenizer.model"
    with path.open("wb") as file:
        for rank, token in enumerate(tokens[:N_RANKS]):
            spelled = bytes(byte_of[character] for character in token)
            file.write(base64.b64encode(spelled) + b" %d\n" % rank)
    return path


def file_of(folder: Path) -> Path:
    output = folder.parent / f"{folder.name}.gguf"
    import_model(open_source(folder), output, "F32", force=True)
    return output


@pytest.fixture(scope="module")
def llama3(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, bytes]:
    """A model with that vocabulary, and the bytes of the file that its folder becomes."""
    folder = tmp_path_factory.mktemp("whole") / "twin"
    model = peer_models.make_llama3(folder)
    return model, file_of(folder).read_bytes()


@pytest.mark.parametrize("n_shards", [1, 2])
def test_llama_3_gives_the_bytes_of_its_hugging_face_folder(
    n_shards: int, llama3: tuple[Any, bytes], ranks: Path, tmp_path: Path
) -> None:
    model, expected = llama3
    folder = tmp_path / "twin"
    write_meta(folder, model, ranks, n_shards, by_words=True, rope_theta=500000.0)
    assert file_of(folder).read_bytes() == expected


@pytest.mark.parametrize(("tied", "factor"), [(False, 8.0), (True, 32.0)])
def test_low_frequencies_are_scaled_since_llama_3_1(
    tied: bool, factor: float, llama3: tuple[Any, bytes], ranks: Path, tmp_path: Path
) -> None:
    """Each frequency is divided as in transformers."""
    config = transformers.LlamaConfig(
        **{**peer_models.SMALL, "max_position_embeddings": 131072}, rope_theta=500000.0,
        rope_scaling={**SCALING, "factor": factor},
    )  # fmt: skip
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
    plain = 500000.0 ** -(torch.arange(0, 16, 2) / 16)

    model = copy.deepcopy(llama3[0])
    if tied:
        model.lm_head.weight = model.model.embed_tokens.weight
    write_meta(tmp_path / "meta", model, ranks, 1, rope_theta=500000.0, use_scaled_rope=True)
    reader = GGUFReader(file_of(tmp_path / "meta"))
    tensors = {tensor.name: torch.tensor(tensor.data) for tensor in reader.tensors}
    torch.testing.assert_close(tensors["rope_freqs.weight"], plain / scaled)
    assert max(tensors["rope_freqs.weight"]) == factor
    assert reader.fields["llama.context_length"].contents() == 131072
    assert ("output.weight" in tensors) is not tied


def test_the_names_of_special_tokens_are_those_of_each_version() -> None:
    tokens, _ = peer_models.real_bpe("llama-bpe")
    assert meta.special_tokens(newer=False) == tokens[N_RANKS:]
    newer = meta.special_tokens(newer=True)
    assert len(newer) == len(set(newer)) == 256
    assert [newer.index(name) for name in ("<|eot_id|>", "<|eom_id|>", "<|python_tag|>")] == [
        9, 8, 10,
    ]  # fmt: skip


def test_the_merges_are_those_of_the_published_tokenizer(ranks: Path) -> None:
    _, merges = peer_models.real_bpe("llama-bpe")
    known = meta.read_ranks(ranks)
    assert known is not None
    spelled = bytes_to_unicode()
    ours = meta.merges_of(known)
    assert [tuple("".join(spelled[byte] for byte in side) for side in pair) for pair in ours] == (
        merges
    )


def test_a_tokenizer_of_another_size_is_refused(
    ranks: Path, tmp_path: Path, started_instr: Callable[..., subprocess.CompletedProcess[str]]
) -> None:
    model = peer_models.make_llama(tmp_path / "hf")
    write_meta(tmp_path / "meta", model, ranks, 1)
    done = started_instr("import", tmp_path / "meta", "-o", tmp_path / "out.gguf")
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1, done.stderr
    assert "has 128000 tokens and 256 special ones, but the embedding has" in done.stderr
