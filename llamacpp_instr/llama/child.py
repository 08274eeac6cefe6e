"""Calls a function in a child process, for work during which llama.cpp may end the process.

llama.cpp trusts much of a model file, so the caller trusts no answer: it is decoded as what the
function is declared to return. Whatever happens to the child, the caller gets one exception with
the reason. Ctrl-C ends the child even inside a C call that never returns, and a caller that is
killed does not leave it behind.
"""

from __future__ import annotations

import ctypes
import os
import pickle
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar, get_type_hints

import msgspec

from llamacpp_instr.base.child import no_core_dump
from llamacpp_instr.base.errors import InstrError, error_named
from llamacpp_instr.base.system import python
from llamacpp_instr.llama import native
from llamacpp_instr.llama.crashes import last_line

Result = TypeVar("Result")
_RETURNED, _FAILED, _NO_MEMORY = b"r", b"f", b"m"


class ChildEnded(Exception):
    """The child ended before the function returned; the text is the reason."""

    def __init__(self, reason: str, number: int = 0) -> None:
        super().__init__(reason)
        self.number = number
        """the signal that ended it, or 0"""


def call_in_child(max_bytes: int, function: Callable[..., Result], *arguments: object) -> Result:
    """What `function` returns or raises for these arguments, called in a child that may take
    `max_bytes` of memory beyond what it needs to start. `function` must declare what it returns.

    Raises `ChildEnded` if the process ends, runs out of memory, or answers something else.
    """
    environment = {k: v for k, v in os.environ.items() if not k.startswith("LLAMA_INSTR_")}
    done = subprocess.run(
        python(f"from {__name__} import answer; answer()"),
        input=pickle.dumps((os.getpid(), max_bytes, function, arguments)),
        # otherwise ggml starts a debugger to print the stack, which takes seconds
        env={**environment, "GGML_NO_BACKTRACE": "1"},
        capture_output=True,
        check=False,
    )
    if done.returncode < 0:
        raise ChildEnded(_last_words(done), -done.returncode)
    if done.returncode and b"Traceback" in done.stderr:
        raise RuntimeError(done.stderr.decode(errors="replace"))  # a bug of ours
    if done.returncode or not done.stdout:
        raise ChildEnded(f"{_last_words(done)} (exit status {done.returncode})")
    status, content = done.stdout[:1], done.stdout[1:]
    if status == _NO_MEMORY:
        raise ChildEnded(f"it takes more than {max_bytes / 1e9:,.1f} GB of memory")
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
    parent, max_bytes, function, arguments = pickle.load(sys.stdin.buffer)
    _end_with(parent)
    try:
        native.load()  # before the limit: numpy allocates memory for each CPU
        with limited_memory(max_bytes):
            answer = _RETURNED + msgspec.msgpack.encode(function(*arguments))
    except InstrError as error:
        answer = _FAILED + os.fsencode(f"{type(error).__name__}\n{error}")
    except MemoryError:
        answer = _NO_MEMORY
    answers.write(answer)
    answers.flush()


def _end_with(parent: int) -> None:
    """End this process when its parent ends, however that ends. Linux only."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
        if os.getppid() != parent:  # it has ended already
            os._exit(1)


@contextmanager
def limited_memory(max_bytes: int) -> Iterator[None]:
    """Limit the memory that this process may allocate in the block, beyond what it has."""
    try:
        import resource
    except ImportError:  # not on this operating system
        yield
        return
    try:
        in_use = int(Path("/proc/self/statm").read_text().split()[5]) * resource.getpagesize()
    except OSError:  # not Linux
        in_use = 0
    now, most = resource.getrlimit(resource.RLIMIT_DATA)
    if now == resource.RLIM_INFINITY or now > in_use + max_bytes:
        resource.setrlimit(resource.RLIMIT_DATA, (in_use + max_bytes, most))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, (now, most))


def _last_words(done: subprocess.CompletedProcess[bytes]) -> str:
    """The last line of a process that ended itself: ggml's failed assertion, or the message of a
    C++ exception."""
    words = last_line(done.stderr)
    if words or done.returncode >= 0:
        return words
    return signal.Signals(-done.returncode).name
