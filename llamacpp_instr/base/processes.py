"""Processes as the operating system sees them: limits, signals, and the libraries that they load.

Invariant: no other module asks a system for these. The code for Linux is next to that for macOS;
the code for macOS has never run.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

from llamacpp_instr.base.terminal import handled

OUT_OF_MEMORY = 77
"""exit status of a process that took more than `limited_memory` allows, on systems where no limit
makes its allocations fail"""

_LOOK_S = 0.01
"""how often a process checks itself, and its parent"""

Wait = Callable[[float], tuple[int, bool]]
"""called with seconds; returns the number of the next signal, 0 if none came in time, and whether
the kernel sent it, not a process"""


def no_core_dump() -> None:
    """Write no core file when a signal ends this process."""
    with contextlib.suppress(ImportError):  # not on this operating system
        import resource

        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def end_with(parent: int) -> None:
    """End this process when its parent, the process with that number, ends in any way."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    else:
        _end_when(lambda: os.getppid() != parent, 1, threading.Event())
    if os.getppid() != parent:  # it has ended already
        os._exit(1)


@contextlib.contextmanager
def limited_memory(max_bytes: int) -> Iterator[None]:
    """Limit the memory that this process may allocate in the block, beyond what it has. On Linux
    an allocation fails; on macOS, which limits no mappings, the process ends with OUT_OF_MEMORY
    once it has written to more."""
    try:
        import resource
    except ImportError:  # not on this operating system
        yield
        return
    if sys.platform == "darwin":
        with _watched_memory(max_bytes):
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


@contextlib.contextmanager
def _watched_memory(max_bytes: int) -> Iterator[None]:
    over, limit = threading.Event(), _most_resident() + max_bytes
    _end_when(lambda: _most_resident() > limit, OUT_OF_MEMORY, over)
    try:
        yield
    finally:
        over.set()


def _most_resident() -> int:
    """The largest number of bytes of memory that this process has had at once."""
    import resource

    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def _end_when(happened: Callable[[], bool], status: int, over: threading.Event) -> None:
    """End this process with `status` once `happened` is true, unless `over` is set before that."""

    def look() -> None:
        while not over.wait(_LOOK_S):
            if happened():
                os._exit(status)

    threading.Thread(target=look, daemon=True).start()


@contextlib.contextmanager
def waking(numbers: Sequence[signal.Signals]) -> Iterator[tuple[Iterable[int], Wait]]:
    """`awaited` without `sigtimedwait`. An ignored signal stays ignored, also in a child. The
    sender of a signal is unknown: it counts as a key of the terminal if it may have been one."""
    receiver, sender = socket.socketpair()

    def wait(seconds: float) -> tuple[int, bool]:
        if not select.select([receiver], [], [], seconds)[0]:
            return 0, True
        number = receiver.recv(1)[0]
        if number not in numbers:
            return 0, True
        return number, number in (signal.SIGINT, signal.SIGQUIT) and _has_terminal()

    with receiver, sender:
        sender.setblocking(False)
        before = signal.set_wakeup_fd(sender.fileno(), warn_on_full_buffer=False)
        names = [number.name for number in numbers]
        try:
            with handled(lambda *_: None, *names, only=lambda of: of not in (None, signal.SIG_IGN)):
                yield signal.pthread_sigmask(signal.SIG_BLOCK, ()), wait
        finally:
            signal.set_wakeup_fd(before)


if sys.platform == "linux":

    @contextlib.contextmanager
    def awaited(numbers: Sequence[signal.Signals]) -> Iterator[tuple[Iterable[int], Wait]]:
        """Inside, these signals only wake the function that waits for them. Yields the previous
        mask of signals, for a child, and that function. For the main thread."""
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, numbers)

        def wait(seconds: float) -> tuple[int, bool]:
            info = signal.sigtimedwait(numbers, seconds)
            return (info.si_signo, info.si_code > 0) if info else (0, True)

        try:
            yield mask, wait
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)

