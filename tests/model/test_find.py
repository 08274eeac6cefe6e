"""Every file that is not a model is refused in one line, before llama.cpp reads it."""

from __future__ import annotations

import resource
import shutil
import struct
from pathlib import Path

import gguf
import pytest

from llamacpp_instr.base.errors import UsageError
from llamacpp_instr.model.file import load_model_file
from llamacpp_instr.model.header import read_header
from tests.kit import tiny_models
from tests.kit.gguf_files import write_two_parts


def header(version: int = 3, tensors: int = 0, metadata: int = 0, order: str = "<") -> bytes:
    return b"GGUF" + struct.pack(f"{order}IQQ", version, tensors, metadata)


def string(text: str) -> bytes:
    return struct.pack("<Q", len(text)) + text.encode()


def runnable(name: str) -> Path:
    """The path for a name, after the checks for a model that can run."""
    model = load_model_file(name)
    model.check_has_weights()
    return model.path


def refusal(path: Path | str) -> str:
    """The error message for a file."""
    with pytest.raises(UsageError) as caught:
        runnable(str(path))
    line = str(caught.value)
    assert "\n" not in line
    assert str(path) in line
    return line


def refusal_of(tmp_path: Path, content: bytes) -> str:
    path = tmp_path / "model.gguf"
    path.write_bytes(content)
    return refusal(path)


def test_demo_stands_for_the_model_that_ships(demo_model: Path) -> None:
    assert runnable("demo") == demo_model
    assert read_header(demo_model).metadata["general.architecture"] == "llama"


def test_every_kind_of_tiny_model_passes(models: Path) -> None:
    for path in models.glob("*.gguf"):
        if path.stem != "vocabulary":
            assert runnable(str(path)) == path


def test_the_header_agrees_with_gguf_py(demo_model: Path) -> None:
    ours, theirs = read_header(demo_model), gguf.GGUFReader(demo_model)
    assert ours.data_start == theirs.data_offset
    assert [(t.name, t.type, list(t.ne)) for t in ours.tensors] == [
        (t.name, int(t.tensor_type), [int(n) for n in t.shape]) for t in theirs.tensors
    ]
    for key, value in ours.metadata.items():
        assert theirs.fields[key].contents() == value


def test_a_path_that_leads_to_no_file(tmp_path: Path) -> None:
    assert "does not exist" in refusal(tmp_path / "missing.gguf")
    assert "is a directory" in refusal(tmp_path)
    assert "not a regular file" in refusal("/dev/null")
    assert "File name too long" in refusal("x" * 5000)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "is empty"),
        (b"PK\x03\x04" + bytes(100), "'PK??' instead of 'GGUF'"),
        (b"GG", "'GG' instead of 'GGUF'"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n", "git lfs pull"),
        (header(4), "version 4; this llama.cpp reads up to 3"),
        (header(1), "version 1"),
        (header(3, order=">"), "big-endian"),
        (header(3), "does not name its architecture"),
        (header(3, metadata=1) + string("a") + struct.pack("<I", 99), "unknown value type 99"),
        (
            header(3, metadata=1) + string("a") + struct.pack("<IIQ", 9, 13, 1),
            "array of the unknown value type 13",
        ),
        (
            header(3, metadata=1) + string("general.type") + struct.pack("<I", 8)
            + string("adapter"),
            "'adapter'",
        ),
    ],
)  # fmt: skip
def test_a_file_that_is_no_model(tmp_path: Path, content: bytes, words: str) -> None:
    assert words in refusal_of(tmp_path, content)


def test_a_vocabulary_without_weights(models: Path) -> None:
    assert "only a vocabulary" in refusal(models / "vocabulary.gguf")


def test_a_model_cut_off_anywhere(tmp_path: Path, models: Path) -> None:
    whole = (models / "llama.gguf").read_bytes()
    data_start = read_header(models / "llama.gguf").data_start
    # everywhere in the header, and coarsely in the data
    for size in [*range(24, data_start, 7), *range(data_start, len(whole) - 32, 4096)]:
        assert "truncated" in refusal_of(tmp_path, whole[:size]), size


@pytest.mark.parametrize(
    "content",
    [
        header(3, tensors=2**62),
        header(3, tensors=2**63 + 5),
        header(3, metadata=2**62),
        header(3, metadata=1) + struct.pack("<Q", 2**62) + bytes(16),
        header(3, metadata=1) + string("a") + struct.pack("<IIQ", 9, 4, 2**62),
        header(3, metadata=1) + string("a") + struct.pack("<IIQ", 9, 8, 2**62),
        header(3, metadata=1) + string("a") + struct.pack("<IIQQQ", 9, 8, 2, 2**63, 1),
        header(3, metadata=1) + string("split.count") + struct.pack("<II", 4, 2**32 - 1),
    ],
    ids=["tensors", "negative", "metadata", "key", "numbers", "strings", "string", "parts"],
)  # fmt: skip
def test_what_a_header_claims_costs_no_memory(tmp_path: Path, content: bytes) -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    refusal_of(tmp_path, content + bytes(64))
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 16 * 1024  # KiB


def test_a_tensor_beyond_the_end_is_named(tmp_path: Path) -> None:
    path = tiny_models.write_llama(tmp_path / "model.gguf")
    last = max(read_header(path).tensors, key=lambda tensor: tensor.offset)
    path.write_bytes(path.read_bytes()[:-64])
    assert repr(last.name) in refusal(path)


@pytest.fixture
def parts(tmp_path: Path) -> list[Path]:
    """A model in two parts, as gguf-py splits it."""
    return write_two_parts(tmp_path)


def test_a_split_model_is_its_first_part(parts: list[Path]) -> None:
    assert len(parts) == 2
    assert runnable(str(parts[0])) == parts[0]
    assert f"give the first part, {parts[0]}" in refusal(parts[1])


def test_a_split_model_needs_all_its_parts_whole(parts: list[Path], tmp_path: Path) -> None:
    renamed = shutil.copy(parts[0], tmp_path / "renamed.gguf")
    assert "name it NAME-00001-of-00002.gguf" in refusal(renamed)
    parts[1].write_bytes(parts[1].read_bytes()[:-64])
    with pytest.raises(UsageError, match=r"00002-of-00002.gguf is truncated"):
        runnable(str(parts[0]))
    parts[1].unlink()
    assert "1 of the model's 2 parts missing" in refusal(parts[0])
