"""Runs a command so that each of its processes that uses llama.cpp records a log.

The command gets the standard streams, signals and environment of this process, with the recorder's
variables added. Its exit status is passed on. A command whose own Python would load another
llama_cpp is refused before any of its code runs. A llama.cpp program that was built elsewhere runs
with the recorder's libraries if it is from the same commit, and is refused otherwise.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

from llamacpp_instr.base.errors import NativeError, UsageError
from llamacpp_instr.base.patterns import regular_expression
from llamacpp_instr.base.processes import awaited, linked_library, loaded_library, search_first
from llamacpp_instr.base.terminal import notice
from llamacpp_instr.llama import native
from llamacpp_instr.llama.build.programs import PROGRAMS, find_program
from llamacpp_instr.recording.session import (
    OnLogError,
    check_log_path,
    check_replaceable,
    later_parts,
    logs_of,
    shortcoming,
)

_FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1,
              signal.SIGUSR2)  # fmt: skip

_LOOK_S = 0.1
"""the interval at which the program is looked at; while it is young, a tenth of its age"""


def execute(
    command: Sequence[str],
    log: str | None = None,
    level: str = "detailed",
    stats: str | None = None,
    on_log_error: OnLogError = "continue",
    rotate: int | None = None,
    force: bool = False,
    keep_args: bool = False,
) -> int:
    """Run `command` and wait for it; returns its exit status, or 128 + the signal that ended it.
    Prints the path of each log that was written meanwhile, and what is missing from it.

    The options are those of `instr exec`. A log that has grown past `rotate` bytes ends, and the
    next step begins another one: `session.log`, `session.part2.log`, … With `force` the recorder
    replaces an existing log and deletes its later parts, as soon as it has a new one.

    Raises `UsageError` if the command is empty or the log cannot be written, `NativeError` if the
    command's Python would load an unpatched library.
    """
    if log == "-":
        raise UsageError("standard output belongs to the command; name a file with --log")
    program = _find(command)
    expression = _expression(stats)
    check_library(program, command[1:])
    libraries = patched_libraries(program)
    target = log_target(command, log)
    if "%p" in str(target.parent):
        raise UsageError(f"{target.parent}: only the log's name can contain %p, not its directory")
    check_log_path(target, force, "--force")
    old_parts = later_parts(target) if rotate and "%p" not in target.name else []
    if old_parts and not force:
        raise UsageError(f"{old_parts[0]} exists; use --force to overwrite the log and its parts")
    for part in old_parts:
        check_replaceable(part)
    environment = {
        **os.environ,
        **libraries,
        "LLAMA_INSTR_LOG": str(target),
        "LLAMA_INSTR_LEVEL": level,
        "LLAMA_INSTR_STATS": expression,
        "LLAMA_INSTR_ON_ERROR": on_log_error,
        "LLAMA_INSTR_ROTATE": str(rotate or 0),
        "LLAMA_INSTR_KEEP_ARGS": "1" if keep_args else "",
        "LLAMA_INSTR_OVERWRITE": identity(target) if force else "",
    }
    before = logs_of(target)
    status, library = _run(program, command, environment)
    after = logs_of(target)
    written = [path for path, of in after.items() if before.get(path) != of]
    for path in sorted(written, key=_order):
        missing = shortcoming(path)
        notice(f"incomplete log: {path}: {missing}" if missing else f"log: {path}")
    if not written and library is not None and not is_instrumented(library):
        notice(
            f"no log was written: the program loaded {library}, which is not the instrumented "
            "library; run `instr build` in its environment"
        )
    elif not written:
        notice(
            "no log was written: no process of the command loaded a model with the llama_cpp of "
            "`instr build`, or it does its own recording, or no log could be created"
        )
    ended = os.WIFEXITED(status)
    return os.waitstatus_to_exitcode(status) if ended else 128 + os.WTERMSIG(status)


def log_target(command: Sequence[str], log: str | None = None) -> Path:
    """The path of the command's log, in which %p is the process id. It is absolute, because the
    command may change its working directory."""
    return Path.cwd() / (log or f"{Path(command[0]).stem if command else ''}-%p.log")


def identity(log: Path) -> str:
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
    ours = find_program(command[0])
    program = str(ours) if ours else shutil.which(command[0])
    if program is None:
        reason = "is not executable" if Path(command[0]).exists() else "was not found"
        cure = "; `instr build --programs` builds it" if command[0] in PROGRAMS else ""
        raise UsageError(f"the command {command[0]!r} {reason}{cure}")
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
    """Run the program; returns the status of `waitpid`, and the first libllama seen in it."""
    library = None
    with awaited([signal.SIGCHLD, *_FORWARDED]) as (mask, wait):
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
                number, from_kernel = wait(look)
                library = library or loaded_library(child, "libllama")
                if number == signal.SIGCHLD:
                    pid, status = os.waitpid(child, os.WNOHANG)
                    if pid == child:
                        return status, library
                elif not from_kernel:
                    os.kill(child, number)
                # the terminal has already sent its signals (Ctrl-C) to the child as well
        except OSError as error:
            raise UsageError(f"{program} cannot be run: {error.strerror}") from None


# Run by the command's interpreter; its arguments are the first entries of the search path. The
# working directory is removed before any import, so that no module there runs.
_PROBE = """
import sys
if sys.path[0] == "":
    del sys.path[0]
