"""Runs a command so that each of its processes that uses llama.cpp records a log.

The command gets the standard streams, signals and environment of this process, with the recorder's
variables added. Its exit status is passed on.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from llamacpp_instr.base.errors import UsageError
from llamacpp_instr.base.patterns import regular_expression
from llamacpp_instr.recording.session import (
    OnLogError,
    check_log_path,
    check_replaceable,
    later_parts,
    logs_of,
    shortcoming,
)
from llamacpp_instr.run.program import check_library, is_instrumented

_FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1,
              signal.SIGUSR2)  # fmt: skip

_LOOK_S = 0.1
"""how often the program is looked at; while it is young, after each tenth of its age"""


@dataclass(frozen=True)
class Executed:
    """The result of a command."""

    exit_code: int
    """the command's exit status, or 128 + the signal that ended it"""
    logs: dict[Path, str]
    """the logs written while it ran, ordered by name and part -> what is missing in each, or an
    empty string"""
    other_library: Path | None
    """a libllama without the recorder that a process of the command was seen to have loaded"""


def execute(
    command: Sequence[str],
    log: str | None = None,
    level: str = "detailed",
    stats: str | None = None,
    on_log_error: OnLogError = "continue",
    rotate: int | None = None,
    force: bool = False,
    keep_args: bool = False,
) -> Executed:
    """Run `command` and wait for it.

    `log` is the path of the log; `%p` in it is replaced by the process id. It defaults to the
    command's name with the process id. A log that has grown past `rotate` bytes ends, and the next
    step begins another one: `session.log`, `session.part2.log`, … With `force` the recorder
    replaces an existing log and deletes its later parts, as soon as it has a new one. The log
    contains the arguments of its process without secrets, unless `keep_args` is set.

    Raises `UsageError` if the command is empty or the log cannot be written, `NativeError` if the
    command's Python would load an unpatched library.
    """
    if log == "-":
        raise UsageError("standard output is the command's; give --log the name of a file")
    program = _find(command)
    expression = _expression(stats)
    check_library(program, command[1:])
    target = log_target(command, log)
    if "%p" in str(target.parent):
        raise UsageError(f"{target.parent}: the log's directory cannot hold %p, only its name can")
    check_log_path(target, force, "--force")
    old_parts = later_parts(target) if rotate and "%p" not in target.name else []
    if old_parts and not force:
        raise UsageError(f"{old_parts[0]} exists; use --force to overwrite the log and its parts")
    for part in old_parts:
        check_replaceable(part)
    environment = {
        **os.environ,
        "LLAMA_INSTR_LOG": str(target),
        "LLAMA_INSTR_LEVEL": level,
        "LLAMA_INSTR_STATS": expression,
        "LLAMA_INSTR_ON_ERROR": on_log_error,
        "LLAMA_INSTR_ROTATE": str(rotate or 0),
        "LLAMA_INSTR_KEEP_ARGS": "1" if keep_args else "",
        "LLAMA_INSTR_OVERWRITE": _identity(target) if force else "",
    }
    before = logs_of(target)
    status, library = _run(program, command, environment)
    after = logs_of(target)
    written = [path for path, identity in after.items() if before.get(path) != identity]
    return Executed(
        exit_code=os.waitstatus_to_exitcode(status)
        if os.WIFEXITED(status)
        else 128 + os.WTERMSIG(status),
        logs={path: shortcoming(path) for path in sorted(written, key=_order)},
        other_library=None if library is None or is_instrumented(library) else library,
    )


def log_target(command: Sequence[str], log: str | None = None) -> Path:
    """The path of the command's log, in which %p is the process id. It is absolute, because the
    command may change its working directory."""
    return Path.cwd() / (log or f"{Path(command[0]).stem if command else ''}-%p.log")


def _identity(log: Path) -> str:
    """Device and inode of the log that may be replaced, so that only one of several processes
    replaces it; 0:0 if it does not exist."""
    if not log.is_file():
        return "0:0"
    found = log.stat()
    return f"{found.st_dev}:{found.st_ino}"


def _order(path: Path) -> list[str | int]:
    """Sort key: by name, with numbers by value, so that part 10 comes after part 9."""
    return [int(word) if word.isdecimal() else word for word in re.split(r"(\d+)", path.name)]


def _find(command: Sequence[str]) -> str:
    if not command:
        raise UsageError("no command is given; write it after --")
    program = shutil.which(command[0])
    if program is None:
        reason = "is not executable" if Path(command[0]).exists() else "was not found"
        raise UsageError(f"the command {command[0]!r} {reason}")
    return program


def _expression(stats: str | None) -> str:
    expression = regular_expression("--stats", stats) if stats else ""
    # the library's syntax is ECMAScript; it cannot compile what Python cannot
    try:
        re.compile(expression)
    except re.error as error:
        raise UsageError(f"--stats {stats!r} is not a regular expression: {error}") from None
    return expression


def _run(
    program: str, command: Sequence[str], environment: dict[str, str]
) -> tuple[int, Path | None]:
    """Run the program to its end; returns the status from `waitpid`, and the first libllama that
    was seen in it."""
    awaited = {signal.SIGCHLD, *_FORWARDED}
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, awaited)
    library = None
    try:
        child = os.posix_spawn(
            program, list(command), environment,
            setsigmask=mask,
            # Python ignores these signals; a program expects the default
            setsigdef=[signal.SIGPIPE, signal.SIGXFSZ],
        )  # fmt: skip
        begin = time.monotonic()
        while True:
            look = min(_LOOK_S, 0.001 + (time.monotonic() - begin) / 10)
            number, from_kernel = _wait_for_signal(awaited, look)
            library = library or _find_library(child)
            if number == signal.SIGCHLD:
                pid, status = os.waitpid(child, os.WNOHANG)
                if pid == child:
                    return status, library
            elif not from_kernel:
                os.kill(child, number)
            # the terminal has already sent its signals (Ctrl-C) to the child as well
    except OSError as error:
        raise UsageError(f"{program} cannot be run: {error.strerror}") from None
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def _wait_for_signal(awaited: set[signal.Signals], seconds: float) -> tuple[int, bool]:
    """The next signal's number, 0 if none came in time, and whether the kernel sent it rather than
    a process."""
    if hasattr(signal, "sigtimedwait"):
        info = signal.sigtimedwait(awaited, seconds)
        return (info.si_signo, info.si_code > 0) if info else (0, True)
    return signal.sigwait(awaited), False


def _find_library(pid: int) -> Path | None:
    """The libllama that a process, or one that it started, has loaded; None without Linux's /proc,
    and of another user's process."""
    try:
        maps = Path(f"/proc/{pid}/maps").read_text(errors="surrogateescape")
        if match := re.search(r"/(.*/)?libllama\.so[\w.]*$", maps, re.MULTILINE):
            return Path(match[0])
        tasks = Path(f"/proc/{pid}/task").glob("*/children")
        children = [child for task in tasks for child in task.read_text().split()]
    except OSError:  # it has ended
        return None
    return next((found for child in children if (found := _find_library(int(child)))), None)
