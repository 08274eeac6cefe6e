"""What happens when llama.cpp ends the process: on a failed assertion of ggml, an uncaught C++
exception, or a crash.

Python cannot prevent that. `last_words` prints one line first: the file, and what went wrong.
`call_in_child` calls a function in a child process instead.
"""

from __future__ import annotations

import ctypes
import importlib
import os
import pickle
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, TypeVar, get_type_hints

import msgspec

from llamacpp_instr.base import terminal
from llamacpp_instr.base.errors import InstrError, error_named
from llamacpp_instr.base.processes import OUT_OF_MEMORY, end_with, limited_memory, no_core_dump
from llamacpp_instr.base.system import python
from llamacpp_instr.llama import native
from llamacpp_instr.llama.devices import devices

_ON_ABORT = ctypes.CFUNCTYPE(None, ctypes.c_char_p)
_ON_SIGNAL = ctypes.CFUNCTYPE(None, ctypes.c_int)
_ON_TERMINATE = ctypes.CFUNCTYPE(None)

_SIGNALS = ("SIGSEGV", "SIGBUS", "SIGFPE", "SIGILL", "SIGABRT")
_SET_TERMINATE = "_ZSt13set_terminatePFvvE"
"""`std::set_terminate`, as mangled by both C++ runtimes"""
_STRUCT_BYTES = 512
"""at least `sizeof(struct sigaction)` on every system"""
_SECONDS = 5
"""time limit for the message: after a crash inside malloc, it may wait for a lock forever"""


Result = TypeVar("Result")
_RETURNED, _FAILED, _NO_MEMORY = b"r", b"f", b"m"


@contextmanager
def last_words(about: Callable[[], tuple[str, int]]) -> Iterator[None]:
    """Inside, if llama.cpp ends the process, it prints one line to standard error first.

    `about` is called then, in the thread that failed, and returns the beginning of the line and
    the exit status. The C callbacks close no file: a log keeps every line that was written and has
    no end event. Other programs that use llama.cpp, recorded or not, end with a stack trace on
    standard error and SIGABRT.
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
        words = b""
        if b"Remote RPC server" in message and hasattr(lib, "llama_instr_error"):
            # ggml does not say which server; the recorder knows that of this thread's connection
            lib.llama_instr_error.restype = ctypes.c_char_p
            words = lib.llama_instr_error()
        end(last_line(words or message))

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
    """The last line of a message from ggml or C++, without the path of the source folder."""
    lines = [line.strip() for line in message.decode(errors="replace").splitlines()]
    words = next((line for line in reversed(lines) if line), "").removeprefix("what():").strip()
    # /path/of/the/build/llama-model.cpp:12: GGML_ASSERT(…) failed
    return re.sub(r"^\S*?([^/\s]+:\d+: )", r"\1", words)


class ChildEnded(Exception):
    """The child ended before the function returned; the text is the reason."""

    def __init__(self, reason: str, number: int = 0) -> None:
        super().__init__(reason)
        self.number = number
        """the signal that ended it, or 0"""


def call_in_child(
    max_bytes: int,
    function: Callable[..., Result],
    *arguments: object,
    imports: Sequence[str] = (),
) -> Result:
    """What `function` returns or raises for these arguments, called in a child that may take
    `max_bytes` of memory beyond what it needs to start. `imports` are modules that it imports only
    when it is called.

    llama.cpp trusts much of a model file, so the answer is not trusted: it is decoded as what
    `function` is declared to return. Raises `ChildEnded` if the process ends, runs out of memory,
    or answers something else. Ctrl-C ends the child even inside a C call that never returns, and a
    caller that is killed does not leave it behind.
    """
    environment = {k: v for k, v in os.environ.items() if not k.startswith("LLAMA_INSTR_")}
    done = subprocess.run(
        python(f"from {__name__} import answer; answer()"),
        input=pickle.dumps((os.getpid(), max_bytes, imports, function, arguments)),
        # otherwise ggml starts a debugger to print the stack, which takes seconds
        env={**environment, "GGML_NO_BACKTRACE": "1"},
        capture_output=True,
        check=False,
    )
    # of a failed assertion of ggml, or the message of a C++ exception
    words = last_line(done.stderr)
    if done.returncode < 0:
        words = words or signal.Signals(-done.returncode).name
        raise ChildEnded(words, -done.returncode)
    too_large = f"it takes more than {max_bytes / 1e9:,.1f} GB of memory"
    if done.returncode == OUT_OF_MEMORY:
        raise ChildEnded(too_large)
    if done.returncode and b"Traceback" in done.stderr:
        raise RuntimeError(done.stderr.decode(errors="replace"))  # a bug of ours
    if done.returncode or not done.stdout:
        raise ChildEnded(f"{words} (exit status {done.returncode})")
    status, content = done.stdout[:1], done.stdout[1:]
    if status == _NO_MEMORY:
        raise ChildEnded(too_large)
    if status != _RETURNED:
        name, _, text = os.fsdecode(content).partition("\n")
        raise error_named(name)(text)
    try:
        result: Result = msgspec.msgpack.decode(content, type=get_type_hints(function)["return"])
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ChildEnded(f"its answer is damaged: {error}") from None
    return result


def answer() -> None:
    """The child's side: reads a call from standard input, writes its result to standard output."""
    # C code that prints to standard output prints to standard error instead
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    no_core_dump()
    parent, max_bytes, imports, function, arguments = pickle.load(sys.stdin.buffer)
    end_with(parent)
    try:
        native.only_bindings = not imports
        native.load()
        devices()  # before the limit: a driver starts when it is asked, and may take gigabytes
        for module in imports:  # before the limit: numpy allocates memory for each CPU
            importlib.import_module(module)
        with limited_memory(max_bytes):
            answer = _RETURNED + msgspec.msgpack.encode(function(*arguments))
    except InstrError as error:
        answer = _FAILED + os.fsencode(f"{type(error).__name__}\n{error}")
    except MemoryError:
        answer = _NO_MEMORY
    answers.write(answer)
    answers.flush()