import importlib.util, os, pathlib
if not getattr(sys.flags, "safe_path", sys.flags.isolated):
    sys.path[:0] = sys.argv[1:]
spec = importlib.util.find_spec("llama_cpp")
if spec and spec.origin:
    print(os.environ.get("LLAMA_CPP_LIB_PATH") or pathlib.Path(spec.origin).parent / "lib")
"""


def check_library(program: str, arguments: Sequence[str]) -> None:
    """Raise `NativeError` if `program` is a Python that would load an unpatched library."""
    interpreter = program
    if not re.fullmatch(r"python[\d.]*", Path(program).name):
        interpreter, arguments = _named_interpreter(Path(program)), [program]
        if not interpreter:
            return
    options, first = _search_path(arguments)
    try:
        probe = subprocess.run(
            [interpreter, *options, "-c", _PROBE, first],
            capture_output=True, text=True, errors="surrogateescape", timeout=30, check=False,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired):
        return
    folder = probe.stdout.strip()
    library = next(Path(folder).glob("libllama.*"), None) if folder else None
    if library is not None and not is_instrumented(library):
        raise NativeError(
            f"the llama-cpp-python that {interpreter} loads is not the patched one "
            f"({library}); run `instr build` in its environment"
        )


def patched_libraries(program: str) -> dict[str, str]:
    """The variable with which a llama.cpp program that was built elsewhere loads the patched
    libraries, which have the same sonames; empty for any other program. Raises `NativeError` if the
    program is from another commit."""
    linked = linked_library(program, "libllama")
    if linked is None or is_instrumented(linked):
        return {}
    ours = native.load()
    folder, pinned = str(ours.path.parent), str(ours.info()["commit"])
    try:
        asked = subprocess.run(
            [program, "--version"], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT, text=True, errors="replace", timeout=30, check=False,
        ).stdout  # fmt: skip
    except (OSError, subprocess.TimeoutExpired):
        asked = ""
    found = re.search(r"^version: .*\b(?:commit |\()([0-9a-f]{7,40})\)", asked, re.MULTILINE)
    commit = found[1] if found else "unknown"
    if not pinned.startswith(commit):
        raise NativeError(
            f"{program} is from another llama.cpp (commit {commit}) than the recorder "
            f"({pinned[:12]}); `instr build --programs` builds llama.cpp's programs with it"
        )
    notice(f"{program} runs with the libraries in {folder}")
    return search_first(folder)


def is_instrumented(library: Path) -> bool:
    """Whether a libllama is the patched one, or no longer exists."""
    return not library.is_file() or b"llama_instr_abi" in library.read_bytes()


def _search_path(arguments: Sequence[str]) -> tuple[list[str], str]:
    """From a Python's arguments: the options that change the module search path, and the directory
    of the program, which comes first in it (empty for the working directory)."""
    options: list[str] = []
    rest = iter(arguments)
    for argument in rest:
        if not argument.startswith("-") or argument == "-":
            script = Path(argument).resolve()
            first = "" if argument == "-" else str(script if script.is_dir() else script.parent)
            return options, first
        if argument == "--check-hash-based-pycs":
            next(rest, None)
        for at, letter in enumerate("" if argument.startswith("--") else argument, start=1):
            if letter in "cm":
                return options, ""
            if letter in "WX":
                if at == len(argument):
                    next(rest, None)  # its value
                break
            if letter in "IEsSP":
                options.append(f"-{letter}")
    return options, ""


def _named_interpreter(program: Path) -> str:
    """The Python interpreter in a script's first line; empty if there is none."""
    with program.open("rb") as file:
        first = file.readline(512).decode(errors="replace")
    match = re.match(r"#!\s*(?:/usr/bin/env\s+)?(\S*python[\d.]*)\s*$", first)
    return (shutil.which(match[1]) if match else None) or ""
