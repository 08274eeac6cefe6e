"""Importance matrices are read as llama-quantize reads them; damaged ones are refused."""

from __future__ import annotations

import struct
from pathlib import Path

import gguf
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llamacpp_instr.base.errors import UsageError
from llamacpp_instr.model.imatrix import ImportanceMatrix, load_imatrix
from tests.kit.gguf_files import save
from tests.kit.quantize_kit import legacy_imatrix, write_imatrix

SUMS = {"a.weight": np.array([3, 6, 9, 1.5], np.float32), "b.weight": np.ones(8, np.float32)}


def test_sums_are_divided_by_their_counts(tmp_path: Path) -> None:
    matrix = load_imatrix(write_imatrix(tmp_path / "i.gguf", SUMS, count=3))
    assert list(matrix.entries) == ["a.weight", "b.weight"]
    assert matrix.entries["a.weight"].tolist() == [1, 2, 3, 0.5]
    assert matrix.entries["a.weight"].dtype == np.float32
    assert (matrix.dataset, matrix.n_chunks) == ("wörds.txt", 2)


def test_each_expert_has_its_count_and_one_never_seen_counts_as_one(tmp_path: Path) -> None:
    path = tmp_path / "i.gguf"
    writer = gguf.GGUFWriter(path, "")
    writer.add_array("imatrix.datasets", ["x"])
    writer.add_uint32("imatrix.chunk_count", 1)
    writer.add_uint32("imatrix.chunk_size", 1)
    sums = np.array([[2, 4], [5, 5], [9, 9]], np.float32)
    writer.add_tensor("exps.weight.in_sum2", sums)
    writer.add_tensor("exps.weight.counts", np.array([[2], [0], [2.5]], np.float32))
    save(writer)
    # 2.5 is rounded away from zero, as by lround
    assert load_imatrix(path).entries["exps.weight"].tolist() == [1, 2, 1, 1, 3, 3]


def test_the_older_format_is_divided_by_its_calls(tmp_path: Path) -> None:
    path = tmp_path / "i.dat"
    path.write_bytes(legacy_imatrix(SUMS, calls=3))
    matrix = load_imatrix(path)
    assert matrix.entries["a.weight"].tolist() == [1, 2, 3, 0.5]
    assert (matrix.dataset, matrix.n_chunks) == ("words.txt", 2)

    # later versions of the format have more after the entries
    path.write_bytes(legacy_imatrix(SUMS, calls=0)[: -(4 + 4 + 9)])
    matrix = load_imatrix(path)
    assert matrix.entries["a.weight"].tolist() == SUMS["a.weight"].tolist()
    assert (matrix.dataset, matrix.n_chunks) == (None, 0)


def test_what_a_quantized_model_says_of_its_matrix() -> None:
    """llama-quantize cuts texts at 127 bytes, here inside of a character."""
    text = "x" * 126 + "ö"
    matrix = ImportanceMatrix(Path("i.gguf"), {"a": np.ones(1, np.float32)}, text, 1)
    assert matrix.metadata() == {
        "quantize.imatrix.file": "i.gguf", "quantize.imatrix.dataset": "x" * 126,
        "quantize.imatrix.entries_count": 1, "quantize.imatrix.chunks_count": 1,
    }  # fmt: skip
    long = ImportanceMatrix(Path("y" * 128), {}, "", 0).metadata()
    assert long == {
        "quantize.imatrix.file": "y" * 127, "quantize.imatrix.dataset": "",
        "quantize.imatrix.entries_count": 0,
    }  # fmt: skip
    unknown = ImportanceMatrix(Path("i"), {}, None, -1).metadata()
    assert unknown == {"quantize.imatrix.file": "i", "quantize.imatrix.entries_count": 0}


