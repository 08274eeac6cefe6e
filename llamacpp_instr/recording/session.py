"""Records any use of `llama_cpp` from Python: `with record("session.log") as session:`.

A session is closed however the `with` block ends. If the log is incomplete, closing it reports
that. What a program adds is written as JSON in valid UTF-8 with finite numbers, and no line is
longer than the reader accepts.

The recorder chooses the names of its files: `session.log`, then `session.part2.log` and so on after
a rotation. Every process after the first one adds its process id before the suffix.
"""

from __future__ import annotations

import errno
import json
import os
import re
import secrets
import select
import stat
import sys
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import accumulate, chain, count
from pathlib import Path
from typing import Any, Literal, get_args

import msgspec

from llamacpp_instr.base.errors import InstrError, UsageError, reason
from llamacpp_instr.base.output import file_mode
from llamacpp_instr.base.patterns import regular_expression
from llamacpp_instr.base.terminal import counted
from llamacpp_instr.llama import native
from llamacpp_instr.log.schema import FIRST_BYTES, LEVELS, MAX_LINE, MAX_SEQUENCES, SessionEnd

_PART = r"\.part(?:[2-9]|[1-9][0-9]+)"
_TAIL = 1 << 16
"""bytes; the last line, `session_end`, has a few hundred"""


def check_replaceable(path: Path) -> None:
    """Raise `UsageError` unless the file begins like a log, or is empty."""
    try:
        with path.open("rb") as file:
            head = file.read(len(FIRST_BYTES))
    except OSError as error:
        raise UsageError(f"{path} cannot be read ({error.strerror}): is it a log?") from None
    if not FIRST_BYTES.startswith(head):
        raise UsageError(f"{path} is not a log, so it is not overwritten; name another file")


def fresh_log(path: Path) -> Path:
    """`session.log`, or the first of `session-2.log`, `session-3.log`, … that does not exist."""
    others = (path.with_stem(f"{path.stem}-{number}") for number in count(2))
    return next(name for name in chain([path], others) if not os.path.lexists(name))


def later_parts(target: Path) -> list[Path]:
    """The existing files that a rotation of the log `target` wrote, or another one would write."""
    before, after = _around_suffix(target.name)
    return sorted(_matching(target.parent, f"{before}{_PART}{after}"))


def logs_of(target: Path) -> dict[Path, tuple[int, int, int]]:
    """The existing logs of `target`, in whose name `%p` is any process id, each with a key that
    changes if the file is replaced."""
    before, after = _around_suffix(target.name)
    found = {}
    for path in _matching(target.parent, rf"{before}(?:\.[0-9]+)?(?:{_PART})?{after}"):
        with suppress(FileNotFoundError):
            stat = path.stat()
            found[path] = (stat.st_ino, stat.st_mtime_ns, stat.st_size)
    return found


def shortcoming(log: Path) -> str:
    """What the log of an ended process lacks, judged by its last line; empty if nothing."""
    with log.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - _TAIL))
        lines = file.read().splitlines()
    if not lines:
        return "it is empty: nothing could be written"
    try:
        end = msgspec.json.decode(lines[-1], type=SessionEnd)
    except ValueError:  # msgspec's errors are ValueErrors
        return "it has no end: its process is still running or was killed, or the disk was full"
    return f"lost while writing: {counted(end.dropped, 'event')}" if end.dropped else ""


def _around_suffix(name: str) -> tuple[str, str]:
    """Patterns for the parts of a name before and after what the recorder inserts."""
    dot = name.rfind(".")
    at = dot if dot > 0 else len(name)
    before, after = (re.escape(text).replace("%p", "[0-9]+") for text in (name[:at], name[at:]))
    return before, after


def _matching(directory: Path, pattern: str) -> list[Path]:
    own = re.compile(pattern)
    try:
        return [path for path in directory.iterdir() if own.fullmatch(path.name) and path.is_file()]
    except OSError:  # the command removed the directory
        return []


