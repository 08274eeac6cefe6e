"""`instr import` as far as it needs no PyTorch: which folders it accepts, and what it refuses.

`make test-all PARTS=peers` compares what it writes with transformers.
"""

from __future__ import annotations

import json
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from llamacpp_instr.base.errors import UsageError
from llamacpp_instr.base.system import cache_dir
from llamacpp_instr.lab.importer.source import INDEX, Kind, find_converter, open_source
from tests.conftest import Instr, assert_refused
from tests.kit import tiny_models

SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")


def save(path: Path, *names: str) -> None:
    save_file({name: np.ones((4, 4), np.float32) for name in names}, path)


def write_hugging_face(folder: Path) -> None:
    (folder / "config.json").write_text('{"architectures": ["LlamaForCausalLM"]}')
    save(folder / SHARDS[0], "a", "b")
    save(folder / SHARDS[1], "c")
    weight_map = {"a": SHARDS[0], "b": SHARDS[0], "c": SHARDS[1]}
    (folder / INDEX).write_text(json.dumps({"weight_map": weight_map}))


def write_meta(folder: Path) -> None:
    (folder / "params.json").write_text('{"dim": 64}')
    (folder / "tokenizer.model").write_bytes(b"pieces")
    for number in range(3):
        (folder / f"consolidated.{number:02}.pth").write_bytes(b"weights")


def write_adapter(folder: Path) -> None:
    (folder / "adapter_config.json").write_text('{"base_model_name_or_path": "org/some-model"}')
    save(folder / "adapter_model.safetensors", "a.lora_A.weight")


WRITERS = {"hugging_face": write_hugging_face, "meta": write_meta, "adapter": write_adapter}


def test_a_hugging_face_folder(tmp_path: Path) -> None:
    write_hugging_face(tmp_path)
    source = open_source(tmp_path)
    assert source.kind is Kind.HUGGING_FACE
    assert [file.name for file in source.weights] == list(SHARDS)


def test_metas_folder_in_the_order_of_its_shards(tmp_path: Path) -> None:
    write_meta(tmp_path)
    source = open_source(tmp_path)
    assert source.kind is Kind.META
    assert [file.stem for file in source.weights] == [f"consolidated.0{n}" for n in range(3)]


def test_an_adapter_with_the_folder_of_its_base(tmp_path: Path) -> None:
    (tmp_path / "base").mkdir()
    (tmp_path / "base" / "config.json").write_text("{}")
    (tmp_path / "adapter").mkdir()
    write_adapter(tmp_path / "adapter")
    source = open_source(tmp_path / "adapter", tmp_path / "base")
    assert (source.kind, source.base) == (Kind.LORA, tmp_path / "base")


