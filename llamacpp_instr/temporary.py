"""Directories for temporary files that go away with the command, whatever ends it.

A child process owns such a directory: it waits for the end of a pipe that this process holds open,
and then removes the directory. So nothing stays behind after SIGTERM, SIGKILL or an abort of ggml,
where this process has no chance to clean up.
"""

from __future__ import annotations

import contextlib
import secrets
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from llamacpp_instr.errors import UsageError

_OWNER = """
import os, shutil, signal, sys, time
for name in ("SIGINT", "SIGTERM", "SIGHUP"):
    if hasattr(signal, name):
        signal.signal(getattr(signal, name), signal.SIG_IGN)
print(flush=True)
sys.stdin.read()
for _ in range(100):  # a process that still writes there may need a moment to end
    shutil.rmtree(sys.argv[1], ignore_errors=True)
    if not os.path.exists(sys.argv[1]):
        break
    time.sleep(0.1)
"""


@contextlib.contextmanager
def temporary_directory(prefix: str, parent: Path | None = None) -> Iterator[Path]:
    """A new directory in `parent`, or where temporary files go; removed when the block is left or
    this process ends.

    Raises `UsageError` when there is no place for temporary files, `OSError` when the directory
    cannot be made in `parent`.
    """
    try:
        place = parent or Path(tempfile.gettempdir())
    except FileNotFoundError:
        raise UsageError("no directory for temporary files is writable; set TMPDIR") from None
    path = place.absolute() / f"{prefix}{secrets.token_hex(8)}"
    with start_owner(path):
        path.mkdir(0o700)
        yield path


def start_owner(path: Path) -> subprocess.Popen[bytes]:
    """The process that removes the directory `path`, a whole path, when its standard input ends:
    when it is left as a context manager, or when this process ends."""
    owner = subprocess.Popen(
        [sys.executable, "-I", "-S", "-c", _OWNER, path],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        cwd=path.anchor,  # else the directory of the caller could not be unmounted
        start_new_session=True,  # Ctrl-C is for us
    )
    assert owner.stdout
    owner.stdout.readline()  # from now on only SIGKILL ends it
    return owner
