"""The demo model in the package: its file, what it computes, and that it can be made again."""

from __future__ import annotations

import re
from itertools import islice
from typing import Any

import gguf
import numpy as np
import pytest

from tests.kit.native_kit import DEMO, ROOT, open_llama
from tools.demo_model.grammar import Story, stories
from tools.demo_model.tokenizer import EOS, Tokenizer, learn_pieces

PAGE = (ROOT / "docs" / "explanation" / "demo-model.md").read_text(encoding="utf-8")

ODD_TEXTS = (
    "",
    " ",
    "  two  spaces ",
    "line\nbreak\ttab",
    "1234 + 5 = x_y; {}[]<>|",
    "Zu\u0308rich \u2014 caf\u00e9 \u4e2d\u6587 \U0001f98a",
    "<s>not a token</s> <0x41> <unk>",
    "qqqq XYZZY onceuponatime ONCE",
)


@pytest.fixture(scope="module")
def reader() -> gguf.GGUFReader:
    return gguf.GGUFReader(DEMO)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    """Learned again from the stories that the model was trained on."""
    return Tokenizer(learn_pieces((story.text for story in islice(stories(1), 4000)), 1024))


@pytest.fixture(scope="module")
def held_out() -> list[Story]:
    """Stories that training left out."""
    return list(islice(stories(2), 100))


def value(reader: gguf.GGUFReader, key: str) -> Any:
    return reader.fields[key].contents()


def test_the_metadata_describe_a_small_llama(reader: gguf.GGUFReader) -> None:
    expected = {
        "general.architecture": "llama",
        "general.license": "mit",
        "general.file_type": int(gguf.LlamaFileType.MOSTLY_F16),
        "llama.block_count": 4,
        "llama.vocab_size": 1024,
        "llama.context_length": 512,
        "llama.embedding_length": 256,
        "llama.feed_forward_length": 768,
        "llama.attention.head_count": 4,
        "llama.attention.head_count_kv": 2,
        "llama.rope.dimension_count": 64,
        "llama.rope.freq_base": 10000.0,
        "llama.attention.layer_norm_rms_epsilon": pytest.approx(1e-5),
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": EOS,
        "tokenizer.ggml.add_bos_token": True,
        "tokenizer.ggml.add_eos_token": False,
        "tokenizer.ggml.add_space_prefix": True,
    }
    assert {key: value(reader, key) for key in expected} == expected


def test_the_tensors_are_those_of_four_layers(reader: gguf.GGUFReader) -> None:
    layer = {
        "attn_norm": [256],
        "attn_q": [256, 256],
        "attn_k": [256, 128],
        "attn_v": [256, 128],
        "attn_output": [256, 256],
        "ffn_norm": [256],
        "ffn_gate": [256, 768],
        "ffn_up": [256, 768],
        "ffn_down": [768, 256],
    }
    whole = {"token_embd": [256, 1024], "output_norm": [256], "output": [256, 1024]}
    layers = {f"blk.{at}.{name}": sizes for at in range(4) for name, sizes in layer.items()}
    found = {tensor.name.removesuffix(".weight"): tensor for tensor in reader.tensors}
    assert {name: tensor.shape.tolist() for name, tensor in found.items()} == whole | layers
    for tensor in reader.tensors:
        assert tensor.data.dtype == (np.float16 if len(tensor.shape) == 2 else np.float32)
        assert np.isfinite(tensor.data).all()


@pytest.mark.native
def test_the_chat_template_gives_the_last_message_of_the_user(reader: gguf.GGUFReader) -> None:
    import jinja2  # llama-cpp-python brings it

    template = jinja2.Template(value(reader, "tokenizer.chat_template"))
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Tom"},
        {"role": "assistant", "content": "Tom was a bear."},
        {"role": "user", "content": "One day"},
    ]
    assert template.render(messages=messages, bos_token="<s>") == "<s>One day"


def test_the_grammar_gives_the_vocabulary_again(
    reader: gguf.GGUFReader, tokenizer: Tokenizer
) -> None:
    assert value(reader, "tokenizer.ggml.tokens") == tokenizer.tokens
    assert value(reader, "tokenizer.ggml.token_type") == tokenizer.types
    assert value(reader, "tokenizer.ggml.scores") == tokenizer.scores


@pytest.fixture(scope="module")
def llama() -> Any:
    """The model as llama.cpp loads it."""
    return open_llama(DEMO, n_ctx=512, n_batch=512, n_threads=1, n_threads_batch=1, logits_all=True)


@pytest.mark.native
def test_llama_cpp_reads_the_same_tokens(
    llama: Any, tokenizer: Tokenizer, held_out: list[Story]
) -> None:
    for text in (*ODD_TEXTS, *(story.text for story in held_out)):
        assert llama.tokenize(text.encode(), special=False) == tokenizer.encode(text)


@pytest.mark.native
def test_its_loss_is_that_of_the_page(
    llama: Any, tokenizer: Tokenizer, held_out: list[Story]
) -> None:
    """A little more than the entropy of the choices that made the stories."""
    losses: list[float] = []
    for story in held_out:
        ids = [*tokenizer.encode(story.text), EOS]
        llama.reset()
        llama.eval(ids[:-1])
        logits = llama.scores[: len(ids) - 1].astype(np.float64)
        target = logits[np.arange(len(ids) - 1), ids[1:]]
        losses += (np.logaddexp.reduce(logits, axis=1) - target).tolist()
    entropy = sum(story.nats for story in held_out) / len(losses)
    page = re.findall(r"(\d\.\d{4}) nats per token", PAGE)
    assert [np.mean(losses), entropy] == pytest.approx([float(x) for x in page], abs=0.001)


@pytest.mark.native
@pytest.mark.parametrize("prompt", ["Once upon a time", "One day, a little fox", "Tom"])
def test_it_tells_a_story_to_the_end(llama: Any, prompt: str) -> None:
    """As docs/explanation/demo-model.md shows it, in words of the grammar."""
    (choice,) = llama.create_completion(prompt, max_tokens=None, temperature=0, echo=True)[
        "choices"
    ]
    assert choice["finish_reason"] == "stop"
    assert choice["text"] in " ".join(re.sub(r"^> |\*\*", "", PAGE, flags=re.M).split())
