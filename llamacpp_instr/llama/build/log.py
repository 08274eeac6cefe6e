"""Runs a build's commands, keeps their output in one log, and finds the cause of a failure.

If a command fails, the user gets one line: the command, what to do, and where the log is.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from llamacpp_instr.base.errors import BuildError

# Patterns in a log, and what to do about them. The first that matches is the cause, so errors that
# end a build come before those that pip only warns about and retries.
_CAUSES: tuple[tuple[str, str], ...] = (
    (
        r"No space left on device",
        "the disk is full; free some space, or set LLAMACPP_INSTR_CACHE to another disk",
    ),
    (
        r"Killed signal terminated program|cc1(?:plus)?: out of memory",
        "the compiler ran out of memory; try again with --jobs 1",
    ),
    (
        r"externally-managed-environment",
        "this Python belongs to the system; work in a virtual environment (python3 -m venv .venv)",
    ),
    (
        r"No CMAKE_(?:C|CXX)_COMPILER could be found|is not able to compile a simple test program",
        "no working C++ compiler was found; install one (Debian, Ubuntu: apt install g++)",
    ),
    (r"(?:^|\s)(?:\S+:\d+(?::\d+)?: )(?:fatal )?error: .*", "{line}"),
    (r"^\s*CMake Error.*", "{line}"),
    (r"undefined reference to .*", "{line}"),
    (
        r"(?:Permission denied|Read-only file system).*",
        "a file could not be written ({line}); work in a virtual environment of your own",
    ),
    (
        r"NewConnectionError|Temporary failure in name resolution|ConnectTimeoutError|ReadTimeout",
        "the package index cannot be reached; check the network and pip's settings",
    ),
    (
        r"Could not find a version that satisfies the requirement (?P<name>[^\s(]+)",
        "the package index has no {name}; check pip's settings (pip config list)",
    ),
    (r"^\s*(?:error|ERROR):? (?!subprocess-exited|Failed building|Failed to build).*", "{line}"),
)


class BuildLog:
    """The log of one build; a new build overwrites it."""

    def __init__(self, path: Path) -> None:
        """Create `path` and its directory. Raises BuildError if it cannot be written."""
        self.path = path
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(b"")
        except OSError as error:
            raise BuildError(
                f"{error.filename}: {error.strerror}; set LLAMACPP_INSTR_CACHE to a directory "
                "where you can write"
            ) from None

    def run(
        self,
        command: Sequence[str],
        *,
        cwd: Path | None = None,
        env: Mapping[str, str | None] | None = None,
        on_line: Callable[[str], None] | None = None,
    ) -> tuple[int, str]:
        """Run a command; returns its exit status and its output, which also goes to the log.

        `env` changes the environment (None removes a variable). `on_line` gets each line as it is
        printed. Raises BuildError if the program cannot be started.
        """
        printed: list[str] = []
        whole = {**os.environ, **(env or {})}
        with self.path.open("a", encoding="utf-8") as log:
            log.write(f"$ {shlex.join(command)}\n")
            try:
                process = subprocess.Popen(
                    command,
                    cwd=cwd,
                    env={key: value for key, value in whole.items() if value is not None},
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    encoding="utf-8",
                    errors="replace",
                )
            except OSError as error:
                raise BuildError(f"cannot run {command[0]}: {error.strerror}") from None
            with process:
                assert process.stdout is not None
                for line in process.stdout:
                    log.write(line)
                    log.flush()
                    printed.append(line)
                    if on_line is not None:
                        on_line(line)
            log.write(f"# exit status {process.returncode}\n")
        return process.returncode, "".join(printed)

    def failure(self, what: str, output: str) -> BuildError:
        """The error for a failed command: `what` failed, the cause from `output`, and the log."""
        return BuildError(f"{what}: {find_cause(output)}; the full log is {self.path}")


def find_cause(output: str) -> str:
    """The line of a build's output that explains its failure, or advice if a cause is known."""
    for pattern, advice in _CAUSES:
        match = re.search(pattern, output, re.MULTILINE)
        if match:
            line = match.group(0).strip()
            return advice.format(line=line, **match.groupdict())
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    return lines[-1] if lines else "it printed nothing"
