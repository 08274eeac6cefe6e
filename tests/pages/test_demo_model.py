"""The demo model's file, the grammar of its stories, and its tokenizer. None of it needs torch."""

import re
from itertools import islice
from pathlib import Path
from typing import Any

import gguf
import jinja2
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tools.demo_model import grammar
from tools.demo_model.consistency import faults
from tools.demo_model.lexicon import NAMES, PLACES
from tools.demo_model.pieces import learn_pieces
from tools.demo_model.settings import PLOTS_AT
from tools.demo_model.shape import Shape
from tools.demo_model.stored import read_tokenizer
from tools.demo_model.tokenizer import BOS, EOS, SPACE, UNKNOWN, Tokenizer

DEMO = Path(__file__).parent.parent.parent / "llamacpp_instr" / "data" / "demo.gguf"
SHAPE = Shape()
MANY = 2000


@pytest.fixture(scope="module")
def reader() -> gguf.GGUFReader:
    return gguf.GGUFReader(DEMO)


@pytest.fixture(scope="module")
def stories() -> list[grammar.Story]:
    return list(islice(grammar.stories(7), MANY))


TOKENIZER = read_tokenizer(DEMO)


def value(reader: gguf.GGUFReader, key: str) -> Any:
    return reader.fields[key].contents()


# The file.


def test_file_is_at_most_eight_megabytes() -> None:
    assert DEMO.stat().st_size <= 8_000_000


@pytest.mark.parametrize(
    ("key", "expected"),
    [
        ("general.architecture", "llama"),
        ("general.license", "mit"),
        ("general.file_type", int(gguf.LlamaFileType.MOSTLY_F16)),
        ("llama.block_count", SHAPE.layers),
        ("llama.vocab_size", SHAPE.vocabulary),
        ("llama.context_length", SHAPE.context),
        ("llama.embedding_length", SHAPE.width),
        ("llama.feed_forward_length", SHAPE.feed_forward),
        ("llama.attention.head_count", SHAPE.heads),
        ("llama.attention.head_count_kv", SHAPE.kv_heads),
        ("llama.rope.dimension_count", SHAPE.head_size),
        ("llama.rope.freq_base", SHAPE.rope_base),
        ("llama.attention.layer_norm_rms_epsilon", pytest.approx(SHAPE.norm_epsilon)),
        ("tokenizer.ggml.model", "llama"),
        ("tokenizer.ggml.unknown_token_id", UNKNOWN),
        ("tokenizer.ggml.bos_token_id", BOS),
        ("tokenizer.ggml.eos_token_id", EOS),
        ("tokenizer.ggml.add_bos_token", True),
        ("tokenizer.ggml.add_eos_token", False),
        ("tokenizer.ggml.add_space_prefix", True),
    ],
)
def test_metadata(reader: gguf.GGUFReader, key: str, expected: Any) -> None:
    assert value(reader, key) == expected


def test_tensors_are_those_of_a_four_layer_llama(reader: gguf.GGUFReader) -> None:
    width, kv_width = SHAPE.width, SHAPE.kv_heads * SHAPE.head_size
    layer = {
        "attn_norm": [width],
        "attn_q": [width, width],
        "attn_k": [width, kv_width],
        "attn_v": [width, kv_width],
        "attn_output": [width, width],
        "ffn_norm": [width],
        "ffn_gate": [width, SHAPE.feed_forward],
        "ffn_up": [width, SHAPE.feed_forward],
        "ffn_down": [SHAPE.feed_forward, width],
    }
    expected = {
        "token_embd.weight": [width, SHAPE.vocabulary],
        "output_norm.weight": [width],
        "output.weight": [width, SHAPE.vocabulary],
    } | {
        f"blk.{at}.{name}.weight": sizes
        for at in range(SHAPE.layers)
        for name, sizes in layer.items()
    }
    assert {tensor.name: tensor.shape.tolist() for tensor in reader.tensors} == expected


def test_rows_fit_every_k_quantization(reader: gguf.GGUFReader) -> None:
    rows = [tensor.shape[0] for tensor in reader.tensors if len(tensor.shape) == 2]
    assert rows
    assert all(row % 256 == 0 for row in rows)


def test_matrices_are_half_and_gains_single_precision(reader: gguf.GGUFReader) -> None:
    for tensor in reader.tensors:
        assert tensor.data.dtype == (np.float16 if len(tensor.shape) == 2 else np.float32)
        assert np.isfinite(tensor.data).all()


def test_token_types_and_scores(reader: gguf.GGUFReader) -> None:
    assert value(reader, "tokenizer.ggml.token_type") == list(TOKENIZER.types)
    assert value(reader, "tokenizer.ggml.scores") == list(TOKENIZER.scores)
    assert len(set(TOKENIZER.tokens)) == SHAPE.vocabulary


