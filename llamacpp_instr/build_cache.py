"""Where builds are kept, and a place to build in that one process has to itself.

A lock belongs to a process and ends with it, however it ends; what a killed build left behind is
therefore known by a lock that nobody holds, and is swept away by the next build.
"""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TextIO

from llamacpp_instr.errors import BuildError


def cache_dir() -> Path:
    """Where sdists, wheels and logs are kept: LLAMACPP_INSTR_CACHE, else the user's cache."""
    own = os.environ.get("LLAMACPP_INSTR_CACHE")
    if own:
        return Path(own).expanduser().absolute()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache").absolute() / "llamacpp-instr"


@contextmanager
def workplace(cache: Path, name: str, stream: TextIO) -> Iterator[Path]:
    """An empty directory below `cache` that is gone afterwards; waits for who has it now.

    A process that waits says so on `stream`. Raises BuildError when the disk is full or the cache
    cannot be written.
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
        raise BuildError(
            f"{error.filename or cache}: {error.strerror}; free it or set LLAMACPP_INSTR_CACHE to "
            "a directory that can be written"
        ) from None


def _lock_of(place: Path) -> Path:
    return place.with_name(f"{place.name}.lock")


def _sweep(work: Path) -> None:
    """Remove the places of builds that were killed."""
    for place in work.iterdir():
        if not place.is_dir():
            continue
        with _lock_of(place).open("w") as lock, suppress(BlockingIOError):
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(place, ignore_errors=True)
