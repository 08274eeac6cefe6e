"""Reads a log: a stream of (line number, event) from a file, `.gz`, `.zst` or standard input.

Invariant: every line is either decoded whole and exactly as `schema` says, or reported with its
number; memory is bounded by one chunk and one line, never by a number that stands in the file.
What the lines say together (references, order, counts) is `check`'s business.
"""

from __future__ import annotations

import errno
import gzip
import io
import os
import sys
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any, BinaryIO, Literal

import msgspec

from llamacpp_instr.dialects import Dialect, dialect_of
from llamacpp_instr.errors import LogError
from llamacpp_instr.progress import OnProgress
from llamacpp_instr.schema import (
    EVENTS,
    FIRST_BYTES,
    MAX_LINE,
    SCHEMA_VERSION,
    AnyEvent,
    Event,
    SessionEnd,
    event_name,
)

CHUNK = 1 << 18


@dataclass(frozen=True)
class LogEnd:
    """How a log ended, known once its last line was read."""

    state: Literal["closed", "unclosed", "truncated"]
    """closed by `session_end`; without it; or in the middle of a line"""
    lines: int
    """whole lines, skipped ones included"""
    skipped: int
    """lines that could not be decoded (lenient only)"""
    bytes_before_last: int
    """uncompressed bytes before the last whole line"""

    def sentence(self) -> str:
        """What a reader of the log should know of its end, empty when all is well."""
        parts = {
            "closed": [],
            "unclosed": ["the log ended unclosed"],
            "truncated": [f"the log ended unclosed, in the middle of line {self.lines + 1}"],
        }[self.state]
        if self.skipped:
            lines = "line was" if self.skipped == 1 else "lines were"
            parts.append(f"{self.skipped} damaged {lines} skipped")
        return "; ".join(parts)


def read_events(
    path: str | Path, lenient: bool = False, on_progress: OnProgress | None = None
) -> LogReader:
    """The events of the log at `path` (`-` is standard input), as (line number, event) in order.

    Files of gzip and zstd are known by their first bytes, whatever their name. A log that stops
    in the middle of a line, as `kill -9` leaves it, is read up to its last whole line; the
    reader's `end` then says so. Raises LogError at once for what is no log, and at its line for
    a line that is not as the schema says; `lenient` counts and skips such lines instead.
    `on_progress` is told the bytes of the file that were read and how many there are.
    """
    return LogReader(path, (lambda _line, _reason: None) if lenient else None, on_progress)