# together less than a line: a note has a name and data, `session_start` the arguments and the host
MAX_DATA, MAX_NAME = MAX_LINE // 2, MAX_LINE // 4
MAX_DEPTH = 100
"""of nested lists and objects; readers of JSON have various limits"""

_SURROGATES = re.compile("[\udc80-\udcff]+|[\ud800-\udfff]")
_STRING = re.compile(r'"(?:[^"\\]|\\.)*"')


def log_json(what: str, data: Any, default: Callable[[Any], Any] | None = None) -> str:
    """`data` as JSON for a log. `default` converts other objects to JSON values. Bytes that are
    not UTF-8, as in file names, are escaped as `\\xff`. Raises `UsageError`, which begins with
    `what`, if `data` cannot be written."""
    try:
        text = json.dumps(data, allow_nan=False, ensure_ascii=False, default=default)
        text = json.dumps(json.loads(_SURROGATES.sub(_escaped, text)))
        if len(text) <= MAX_DATA:
            msgspec.json.decode(text)  # has its own limits for integers
    except (TypeError, ValueError, RecursionError) as error:
        raise UsageError(f"{what} cannot be written as JSON: {reason(error)}") from None
    if len(text) > MAX_DATA:
        raise UsageError(f"{what} has {len(text)} bytes as JSON; a log allows {MAX_DATA}")
    brackets = re.sub(r"[^][{}]", "", _STRING.sub("", text))
    depth = max(accumulate(1 if bracket in "[{" else -1 for bracket in brackets), default=0)
    if depth > MAX_DEPTH:
        raise UsageError(f"{what} is nested {depth} levels deep; a log allows {MAX_DEPTH}")
    return text


def log_name(what: str, name: str) -> str:
    """A name with surrogates and NUL escaped. Raises `UsageError` (`what` …) if it is too long."""
    name = _SURROGATES.sub(_written_out, name).replace("\0", "\\x00")
    size = len(json.dumps(name))
    if size > MAX_NAME:
        raise UsageError(f"{what} has {size} bytes as JSON; a log allows {MAX_NAME}")
    return name


def _written_out(found: re.Match[str]) -> str:
    if not "\udc80" <= found[0][0] <= "\udcff":
        return ascii(found[0])[1:-1]
    # bytes that Python could not decode; if the locale's encoding is another one, they may be UTF-8
    return found[0].encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")


def _escaped(found: re.Match[str]) -> str:
    return _written_out(found).replace("\\", "\\\\")


OnLogError = Literal["continue", "stop"]
"""what happens to the process if the log can no longer be written"""


@dataclass
class Span:
    """A span of `Recording.mark` that has not ended."""

    seq: int = -1
    """the sequence that serves it, -1 if none does"""


