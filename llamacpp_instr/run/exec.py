"""Runs a command so that every process of it that uses llama.cpp records a log of its own.

The command sees its own standard streams, signals and environment, the recorder's variables added;
its exit code is passed on.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from llamacpp_instr.errors import UsageError
from llamacpp_instr.patterns import check_pattern
from llamacpp_instr.recording.files import check_replaceable, later_parts, logs_of, shortcoming
from llamacpp_instr.recording.session import OnLogError, check_log_path
from llamacpp_instr.run.program import check_library

_FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1,
              signal.SIGUSR2)  # fmt: skip


@dataclass(frozen=True)
class Executed:
    """What became of a command."""

    exit_code: int
    """its own, or 128 + the signal that ended it"""
    logs: dict[Path, str]
    """written while it ran, by name and part; with what is missing in each, empty if nothing"""


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

    `log` is the path of the log, in which `%p` stands for the process id; left out, it is the
    command's name with the process id. A log that has grown past `rotate` bytes ends, and the
    next step begins another one: `session.log`, `session.part2.log`, … With `force` the recorder
    replaces an existing log, and deletes its later parts, once it has another one to put there. The
    log holds the arguments of its process without secrets, unless `keep_args` is set.

    Raises `UsageError` when there is nothing to run or the log cannot be written, `NativeError`
    when the command's Python would load an unpatched library.
    """
    if log == "-":
        raise UsageError("standard output is the command's; give --log the name of a file")
    program = _find(command)
    _check_pattern(stats)
    check_library(program, command[1:])
    # the command may change its directory; the log stays where it was asked for
    target = Path.cwd() / (log or f"{Path(command[0]).stem}-%p.log")
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
        "LLAMA_INSTR_STATS": stats or "",
        "LLAMA_INSTR_ON_ERROR": on_log_error,
        "LLAMA_INSTR_ROTATE": str(rotate or 0),
        "LLAMA_INSTR_KEEP_ARGS": "1" if keep_args else "",
        "LLAMA_INSTR_OVERWRITE": _identity(target) if force else "",
    }
    before = logs_of(target)
    status = _run(program, command, environment)
    after = logs_of(target)
    written = [path for path, identity in after.items() if before.get(path) != identity]
    return Executed(
        exit_code=os.waitstatus_to_exitcode(status)
        if os.WIFEXITED(status)
        else 128 + os.WTERMSIG(status),
        logs={path: shortcoming(path) for path in sorted(written, key=_order)},
    )


def _identity(log: Path) -> str:
    """What the recorder knows the file by that it may replace, so that of several processes one
    does; 0:0 when there is none."""
    if not log.is_file():
        return "0:0"
    found = log.stat()
    return f"{found.st_dev}:{found.st_ino}"


def _order(path: Path) -> list[str | int]:
    """By name, numbers by their size: part 10 comes after part 9."""
    return [int(word) if word.isdecimal() else word for word in re.split(r"(\d+)", path.name)]


def _find(command: Sequence[str]) -> str:
    if not command:
        raise UsageError("there is no command to run; write it after --")
    program = shutil.which(command[0])
    if program is None:
        reason = "is not executable" if Path(command[0]).exists() else "was not found"
        raise UsageError(f"the command {command[0]!r} {reason}")
    return program


def _check_pattern(stats: str | None) -> None:
    check_pattern("--stats", stats or "")
    # the library takes ECMAScript's syntax; what Python cannot read, it cannot either
    try:
        re.compile(stats or "")
    except re.error as error:
        raise UsageError(f"--stats {stats!r} is no regular expression: {error}") from None


def _run(program: str, command: Sequence[str], environment: dict[str, str]) -> int:
    """Run to the end; the status as `waitpid` gives it."""
    awaited = {signal.SIGCHLD, *_FORWARDED}
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, awaited)
    try:
        child = os.posix_spawn(
            program, list(command), environment,
            setsigmask=mask,
            # Python ignores these; a program expects them to be as usual
            setsigdef=[signal.SIGPIPE, signal.SIGXFSZ],
        )  # fmt: skip
        while True:
            number, from_kernel = _wait_for_signal(awaited)
            if number == signal.SIGCHLD:
                pid, status = os.waitpid(child, os.WNOHANG)
                if pid == child:
                    return status
            elif not from_kernel:
                os.kill(child, number)
            # what the terminal sends (Ctrl-C) it has sent to the child as well
    except OSError as error:
        raise UsageError(f"{program} cannot be run: {error.strerror}") from None
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def _wait_for_signal(awaited: set[signal.Signals]) -> tuple[int, bool]:
    """The next signal's number and whether the kernel sent it, not a process."""
    if hasattr(signal, "sigwaitinfo"):
        info = signal.sigwaitinfo(awaited)
        return info.si_signo, info.si_code > 0
    return signal.sigwait(awaited), False