class LogReader:
    """An iterable of (1-based line number, event), to be gone through once.

    `end` is None until the last line was read. `dialect` names the earlier fork's dialect that
    the log is converted from, and is None for a log of ours. `on_bad_line` is given the number of
    every line that cannot be decoded and why; without it the first such line is a LogError.
    """

    def __init__(
        self,
        path: str | Path,
        on_bad_line: Callable[[int, str], None] | None = None,
        on_progress: OnProgress | None = None,
    ) -> None:
        self.path = "standard input" if str(path) == "-" else str(path)
        self.end: LogEnd | None = None
        self._on_bad_line = on_bad_line
        self._on_progress = on_progress
        self._lines = self._skipped = self._bytes_before_last = 0
        self._cut = False
        self._file = _open(path, self.path)
        self._size = _size(self._file)
        self._chunks = _decompressed(self._file, self.path)
        self._blocks = self._line_blocks()
        self._first = next(self._blocks, b"")
        self.dialect = self._identify()

    def __iter__(self) -> Iterator[tuple[int, Event]]:
        last = b""
        for lines in self._whole_lines():
            last = lines[-1]
            yield from self._convert(lines) if self.dialect else self._decode(lines)
        closed = isinstance(_attempt(_decode, last), SessionEnd)
        if self.dialect:
            closed = self.dialect.closed
        self.end = LogEnd(
            "closed" if closed else "truncated" if self._cut else "unclosed",
            self._lines,
            self._skipped,
            self._bytes_before_last,
        )

    # --- lines to events ---

    def _decode(self, lines: list[bytes]) -> Iterator[tuple[int, Event]]:
        first = self._lines - len(lines) + 1
        numbers, rest = count(first), iter(lines)
        while True:
            try:
                # the one hot loop: zip takes the number first, so it names the line that fails
                yield from zip(numbers, map(_decode, rest))  # noqa: B905
                return
            except _BAD_LINE as error:
                number = next(numbers) - 1
                self._bad(_explain(lines[number - first], error), number)
                numbers = count(number + 1)

    def _convert(self, lines: list[bytes]) -> Iterator[tuple[int, Event]]:
        assert self.dialect is not None
        for number, line in enumerate(lines, self._lines - len(lines) + 1):
            try:
                events = self.dialect.convert(line)
            except _BAD_LINE as error:
                self._bad(f"{self.dialect.name}: {error}", number)
                continue
            for event in events:
                yield number, event

    def _bad(self, reason: str, number: int) -> None:
        if self._on_bad_line is None:
            raise LogError(reason, self.path, number) from None
        self._skipped += 1
        self._on_bad_line(number, reason)

    # --- bytes to lines ---

    def _whole_lines(self) -> Iterator[list[bytes]]:
        """Lists of lines without their newlines, never empty; keeps the counts of `end`."""
        n_bytes = 0
        block = self._first
        while block:
            lines = block.split(b"\n")
            fragment = lines.pop()
            newline = 1
            if fragment and _attempt(msgspec.json.decode, fragment) is not None:
                # only the newline is missing: no proper prefix of an object is an object
                lines.append(fragment)
                fragment, newline = b"", 0
            self._cut = self._cut or bool(fragment)
            n_bytes += len(block) - len(fragment)
            if lines:
                self._lines += len(lines)
                self._bytes_before_last = n_bytes - len(lines[-1]) - newline
                yield lines
            block = next(self._blocks, b"")

    def _line_blocks(self) -> Iterator[bytes]:
        """Blocks of whole lines; only the last block may end without a newline."""
        pending: list[bytes] = []
        size = 0
        while chunk := self._next_chunk():
            cut = chunk.rfind(b"\n") + 1
            size += len(chunk)
            if cut:
                yield b"".join([*pending, chunk[:cut]])
                pending = [chunk[cut:]]
                size = len(chunk) - cut
            else:
                pending.append(chunk)
            if size > MAX_LINE:
                raise LogError(f"longer than {MAX_LINE >> 20} MiB", self.path, self._lines + 1)
        yield b"".join(pending)

    def _next_chunk(self) -> bytes:
        if self._on_progress is not None and self._size and not self._file.closed:
            self._on_progress(self._file.tell(), self._size)
        try:
            return next(self._chunks, b"")
        except EOFError:
            self._cut = True
            return b""
        except _BAD_STREAM as error:
            if not self._lines:
                raise LogError(f"the compressed data is damaged ({error})", self.path) from None
            self._bad(f"the compressed data is damaged from here on ({error})", self._lines + 1)
            self._cut = True
            return b""
        except OSError as error:
            raise LogError(_os_reason(error), self.path, self._lines) from None

    # --- what is it? ---

    def _identify(self) -> Dialect | None:
        line, newline, _ = self._first.partition(b"\n")
        if not self._first:
            raise LogError("empty: nothing was recorded", self.path)
        head = _attempt(msgspec.json.decode, line)
        if isinstance(head, dict) and head.get("event") == "session_start" and "schema" in head:
            if head["schema"] == SCHEMA_VERSION:
                return None
            raise LogError(
                f"written with schema version {head['schema']}, which this instr cannot read"
                f" (it reads {SCHEMA_VERSION}); use the instr that wrote it",
                self.path,
            )
        if head is None and not newline and line.startswith(FIRST_BYTES[: len(line)]):
            raise LogError("ends in the middle of its first line: nothing was recorded", self.path)
        dialect = dialect_of(head) if isinstance(head, dict) else None
        if dialect is None:
            raise LogError("not a log: its first line is no session_start", self.path)
        return dialect


