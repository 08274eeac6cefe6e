"""The errors raised on purpose. Only `cli` turns them into a line and an exit status."""

from __future__ import annotations

from pathlib import Path


class InstrError(Exception):
    """Base of all errors with a message for the user: one line, no traceback."""

    exit_code = 1


class UsageError(InstrError):
    """The caller passed a wrong input: an argument, a model, a path."""

    exit_code = 2


class LogError(UsageError):
    """A log that is damaged, not ours, or in a newer format; `line` is 0 for the whole file."""

    def __init__(self, message: str, path: str | Path = "", line: int = 0) -> None:
        self.path = str(path)
        self.line = line
        place = f"{self.path}:{line}" if line else self.path
        super().__init__(f"{place}: {message}" if place else message)


class BuildError(InstrError):
    """The patched library could not be built; the message names the full build log."""


class NativeError(InstrError):
    """The patched library is missing, or its ABI version differs from this package's."""

    exit_code = 2


def error_named(name: str) -> type[InstrError]:
    """The class of an error that another process raised; `InstrError` if it is unknown here."""
    todo = [InstrError]
    for error in todo:
        if error.__name__ == name:
            return error
        todo += error.__subclasses__()
    return InstrError


def reason(error: BaseException) -> str:
    """The message of an error from the system or a library: one line, without an error number."""
    return " ".join(str(getattr(error, "strerror", None) or error).split())
