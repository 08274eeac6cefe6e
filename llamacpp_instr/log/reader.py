"""Reads a log: a stream of (line number, event) from a file, `.gz`, `.zst` or standard input.

Invariant: every line is either decoded completely, as `schema` says, or reported with its number.
Memory is bounded by one chunk and one line, and a compressed file expands to at most MAX_EXPANSION
times its size. So the size of the file bounds what a reader keeps of the lines.
"""

from __future__ import annotations

import errno
import gzip
import io
import os
import sys
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any, BinaryIO, Literal, Protocol, cast

import msgspec

from llamacpp_instr.base.errors import LogError
from llamacpp_instr.base.terminal import OnProgress
from llamacpp_instr.log import schema
from llamacpp_instr.log.dialects import Dialect, dialect_of
from llamacpp_instr.log.schema import MAX_LINE, Event

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
    known = {errno.ENOENT: "no such file", errno.EISDIR: "is a directory, not a log"}
    number = error.errno or 0
    return known.get(number) or (os.strerror(number) if number else str(error))


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
    """The same for a plain file that is being written; `more` waits, and says whether to go on."""
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


MAX_SKIPPED = 1_000_000
"""damaged lines that a lenient reader leaves out of one log"""


@dataclass(frozen=True)
class LogEnd:
    """How a log ended; known after its last line."""

    state: Literal["closed", "unclosed", "truncated"]
    """closed by `session_end`; ends without it; or ends in the middle of a line"""
    lines: int
    """complete lines, including skipped ones"""
    skipped: int
    """lines that could not be decoded (lenient only)"""
    bytes_before_last: int
    """uncompressed bytes before the last complete line"""
    left_out: int = 0
    """events that were not whole (`log.resolve`; lenient only)"""
    parts: tuple[str, ...] = ()
    """what the user should know about the parts of a rotated log; the other fields are about the
    last part, except for the counts"""

    def sentence(self) -> str:
        """What the user should know about the end of the log, empty if all is well."""
        middle = f" and ends in the middle of line {self.lines + 1}"
        where = {"closed": None, "unclosed": "", "truncated": middle}[self.state]
        parts = [] if where is None else [f"the log was not closed{where}"]
        if self.skipped:
            lines = "line was" if self.skipped == 1 else "lines were"
            parts.append(f"{self.skipped} damaged {lines} skipped")
        if self.left_out:
            events = "event that refers" if self.left_out == 1 else "events that refer"
            were = "was" if self.left_out == 1 else "were"
            parts.append(f"{self.left_out} {events} to missing ones {were} left out")
        return "; ".join([*parts, *self.parts])

    def notes(self) -> list[str]:
        """`sentence` as a note of a report, if there is one."""
        sentence = self.sentence()
        return [f"{sentence[0].upper()}{sentence[1:]}."] if sentence else []


class EventReader(Protocol):
    """What gives the events of a log: `LogReader`, or the parts of a rotated log (`log.runs`)."""

    end: LogEnd | None
    """None until the last line was read"""

    @property
    def path(self) -> str: ...

    def __iter__(self) -> Iterator[tuple[int, Event]]: ...


def read_events(
    path: str | Path, lenient: bool = False, on_progress: OnProgress | None = None
) -> LogReader:
    """The events of the log at `path` (`-` is standard input), as (line number, event) in order.

    The first bytes identify gzip and zstd, whatever the name of the file. A log that stops in
    the middle of a line, for example after `kill -9`, is read up to its last complete line; the
    reader's `end` then says so. Raises LogError at once if the file is not a log, and later for a
    line that violates the schema; `lenient` counts and skips such lines instead. `on_progress`
    gets the number of bytes read and the size of the file.
    """
    return LogReader(path, "skip" if lenient else "raise", on_progress)


