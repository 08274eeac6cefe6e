"""Makes one line of it when ggml ends the process: which file it was, and what did not hold.

ggml cannot be kept from ending it where an assertion fails; a function that it calls before is all
that is left to us. So nothing is closed or completed here: a log that is being written stays whole
up to its last line and has no end, which is what happened. Who uses llama.cpp by themselves,
recorded or not, keep ggml's own way, a stack on standard error and SIGABRT.
"""

from __future__ import annotations

import ctypes
import os
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from . import native, terminal

_CALLBACK = ctypes.CFUNCTYPE(None, ctypes.c_char_p)


@contextmanager
def last_words(about: Callable[[], tuple[str, int]]) -> Iterator[None]:
    """Inside, an assertion of ggml's that fails ends the process with one line on standard error.

    `about` is asked then, from whichever thread failed, and returns what the line begins with and
    the exit code.
    """
    lib = native.import_llama_cpp().llama_cpp._lib
    set_callback = lib.ggml_set_abort_callback
    set_callback.argtypes, set_callback.restype = [ctypes.c_void_p], ctypes.c_void_p

    first = threading.Lock()

    def end(message: bytes) -> None:
        first.acquire()  # and never released: several threads may fail at once
        status = 1
        try:
            subject, status = about()
            words = without_directories(message.decode(errors="replace").strip())
            terminal.notice(f"Error: {subject}: llama.cpp ended the process: {words}")
        finally:
            os._exit(status)

    callback = _CALLBACK(end)
    before = set_callback(ctypes.cast(callback, ctypes.c_void_p))
    try:
        yield
    finally:
        set_callback(before)


def without_directories(words: str) -> str:
    """ggml's words, without the place where it was built."""
    # /the/place/where/it/was/built/llama-model.cpp:12: GGML_ASSERT(…) failed
    return re.sub(r"^\S*?([^/\s]+:\d+: )", r"\1", words)
