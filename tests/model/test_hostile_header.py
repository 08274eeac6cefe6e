"""Whatever a header claims, the result is correct or one clear line of error, at a bounded cost."""

from __future__ import annotations

import json
import struct
import tracemalloc
from pathlib import Path

import gguf
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llamacpp_instr.base.errors import UsageError
from llamacpp_instr.converters.analyses.inspect import compute_inspection, compute_tensors
from llamacpp_instr.model.file import load_any_file, load_model_file
from llamacpp_instr.model.header import read_array, read_header
from llamacpp_instr.model.types import TYPES
from llamacpp_instr.report.render import render_csv, render_html, render_markdown, render_text
from tests.kit import tiny_models
from tests.kit.gguf_files import save, write_two_parts

STRING, ARRAY, FLOAT32, UINT32 = 8, 9, 6, 4
MOST = 1 << 14
"""tensors, and metadata entries, of a file"""


def text(value: str | bytes) -> bytes:
    data = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(data)) + data


def entry(key: str | bytes, type_: int, value: bytes) -> bytes:
    return text(key) + struct.pack("<I", type_) + value


def nested(key: str, count: int) -> bytes:
    """An array of empty arrays."""
    return entry(key, ARRAY, struct.pack("<IQ", ARRAY, count) + struct.pack("<IQ", 4, 0) * count)


def tensor(name: str | bytes, ne: list[int], type_: int = 0, offset: int = 0) -> bytes:
    return text(name) + struct.pack(f"<I{len(ne)}QIQ", len(ne), *ne, type_, offset)


ARCHITECTURE = entry("general.architecture", STRING, text("llama"))


def write(path: Path, entries: list[bytes], tensors: list[bytes], data: int = 4096) -> Path:
    """A model with these entries (its architecture first), tensors and bytes of data."""
    start = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(entries) + 1)
    header = start + ARCHITECTURE + b"".join(entries) + b"".join(tensors)
    path.write_bytes(header + bytes(-len(header) % 32 + data))
    return path


def inspect(path: Path) -> str | None:
    """The error message for a file; None if every report was rendered in every format. Files that
    are not damaged are rendered, even where llama.cpp could not load them."""
    try:
        model = load_any_file(path)
        reports = [*compute_inspection(model), compute_tensors(model)]
    except UsageError as error:
        line = str(error)
        assert "\n" not in line
        assert line.isprintable()
        assert len(line) < 1000
        return line
    assert sum(weight.n_bytes for weight in model.weights) <= model.file_size
    assert "\x1b" not in render_text(reports) + render_markdown(reports) + render_html(reports)
    render_csv(reports[-1])
    json.dumps([report.to_json() for report in reports], allow_nan=False)
    try:
        load_model_file(path)
    except UsageError as error:
        assert "llama.cpp cannot load" in render_text(reports)
        return str(error)
    return None


# --- hypothesis ---

WILD = st.sampled_from([0, 1, 7, 8, 31, 255, 2**15, 2**16, 2**31 - 1, 2**31, 2**32 - 1, 2**62,
                        2**63 - 1, 2**63, 2**64 - 1]) | st.integers(0, 2**64 - 1)  # fmt: skip


@st.composite
def edits(draw: st.DrawFn, size: int) -> list[tuple[int, bytes]]:
    """Places in a header and the bytes to write there."""
    at = st.integers(0, size - 1)
    content = st.one_of(
        st.binary(min_size=1, max_size=4),
        WILD.map(lambda n: struct.pack("<Q", n)),
        WILD.map(lambda n: struct.pack("<I", n % 2**32)),
    )
    return draw(st.lists(st.tuples(at, content), min_size=1, max_size=4))


@pytest.fixture(scope="module")
def originals(models: Path, tmp_path_factory: pytest.TempPathFactory) -> list[tuple[bytes, int]]:
    """Small models, each with the size of its header: a decoder, a vocabulary, and a decoder and an
    encoder with arrays and blocks."""
    folder = tmp_path_factory.mktemp("originals")
    tiny_models.write_llama(folder / "llama.gguf", layers=1)
    for architecture in ("llama", "bert"):
        writer = gguf.GGUFWriter(folder / f"{architecture}-arrays.gguf", architecture)
        writer.add_array(f"{architecture}.attention.head_count", [1, 2, 3])
        writer.add_array(f"{architecture}.rope.dimension_sections", [0.5] * 20)
        writer.add_array(f"{architecture}.words", ["b", "c"])
        writer.add_bool(f"{architecture}.use_parallel_residual", True)
        writer.add_causal_attention(architecture == "llama")
        writer.add_pooling_type(gguf.PoolingType.MEAN)
        writer.add_file_type(15)
        writer.add_tensor("blk.0.a.weight", np.zeros((4, 144), np.uint8),
                          raw_dtype=gguf.GGMLQuantizationType.Q4_K)  # fmt: skip
        save(writer)
    paths = [*sorted(folder.iterdir()), models / "vocabulary.gguf"]
    return [(path.read_bytes(), read_header(path).data_start) for path in paths]