@pytest.mark.parametrize(
    ("end", "dataset", "n_chunks"),
    [
        (b"", None, 0),
        (b"\x02\0\0", None, 0),
        (b"\x02\0\0\0", None, 2),
        (b"\x02\0\0\0\x01\0\0", None, 2),
        (b"\x02\0\0\0\x01\0\0\0", None, 2),
        (b"\x02\0\0\0\x01\0\0\0x", "x", 2),
        (b"\x02\0\0\0\x01\0\0\0xy", "x", 2),
        (b"\x02\0\0\0\x02\0\0\0x", None, 2),
        (b"\x02\0\0\0\0\0\0\0x", None, 2),
    ],
)
def test_what_follows_the_entries_of_the_older_format(
    end: bytes, dataset: str | None, n_chunks: int, tmp_path: Path
) -> None:
    path = tmp_path / "i.dat"
    path.write_bytes(legacy_imatrix(SUMS, calls=1)[: -(4 + 4 + 9)] + end)
    matrix = load_imatrix(path)
    assert (matrix.dataset, matrix.n_chunks) == (dataset, n_chunks)
    assert matrix.entries["a.weight"].tolist() == SUMS["a.weight"].tolist()


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_importances_that_are_no_numbers(tmp_path: Path, value: float) -> None:
    sums = {"a.weight": np.array([1, value], np.float32)}
    with pytest.raises(UsageError, match=r"'a\.weight' are not all finite"):
        load_imatrix(write_imatrix(tmp_path / "i.gguf", sums))
    (tmp_path / "i.dat").write_bytes(legacy_imatrix(sums))
    with pytest.raises(UsageError, match="not all finite"):
        load_imatrix(tmp_path / "i.dat")


def test_what_is_no_importance_matrix(demo_model: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="not an importance matrix: it has no imatrix"):
        load_imatrix(demo_model)
    with pytest.raises(UsageError, match="is not a file"):
        load_imatrix(tmp_path)
    empty = tmp_path / "empty"
    empty.write_bytes(b"")
    with pytest.raises(UsageError, match="truncated"):
        load_imatrix(empty)
    with pytest.raises(UsageError, match="no entries"):
        load_imatrix(write_imatrix(tmp_path / "none.gguf", {}))


def test_counts_without_sums(tmp_path: Path) -> None:
    path = tmp_path / "i.gguf"
    data = write_imatrix(path, SUMS).read_bytes()
    path.write_bytes(data.replace(b"a.weight.in_sum2", b"a.weight.in_sumX"))
    with pytest.raises(UsageError, match=r"'a\.weight'.*not both"):
        load_imatrix(path)


def test_memory_is_bounded_by_the_file(tmp_path: Path) -> None:
    """Overlapping tensors could claim the same bytes many times."""
    path = tmp_path / "i.gguf"
    many = {f"t{i}.weight": np.ones(1000, np.float32) for i in range(4)}
    data = bytearray(write_imatrix(path, many).read_bytes())
    for i in range(4):
        place = data.index(f"t{i}.weight.in_sum2".encode()) + len("t0.weight.in_sum2")
        struct.pack_into("<qqIQ", data, place + 4, 2000, 1, 0, 0)
    path.write_bytes(data)
    with pytest.raises(UsageError, match="more values than bytes"):
        load_imatrix(path)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[bytes, bytes]:
    """An importance matrix in the older format, and in the newer one."""
    path = tmp_path_factory.mktemp("whole") / "i.gguf"
    return legacy_imatrix(SUMS), write_imatrix(path, SUMS).read_bytes()


@settings(max_examples=100)
@given(data=st.data())
def test_a_damaged_file_is_refused_or_read_never_more(
    whole: tuple[bytes, bytes], tmp_path: Path, data: st.DataObject
) -> None:
    path = tmp_path / "i"
    content = bytearray(data.draw(st.sampled_from(whole)))
    cut = data.draw(st.integers(0, len(content)))
    del content[cut:]
    for at in data.draw(st.lists(st.integers(0, max(len(content) - 1, 0)), max_size=3)):
        if content:
            content[at] = data.draw(st.integers(0, 255))
    path.write_bytes(content)
    try:
        entries = load_imatrix(path).entries
    except UsageError:
        entries = {}
    assert sum(values.nbytes for values in entries.values()) <= len(content)
