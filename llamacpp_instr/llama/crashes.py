"""Prints one line when llama.cpp ends the process: the file, and what went wrong.

llama.cpp ends the process on a failed assertion of ggml, an uncaught C++ exception, or a crash.
Python cannot prevent that, but it can register C callbacks that run first. They close no file: a
log keeps every line that was written and has no end event. Other programs that use llama.cpp,
recorded or not, end as without this module: with a stack trace on standard error and SIGABRT.
"""

from __future__ import annotations

import ctypes
import os
import re
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from llamacpp_instr.base import terminal
from llamacpp_instr.llama import native

_ON_ABORT = ctypes.CFUNCTYPE(None, ctypes.c_char_p)
_ON_SIGNAL = ctypes.CFUNCTYPE(None, ctypes.c_int)
_ON_TERMINATE = ctypes.CFUNCTYPE(None)

_SIGNALS = ("SIGSEGV", "SIGBUS", "SIGFPE", "SIGILL", "SIGABRT")
_SET_TERMINATE = "_ZSt13set_terminatePFvvE"
"""`std::set_terminate`, as mangled by both C++ runtimes"""
_STRUCT_BYTES = 512
"""at least `sizeof(struct sigaction)` on every system"""
_SECONDS = 5
"""time limit for the message: a crash inside malloc may leave a lock that it waits for"""


@contextmanager
def last_words(about: Callable[[], tuple[str, int]]) -> Iterator[None]:
    """Inside, if llama.cpp ends the process, it prints one line to standard error first.

    `about` is called then, in the thread that failed, and returns the beginning of the line and
    the exit status.
    """
    lib = native.import_llama_cpp().llama_cpp._lib
    first = threading.Lock()
    readers: list[int] = []
    stderr = os.dup(2)

    def end(words: str) -> None:
        first.acquire()  # never released: several threads may fail at once
        status = 1
        try:
            if hasattr(signal, "alarm"):
                signal.alarm(_SECONDS)
            os.dup2(stderr, 2)
            subject, status = about()
            terminal.notice(f"Error: {subject}: llama.cpp ended the process: {words}")
        finally:
            os._exit(status)

    def on_abort(message: bytes) -> None:
        end(last_line(message))

    def on_signal(number: int) -> None:
        end((readers and last_line(os.read(readers[0], 1 << 16))) or signal.Signals(number).name)

    def on_terminate() -> None:
        # the previous handler prints the exception's message and aborts, which calls `on_signal`
        reader, writer = os.pipe()
        os.set_blocking(writer, False)  # for a text that does not fit into the pipe
        os.write(writer, b"a C++ exception\n")
        os.environ["GGML_NO_BACKTRACE"] = "1"
        os.dup2(writer, 2)
        readers.append(reader)
        _ON_TERMINATE(terminate_before)()

    with ExitStack() as stack:
        stack.callback(os.close, stderr)
        stack.enter_context(_installed(lib.ggml_set_abort_callback, _ON_ABORT(on_abort)))
        terminate_before = 0
        if hasattr(lib, _SET_TERMINATE):
            set_terminate = getattr(lib, _SET_TERMINATE)
            terminate_before = stack.enter_context(
                _installed(set_terminate, _ON_TERMINATE(on_terminate))
            )
            stack.enter_context(_handled(_ON_SIGNAL(on_signal)))
        yield


@contextmanager
def _installed(install: Any, callback: Any) -> Iterator[int]:
    """Inside, `install` has set the callback; yields the previous one."""
    install.argtypes, install.restype = [ctypes.c_void_p], ctypes.c_void_p
    before = install(ctypes.cast(callback, ctypes.c_void_p))
    try:
        yield before
    finally:
        install(before)


@contextmanager
def _handled(callback: Any) -> Iterator[None]:
    """Inside, the signals of a crash call the callback immediately. Python's own handlers would
    wait for the C call to return."""
    libc = ctypes.CDLL(None)
    libc.signal.argtypes, libc.signal.restype = [ctypes.c_int, ctypes.c_void_p], ctypes.c_void_p
    before = {}
    for name in _SIGNALS:
        number = getattr(signal, name)
        before[number] = ctypes.create_string_buffer(_STRUCT_BYTES)
        libc.sigaction(number, None, before[number])
        libc.signal(number, ctypes.cast(callback, ctypes.c_void_p))
    try:
        yield
    finally:
        for number, action in before.items():
            libc.sigaction(number, action, None)


def last_line(message: bytes) -> str:
    """The last line of a message of ggml or C++, without the path of the source folder."""
    lines = [line.strip() for line in message.decode(errors="replace").splitlines()]
    words = next((line for line in reversed(lines) if line), "").removeprefix("what():").strip()
    # /path/of/the/build/llama-model.cpp:12: GGML_ASSERT(…) failed
    return re.sub(r"^\S*?([^/\s]+:\d+: )", r"\1", words)