def test_the_headers_that_are_changed_are_those_of_models(
    originals: list[tuple[bytes, int]], tmp_path: Path
) -> None:
    for content, _ in originals:
        (tmp_path / "model.gguf").write_bytes(content)
        assert inspect(tmp_path / "model.gguf") is None


@settings(max_examples=100)
@given(st.data())
def test_a_real_header_with_other_bytes_in_it(
    originals: list[tuple[bytes, int]], tmp_path: Path, data: st.DataObject
) -> None:
    original, head = data.draw(st.sampled_from(originals))
    content = bytearray(original)
    for at, written in data.draw(edits(head)):
        content[at : at + len(written)] = written
    path = tmp_path / "model.gguf"
    path.write_bytes(content[: data.draw(st.sampled_from([len(content), head, head - 5]))])
    tracemalloc.start()
    try:
        inspect(path)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 16e6


names = st.text(max_size=70) | st.binary(max_size=20) | st.sampled_from(["a", "blk.1.x.weight"])


@settings(max_examples=100)
@given(
    entries=st.lists(st.one_of(
        st.builds(lambda k, v: entry(k, STRING, text(v)), names, names),
        st.builds(lambda k, v: entry(k, FLOAT32, struct.pack("<f", v)), names, st.floats(width=32)),
        st.builds(lambda k, t, n: entry(k, ARRAY, struct.pack("<IQ", t, n) + bytes(64)),
                  names, st.integers(0, 13), WILD),
    ), max_size=4),
    tensors=st.lists(st.builds(
        tensor, names, st.lists(st.integers(0, 600) | WILD, max_size=5),
        st.sampled_from(list(TYPES)) | WILD.map(lambda n: n % 2**32),
        st.sampled_from([0, 32, 64, 128, 2048]) | WILD,
    ), max_size=3),
)  # fmt: skip
def test_a_header_of_any_parts(tmp_path: Path, entries: list[bytes], tensors: list[bytes]) -> None:
    inspect(write(tmp_path / "model.gguf", entries, tensors))


# --- former findings, and checks of gguf.cpp ---


@pytest.mark.parametrize(
    ("entries", "tensors", "words"),
    [
        ([entry("a", UINT32, bytes(4))] * 2, [], "the metadata has 'a' twice"),
        ([ARCHITECTURE], [], "the metadata has 'general.architecture' twice"),
        ([entry("a", UINT32, bytes(4)), entry("a", ARRAY, struct.pack("<IQ", 4, 0))], [], "twice"),
        ([entry("", UINT32, bytes(4))], [], "the key of metadata entry 1 is empty"),
        ([entry("a", ARRAY, struct.pack("<IQIQ", 9, 1, 4, 0))], [], "'a' is an array of arrays"),
        ([nested("a", MOST)], [], "'a' is an array of arrays"),
        ([nested("a", MOST), nested("b", 1)], [], "its arrays contain more than 16,384 arrays"),
        ([entry("a", ARRAY, struct.pack("<IQ", 9, 1) * 20)], [], "the unknown value type 9"),
        ([entry("a", ARRAY, struct.pack("<IQ", 0, 2**31))], [], "array of 2,147,483,648 items"),
        ([entry("k" * 5000, 99, b"")], [], "kkk... has the unknown value type 99"),
        ([entry(f"{i}", UINT32, bytes(4)) for i in range(MOST)], [], "claims 16,385 metadata"),
        ([], [tensor(f"{i}", [0]) for i in range(MOST + 1)], "claims 16,385 tensors, more than"),
        ([], [tensor("a", [8]), tensor("a", [8], 0, 32)], "tensor 'a' twice"),
        ([], [tensor("n" * 64, [8])], "the name of tensor 0 is longer than 63 bytes"),
        ([], [tensor("a", [2**32, 2**31])], "more elements than can be counted"),
        ([], [tensor("a", [2**63])], "negative dimension"),
        ([], [tensor("a", [1] * 5)], "5 dimensions"),
        (
            [],
            [tensor("a", [], 12)],
            "rows of 1 elements, which are not divisible into blocks of 256",
        ),
        ([], [tensor("a", [32]), tensor("b", [32], 0, 64)], "'b' overlaps 'a'"),
        ([], [tensor("b", [32], 0, 64), tensor("a", [64])], "'b' overlaps 'a'"),
        ([], [tensor("a", [32], 12)], "not divisible into blocks of 256 (Q4_K)"),
        ([], [tensor("a", [32], 4)], "storage type 4, which this llama.cpp"),
        ([], [tensor("a", [32], 4000)], "storage type 4000"),
        ([], [tensor("a", [2**60])], "truncated"),
        ([], [tensor("a", [32], 0, 2**63)], "truncated"),
        ([], [tensor("a", [8]), tensor("b", [8], 0, 64)], "'b' begins 64 bytes into the data"),
        ([], [tensor("b", [8], 0, 32), tensor("a", [8])], "'b' begins 32 bytes into the data"),
        ([entry("general.alignment", UINT32, struct.pack("<I", 48))], [], "not a power of two"),
        ([entry("general.alignment", STRING, text("x" * 999))], [], "xxx..., not a power of two"),
    ],
)
def test_what_llama_cpp_refuses(
    tmp_path: Path, entries: list[bytes], tensors: list[bytes], words: str
) -> None:
    line = inspect(write(tmp_path / "model.gguf", entries, tensors))
    assert line is not None
    assert words in line
    assert str(tmp_path / "model.gguf") in line


