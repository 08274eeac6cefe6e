"""A model file has the content that gguf-py reads, in one file or split."""

from __future__ import annotations

from pathlib import Path

import gguf
import pytest

from llamacpp_instr.model.file import Weight, load_model_file
from llamacpp_instr.model.header import read_array
from llamacpp_instr.model.types import BY_NAME
from tests.kit.gguf_files import split_model


def test_weights_are_those_of_gguf_py(demo_model: Path, models: Path) -> None:
    for path in (demo_model, models / "bert.gguf", models / "t5.gguf"):
        model, theirs = load_model_file(path), gguf.GGUFReader(path)
        assert [
            (w.name, w.type.number, list(w.ne), w.n_elements, w.n_bytes, w.offset)
            for w in model.weights
        ] == [
            (t.name, int(t.tensor_type), t.shape.tolist(), t.n_elements, t.n_bytes, t.data_offset)
            for t in theirs.tensors
        ]  # fmt: skip
        assert model.file_size == path.stat().st_size
        for key, array in model.arrays.items():
            assert read_array(path, array, 1000) == theirs.fields[key].contents()[:1000]


def test_the_demo_model_by_hand(demo_model: Path) -> None:
    model = load_model_file("demo")
    assert model.path == demo_model
    assert (model.architecture, model.file_type) == ("llama", "F16")
    assert model.hyper_parameter("block_count") == 4
    down = model.by_name["blk.3.ffn_down.weight"]
    assert (down.layer, down.role, down.ne) == (3, "ffn_down", (768, 256))
    assert down.n_bytes == 768 * 256 * 2
    assert model.by_name["token_embd.weight"].layer == -1


@pytest.mark.parametrize(
    ("shape", "n_rows", "n_bytes"),
    [((), 1, 4), ((7,), 1, 28), ((7, 3), 3, 84), ((7, 3, 2, 5), 30, 840)],
)
def test_all_dimensions_but_the_first_are_rows(
    shape: tuple[int, ...], n_rows: int, n_bytes: int
) -> None:
    weight = Weight("w", BY_NAME["F32"], shape, Path("m"), 0)
    assert (weight.n_rows, weight.n_bytes) == (n_rows, n_bytes)
    if shape:
        half = Weight("w", BY_NAME["Q4_0"], (64, *shape[1:]), Path("m"), 0)
        assert half.n_bytes == n_rows * 2 * 18


def test_names_of_encoders_and_of_biases(models: Path) -> None:
    roles = {(w.layer, w.role) for w in load_model_file(models / "t5.gguf").weights}
    assert {(1, "enc.attn_q"), (0, "dec.cross_attn_k"), (-1, "token_embd")} <= roles
    roles = {(w.layer, w.role) for w in load_model_file(models / "bert.gguf").weights}
    assert (1, "attn_q.bias") in roles


@pytest.mark.native
def test_a_split_model_is_one(tmp_path: Path, demo_model: Path) -> None:
    parts = split_model(demo_model, tmp_path / "demo", tensors=15)
    split, whole = load_model_file(parts[0]), load_model_file(demo_model)
    assert len(parts) == len(split.headers) == 3
    assert {w.path for w in split.weights} == set(parts)
    assert [(w.name, w.type, w.ne) for w in split.weights] == [
        (w.name, w.type, w.ne) for w in whole.weights
    ]
    for weight in split.weights:
        there = weight.path.read_bytes()[weight.offset :][: weight.n_bytes]
        original = whole.by_name[weight.name]
        assert there == demo_model.read_bytes()[original.offset :][: original.n_bytes]


def test_a_vocabulary_has_no_weights(models: Path) -> None:
    assert load_model_file(models / "vocabulary.gguf").weights == []


@pytest.mark.parametrize("limit", [0, 3])
def test_an_array_is_read_as_far_as_is_asked_for(demo_model: Path, limit: int) -> None:
    array = load_model_file(demo_model).arrays["tokenizer.ggml.tokens"]
    assert len(read_array(demo_model, array, limit)) == limit
