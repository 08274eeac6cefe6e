"""An imported model computes what its source computes: transformers agrees.

Not part of `make test`: it needs PyTorch. `make test-all PARTS=peers` runs it.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import sentencepiece
import torch
import transformers

from llamacpp_instr.lab.importer.source import import_model, open_source
from tests.parts.peers import peer_models
from tests.parts.peers.answers import (
    hidden,
    largest_error,
    logits,
    opened,
    relative_error,
    transformers_logits,
)
from tests.parts.peers.peer_models import MINILM

BOUND = 1e-3
TEXT = "Once upon a time, 3 ops of llama.cpp took 12.5 ms (the naïve ones).\n"


def test_the_logits_are_those_of_transformers(decoder: tuple[Any, Path, Path]) -> None:
    model, _, imported = decoder
    tokens = [1, *np.random.default_rng(20).integers(3, 500, 40).tolist()]
    error = relative_error(logits(imported, tokens), transformers_logits(model, tokens))
    print(f"{model.config.model_type}: {error:.1e}")
    assert error < BOUND


def test_the_tokens_are_those_of_its_tokenizer(decoder: tuple[Any, Path, Path]) -> None:
    _, folder, imported = decoder
    tokens = opened(imported, vocab_only=True).tokenize(TEXT.encode(), add_bos=False, special=False)
    if (folder / "tokenizer.model").is_file():
        expected = sentencepiece.SentencePieceProcessor(str(folder / "tokenizer.model")).encode(
            TEXT
        )
        if "gemma3" in str(folder):  # its pieces do not begin with a space
            expected, tokens = expected[2:], tokens[1:]
    else:
        expected = transformers.AutoTokenizer.from_pretrained(folder).encode(TEXT)
    assert tokens == expected


def test_an_encoder_of_random_weights(tmp_path: Path) -> None:
    model = peer_models.make_bert(tmp_path / "bert")
    imported = tmp_path / "bert.gguf"
    import_model(open_source(tmp_path / "bert"), imported, "F32")
    tokens = [101, *range(2000, 2020), 102]
    with torch.no_grad():
        expected = model(torch.tensor([tokens])).last_hidden_state[0].numpy()
    error = relative_error(hidden(imported, tokens), expected)
    print(f"bert: {error:.1e}")
    assert error < BOUND


def test_a_real_encoder(tmp_path: Path) -> None:
    """all-MiniLM-L6-v2: its own tokenizer, the vectors of the tokens, and their mean. llama.cpp
    computes GELU with tanh where the model has erf. Each number of the vectors is within the bound
    all the same, relative to the largest; the norm of all differences is not."""
    imported = tmp_path / "minilm.gguf"
    import_model(open_source(MINILM), imported, "F32")
    tokenizer = transformers.AutoTokenizer.from_pretrained(MINILM)
    models = [
        (
            transformers.AutoModel.from_pretrained(MINILM, dtype=torch.float32, hidden_act=name),
            bound,
        )
        for name, bound in (("gelu_pytorch_tanh", BOUND), ("gelu", 2 * BOUND))
    ]
    encoder = opened(imported, embedding=True)
    for text in ("A sentence.", "Where does the time go in a transformer with 6 layers?"):
        tokens = tokenizer(text)["input_ids"]
        assert encoder.tokenize(text.encode()) == tokens
        found = np.array(encoder.embed(text, normalize=False), np.float32)
        vectors = hidden(imported, tokens)
        for model, bound in models:
            with torch.no_grad():
                states = model.eval()(torch.tensor([tokens])).last_hidden_state[0]
            error = relative_error(found, states.mean(0).numpy())
            largest = largest_error(vectors, states.numpy())
            print(f"MiniLM, {model.config.hidden_act}: {error:.1e}, largest {largest:.1e}")
            assert error < bound
            assert largest < BOUND


@pytest.mark.parametrize(
    ("type_", "number", "least", "most"),
    [
        ("F32", 0, 0, 1e-5),
        ("F16", 1, 1e-5, 3e-3),
        ("BF16", 30, 1e-4, 3e-2),
        ("Q8_0", 8, 1e-4, 3e-2),
    ],
)
def test_every_type(
    type_: str,
    number: int,
    least: float,
    most: float,
    made: Callable[..., Any],
    tmp_path: Path,
) -> None:
    """The weights have the type, and the errors of rounding to it."""
    model, folder = made()
    imported = import_model(open_source(folder), tmp_path / "model.gguf", type_)
    assert imported is not None
    assert imported.by_name["blk.0.ffn_up.weight"].type.number == number
    tokens = [1, *range(40, 60)]
    found = logits(tmp_path / "model.gguf", tokens)
    error = relative_error(found, transformers_logits(model, tokens))
    assert least < error < most


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Any]:
    folder = tmp_path_factory.mktemp("made") / "llama"
    model = peer_models.make_llama(folder)
    return lambda: (model, folder)


def test_bf16_stays_bf16(tmp_path: Path) -> None:
    folder = tmp_path / "llama"
    model = peer_models.make_llama(folder).to(torch.bfloat16)
    model.save_pretrained(folder)
    imported = import_model(open_source(folder), tmp_path / "model.gguf")
    assert imported is not None
    assert imported.by_name["blk.0.ffn_up.weight"].type.name == "BF16"


def test_an_adapter_does_what_merged_weights_do(tmp_path: Path) -> None:
    import peft

    base = peer_models.make_llama(tmp_path / "llama")
    torch.manual_seed(3)
    modules = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    config = peft.LoraConfig(r=4, lora_alpha=8, target_modules=modules, init_lora_weights=False)
    adapted = peft.get_peft_model(base, config).eval()
    adapted.save_pretrained(tmp_path / "adapter")
    import_model(open_source(tmp_path / "llama"), tmp_path / "llama.gguf", "F32")
    adapter = open_source(tmp_path / "adapter", base=tmp_path / "llama")
    import_model(adapter, tmp_path / "adapter.gguf")
    merged = adapted.merge_and_unload()
    tokens = [1, *range(40, 60)]
    expected = transformers_logits(merged, tokens)
    options = {"lora_path": str(tmp_path / "adapter.gguf")}
    assert relative_error(logits(tmp_path / "llama.gguf", tokens), expected) > 0.1, "it does much"
    error = relative_error(logits(tmp_path / "llama.gguf", tokens, **options), expected)
    print(f"adapter: {error:.1e}")
    assert error < BOUND
