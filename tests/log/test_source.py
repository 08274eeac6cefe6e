"""The bytes of a log, from files of every kind."""

from __future__ import annotations

import errno
import gzip
import io
import os
from pathlib import Path
from random import Random
from types import SimpleNamespace

import pytest
import zstandard

from llamacpp_instr.base.errors import LogError
from llamacpp_instr.log import reader as log_file
from llamacpp_instr.log.reader import (
    decompressed,
    file_size,
    growing,
    is_pipe,
    open_log,
    os_reason,
)


def test_a_pipe_is_neither_a_file_nor_a_directory(tmp_path: Path) -> None:
    file, pipe = tmp_path / "file", tmp_path / "pipe"
    file.touch()
    os.mkfifo(pipe)
    found = [is_pipe(of) for of in (file, pipe, tmp_path, tmp_path / "none", "-", "/dev/null")]
    assert found == [False, True, False, False, True, True]


def test_the_size_of_a_file_that_can_be_sought(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"12345")
    with path.open("rb") as file:
        assert file_size(file) == 5
    reader, writer = os.pipe()
    os.close(writer)
    with os.fdopen(reader, "rb") as pipe:
        assert file_size(pipe) == 0
    assert file_size(io.BytesIO(b"12345")) == 0, "it is no file"


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (OSError(errno.ENOENT, "x"), "no such file"),
        (OSError(errno.EISDIR, "x"), "is a directory, not a log"),
        (OSError(errno.EACCES, "x"), os.strerror(errno.EACCES)),
        (OSError("of its own"), "of its own"),
    ],
)
def test_why_a_file_cannot_be_read(error: OSError, reason: str) -> None:
    assert os_reason(error) == reason


def test_what_cannot_be_opened_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(LogError, match="no log is named: the path is empty"):
        open_log("", "")
    with pytest.raises(LogError, match="shown: no such file"):
        open_log(tmp_path / "none", "shown")
    closed = io.BytesIO()
    closed.close()
    for stdin in (None, SimpleNamespace(), SimpleNamespace(buffer=closed)):
        monkeypatch.setattr("sys.stdin", stdin)
        with pytest.raises(LogError, match="shown: closed, or replaced by something without bytes"):
            open_log("-", "shown")
    there = io.BytesIO(b"x")
    monkeypatch.setattr("sys.stdin", SimpleNamespace(buffer=there))
    assert open_log("-", "shown") is there
    assert list(decompressed(open_log("-", "shown"), "shown")) == [b"x"]
    assert not there.closed, "it is the caller's"


@pytest.mark.parametrize("compress", [bytes, gzip.compress, zstandard.compress])
@pytest.mark.parametrize("size", [0, 1, 3, 1000, (1 << 18) + 1])
def test_chunks_are_the_content_and_none_is_too_large(compress, size: int, tmp_path: Path) -> None:
    data = Random(size).randbytes(size)
    path = tmp_path / "file"
    path.write_bytes(compress(data))
    file = path.open("rb")
    chunks = list(decompressed(file, "shown"))
    assert b"".join(chunks) == data
    assert all(0 < len(chunk) <= 1 << 18 for chunk in chunks)
    assert file.closed


@pytest.mark.parametrize("refused", [False, True])
def test_a_file_that_expands_beyond_the_limit_is_no_log(
    refused: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "file"
    size = 1 << 20
    packed = gzip.compress(bytes(size))
    path.write_bytes(packed)
    ratio = (size - 1) // len(packed) if refused else -(-size // len(packed))
    monkeypatch.setattr(log_file, "MAX_EXPANSION", ratio)
    if refused:
        with pytest.raises(LogError, match=f"shown: expands to more than {ratio} times its size"):
            list(decompressed(path.open("rb"), "shown"))
    else:
        assert sum(map(len, decompressed(path.open("rb"), "shown"))) == size


def test_real_logs_may_expand_a_hundred_times_and_come_in_pieces_of_256_kib() -> None:
    assert (log_file.MAX_EXPANSION, log_file.CHUNK) == (100, 1 << 18)


def test_a_growing_file_is_read_until_nothing_more_comes(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"one")
    answers = iter([True, True, False])

    def more() -> bool:
        answer = next(answers)
        if answer:
            with path.open("ab") as file:
                file.write(b"two")
        return answer

    file = path.open("rb", buffering=0)
    assert b"".join(growing(file, more)) == b"onetwotwo"
    assert file.closed
    assert next(answers, None) is None
