"""Writes a command's output to standard output, or completely to a file or a directory.

Invariant: a file with the name of an output is always complete. The previous file stays until the
new one is complete, even if an error, a full disk, Ctrl-C or SIGTERM ends the writing. No file is
overwritten without `force`, and this is checked before the work begins. Only a model may replace a
model, and nothing may replace an input.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import signal
import stat
import sys
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import BinaryIO, NoReturn

from llamacpp_instr.base.errors import InstrError, UsageError
from llamacpp_instr.base.terminal import abandon_standard_output, handled


@contextlib.contextmanager
def open_output(path: str | Path, force: bool = False) -> Iterator[BinaryIO]:
    """A binary file to write to. It gets its name when the block ends without an error.

    `-` is standard output. A name that is not a regular file (a pipe, /dev/null) is written
    directly. Raises UsageError if the file exists and `force` is not set, or if it cannot be
    created; InstrError if writing fails.
    """
    if str(path) == "-":
        with _named_errors(Path("standard output")):
            try:
                yield sys.stdout.buffer
                sys.stdout.buffer.flush()
            except OSError as error:
                if error.filename is None and not isinstance(error, BrokenPipeError):
                    abandon_standard_output()
                raise
        return
    check_output(path, force)
    path = Path(path)
    with _named_errors(path), _tidy_end():
        if path.exists() and not path.is_file():
            with path.open("wb") as special:
                yield special
            return
        with _new_file(path, force) as temporary, temporary.open("wb") as file:
            yield file


@contextlib.contextmanager
def new_model(path: Path, force: bool = False) -> Iterator[Path]:
    """The name of an empty file into which other code writes a model. It becomes `path` when the
    block ends without an error. Raises the same errors as `open_output`."""
    check_model_output(path, force)
    with _named_errors(path), _tidy_end(), _new_file(path, force) as temporary:
        yield temporary


def check_output(path: str | Path, force: bool = False, *inputs: str | Path | None) -> None:
    """Raises UsageError if `path` must not or cannot be written, or is one of `inputs`. A model is
    refused even with `force`, because it may be an input that no argument names: another part of a
    split model, or the model of a log. Creates nothing."""
    if str(path) != "-" and begins_as_model(path):
        raise UsageError(f"{path} is a model; name another file")
    check_model_output(path, force)
    check_not_input(path, *inputs)


def check_model_output(path: str | Path, force: bool = False) -> None:
    """Like `check_output`, for an output that is a model: it may replace another model."""
    path = Path(path)
    if str(path) == "-":
        return
    mode = file_mode(path)
    if mode is not None and stat.S_ISDIR(mode):
        raise UsageError(f"{path} is a directory; name a file")
    if mode is not None and stat.S_ISREG(mode) and not force:
        raise UsageError(f"{path} exists; use --force to overwrite it")
    if not path.parent.is_dir():
        raise UsageError(f"{path}: there is no directory {path.parent}")
    # a pipe or a device is written itself, and needs nothing beside it
    is_special = mode is not None and not stat.S_ISREG(mode)
    if not is_special and not os.access(path.parent, os.W_OK):
        raise UsageError(f"{path}: the directory {path.parent} cannot be written to")


def check_not_input(output: str | Path, *inputs: str | Path | None) -> None:
    """Raises UsageError if `output` is one of the input files, even with --force: a forgotten
    argument must not destroy a log or a text. `-` is standard input; None is ignored."""
    written = _status(output) if str(output) != "-" else None
    if written is None or not stat.S_ISREG(written.st_mode):
        return
    for name in inputs:
        source = _status(name) if name else None
        if source is not None and os.path.samestat(source, written):
            input_name = "standard input" if str(name) == "-" else name
            raise UsageError(f"{output} would overwrite the input {input_name}; name another file")


def begins_as_model(path: str | Path) -> bool:
    """Whether a regular file begins with the magic bytes of GGUF; False if it cannot be read."""
    try:
        if not Path(path).is_file():
            return False  # opening a pipe would block until a writer also opens it
        with Path(path).open("rb") as file:
            return file.read(4) == b"GGUF"
    except OSError:
        return False


def _status(name: str | Path) -> os.stat_result | None:
    """The status of a file; None if it does not exist, which the code that opens it reports."""
    try:
        return os.fstat(0) if str(name) == "-" else Path(name).stat()
    except (OSError, ValueError):
        return None


@contextlib.contextmanager
def open_output_directory(
    path: str | Path, names: Collection[str], force: bool = False
) -> Iterator[Path]:
    """A new directory to write files into. It gets its name when the block ends without an error,
    so a partial set of files is never visible under that name.

    `names` are all files that a caller may ever write there. An existing directory is replaced only
    with `force`, and only if it contains no other files. Raises UsageError otherwise, or if the
    directory cannot be created; InstrError if writing fails.
    """
    check_output_directory(path, names, force)
    path = Path(path)
    place = path.resolve()  # a symbolic link to the directory stays a link
    temporary = _beside(place)
    with _named_errors(path, inside=temporary), _tidy_end():
        try:
            with _creating(path):
                temporary.mkdir()
            yield temporary
            if place.is_dir():
                shutil.copymode(place, temporary)
            if place.is_dir() and any(place.iterdir()):
                if not force:
                    raise UsageError(f"{path} exists now; use --force to replace what is in it")
                check_output_directory(path, names, force)
                with _uninterrupted():
                    _exchange(temporary, place, names)
            else:
                temporary.replace(place)
        except BaseException:
            with _uninterrupted():
                shutil.rmtree(temporary, ignore_errors=True)
            raise


def check_output_directory(path: str | Path, names: Collection[str], force: bool = False) -> None:
    """Raises UsageError if `path` must not or cannot become such a directory. Creates nothing."""
    path = Path(path)
    mode = file_mode(path)
    if mode is None:
        check_output(path)
        return
    if not stat.S_ISDIR(mode):
        raise UsageError(f"{path} is not a directory; name another")
    entries = sorted(path.iterdir())
    for entry in entries:
        if entry.name not in names or entry.is_symlink() or not entry.is_file():
            raise UsageError(f"{path} contains another file ({entry.name}); name another directory")
    if entries and not force:
        raise UsageError(f"{path} exists; use --force to replace what is in it")
    check_output(_beside(path.resolve()), force=True)


def _exchange(new: Path, old: Path, names: Collection[str]) -> None:
    """Put the directory `new` in the place of `old`, then remove `old` and its files `names`. No
    signal may interrupt it."""
    aside = _beside(old)
    old.replace(aside)
    try:
        new.replace(old)
    except OSError:
        aside.replace(old)
        raise
    for name in names:
        (aside / name).unlink(missing_ok=True)
    try:
        aside.rmdir()
    except OSError:
        raise InstrError(f"{old}: files that appeared meanwhile are in {aside}") from None


def file_mode(path: Path) -> int | None:
    """`st_mode` of a file, None if there is none. Raises UsageError for an impossible name."""
    try:
        return path.stat().st_mode
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError) as error:
        raise UsageError(f"{path}: {getattr(error, 'strerror', None) or error}") from None


def _beside(path: Path) -> Path:
    """A name beside `path`, so that a rename to `path` is possible. The caller creates the file:
    it must know the name before a signal can interrupt it, so that it can remove the file."""
    # short: a file system that accepts the name itself may reject a longer one
    return path.with_name(f".instr-{secrets.token_hex(8)}")


@contextlib.contextmanager
def _new_file(path: Path, force: bool) -> Iterator[Path]:
    """The name of an empty file, which becomes `path` when the block ends without an error. Raises
    UsageError if another program created `path` meanwhile and `force` is not set."""
    temporary = _beside(path)
    try:
        with _creating(path):
            temporary.touch(exist_ok=False)
        yield temporary
        if not force:
            try:
                os.link(temporary, path)
                temporary.unlink()
                return
            except FileExistsError:
                raise UsageError(f"{path} exists now; use --force to overwrite it") from None
            except OSError:
                pass  # the file system has no hard links
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


@contextlib.contextmanager
def _creating(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}") from None


def _tidy_end() -> contextlib.AbstractContextManager[None]:
    """Inside, SIGTERM and SIGHUP end the program like Ctrl-C, unless they are handled already."""
    return handled(_leave, "SIGTERM", "SIGHUP", only=lambda before: before is signal.SIG_DFL)


@contextlib.contextmanager
def _uninterrupted() -> Iterator[None]:
    """Inside, Ctrl-C, SIGTERM and SIGHUP are held back until the block ends."""
    came: list[int] = []
    try:
        with handled(lambda number, _frame: came.append(number), "SIGINT", "SIGTERM", "SIGHUP"):
            yield
    finally:
        for number in came:
            signal.raise_signal(number)


def _leave(number: int, _frame: object) -> NoReturn:
    raise SystemExit(128 + number)


@contextlib.contextmanager
def _named_errors(path: Path, inside: Path | None = None) -> Iterator[None]:
    """Turns errors of the file system about `path`, or about files in `inside`, into one line.
    A broken pipe and errors about other files pass through."""
    try:
        yield
    except BrokenPipeError:
        raise
    except OSError as error:
        if error.filename is not None:
            name = Path(os.fsdecode(error.filename))
            ours = {path.resolve(), inside} & {name.resolve(), *name.resolve().parents}
            if not ours:
                raise  # about another file
        raise InstrError(f"{path} cannot be written: {error.strerror or error}") from None
