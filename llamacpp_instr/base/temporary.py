"""Temporary directories that are removed with the command, however it ends.

A child process owns such a directory. It waits for the end of a pipe that this process holds open,
and then removes the directory. This also works after SIGTERM, SIGKILL or an abort of ggml, where
this process has no chance to clean up.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from llamacpp_instr.base.errors import UsageError

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
    """A new directory in `parent`, by default where temporary files go. It is removed when the
    block or this process ends.

    Raises `UsageError` if no directory for temporary files is writable, `OSError` if the directory
    cannot be created in `parent`.
    """
    path = (parent or place()).absolute() / f"{prefix}{secrets.token_hex(8)}"
    with start_owner(path):
        path.mkdir(0o700)
        yield path


def place() -> Path:
    """Where temporary files go. `tempfile` finds it with a trial file, which an interruption leaves
    behind.

    Raises `UsageError` if no such directory is writable.
    """
    named = (os.environ.get(name) for name in ("TMPDIR", "TEMP", "TMP"))
    for name in (*named, "/tmp", "/var/tmp", "."):
        if name and Path(name).is_dir() and os.access(name, os.W_OK | os.X_OK):
            return Path(name)
    raise UsageError("no directory for temporary files is writable; set TMPDIR")


def start_owner(path: Path) -> subprocess.Popen[bytes]:
    """A process that removes the directory `path` (absolute) when its standard input ends: at the
    end of the process's context manager, or at the end of this process."""
    owner = subprocess.Popen(
        [sys.executable, "-I", "-S", "-c", _OWNER, path],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        cwd=path.anchor,  # otherwise the caller's directory could not be unmounted
        start_new_session=True,  # Ctrl-C is for this process
    )
    assert owner.stdout
    owner.stdout.readline()  # from now on it ignores every signal but SIGKILL
    return owner
