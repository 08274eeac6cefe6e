"""The cache of builds, and a working directory for one build at a time.

Wheels in the cache are installed, so no other user may write there. A wheel is valid only with its
digest, which is written last.

A lock belongs to a process and is released when that process ends. So a directory whose lock is
free is left from a killed build, and the next build removes it.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TextIO

from llamacpp_instr.base.errors import BuildError
from llamacpp_instr.base.system import cache_dir
from llamacpp_instr.llama.build.source_tree import sha256_of


def own_cache() -> Path:
    """`cache_dir()`, created if necessary. Raises BuildError if other users can write to it or to
    a file in it."""
    cache = cache_dir()
    try:
        cache.parent.mkdir(parents=True, exist_ok=True)
        for name in ("", "converters", "imports", "logs", "sdist", "wheels", "work"):
            _own_directory(cache / name)
    except OSError as error:
        raise _unusable(error, cache) from None
    return cache


def kept_wheel(cache: Path, key: str) -> Path | None:
    """The wheel of a key, if the cache has it and its digest is right; else None."""
    place = cache / "wheels" / key
    if place.is_dir():
        _own_directory(place)
    for wheel in place.glob("*.whl"):
        digest = _digest_of(wheel)
        if digest.is_file() and digest.read_text(encoding="utf-8") == _digest_line(wheel):
            return wheel
    return None


def keep_wheel(cache: Path, key: str, wheel: Path) -> Path:
    """Move a wheel into the cache, replacing an existing one; returns its new path."""
    place = cache / "wheels" / key
    shutil.rmtree(place, ignore_errors=True)
    _own_directory(place)
    kept = wheel.replace(place / wheel.name)
    _digest_of(kept).write_text(_digest_line(kept), encoding="utf-8")
    return kept


def _digest_of(wheel: Path) -> Path:
    return wheel.with_name(f"{wheel.name}.sha256")


def _digest_line(wheel: Path) -> str:
    """A line in the format of `sha256sum`."""
    return f"{sha256_of(wheel)}  {wheel.name}\n"


def _own_directory(path: Path) -> None:
    """Create a private directory. Raises BuildError for one that others can write to."""
    path.mkdir(mode=0o700, exist_ok=True)
    found = path.stat()
    if found.st_uid not in (0, os.geteuid()):
        problem, remedy = "belongs to another user", "set"
    elif found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        problem, remedy = "can be written by others", f"run: chmod -R go-w {path}; or set"
    else:
        return
    raise BuildError(
        f"{path} {problem}, who could change what is installed from there; {remedy} "
        "LLAMACPP_INSTR_CACHE to a directory of your own"
    )


def _unusable(error: OSError, cache: Path) -> BuildError:
    return BuildError(
        f"{error.filename or cache}: {error.strerror}; free it or set LLAMACPP_INSTR_CACHE to "
        "a writable directory"
    )


@contextmanager
def workplace(cache: Path, name: str, stream: TextIO) -> Iterator[Path]:
    """An empty directory below `cache`, removed afterwards. Waits for a process that uses it.

    A process that waits prints a line to `stream`. Raises BuildError if the disk is full or the
    cache cannot be written.
    """
    place = cache / "work" / name
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        with _lock_of(place).open("w") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                print("waiting for another instr build", file=stream, flush=True)
                fcntl.flock(lock, fcntl.LOCK_EX)
            _sweep(place.parent)
            shutil.rmtree(place, ignore_errors=True)
            place.mkdir()
            try:
                yield place
            finally:
                shutil.rmtree(place, ignore_errors=True)
    except OSError as error:
        raise _unusable(error, cache) from None


def _lock_of(place: Path) -> Path:
    return place.with_name(f"{place.name}.lock")


def _sweep(work: Path) -> None:
    """Remove the directories of killed builds."""
    for place in work.iterdir():
        if not place.is_dir():
            continue
        with _lock_of(place).open("w") as lock, suppress(BlockingIOError):
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(place, ignore_errors=True)
