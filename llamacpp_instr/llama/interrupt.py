"""Lets Ctrl-C stop a long compute between two ops, and never loses one.

Python runs its signal handlers only after a C call returns, and a prefill may take minutes. During
the call only C code can read the flag. So the flag is a C string, and the abort callback (`bool
(*)(void *)`) is `strlen`, which returns a nonzero value when the string is no longer empty.
Conversely, a handler may run inside a callback from C, where an exception would be swallowed. So
during a call `KeyboardInterrupt` waits for its end.
"""

from __future__ import annotations

import ctypes
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


class Interrupt:
    """Whether the user pressed Ctrl-C."""

    def __init__(self) -> None:
        self._flag = ctypes.create_string_buffer(2)
        self._deferred = False

    @property
    def requested(self) -> bool:
        return bool(self._flag.value)

    def request(self) -> None:
        """What Ctrl-C does, from another thread."""
        self._flag.value = b"1"

    @contextmanager
    def deferred(self) -> Iterator[None]:
        """Around a C call: `KeyboardInterrupt` is raised at its end, even if the call failed."""
        self._deferred = True
        try:
            yield
        finally:
            self._deferred = False
            if self.requested:
                raise KeyboardInterrupt

    def abort_callback(self) -> tuple[int, int]:
        """Addresses of ggml's abort callback and its argument, valid while this object lives."""
        if os.name == "nt":
            return 0, 0
        strlen = ctypes.cast(ctypes.CDLL(None).strlen, ctypes.c_void_p).value
        return strlen or 0, ctypes.addressof(self._flag)

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Inside, this object handles SIGINT. Does nothing outside the main thread, which alone
        receives signals."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        # the pipe reports a signal immediately, the handler only when Python code runs again
        receiver, sender = os.pipe()
        os.set_blocking(sender, False)
        fd_before = signal.set_wakeup_fd(sender, warn_on_full_buffer=False)
        handler_before = signal.signal(signal.SIGINT, self._handle)
        watcher = threading.Thread(target=self._watch, args=(receiver,), daemon=True)
        watcher.start()
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, handler_before)
            signal.set_wakeup_fd(fd_before)
            os.close(sender)
            watcher.join()
            os.close(receiver)

    def _watch(self, receiver: int) -> None:
        while number := os.read(receiver, 1):
            if number[0] == signal.SIGINT:
                self.request()

    def _handle(self, _number: int, _frame: Any) -> None:
        self.request()
        if not self._deferred:
            raise KeyboardInterrupt
