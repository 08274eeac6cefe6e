"""Importance matrices are read like llama-quantize reads them; damaged ones are refused."""

from __future__ import annotations

import struct
from pathlib import Path

import gguf
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from llamacpp_instr.errors import UsageError
from llamacpp_instr.model.imatrix import load_imatrix
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


@settings(
    max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
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
