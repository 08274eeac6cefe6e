"""Records any use of `llama_cpp` from Python: `with record("session.log") as session:`.

A session is closed however the `with` block ends. If the log is incomplete, closing it reports
that.
"""

from __future__ import annotations

import os
import re
import secrets
import stat
import sys
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from llamacpp_instr.base.errors import InstrError, UsageError
from llamacpp_instr.base.output import file_mode
from llamacpp_instr.base.patterns import regular_expression
from llamacpp_instr.llama import native
from llamacpp_instr.log.schema import LEVELS, MAX_SEQUENCES
from llamacpp_instr.recording.files import check_replaceable
from llamacpp_instr.recording.text import log_json, log_name

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

        If it is a request that a sequence of a context serves, set `seq` of the span that it
        returns, before the block ends; the request arrived when the block began. Raises
        `UsageError` if that is not a sequence.
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
        """Add an event of the application. Raises `UsageError` if `data` is not a JSON value or too
        large for a log."""
        self._require_open()
        name = log_name("the note's name", name)
        if self._native.note(name, log_json(f"note {name[:100]!r}: the data", data)) != 0:
            raise InstrError(f"note {name[:100]!r}: {self._native.error()}")

    @property
    def dropped(self) -> int:
        """Number of events that could not be written so far."""
        if self._open:
            self._dropped = self._native.dropped()
        return self._dropped

    @property
    def nan_seen(self) -> bool:
        """Whether a tensor chosen with `stats` contained a NaN so far."""
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
    `force` replaces an existing log, and no other file. `stop_on_nan` makes a decode fail once a
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
        raise UsageError("stopping on NaN needs the tensors to look at (stats)")
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
    set `force`.

    An existing file may be replaced if it begins like a log or is not a regular file.
    """
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
    """Raise `UsageError` when `value` is none of `choices`."""
    if value not in choices:
        raise UsageError(f"{what} {value!r} is none of {', '.join(choices)}")


def _with_path(reason: str, path: Path) -> str:
    reason = re.sub(r"\s+", " ", reason).strip() or "the log cannot be opened"
    return reason if str(path) in reason else f"{path}: {reason}"