class LogReader:
    """An iterable of (1-based line number, event). It can be iterated once.

    `end` is None until the last line was read. `dialect` names the dialect of an earlier fork that
    the log is converted from, or is None. `bad_lines` says what happens to a line that cannot be
    decoded: it raises LogError, is counted and skipped, or is one of the `items`. With `more`, the
    log is plain and being written (`growing`).
    """

    def __init__(
        self,
        path: str | Path,
        bad_lines: Literal["raise", "skip", "give"] = "raise",
        on_progress: OnProgress | None = None,
        more: Callable[[], bool] | None = None,
    ) -> None:
        self.path = "standard input" if str(path) == "-" else str(path)
        self.end: LogEnd | None = None
        self._bad_lines = bad_lines
        self._damage: Iterable[Item] = ()
        self._on_progress = on_progress
        self._lines = self._skipped = self._bytes_before_last = 0
        self._cut = False
        self._file = open_log(path, self.path)
        self._size = file_size(self._file)
        self._chunks = growing(self._file, more) if more else decompressed(self._file, self.path)
        self._blocks = self._line_blocks()
        self._first = next(self._blocks, b"")
        self.dialect = self._identify()

    def __iter__(self) -> Iterator[tuple[int, Event]]:
        assert self._bad_lines != "give"
        return cast("Iterator[tuple[int, Event]]", self.items())

    def items(self) -> Iterator[Item]:
        """The events and, if `bad_lines` asks for them, why lines cannot be decoded."""
        last = b""
        for lines in self._whole_lines():
            last = lines[-1]
            yield from self._convert(lines) if self.dialect else self._decode(lines)
        yield from self._damage
        head = _attempt(_decode_head, last)
        closed = head and head.event == "session_end" and _attempt(_decode, last) is not None
        if self.dialect:
            closed = self.dialect.closed
        self.end = LogEnd(
            "closed" if closed else "truncated" if self._cut else "unclosed",
            self._lines,
            self._skipped,
            self._bytes_before_last,
        )

    # --- lines to events ---

    def _decode(self, lines: list[bytes]) -> Iterator[Item]:
        first = self._lines - len(lines) + 1
        numbers, rest = count(first), iter(lines)
        while True:
            try:
                # the only hot loop; zip takes the number first, so it names the line that fails
                yield from zip(numbers, map(_decode, rest))  # noqa: B905
                return
            except _BAD_LINE as error:
                number = next(numbers) - 1
                yield from self._bad(number, _explain, lines[number - first], error)
                numbers = count(number + 1)

    def _convert(self, lines: list[bytes]) -> Iterator[Item]:
        assert self.dialect is not None
        for number, line in enumerate(lines, self._lines - len(lines) + 1):
            try:
                events = self.dialect.convert(line)
            except _BAD_LINE as error:
                yield from self._bad(number, "{}: {}".format, self.dialect.name, error)
                continue
            for event in events:
                yield number, event

    def _bad(self, number: int, explain: Callable[..., str], *why: Any) -> Iterable[Item]:
        """Replaces a line that cannot be decoded; `explain(*why)` is the reason."""
        self._skipped += 1
        if self._bad_lines == "skip":
            if self._skipped > MAX_SKIPPED:
                reason = f"more than {MAX_SKIPPED:,} lines are damaged: not a log"
                raise LogError(reason, self.path, number) from None
            return ()
        if self._bad_lines == "raise":
            raise LogError(explain(*why), self.path, number) from None
        return ((number, explain(*why)),)

    # --- bytes to lines ---

    def _whole_lines(self) -> Iterator[list[bytes]]:
        """Non-empty lists of lines without their newlines; counts for `end`."""
        n_bytes = 0
        block = self._first
        while block:
            lines = block.split(b"\n")
            fragment = lines.pop()
            newline = 1
            if fragment and _is_json(fragment):
                # only the newline is missing, since no proper prefix of an object is an object
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
        """Blocks of complete lines; only the last block may end without a newline."""
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
        except BAD_STREAM as error:
            if not self._lines:
                raise LogError(f"the compressed data is damaged ({error})", self.path) from None
            reason = "the compressed data is damaged from here on ({})".format
            self._damage = self._bad(self._lines + 1, reason, error)
            self._cut = True
            return b""
        except OSError as error:
            raise LogError(os_reason(error), self.path, self._lines) from None

    # --- what is it? ---

    def _identify(self) -> Dialect | None:
        line, newline, _ = self._first.partition(b"\n")
        if not self._first:
            raise LogError("empty: nothing was recorded", self.path)
        head = _attempt(_decode_head, line)
        if head and head.event == "session_start" and head.schema is not None:
            if head.schema == schema.SCHEMA_VERSION:
                return None
            raise LogError(
                f"written with schema version {head.schema}, which this instr cannot read"
                f" (it reads {schema.SCHEMA_VERSION}); use the instr that wrote it",
                self.path,
            )
        if head is None and not newline and line.startswith(schema.FIRST_BYTES[: len(line)]):
            raise LogError("ends in the middle of its first line: nothing was recorded", self.path)
        dialect = dialect_of(msgspec.structs.asdict(head)) if head else None
        if dialect is None:
            raise LogError("not a log: its first line is not a session_start", self.path)
        return dialect


_BAD_LINE = (ValueError, RecursionError)
"""raised for a line that cannot be decoded; errors of msgspec and UTF-8 are ValueErrors"""

_EVENT_NAMES = frozenset(schema.event_name(event) for event in schema.EVENTS)

Item = tuple[int, Event | str]
"""the number of a line, and its event or why it cannot be decoded"""


class _Head(msgspec.Struct):
    """The kind of a line. Decoding skips the rest of the line, which takes no memory."""

    event: str | None = None
    type: str | None = None
    schema: int | None = None
    timestamp: str | None = None


_decode = msgspec.json.Decoder(schema.AnyEvent).decode
_decode_head = msgspec.json.Decoder(_Head).decode
_skip = msgspec.json.Decoder(msgspec.Raw).decode


def _attempt(decode: Callable[[bytes], Any], line: bytes) -> Any:
    """The decoded `line`, None if it cannot be decoded."""
    try:
        return decode(line)
    except _BAD_LINE:
        return None


def _is_json(line: bytes) -> bool:
    """Whether `line` is JSON; builds no objects from it."""
    try:
        _skip(line)
        line.decode()
    except _BAD_LINE:
        return False
    return True


def _explain(line: bytes, error: Exception) -> str:
    """Why `line` violates the schema, in the schema's words."""
    if not line.strip():
        return "an empty line"
    if isinstance(error, RecursionError):
        return "nested too deeply"
    if not _is_json(line):
        return f"not a line of JSON ({error})"
    if not line.lstrip().startswith(b"{"):
        return "not a JSON object"
    head = _attempt(_decode_head, line)
    event = head and head.event
    if event is None:
        return "no key `event`"
    if event not in _EVENT_NAMES:
        return f"unknown event `{event}`"
    # msgspec ends its messages with the place: " - at `$.dur[3]`"
    return f"{event}: {error}".replace("Object contains unknown", "unknown").replace("`$.", "`")