else:
    awaited = waking


def _has_terminal() -> bool:
    """Whether the keys of a terminal send their signals to this process."""
    try:
        terminal = os.open("/dev/tty", os.O_RDONLY)
    except OSError:
        return False
    try:
        return os.tcgetpgrp(terminal) == os.getpgrp()
    finally:
        os.close(terminal)


def is_ours(peer: tuple[str, int], own: tuple[str, int]) -> bool:
    """Whether a connection comes from a process of our user, as Linux's table of sockets shows.
    On other systems, which have no such table, every connection counts as ours."""
    table = Path("/proc/net/tcp")
    if not table.exists():
        return True
    ends = f"{_as_in_table(peer)} {_as_in_table(own)}"
    for line in table.read_text().splitlines()[1:]:
        fields = line.split()
        if " ".join(fields[1:3]) == ends:
            return int(fields[7]) == os.getuid()
    return False


def _as_in_table(address: tuple[str, int]) -> str:
    number = int.from_bytes(socket.inet_aton(address[0]), sys.byteorder)
    return f"{number:08X}:{address[1]:04X}"


# --- libraries ---


def search_first(folder: str) -> dict[str, str]:
    """The variable that makes a program look for its libraries in `folder` first. macOS removes it
    when it starts one of its own programs, such as /bin/sh or /usr/bin/env."""
    name = "DYLD_LIBRARY_PATH" if sys.platform == "darwin" else "LD_LIBRARY_PATH"
    return {name: os.pathsep.join(filter(None, [folder, os.environ.get(name)]))}


def loaded_library(pid: int, name: str) -> Path | None:
    """The library (`libllama`) that a process, or one that it started, has loaded, if /proc shows
    that."""
    try:
        maps = Path(f"/proc/{pid}/maps").read_text(errors="surrogateescape")
        if match := re.search(rf"/(.*/)?{name}\.so[\w.]*$", maps, re.MULTILINE):
            return Path(match[0])
        tasks = Path(f"/proc/{pid}/task").glob("*/children")
        children = [child for task in tasks for child in task.read_text().split()]
    except OSError:  # it has ended
        return None
    return next((of for child in children if (of := loaded_library(int(child), name))), None)


def linked_library(program: str, name: str) -> Path | None:
    """The library (`libllama`) that a program is linked with, None if it is not."""
    if sys.platform == "darwin":
        about = output_of("otool", "-L", program), output_of("otool", "-l", program)
        return next(filter(Path.exists, linked_on_macos(*about, program, name)), None)
    listed = output_of("ldd", program)
    found = re.search(rf"^\s*{name}\.so[\w.]* => (/.*) \(", listed, re.MULTILINE)
    return Path(found[1]) if found else None


def output_of(*command: str) -> str:
    """The output of a system program; empty if the program is missing."""
    try:
        return subprocess.run(
            command, capture_output=True, text=True, errors="replace", check=False
        ).stdout
    except OSError:
        return ""


def linked_on_macos(libraries: str, commands: str, program: str, name: str) -> list[Path]:
    """Where macOS looks for a library of a program, from what `otool -L` and `otool -l` print. A
    path that begins with @rpath is looked for in the directory of each LC_RPATH: dyld(1)."""
    found = re.search(rf"^\s+(\S*\b{name}[\w.]*\.dylib) \(compat", libraries, re.MULTILINE)
    if not found:
        return []
    paths = [found[1]]
    if found[1].startswith("@rpath/"):
        folders = re.findall(r"cmd LC_RPATH\n\s*cmdsize \d+\n\s*path (.*) \(offset", commands)
        paths = [found[1].replace("@rpath", folder) for folder in folders]
    own = str(Path(program).resolve().parent)
    return [Path(re.sub("^@(executable|loader)_path", lambda _: own, path)) for path in paths]
