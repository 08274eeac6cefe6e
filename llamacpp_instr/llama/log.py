"""What calls of llama.cpp produce besides their results: its own log, and Ctrl-C.

The log stays off the terminal, except for warnings and errors. These are held back until the work
begins, and during calls that may fail, so that wrong input gives one line.
"""

from __future__ import annotations

import ctypes
import os
import re
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from llamacpp_instr.base.terminal import notice
from llamacpp_instr.llama.native import import_llama_cpp

# GGML_LOG_LEVEL_* of ggml.h
_WARN, _ERROR, _CONT = 3, 4, 5


class Interrupt:
    """Whether the user pressed Ctrl-C. It stops a long compute between two ops, and is never lost.

    Python runs its signal handlers only after a C call returns, and a prefill may take minutes.
    During the call only C code can read the flag. So the flag is a C string, and the abort callback
    (`bool (*)(void *)`) is `strlen`, which returns a nonzero value when the string is no longer
    empty. Conversely, a handler may run inside a callback from C, where an exception would be
    swallowed. So `KeyboardInterrupt` is held back until the call ends.
    """

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


class LogLines:
    """Puts the pieces of llama.cpp's log together."""

    def __init__(self) -> None:
        self._level = 0
        self.unfinished = ""
        """the beginning of a line that has not ended"""

    def completed(self, level: int, text: str) -> list[tuple[int, str]]:
        """The non-empty lines that a piece completes, with their levels; a piece of the level
        "continued" belongs to the previous line."""
        if level != _CONT:
            self._level = level
        *lines, self.unfinished = (self.unfinished + text).split("\n")
        return [(self._level, line) for line in lines if line.strip()]


class LlamaLog:
    """llama.cpp's captured warnings and errors."""

    def __init__(self, interrupt: Interrupt) -> None:
        self.interrupt = interrupt
        self._pending: list[tuple[int, str]] = []
        self._holding = True
        self.released = False
        """whether the input is known to be valid and the work has begun"""
        self._lines = LogLines()

    def receive(self, level: int, text: str) -> None:
        """A piece of llama.cpp's log."""
        for at, line in self._lines.completed(level, text):
            if at in (_WARN, _ERROR):
                self._pending.append((at, line.strip()))
        if not self._holding:
            self._show_pending()

    def release(self) -> None:
        """Print what was held back, and from now on every warning and error immediately."""
        self.released, self._holding = True, False
        self._show_pending()

    def take_pending(self) -> list[str]:
        """Takes out and returns the messages that are held back, so they are never printed."""
        lines = [line for _, line in self._pending]
        self._pending.clear()
        return lines

    @contextmanager
    def trying(self, failure: Callable[[str], Exception]) -> Iterator[None]:
        """Hold messages back; raise `failure(reason)` for a `LlamaFailed` inside."""
        before, start = self._holding, len(self._pending)
        self._holding = True
        try:
            with self.interrupt.deferred():
                yield
        except LlamaFailed:
            errors = [line for level, line in self._pending[start:] if level == _ERROR]
            del self._pending[start:]
            raise failure(_reason(errors)) from None
        except KeyboardInterrupt:
            del self._pending[start:]  # messages about the interruption
            raise
        finally:
            self._holding = before
            if not before:
                self._show_pending()

    def _show_pending(self) -> None:
        for _, line in self._pending:
            notice(f"llama.cpp: {line}")  # it may quote the model
        self._pending.clear()


class LlamaFailed(Exception):
    """A call of llama.cpp failed; its log has the reason."""


@contextmanager
def captured(interrupt: Interrupt | None = None) -> Iterator[LlamaLog]:
    """Capture llama.cpp's log: warnings and errors go to standard error, the rest is discarded.
    Without an `interrupt` it watches for Ctrl-C itself."""
    if interrupt is None:
        interrupt = Interrupt()
        with interrupt.watching(), captured(interrupt) as log:
            yield log
        return
    llama_cpp = import_llama_cpp().llama_cpp
    log = LlamaLog(interrupt)

    @llama_cpp.llama_log_callback  # type: ignore[untyped-decorator]
    def receive(level: int, text: bytes, _user_data: int) -> None:
        log.receive(level, text.decode(errors="replace"))

    before = llama_cpp.llama_log_callback()
    before_data = ctypes.c_void_p()
    llama_cpp.llama_log_get(ctypes.byref(before), ctypes.byref(before_data))
    llama_cpp.llama_log_set(receive, None)
    try:
        yield log
    finally:
        llama_cpp.llama_log_set(before, before_data)


def _reason(errors: list[str]) -> str:
    """Why llama.cpp failed: the first error is the cause, later ones are consequences."""
    if not errors:
        return "it gave no reason"
    reason = errors[0]
    while True:
        # each line begins with names of C++ functions
        place, colon, rest = reason.partition(": ")
        if not colon or " " in place:
            break
        reason = rest
    buffer = re.match(r"failed to allocate (\S+) buffer", reason)
    if buffer and not buffer[1].startswith("CPU"):
        reason += "; put fewer layers there: --gpu-layers"
    return reason
