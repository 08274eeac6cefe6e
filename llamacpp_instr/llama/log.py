"""Keeps llama.cpp's own log off the terminal, except for its warnings and errors.

Warnings and errors are held back until the work begins, and during calls that may fail, so that
wrong input gives one line. The previous log callback is restored at the end.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from llamacpp_instr.base.terminal import notice
from llamacpp_instr.llama.interrupt import Interrupt

# GGML_LOG_LEVEL_* of ggml.h
_WARN, _ERROR, _CONT = 3, 4, 5


class LlamaLog:
    """llama.cpp's captured warnings and errors."""

    def __init__(self, interrupt: Interrupt) -> None:
        self.interrupt = interrupt
        self._pending: list[tuple[int, str]] = []
        self._holding = True
        self.released = False
        """whether the input is known to be valid and the work has begun"""
        self._level = 0
        self._line = ""

    def receive(self, level: int, text: str) -> None:
        """A piece of llama.cpp's log; one of the level "continued" belongs to the line before."""
        if level != _CONT:
            self._level = level
        self._line += text
        *lines, self._line = self._line.split("\n")
        for line in lines:
            if self._level in (_WARN, _ERROR) and line.strip():
                self._pending.append((self._level, line.strip()))
        if not self._holding:
            self._show_pending()

    def release(self) -> None:
        """Print what was held back, and from now on every warning and error immediately."""
        self.released, self._holding = True, False
        self._show_pending()

    def take_pending(self) -> list[str]:
        """The messages that are held back, which are not printed then."""
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
    from llamacpp_instr.llama import native

    if interrupt is None:
        interrupt = Interrupt()
        with interrupt.watching(), captured(interrupt) as log:
            yield log
        return
    llama_cpp = native.import_llama_cpp().llama_cpp
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
            return reason
        reason = rest
