"""LoRA adapters as files: which are refused for a model before llama.cpp sees them."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest

from llamacpp_instr.base.errors import UsageError
from llamacpp_instr.model.adapter import (
    Adapter,
    changed_weights,
    check_adapter,
    parse_adapter,
    ranks_of,
)
from llamacpp_instr.model.file import load_any_file, load_model_file
from tests.kit.adapters import new_adapter, write_adapter
from tests.kit.gguf_files import save
from tests.kit.tiny_models import FEED_FORWARD, VOCABULARY, WIDTH

RANK = 4
Matrices = dict[str, tuple[int, ...]]
QUERY = "blk.0.attn_q.weight"
SQUARE: Matrices = {f"{QUERY}.lora_a": (RANK, WIDTH), f"{QUERY}.lora_b": (WIDTH, RANK)}
EMBEDDING = "token_embd.weight"


def write(path: Path, matrices: Matrices, arch: str = "llama") -> Path:
    writer = new_adapter(path, arch)
    for name, shape in matrices.items():
        writer.add_tensor(name, np.zeros(shape, np.float32))
    save(writer)
    return path


def refusal(path: Path, model: Path) -> str:
    with pytest.raises(UsageError) as refused:
        check_adapter(path, load_model_file(model))
    return str(refused.value)


@pytest.mark.parametrize("text", ["a.gguf", "dir:1/a.gguf", "a.gguf:x", "C:a.gguf"])
def test_a_name_without_a_scale(text: str) -> None:
    assert parse_adapter(text) == Adapter(Path(text), 1)


@pytest.mark.parametrize(("scale", "number"), [("0.5", 0.5), ("-2", -2), ("0", 0), ("1e-3", 1e-3)])
def test_a_name_with_a_scale(scale: str, number: float) -> None:
    assert parse_adapter(f"some:dir/a.gguf:{scale}") == Adapter(Path("some:dir/a.gguf"), number)


def test_a_file_whose_name_looks_like_a_scale_is_that_file(tmp_path: Path) -> None:
    path = tmp_path / "a:2"
    path.touch()
    assert parse_adapter(str(path)) == Adapter(path, 1)


@pytest.mark.parametrize("scale", ["inf", "nan", "-inf", "1e999"])
def test_a_scale_that_is_not_finite_is_refused(scale: str) -> None:
    with pytest.raises(UsageError, match="must be a finite number"):
        parse_adapter(f"a.gguf:{scale}")


def test_an_adapter_that_fits(models: Path, tmp_path: Path) -> None:
    roles = ("attn_q", "ffn_up", "ffn_down", "attn_output")
    path = write_adapter(tmp_path / "a.gguf", models / "llama.gguf", RANK, roles=roles)
    check_adapter(path, load_model_file(models / "llama.gguf"))
    file = load_any_file(path)
    assert ranks_of(file) == [RANK]
    assert set(changed_weights(file)) == {f"blk.{i}.{of}.weight" for i in (0, 1) for of in roles}


@pytest.mark.parametrize(
    ("matrices", "words"),
    [
        ({**SQUARE, f"{QUERY}.lora_a": (RANK, 99)},
         f"'{QUERY}.lora_a' is 99 x {RANK}; it must be {WIDTH} x {RANK}"),
        ({**SQUARE, f"{QUERY}.lora_b": (99, RANK)},
         f"'{QUERY}.lora_b' is {RANK} x 99; it must be {RANK} x {WIDTH}"),
        ({**SQUARE, f"{QUERY}.lora_a": (RANK + 1, WIDTH)}, f"it must be {WIDTH} x {RANK}"),
        ({**SQUARE, f"{QUERY}.lora_b": (2, WIDTH, RANK)}, f"it must be {RANK} x {WIDTH}"),
        ({f"{QUERY}.lora_a": (RANK, WIDTH)}, f"{QUERY!r} has only a lora_a"),
        ({f"{QUERY}.lora_b": (WIDTH, RANK)}, f"{QUERY!r} has only a lora_b"),
        ({"blk.9.attn_q.weight.lora_a": (RANK, WIDTH), "blk.9.attn_q.weight.lora_b": (WIDTH, RANK)},
         "the model has no tensor 'blk.9.attn_q.weight'"),
        ({"blk.0.ffn_down.weight.lora_a": (RANK, WIDTH),
          "blk.0.ffn_down.weight.lora_b": (WIDTH, RANK)}, f"must be {FEED_FORWARD} x {RANK}"),
        ({**SQUARE, "blk.0.attn_q.bias": (WIDTH,)}, "'blk.0.attn_q.bias' is neither a lora_a nor"),
        ({f"{EMBEDDING}.lora_a": (VOCABULARY, RANK), f"{EMBEDDING}.lora_b": (WIDTH, RANK)},
         f"{EMBEDDING!r} is also the output of the model"),
    ],
    ids=["a", "b", "rank", "dimensions", "only a", "only b", "layer", "wide", "bias", "tied"],
)  # fmt: skip
def test_matrices_that_do_not_fit(
    matrices: Matrices, words: str, models: Path, tmp_path: Path
) -> None:
    path = write(tmp_path / "a.gguf", matrices)
    found = refusal(path, models / "llama.gguf")
    assert found.startswith(str(path))
    assert words in found


def test_the_embedding_of_a_model_with_an_output_of_its_own(
    demo_model: Path, tmp_path: Path
) -> None:
    """llama.cpp looks rows of A up, so its shapes are the other way round."""
    right = {f"{EMBEDDING}.lora_a": (1024, RANK), f"{EMBEDDING}.lora_b": (256, RANK)}
    check_adapter(write(tmp_path / "a.gguf", right), load_model_file(demo_model))
    turned = {f"{EMBEDDING}.lora_a": (RANK, 256), f"{EMBEDDING}.lora_b": (1024, RANK)}
    assert f"must be {RANK} x 1024" in refusal(write(tmp_path / "b.gguf", turned), demo_model)


def test_norms_are_left_out_as_llama_cpp_does(models: Path, tmp_path: Path) -> None:
    path = write(tmp_path / "a.gguf", {**SQUARE, "blk.0.attn_norm.weight": (WIDTH,)})
    check_adapter(path, load_model_file(models / "llama.gguf"))


def test_a_file_of_another_kind(models: Path, tmp_path: Path) -> None:
    llama = models / "llama.gguf"
    assert "is not a LoRA adapter: its general.type is 'model'" in refusal(llama, llama)
    assert "does not exist" in refusal(tmp_path / "none.gguf", llama)
    other = write(tmp_path / "a.gguf", SQUARE, arch="qwen2")
    assert "an adapter for the architecture 'qwen2'" in refusal(other, llama)
    for name, kind, alpha in (("b", "other", 1.0), ("c", "lora", 16)):
        writer = gguf.GGUFWriter(tmp_path / f"{name}.gguf", "llama")
        writer.add_type(gguf.GGUFType.ADAPTER)
        writer.add_string(gguf.Keys.Adapter.TYPE, kind)
        (writer.add_uint32 if isinstance(alpha, int) else writer.add_float32)(
            gguf.Keys.Adapter.LORA_ALPHA,
            alpha,  # type: ignore[arg-type]
        )
        save(writer)
    assert "its adapter.type is 'other'" in refusal(tmp_path / "b.gguf", llama)
    assert "its adapter.lora.alpha is 16, not a 32-bit float" in refusal(tmp_path / "c.gguf", llama)


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        (gguf.GGUFType.ADAPTER, "is a LoRA adapter, not a model: its general.type is 'adapter'; "
         "`instr run MODEL --lora FILE` uses it"),
        (gguf.GGUFType.MMPROJ, "is a multimodal projector, not a model: its general.type is "),
    ],
)  # fmt: skip
def test_what_it_is_and_who_uses_it_where_a_model_is_wanted(
    kind: str, words: str, tmp_path: Path
) -> None:
    writer = gguf.GGUFWriter(tmp_path / "a.gguf", "llama")
    writer.add_type(kind)
    save(writer)
    with pytest.raises(UsageError) as refused:
        load_model_file(tmp_path / "a.gguf")
    assert words in str(refused.value)