class Recording:
    """A session that is being recorded; `record` returns one."""

    def __init__(self, library: native.Native, path: Path, written: Path) -> None:
        self._native = library
        self._written = written  # path of the log, until it is renamed
        self._open = True
        self._dropped = 0
        self._nan_seen = False
        self.path = path
        """path of the log"""
        self.problem: str | None = None
        """after `close`: one line about what is missing in the log and why, or None"""

    @contextmanager
    def mark(self, name: str) -> Iterator[Span]:
        """A named span around the `with` block.

        If the span is a request that a sequence of a context serves, set the `seq` of the returned
        span before the block ends; the request arrived when the block began. Raises `UsageError`
        if `seq` is not a sequence.
        """
        self._require_open()
        name = log_name("the mark's name", name)
        number = self._native.mark(native.BEGIN, -1, name)
        span = Span()
        try:
            yield span
        finally:
            known = -1 <= span.seq < MAX_SEQUENCES
            if self._open:
                self._native.mark(native.END, number, name, span.seq if known else -1)
        if not known:
            raise UsageError(
                f"mark {name[:100]!r}: the sequence {span.seq} is not in 0 to {MAX_SEQUENCES - 1}"
            )

    def instant(self, name: str) -> None:
        """A named point in time."""
        self._require_open()
        self._native.mark(native.INSTANT, -1, log_name("the instant's name", name))

    def note(self, name: str, data: Any) -> None:
        """Add an event of the application. Raises `UsageError` unless `data` is a JSON value that
        fits into a log."""
        self._require_open()
        name = log_name("the note's name", name)
        if self._native.note(name, log_json(f"note {name[:100]!r}: the data", data)) != 0:
            raise InstrError(f"note {name[:100]!r}: {self._native.error()}")

    @property
    def dropped(self) -> int:
        """Number of events so far that could not be written."""
        if self._open:
            self._dropped = self._native.dropped()
        return self._dropped

    @property
    def nan_seen(self) -> bool:
        """Whether a tensor chosen with `stats` has contained a NaN so far."""
        if self._open:
            self._nan_seen = bool(self._native.status() & native.NAN_SEEN)
        return self._nan_seen

    def close(self) -> None:
        """Write the end of the log and set `problem`. A second call does nothing."""
        if not self._open:
            return
        _ = self.dropped, self.nan_seen  # read before the end, which resets them
        self._open = False
        with suppress(AttributeError, OSError, ValueError):
            sys.stdout.flush()  # with on_log_error="stop" the next line may end the process
        if self._native.end() != 0:
            self.problem = _with_path(self._native.error(), self.path)

    def take_name(self) -> None:
        """Move a log that was recorded under another name to its path, replacing the old log."""
        if self.is_aside:
            if self.path.is_file():
                check_replaceable(self.path)  # it may have changed since the session began
            try:
                self._written.replace(self.path)
            except OSError as error:
                raise UsageError(f"{self.path} cannot be written: {error.strerror}") from None
            self._written = self.path

    @property
    def is_aside(self) -> bool:
        """Whether the log still has its temporary name."""
        return self._written != self.path

    def discard(self) -> None:
        """Remove the log, if it is a file."""
        if self._written.is_file():
            self._written.unlink()

    def __enter__(self) -> Recording:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
        if self.problem:
            # do not hide an exception of the application
            warnings.warn(self.problem, RuntimeWarning, stacklevel=2)

    def _require_open(self) -> None:
        if not self._open:
            raise UsageError(f"the session of {self.path} is closed")


def record(
    path: str | os.PathLike[str] = "session.log",
    level: str = "detailed",
    stats: str | None = None,
    args: Mapping[str, Any] | None = None,
    force: bool = False,
    stop_on_nan: bool = False,
    on_log_error: OnLogError = "continue",
) -> Recording:
    """Begin a session that records every use of `llama_cpp` in this process until it is closed.

    `level` is how much is recorded (`schema.LEVELS`). `stats` is a glob, or a regular
    expression after `re:`: the values of the tensors whose names match are summarized. `args`, a
    mapping of JSON values (others are converted with `str`), is kept in the log's first line.
    `force` replaces an existing log, but no other file. `stop_on_nan` makes a decode fail once a
    `stats` tensor contains a NaN. With `on_log_error="stop"` the process ends with one line if the
    log can no longer be written; with `"continue"` the dropped events are counted.

    Raises `UsageError` for a wrong argument or a log that cannot be opened, `NativeError` without
    the patched library. A process can have one session at a time.
    """
    return begin_session(
        Path(path),
        level=level,
        stats=stats,
        args=args or {},
        force=force,
        force_option="force=True",
        stop_on_nan=stop_on_nan,
        on_log_error=on_log_error,
    )


