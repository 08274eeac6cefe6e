"""Lets the recorder write a log to something other than a file, through the path of a pipe."""

from __future__ import annotations

import errno
import os
import select
import threading
from collections.abc import Callable
from pathlib import Path

PATIENCE_S = 1.0


class LogPipe:
    """Inside the block, a log can be written to `path`; a thread passes its bytes to `take`. If
    `take` raises an `OSError`, it is kept in `error`, and the writer's next write fails. Leaving
    the block waits for `take`, but not if it takes nothing for `PATIENCE_S`."""

    def __init__(self, take: Callable[[bytes], object]) -> None:
        self._take = take
        self._taken = 0
        self.error: OSError | None = None

    def __enter__(self) -> LogPipe:
        self._receiver, self._sender = os.pipe()
        self.path = Path(f"/dev/fd/{self._sender}")
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._sender)
        before = -1
        while self._reader.is_alive():
            if self._taken == before:
                self.error = TimeoutError(errno.ETIMEDOUT, "it is not read")
                return
            before = self._taken
            self._reader.join(PATIENCE_S)

    def _read(self) -> None:
        with os.fdopen(self._receiver, "rb", buffering=0) as file:
            try:
                while piece := file.read(select.PIPE_BUF):
                    self._take(piece)
                    self._taken += len(piece)
            except OSError as error:
                self.error = error
