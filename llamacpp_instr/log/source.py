"""The bytes of a log from a file or standard input, plain, `.gz` or `.zst`, in chunks.

Invariant: no chunk is larger than CHUNK, and a compressed file expands to at most MAX_EXPANSION
times its size. So the size of the file bounds the memory of a reader.
"""

from __future__ import annotations

import errno
import gzip
import io
import os
import sys
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

from llamacpp_instr.base.errors import LogError

CHUNK = 1 << 18
MAX_EXPANSION = 100
"""the largest compression ratio; real logs have 4 to 20 with gzip and up to 40 with zstd -19, zeros
have 1,000 and 30,000"""


def open_log(path: str | Path, shown: str) -> BinaryIO:
    """The file at `path`; `-` is standard input. Raises LogError, which names it as `shown`."""
    if str(path) == "-":
        if (file := _standard_input()) is None or file.closed:
            raise LogError("closed, or replaced by something without bytes", shown)
        return file
    if path == "":
        raise LogError("no log is named: the path is empty")
    try:
        return Path(path).open("rb", buffering=0)
    except OSError as error:
        raise LogError(os_reason(error), shown) from None


def _standard_input() -> BinaryIO | None:
    """None where a service or a notebook has taken it away."""
    return getattr(sys.stdin, "buffer", None)


def is_pipe(path: str | Path) -> bool:
    """Whether the path is a pipe or a device, which can be read only once; so is `-`."""
    path = Path(path)
    return str(path) == "-" or (path.exists() and not path.is_file() and not path.is_dir())


def file_size(file: BinaryIO) -> int:
    """The size of a regular file in bytes, 0 for other files."""
    try:
        return os.fstat(file.fileno()).st_size if file.seekable() else 0
    except OSError:
        return 0


def os_reason(error: OSError) -> str:
    """Why the file cannot be read."""
    if error.errno == errno.ENOENT:
        return "no such file"
    if error.errno == errno.EISDIR:
        return "is a directory, not a log"
    return os.strerror(error.errno) if error.errno else str(error)


_GZIP, _ZSTD = b"\x1f\x8b", b"\x28\xb5\x2f\xfd"
BAD_STREAM: tuple[type[Exception], ...] = (gzip.BadGzipFile, zlib.error)


def decompressed(file: BinaryIO, shown: str) -> Iterator[bytes]:
    """The file's content in chunks of at most CHUNK bytes; EOFError when gzip ends too early."""
    magic = b""
    while len(magic) < len(_ZSTD) and (more := file.read(len(_ZSTD) - len(magic))):
        magic += more
    replay = _Replay(magic, file)
    source: BinaryIO = io.BufferedReader(replay, CHUNK)
    read: Callable[[int], bytes] = source.read1  # type: ignore[attr-defined]
    if magic.startswith(_GZIP):
        read = gzip.GzipFile(fileobj=source).read1
    elif magic.startswith(_ZSTD):
        read = _zstd_read(source, shown)
    n_bytes = 0
    try:
        while chunk := read(CHUNK):
            n_bytes += len(chunk)
            if n_bytes > MAX_EXPANSION * replay.n_read:
                raise LogError(
                    f"expands to more than {MAX_EXPANSION} times its size, which no recorded"
                    " log does; if it is a log, decompress it first",
                    shown,
                )
            yield chunk
    finally:
        if file is not _standard_input():
            file.close()


def growing(file: BinaryIO, more: Callable[[], bool]) -> Iterator[bytes]:
    """The content of a plain file that is being written, in chunks of at most CHUNK bytes. At its
    end `more` waits, and says whether to look again."""
    with file:
        while (chunk := file.read(CHUNK)) or more():
            if chunk:
                yield chunk


def _zstd_read(source: BinaryIO, shown: str) -> Callable[[int], bytes]:
    try:
        import zstandard  # takes 20 ms, which a plain log does not need
    except ImportError:
        reason = "compressed with zstd, which needs zstandard: pip install zstandard"
        raise LogError(reason, shown) from None

    stream = zstandard.ZstdDecompressor().stream_reader(source, CHUNK, read_across_frames=True)

    def read(size: int) -> bytes:
        try:
            return stream.read(size)
        except zstandard.ZstdError as error:
            raise zlib.error(str(error)) from None

    return read


class _Replay(io.RawIOBase):
    """Puts back the first bytes of a file, which were already read. Works for pipes."""

    def __init__(self, head: bytes, file: BinaryIO) -> None:
        self.n_read = 0
        self._head = head
        self._read: Callable[[int], bytes] = getattr(file, "read1", file.read)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        data = self._head[: len(buffer)] if self._head else self._read(len(buffer))
        self._head = self._head[len(data) :] if self._head else b""
        buffer[: len(data)] = data
        self.n_read += len(data)
        return len(data)
