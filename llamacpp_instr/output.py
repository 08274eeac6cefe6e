"""Where a command writes: what appears whole or not at all, a file or a directory of them, or
standard output.

Invariant: the file of that name is complete; what was there before stays until the new one is
whole, whether an error, a full disk, Ctrl-C or SIGTERM ends the writing. No file is overwritten
unless that was asked for, and this is known before the work begins.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import signal
import sys
import threading
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import BinaryIO, NoReturn

from llamacpp_instr.errors import InstrError, UsageError


@contextlib.contextmanager
def open_output(path: str | Path, force: bool = False) -> Iterator[BinaryIO]:
    """A binary file to write to; it takes its name when the block is left without an error.

    `-` is standard output. A name that is no regular file (a pipe, /dev/null) is written to as it
    is. Raises UsageError when the file exists and `force` is not given, or cannot be created;
    InstrError when it cannot be written to its end.
    """
    if str(path) == "-":
        with _named_errors(Path("standard output")):
            try:
                yield sys.stdout.buffer
                sys.stdout.buffer.flush()
            except OSError as error:
                if error.filename is None and not isinstance(error, BrokenPipeError):
                    # else the interpreter tries once more at exit, and complains
                    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
                raise
        return
    check_output(path, force)
    path = Path(path)
    with _named_errors(path), _tidy_end():
        if path.exists() and not path.is_file():
            with path.open("wb") as special:
                yield special
            return
        temporary = _beside(path)
        try:
            with _created(path, temporary) as file:
                yield file
            _take_name(temporary, path, force)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise


@contextlib.contextmanager
def new_file(path: Path, force: bool = False) -> Iterator[Path]:
    """The name of an empty file for others to write; it becomes `path` when the block is left
    without an error. Raises as `open_output` does."""
    check_output(path, force)
    with _named_errors(path), _tidy_end():
        temporary = _beside(path)
        try:
            _created(path, temporary).close()
            yield temporary
            _take_name(temporary, path, force)
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


def check_not_input(output: str | Path, *inputs: str | Path | None) -> None:
    """Raises UsageError when `output` is one of the files that are read: a forgotten argument must
    not cost a model or a log, not even with --force. None and `-` are no files."""
    written = Path(output)
    if str(output) == "-" or not written.is_file():
        return
    for name in inputs:
        if name and Path(name).is_file() and written.samefile(name):
            raise UsageError(f"{output} is what is read; name another file")


@contextlib.contextmanager
def open_output_directory(
    path: str | Path, suffixes: Collection[str], force: bool = False
) -> Iterator[Path]:
    """A new directory to write files into; it takes its name when the block is left without an
    error, so no half of a set is ever seen under that name.

    `suffixes` are those of the files that the caller writes. An existing directory is replaced
    only with `force`, and only when it holds nothing else. Raises UsageError when that is not so
    or the directory cannot be made; InstrError when it cannot be written to its end.
    """
    path = Path(path)
    check_output_directory(path, suffixes, force)
    temporary = _beside(path.resolve())
    with _named_errors(path, inside=temporary), _tidy_end():
        try:
            _create_directory(path, temporary)
            yield temporary
            if path.is_dir() and any(path.iterdir()):
                if not force:
                    raise UsageError(f"{path} exists by now; use --force to replace what is in it")
                _exchange(temporary, path)
            else:
                temporary.replace(path)
        except BaseException:
            shutil.rmtree(temporary, ignore_errors=True)
            raise


def check_output_directory(path: Path, suffixes: Collection[str], force: bool = False) -> None:
    """Raises UsageError when `path` may not or cannot become such a directory; creates nothing."""
    if not path.is_dir():
        if path.exists():
            raise UsageError(f"{path} is no directory; name another")
        check_output(path)
        return
    entries = sorted(path.iterdir())
    foreign = [entry.name for entry in entries if entry.suffix not in suffixes]
    if foreign:
        raise UsageError(f"{path} holds something else ({foreign[0]}); name another directory")
    if entries and not force:
        raise UsageError(f"{path} exists; use --force to replace what is in it")
    check_output(path.resolve().parent / f"{path.resolve().name}.new", force=True)


def _exchange(new: Path, old: Path) -> None:
    """Put the directory `new` in the place of `old`, and remove that."""
    aside = _beside(old.resolve())
    try:
        old.replace(aside)
        new.replace(old)
        shutil.rmtree(aside)
    except BaseException:
        if not old.exists():
            aside.replace(old)
        shutil.rmtree(aside, ignore_errors=True)
        raise


def _beside(path: Path) -> Path:
    """A name beside `path`, so that what is made there can be renamed to it. Made is nothing yet:
    whoever removes it at the end must know the name before a signal can come."""
    return path.with_name(f".{path.name}.{secrets.token_hex(4)}")


def _take_name(temporary: Path, path: Path, force: bool) -> None:
    """Rename to `path`; UsageError when, without `force`, another program was faster."""
    if not force:
        try:
            os.link(temporary, path)
            temporary.unlink()
            return
        except FileExistsError:
            raise UsageError(f"{path} exists by now; use --force to overwrite it") from None
        except OSError:
            pass  # a file system without links
    temporary.replace(path)


def _created(path: Path, temporary: Path) -> BinaryIO:
    try:
        return temporary.open("xb")
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}") from None


def _create_directory(path: Path, temporary: Path) -> None:
    try:
        temporary.mkdir()
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}") from None


@contextlib.contextmanager
def _tidy_end() -> Iterator[None]:
    """Inside, SIGTERM and SIGHUP end the program as Ctrl-C does, so that no half stays behind
    under another name; unless somebody else has them, or this is no main thread."""
    caught = {}
    if threading.current_thread() is threading.main_thread():
        for name in ("SIGTERM", "SIGHUP"):  # Windows lacks the second
            number = getattr(signal, name, None)
            if number is not None and signal.getsignal(number) is signal.SIG_DFL:
                caught[number] = signal.signal(number, _leave)
    try:
        yield
    finally:
        for number, before in caught.items():
            signal.signal(number, before)


def _leave(number: int, _frame: object) -> NoReturn:
    raise SystemExit(128 + number)


@contextlib.contextmanager
def _named_errors(path: Path, inside: Path | None = None) -> Iterator[None]:
    """Errors of the file system become one line; those of pipes stay what they are. Ours are
    those about `path` and about what lies in `inside`."""
    try:
        yield
    except BrokenPipeError:
        raise
    except OSError as error:
        if error.filename is not None:
            name = Path(os.fsdecode(error.filename))
            if name != path and (inside is None or inside not in (name, *name.parents)):
                raise  # about another file than ours
        raise InstrError(f"{path} cannot be written: {error.strerror or error}") from None
