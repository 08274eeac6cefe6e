"""Keeps llama.cpp's own log off the terminal, all but its warnings and errors.

While something is being tried that may fail, errors are held back, so that a failure can be told in
one line; everything is put back as it was on the way out.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

# GGML_LOG_LEVEL_* of ggml.h
_WARN, _ERROR, _CONT = 3, 4, 5


class LlamaLog:
    """What llama.cpp warned of while its log was captured."""

    def __init__(self) -> None:
        self.held: list[tuple[int, str]] = []
        self.holding = False
        self._level = 0
        self._line = ""

    def receive(self, level: int, text: str) -> None:
        """A piece of llama.cpp's log; at the level "continued" it belongs to the line before."""
        if level != _CONT:
            self._level = level
        self._line += text
        *lines, self._line = self._line.split("\n")
        for line in lines:
            if self._level in (_WARN, _ERROR) and line.strip():
                if self.holding:
                    self.held.append((self._level, line.strip()))
                else:
                    show(line.strip())

    @contextmanager
    def trying(self, failure: Callable[[str], Exception]) -> Iterator[None]:
        """Hold messages back; `failure(reason)` is raised for a `LlamaFailed` from inside."""
        self.held.clear()
        self.holding = True
        try:
            yield
        except LlamaFailed:
            raise failure(self.reason()) from None
        else:
            for _, line in self.held:
                show(line)
        finally:
            self.holding = False

    def reason(self) -> str:
        """What llama.cpp said last about why it failed: its innermost error, without its place."""
        errors = [line for level, line in self.held if level == _ERROR]
        if not errors:
            return "it gave no reason"
        # the first error is the cause, the following ones say what failed because of it; each
        # begins with the names of C++ functions
        first = errors[0]
        while True:
            place, colon, rest = first.partition(": ")
            if not colon or " " in place:
                return first
            first = rest


class LlamaFailed(Exception):
    """A call of llama.cpp returned nothing; its log says why."""


@contextmanager
def captured() -> Iterator[LlamaLog]:
    """Take llama.cpp's log over; warnings and errors go to standard error, the rest nowhere."""
    from . import native

    llama_cpp = native.import_llama_cpp().llama_cpp
    log = LlamaLog()

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


def show(line: str) -> None:
    """One line of llama.cpp's on standard error."""
    print(f"llama.cpp: {line}", file=sys.stderr, flush=True)