def test_as_many_tensors_and_entries_as_may_be(tmp_path: Path) -> None:
    entries = [entry(f"{i}", UINT32, bytes(4)) for i in range(MOST - 1)]
    path = write(tmp_path / "model.gguf", entries, [tensor(f"{i}", [0]) for i in range(MOST)])
    assert len(load_model_file(path).weights) == MOST


def test_names_that_would_steer_a_terminal_or_be_markup(tmp_path: Path) -> None:
    name = b"blk.0.\x1b[31m<b>\xff\n[red]|$x$.weight"
    key = b"llama.\x1b]0;title\x07\r"
    path = write(tmp_path / "model.gguf", [entry(key, FLOAT32, struct.pack("<f", float("nan")))],
                 [tensor(name, [8]), tensor(b"", [8], 0, 32)])  # fmt: skip
    assert inspect(path) is None
    model = load_model_file(path)
    shown = render_text([*compute_inspection(model), compute_tensors(model)], width=200)
    assert r"blk.0.\x1b[31m<b>\xff\n[red]|$x$.weight" in shown
    assert r"\x1b]0;title\x07\r" in shown
    assert "nan" in shown


def test_two_names_that_are_no_text_are_two(tmp_path: Path) -> None:
    path = write(tmp_path / "model.gguf", [], [tensor(b"\xff", [8]), tensor(b"\xfe", [8], 0, 32)])
    assert [weight.name for weight in load_model_file(path).weights] == ["\\xff", "\\xfe"]


def test_a_tensor_without_elements(tmp_path: Path) -> None:
    path = write(tmp_path / "model.gguf", [], [tensor("a", [0, 4], 12), tensor("b", [])])
    assert inspect(path) is None
    assert [(w.n_elements, w.n_bytes) for w in load_model_file(path).weights] == [(0, 0), (1, 4)]


def test_text_without_end_costs_no_memory(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    with path.open("wb") as file:
        file.write(b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + text("a"))
        file.write(struct.pack("<IQ", STRING, 8 << 30))
        file.truncate(9 << 30)
    tracemalloc.start()
    line = inspect(path)
    assert tracemalloc.get_traced_memory()[1] < 2e6
    tracemalloc.stop()
    assert "longer than 16,777,216 bytes" in str(line)


def test_parts_of_a_split_model_that_do_not_belong_together(tmp_path: Path) -> None:
    first, second = write_two_parts(tmp_path)
    good = second.read_bytes()
    second.write_bytes(good.replace(text("b"), text("a")))
    assert "'a' is in split-00001-of-00002.gguf too" in str(inspect(first))
    second.write_bytes(first.read_bytes())
    assert "its split.no is 0" in str(inspect(first))
    second.write_bytes(good)
    assert inspect(first) is None


def test_a_file_that_shrinks_while_it_is_read(tmp_path: Path) -> None:
    path = tiny_models.write_llama(tmp_path / "model.gguf")
    model = load_model_file(path)
    path.write_bytes(path.read_bytes()[: model.arrays["tokenizer.ggml.tokens"].start + 100])
    with pytest.raises(UsageError, match="is truncated or damaged"):
        read_array(path, model.arrays["tokenizer.ggml.tokens"], 1000)