def begin_session(
    log: Path,
    *,
    level: str,
    stats: str | None,
    args: Mapping[str, Any],
    force: bool,
    force_option: str,
    stop_on_nan: bool,
    on_log_error: OnLogError,
    aside: bool = False,
    debugged: bool = False,
) -> Recording:
    """Like `record`. With `aside` an existing log is kept until `Recording.take_name`. Messages
    name `force_option` as the way to set `force`. With `debugged` a debugger may stop computes."""
    check_choice("level", level, LEVELS)
    check_choice("on_log_error", on_log_error, get_args(OnLogError))
    if stop_on_nan and not stats:
        raise UsageError("stopping on NaN needs tensors to check (stats)")
    expression = regular_expression("stats", stats) if stats else None
    library = native.load()
    check_log_path(log, force, force_option)
    written = log.with_name(f".instr-{secrets.token_hex(8)}") if aside and log.is_file() else log
    flags = native.OVERWRITE if force and written == log else 0
    flags |= native.STOP_ON_NAN if stop_on_nan else 0
    flags |= native.DEBUGGED if debugged else 0
    flags |= native.STOP_ON_LOG_ERROR if on_log_error == "stop" else 0
    arguments = log_json("args", dict(args), default=str)
    if library.begin(os.fsencode(written), level, arguments, expression, flags) != 0:
        raise UsageError(_with_path(library.error(), log))
    return Recording(library, log, written)


def check_log_path(path: Path, force: bool, option: str) -> None:
    """Raise `UsageError` if a log cannot be opened at `path`; messages name `option` as the way to
    set `force`. An existing file may be replaced if it begins like a log or is not regular."""
    mode = file_mode(path)
    if mode is None:
        parent = path.parent
        if not parent.is_dir():
            reason = "is not a directory" if parent.exists() else "does not exist"
            raise UsageError(f"{path} cannot be written: {parent} {reason}")
        _check_can_create(path)
    elif stat.S_ISDIR(mode):
        raise UsageError(f"{path} is a directory; give the path of a file for the log")
    elif stat.S_ISREG(mode):
        if not force:
            raise UsageError(f"{path} exists; use {option} to overwrite it")
        check_replaceable(path)
        _check_can_create(path)
    elif not os.access(path, os.W_OK):
        raise UsageError(f"{path} cannot be written: permission denied")


def _check_can_create(path: Path) -> None:
    if not os.access(path.parent, os.W_OK | os.X_OK):
        raise UsageError(f"{path} cannot be written: no permission to write in {path.parent}")


def check_choice(what: str, value: str, choices: tuple[str, ...]) -> None:
    """Raise `UsageError` when `value` is not one of `choices`."""
    if value not in choices:
        raise UsageError(f"{what} {value!r} is not one of {', '.join(choices)}")


def _with_path(reason: str, path: Path) -> str:
    reason = re.sub(r"\s+", " ", reason).strip() or "the log cannot be opened"
    return reason if str(path) in reason else f"{path}: {reason}"


PATIENCE_S = 1.0


class LogPipe:
    """Inside the block, a log can be written to `path`; a thread passes its bytes to `take`. If
    `take` raises an `OSError`, it is kept in `error`, and the writer's next write fails. Leaving
    the block waits for `take`, unless it takes nothing for `PATIENCE_S`."""

    def __init__(self, take: Callable[[bytes], object]) -> None:
        self._take = take
        self._taken = 0
        self.error: OSError | None = None

    def __enter__(self) -> LogPipe:
        self._receiver, self._sender = os.pipe()
        self.path = Path(f"/dev/fd/{self._sender}")
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._sender)
        before = -1
        while self._reader.is_alive():
            if self._taken == before:
                self.error = TimeoutError(errno.ETIMEDOUT, "it is not read")
                return
            before = self._taken
            self._reader.join(PATIENCE_S)

    def _read(self) -> None:
        with os.fdopen(self._receiver, "rb", buffering=0) as file:
            try:
                while piece := file.read(select.PIPE_BUF):
                    self._take(piece)
                    self._taken += len(piece)
            except OSError as error:
                self.error = error