def test_an_adapter_may_name_the_folder_itself(tmp_path: Path) -> None:
    write_adapter(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    named = json.dumps({"base_model_name_or_path": str(tmp_path)})
    (tmp_path / "adapter_config.json").write_text(named)
    assert open_source(tmp_path).base == tmp_path


def remove(name: str) -> Callable[[Path], None]:
    return lambda folder: (folder / name).unlink()


def write(name: str, text: str) -> Callable[[Path], None]:
    def spoil(folder: Path) -> None:
        (folder / name).write_text(text)

    return spoil


def cut(folder: Path) -> None:
    file = folder / SHARDS[1]
    file.write_bytes(file.read_bytes()[:-8])


def without_index_and_shard(folder: Path) -> None:
    (folder / INDEX).unlink()
    (folder / SHARDS[0]).unlink()


def lacking_tensor(folder: Path) -> None:
    save(folder / SHARDS[0], "a")


def mistral(folder: Path) -> None:
    for file in folder.glob("*.pth"):
        file.rename(file.with_suffix(".safetensors"))


def old_pickle(name: str) -> Callable[[Path], None]:
    """As `torch.save` wrote it before 1.6: it begins with the pickled magic number."""
    return lambda folder: (folder / name).write_bytes(pickle.dumps(0x1950A86A20F9469CFC6C, 2))


WRONG: list[tuple[str, Callable[[Path], None], str]] = [
    ("hugging_face", remove("config.json"), "is not a model: it has no config.json"),
    ("hugging_face", remove(SHARDS[1]), f"1 of 2 files with weights is missing: {SHARDS[1]}"),
    ("hugging_face", without_index_and_shard, f"is missing: {SHARDS[0]}"),
    ("hugging_face", cut, f"{SHARDS[1]} is damaged"),
    ("hugging_face", write(SHARDS[0], "no safetensors"), f"{SHARDS[0]} is damaged"),
    ("hugging_face", lacking_tensor, f"{SHARDS[0]} lacks tensors that the index lists: b"),
    ("hugging_face", write(INDEX, "{"), f"{INDEX} is damaged"),
    ("hugging_face", write(INDEX, "[" * 50_000), f"{INDEX} is damaged"),
    ("hugging_face", write(INDEX, "{}"), "it has no weight_map"),
    (
        "hugging_face",
        write(INDEX, '{"weight_map": {"a": "../other"}}'),
        "is not the name of a file",
    ),
    ("meta", remove("consolidated.01.pth"), "shards are missing, the first is consolidated.01.pth"),
    ("meta", write("consolidated.999999999999.pth", ""), "the first is consolidated.03.pth"),
    ("meta", remove("tokenizer.model"), "has no tokenizer.model"),
    ("meta", mistral, "has Mistral's own layout"),
    ("adapter", lambda _folder: None, "its base model is org/some-model; name the folder"),
    (
        "adapter",
        remove("adapter_model.safetensors"),
        "has no weights: no adapter_model.safetensors",
    ),
    ("adapter", write("adapter_config.json", "[]"), "it is not a JSON object"),
    ("meta", old_pickle("consolidated.01.pth"), "has the format of PyTorch before 1.6"),
    ("meta", write("params.json", '{"n_layers": 1000000000}'), "n_layers is 1,000,000,000; it"),
    (
        "hugging_face",
        write("config.json", '{"text_config": {"num_hidden_layers": 1000000000}}'),
        "num_hidden_layers is 1,000,000,000; it can be at most 512",
    ),
    ("hugging_face", write("config.json", '{"vocab_size": 99999999}'), "at most 16,777,216"),
]


@pytest.mark.parametrize(("layout", "spoil", "line"), WRONG)
def test_a_wrong_folder_is_refused(
    layout: str, spoil: Callable[[Path], None], line: str, tmp_path: Path
) -> None:
    WRITERS[layout](tmp_path)
    spoil(tmp_path)
    with pytest.raises(UsageError) as refused:
        open_source(tmp_path)
    assert line in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.native
def test_wrong_arguments_are_refused(tmp_path: Path, instr: Instr) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    write_hugging_face(folder)
    model = tiny_models.write_llama(tmp_path / "old.gguf")
    before = model.read_bytes()
    for words, messages in (
        (["nothing", "-o", "out.gguf"], ["nothing does not exist"]),
        ([model, "-o", "out.gguf"], ["is a GGUF model already"]),
        ([folder / "config.json", "-o", "out.gguf"], ["is a file; name the folder"]),
        ([folder, "-o", "-"], ["written to a file"]),
        ([folder, "-o", "old.gguf"], ["exists; use --force"]),
        ([folder, "-o", "no/out.gguf"], ["there is no directory"]),
        ([folder, "-o", folder / "config.json", "--force"], ["would overwrite the input"]),
        ([folder, "-o", "out.gguf", "--base", folder], ["--base is for LoRA adapters"]),
        ([folder, "-o", "out.gguf", "--type", "Q4_K"], ["is not one of"]),
    ):  # fmt: skip
        assert_refused(instr("import", *words), *messages)
    assert {path.name for path in tmp_path.iterdir()} == {"model", "old.gguf"}
    assert model.read_bytes() == before
    assert_refused(instr("run", tmp_path, "-p", "hi"), "is not a model: it has no config.json")


@pytest.mark.native
def test_the_converter_is_that_of_the_pinned_sdist(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sdists = cache_dir() / "sdist"
    monkeypatch.setenv("LLAMACPP_INSTR_CACHE", str(tmp_path))
    if sdists.is_dir():
        shutil.copytree(sdists, tmp_path / "sdist")
        (tmp_path / "sdist").chmod(0o700)
    found = find_converter()
    assert sorted(path.name for path in found.iterdir()) == [
        "conversion", "convert_lora_to_gguf.py", "gguf-py",
    ]  # fmt: skip
    marker = found / "kept"
    marker.touch()
    assert find_converter() == found
    assert marker.exists(), "it is unpacked once"
