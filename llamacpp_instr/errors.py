"""The errors that the product raises on purpose; `cli` alone turns them into a line and a code.

InstrError              exit code 1: something failed that the user can do something about
 +- UsageError          exit code 2: a wrong input: an argument, a model, a path
 |   +- LogError        exit code 2: a log that cannot be read; knows the file and the line
 +- BuildError          exit code 1: the patched library could not be built
 +- NativeError         exit code 2: the patched library is missing, or is not the one expected
"""

from __future__ import annotations

from pathlib import Path


class InstrError(Exception):
    """Base of every error that is meant to be read by the user: one line, no traceback."""

    exit_code = 1


class UsageError(InstrError):
    """The caller gave something that cannot be worked with."""

    exit_code = 2


class LogError(UsageError):
    """A log that is not whole, not ours, or newer than we are.

    `path` is the file, `line` the 1-based line of the finding (0 when it concerns the whole file).
    """

    def __init__(self, message: str, path: str | Path = "", line: int = 0) -> None:
        self.path = str(path)
        self.line = line
        place = f"{self.path}:{line}" if line else self.path
        super().__init__(f"{place}: {message}" if place else message)


class BuildError(InstrError):
    """The patched library could not be built; the message names the full build log."""


class NativeError(InstrError):
    """The patched library is missing, or answers with another ABI than this package speaks."""

    exit_code = 2
