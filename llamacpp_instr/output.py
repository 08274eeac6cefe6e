"""Where a command writes: a file that appears whole or not at all, or standard output.

Invariant: the file of that name is complete; what was there before stays until the new one is
whole, whether an error, a full disk or Ctrl-C ends the writing. No file is overwritten unless
that was asked for, and this is known before the work begins.
"""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, cast

from llamacpp_instr.errors import InstrError, UsageError


@contextlib.contextmanager
def open_output(path: str | Path, force: bool = False) -> Iterator[BinaryIO]:
    """A binary file to write to; it takes its name when the block is left without an error.

    `-` is standard output. A name that is no regular file (a pipe, /dev/null) is written to as it
    is. Raises UsageError when the file exists and `force` is not given, or cannot be created;
    InstrError when it cannot be written to its end.
    """
    if str(path) == "-":
        yield sys.stdout.buffer
        sys.stdout.buffer.flush()
        return
    check_output(path, force)
    path = Path(path)
    with _named_errors(path):
        if path.exists() and not path.is_file():
            with path.open("wb") as special:
                yield special
            return
        file, temporary = _temporary(path)
        try:
            with file:
                yield file
            # what mkstemp made is for its owner only; a file takes the modes of any other
            temporary.chmod(0o666 & ~_umask())
            temporary.replace(path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise


def check_output(path: str | Path, force: bool = False) -> None:
    """Raises UsageError when `path` may not or cannot be written; creates nothing."""
    path = Path(path)
    if str(path) == "-":
        return
    if path.is_dir():
        raise UsageError(f"{path} is a directory; name a file")
    if path.is_file() and not force:
        raise UsageError(f"{path} exists; use --force to overwrite it")
    if not path.parent.is_dir():
        raise UsageError(f"{path}: there is no directory {path.parent}")
    if not os.access(path.parent, os.W_OK):
        raise UsageError(f"{path}: the directory {path.parent} cannot be written to")


def _temporary(path: Path) -> tuple[BinaryIO, Path]:
    """A new file beside `path`, so that it can be renamed to it."""
    try:
        number, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}") from None
    return cast(BinaryIO, os.fdopen(number, "wb")), Path(name)


@contextlib.contextmanager
def _named_errors(path: Path) -> Iterator[None]:
    """Errors of the file system become one line; those of pipes stay what they are."""
    try:
        yield
    except BrokenPipeError:
        raise
    except OSError as error:
        if error.filename is not None and str(error.filename) != str(path):
            raise  # about another file than ours
        raise InstrError(f"{path} cannot be written: {error.strerror}") from None


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