_BAD_LINE = (ValueError, RecursionError)
"""what decoding a wrong line raises: the errors of msgspec and of UTF-8 are ValueErrors"""

_EVENT_NAMES = frozenset(event_name(event) for event in EVENTS)

_decode = msgspec.json.Decoder(AnyEvent).decode


def _attempt(decode: Callable[[bytes], Any], line: bytes) -> Any:
    """What `line` decodes to, None when it does not."""
    try:
        return decode(line)
    except _BAD_LINE:
        return None


def _explain(line: bytes, error: Exception) -> str:
    """Why `line` is none of the schema's, in the schema's words."""
    if not line.strip():
        return "an empty line"
    head = _attempt(msgspec.json.decode, line)
    if isinstance(error, RecursionError):
        return "nested too deeply"
    if head is None:
        return f"not a line of JSON ({error})"
    if not isinstance(head, dict):
        return "not a JSON object"
    event = head.get("event")
    if not isinstance(event, str):
        return "no key `event`"
    if event not in _EVENT_NAMES:
        return f"unknown event `{event}`"
    # msgspec ends its messages with the place: " - at `$.dur[3]`"
    return f"{event}: {error}".replace("Object contains unknown", "unknown").replace("`$.", "`")


# --- files to chunks ---


def _open(path: str | Path, shown: str) -> BinaryIO:
    if str(path) == "-":
        return sys.stdin.buffer
    if path == "":
        raise LogError("no log is named: the path is empty")
    try:
        return Path(path).open("rb", buffering=0)
    except OSError as error:
        raise LogError(_os_reason(error), shown) from None


def _size(file: BinaryIO) -> int:
    """Bytes of a regular file, 0 for what has no size."""
    try:
        return os.fstat(file.fileno()).st_size if file.seekable() else 0
    except OSError:
        return 0


def _os_reason(error: OSError) -> str:
    if error.errno == errno.ENOENT:
        return "no such file"
    if error.errno == errno.EISDIR:
        return "is a directory, not a log"
    return os.strerror(error.errno) if error.errno else str(error)


_GZIP, _ZSTD = b"\x1f\x8b", b"\x28\xb5\x2f\xfd"
_BAD_STREAM: tuple[type[Exception], ...] = (gzip.BadGzipFile, zlib.error)


def _decompressed(file: BinaryIO, shown: str) -> Iterator[bytes]:
    """The file's content in chunks of at most CHUNK bytes; EOFError when gzip ends too early."""
    magic = b""
    while len(magic) < len(_ZSTD) and (more := file.read(len(_ZSTD) - len(magic))):
        magic += more
    source: BinaryIO = io.BufferedReader(_Replay(magic, file), CHUNK)
    read: Callable[[int], bytes] = source.read1  # type: ignore[attr-defined]
    if magic.startswith(_GZIP):
        read = gzip.GzipFile(fileobj=source).read1
    elif magic.startswith(_ZSTD):
        read = _zstd_read(source, shown)
    try:
        while chunk := read(CHUNK):
            yield chunk
    finally:
        if file is not sys.stdin.buffer:
            file.close()


def _zstd_read(source: BinaryIO, shown: str) -> Callable[[int], bytes]:
    try:
        import zstandard  # 20 ms that a plain log need not wait for
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
    """A file whose first bytes were already read, made whole again; works for pipes."""

    def __init__(self, head: bytes, file: BinaryIO) -> None:
        self._head = head
        self._read: Callable[[int], bytes] = getattr(file, "read1", file.read)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        data = self._head[: len(buffer)] if self._head else self._read(len(buffer))
        self._head = self._head[len(data) :] if self._head else b""
        buffer[: len(data)] = data
        return len(data)