def test_chat_template_is_the_last_thing_the_user_said(reader: gguf.GGUFReader) -> None:
    template = jinja2.Template(value(reader, "tokenizer.chat_template"))
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Tom"},
        {"role": "assistant", "content": "Tom was a bear."},
        {"role": "user", "content": "One day"},
    ]
    assert template.render(messages=messages, bos_token="<s>") == "<s>One day"


# The grammar.


def test_one_seed_tells_one_row_of_stories(stories: list[grammar.Story]) -> None:
    assert list(islice(grammar.stories(7), MANY)) == stories


def test_another_seed_tells_others(stories: list[grammar.Story]) -> None:
    others = {story.text for story in islice(grammar.stories(8), MANY)}
    assert not others & {story.text for story in stories}


def test_sentences_begin_with_a_capital_and_end_with_a_mark(stories: list[grammar.Story]) -> None:
    sentence = re.compile(r'"?[A-Z][^{}]*[.!?]"?')
    for story in stories:
        assert all(sentence.fullmatch(told) for told in story.sentences), story.text


def test_names_pronouns_colours_and_articles_agree(stories: list[grammar.Story]) -> None:
    assert [story.text for story in stories if faults(story.text)] == []


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("Once there was a bear.", "0 names"),
        ("Tom saw Mia and Ben.", "3 names"),
        ("Tom was lost. She was sad.", "a pronoun that is not Tom's"),
        ("Mia had a red ball. Where was the blue ball?", "2 coloured toys"),
        ("Mia had a red ball. Where was the kite?", "another toy"),
        ("Mia had a apple.", "a wrong article"),
        ("Mia had an pear.", "a wrong article"),
        ('"Hello, said Tom.', "an open quotation"),
        ("Tom was upset and not gloomy.", "another sad word"),
        ("Tom and Tom went home.", "one name for two"),
        ('"Look, Tom!" said Tom.', "a speaker who speaks to the same name"),
        ("Tom saw a cat, the dog and the owl.", "3 animals"),
    ],
)
def test_faults_are_found(text: str, fault: str) -> None:
    assert faults(text) == [fault]


def test_every_place_has_four_plots() -> None:
    assert {place.noun for place in PLACES} == set(PLOTS_AT)
    assert all(len({id(plot) for plot in plots}) == 4 for plots in PLOTS_AT.values())


def test_stories_fit_the_context(stories: list[grammar.Story]) -> None:
    assert max(len(TOKENIZER.encode(story.text)) for story in stories) < SHAPE.context


def test_choices_cost_something(stories: list[grammar.Story]) -> None:
    assert all(30 < story.nats < 70 for story in stories)


# The tokenizer.


@given(st.text(alphabet=st.characters(exclude_categories=["Cs"], exclude_characters=SPACE)))
def test_any_text_comes_back(text: str) -> None:
    assert TOKENIZER.decode(TOKENIZER.encode(text)) == text


@given(st.text(alphabet="abeo TM.,\"'\n"))
def test_story_like_text_comes_back(text: str) -> None:
    assert TOKENIZER.decode(TOKENIZER.encode(text)) == text


@given(st.text(alphabet=st.characters(exclude_categories=["Cs"])))
def test_ids_are_in_range_and_text_makes_no_control_token(text: str) -> None:
    first, *others = TOKENIZER.encode(text)
    assert first == BOS
    assert all(EOS < token < SHAPE.vocabulary for token in others)


def test_stories_come_back(stories: list[grammar.Story]) -> None:
    for story in stories:
        assert TOKENIZER.decode(TOKENIZER.encode(story.text)) == story.text


def test_every_name_is_one_token() -> None:
    assert all(len(TOKENIZER.encode(name.name)) == 2 for name in NAMES)


def test_unknown_letters_become_bytes() -> None:
    ids = TOKENIZER.encode("\u00e9")
    assert [TOKENIZER.tokens[token] for token in ids[-2:]] == ["<0xC3>", "<0xA9>"]


def test_a_list_without_the_special_tokens_is_refused() -> None:
    with pytest.raises(ValueError, match="special tokens"):
        Tokenizer.of_tokens(["a", "b"])


def test_merges_come_before_letters_and_the_commonest_first() -> None:
    assert learn_pieces(["ab ab ac"], 6) == [SPACE + "a", SPACE + "ab", "a", "b", "c", SPACE]


def test_too_little_text_is_refused() -> None:
    with pytest.raises(ValueError, match="only"):
        learn_pieces(["a"], 50)
