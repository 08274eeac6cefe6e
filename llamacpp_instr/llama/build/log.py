"""Handles the output of a build: logs it, finds the cause of a failure in it, shows the progress.

If a command fails, the user gets one line: the command, what to do, and where the log is.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TextIO

from llamacpp_instr.base.errors import BuildError
from llamacpp_instr.base.machine import INSTALL_COMPILER

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
        f"no working C++ compiler was found; install one ({INSTALL_COMPILER})",
    ),
    (
        r"Could NOT find Vulkan|provided by \"SPIRV-Headers\"",
        "Vulkan's loader, headers or shader compiler are missing; install them (Debian, Ubuntu: "
        "apt install libvulkan-dev glslc spirv-headers)",
    ),
    (
        r"LayerSettingEXT\W+is not a member",
        "the headers of Vulkan are too old; llama.cpp needs those of Debian 13 (1.4.309) or newer",
    ),
    (
        r"CUDA Toolkit not found|Failed to find nvcc|No CMAKE_CUDA_COMPILER|CUDA::cublas",
        "CUDA's compiler or libraries were not found; install the CUDA toolkit, with nvcc in PATH",
    ),
    (
        r"BLAS not found",
        "OpenBLAS was not found; install it (Debian, Ubuntu: apt install libopenblas-dev)",
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


# CPU time of a build without ccache, measured on a server core; a first guess on other machines
CPU_SECONDS = 420.0
PORTABLE_CPU_SECONDS = 900.0
PROGRAMS_CPU_SECONDS = 420.0
# unpacking, the isolated build environment, CMake's configuration
_SECONDS_BEFORE_COMPILING = 20.0
_PLAIN_INTERVAL = 10.0

_STEP = re.compile(r"\s*\[(?:(\d+)/(\d+)|\s*(\d+)%)\]")


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


def parse_progress(line: str) -> float | None:
    """The completed share, 0 to 1, from a line of ninja (`[3/193] …`) or make (`[ 12%] …`)."""
    match = _STEP.match(line)
    if match is None:
        return None
    if match[3]:
        return min(int(match[3]), 100) / 100
    done, total = int(match[1]), int(match[2])
    return done / total if 0 < done <= total else None


def about(seconds: float) -> str:
    """A duration with the precision of an estimate: `about 40 s`, `about 6 min`."""
    if seconds < 90:
        return f"about {max(10, round(seconds / 10) * 10)} s"
    return f"about {round(seconds / 60)} min"


class BuildProgress:
    """The progress of a build, from the lines that ninja or make print. On a terminal one line is
    redrawn; elsewhere a line is printed every ten seconds. An estimate is marked with "about"."""

    def __init__(
        self,
        stream: TextIO,
        jobs: int,
        cpu_seconds: float = CPU_SECONDS,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.jobs = jobs
        self._stream = stream
        self._clock = clock
        self._prior = cpu_seconds / jobs
        self._tty = stream.isatty()
        self._compiling_since: float | None = None
        self._shown_at = float("-inf")
        self._drawn = False

    def begin(self, what: str, log: Path) -> None:
        """Print what is being built and roughly how long it takes."""
        jobs = "1 job" if self.jobs == 1 else f"{self.jobs} jobs"
        whole = about(_SECONDS_BEFORE_COMPILING + self._prior)
        print(f"building {what} with {jobs}: {whole}", file=self._stream)
        print(f"the build log is {log}", file=self._stream, flush=True)

    def see(self, line: str) -> None:
        """Process a line of the build's output."""
        share = parse_progress(line)
        if share is None:
            return
        now = self._clock()
        if self._compiling_since is None:
            self._compiling_since = now
        if not self._tty and now - self._shown_at < _PLAIN_INTERVAL:
            return
        self._shown_at = now
        left = remaining_seconds(share, now - self._compiling_since, self._prior)
        text = f"compiling: {share:4.0%}, {about(left)} left" if left else "packing"
        if self._tty:
            self._stream.write(f"\r\x1b[K{text}")
            self._stream.flush()
            self._drawn = True
        else:
            print(text, file=self._stream, flush=True)

    def clear(self) -> None:
        """Erase the redrawn line."""
        if self._drawn:
            self._stream.write("\r\x1b[K")
            self._stream.flush()
            self._drawn = False


def remaining_seconds(share: float, elapsed: float, prior: float) -> float:
    """The remaining seconds of a build that completed `share` in `elapsed` seconds.

    The total is a mean of the prior estimate and the measured one, weighted by the completed
    share: the steps are too uneven to extrapolate from the first few.
    """
    if share <= 0:
        return prior
    return (1 - share) * ((1 - share) * prior + elapsed)
