"""The files of a recording: their names, whether one may be replaced, and how they end.

The recorder chooses the names: `session.log`, then `session.part2.log` and so on after a rotation.
Every process after the first one adds its process id before the suffix.
"""

from __future__ import annotations

import os
import re
from contextlib import suppress
from itertools import chain, count
from pathlib import Path

import msgspec

from llamacpp_instr.base.errors import UsageError
from llamacpp_instr.base.terminal import counted
from llamacpp_instr.log.schema import FIRST_BYTES, SessionEnd

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
    """What is missing in a log, according to its last line once its process has ended; empty if
    nothing is."""
    with log.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - _TAIL))
        lines = file.read().splitlines()
    if not lines:
        return "it is empty: nothing could be written"
    try:
        end = msgspec.json.decode(lines[-1], type=SessionEnd)
    except ValueError:  # msgspec's errors are ValueErrors
        return "it has no end: its process still runs or was killed, or the disk was full"
    return f"lost while writing: {counted(end.dropped, 'event')}" if end.dropped else ""


def _around_suffix(name: str) -> tuple[str, str]:
    """Patterns for what the recorder adds to a name: before and after its insertion."""
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
