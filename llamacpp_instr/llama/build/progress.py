"""Shows the progress of a build, from the lines that ninja or make print.

An estimate is marked with "about". On a terminal one line is redrawn; elsewhere a line is printed
every ten seconds.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import TextIO

# CPU time of a build without ccache, measured on a server core; a first guess on other machines
CPU_SECONDS = 420.0
PORTABLE_CPU_SECONDS = 900.0
# unpacking, the isolated build environment, CMake's configuration
_SECONDS_BEFORE_COMPILING = 20.0
_PLAIN_INTERVAL = 10.0

_NINJA = re.compile(r"\s*\[(\d+)/(\d+)\]")
_MAKE = re.compile(r"\s*\[\s*(\d+)%\]")


def parse_progress(line: str) -> float | None:
    """The completed share, 0 to 1, from a line of ninja (`[3/193] …`) or make (`[ 12%] …`)."""
    match = _NINJA.match(line)
    if match:
        done, total = int(match[1]), int(match[2])
        return done / total if 0 < done <= total else None
    match = _MAKE.match(line)
    return min(int(match[1]), 100) / 100 if match else None


def about(seconds: float) -> str:
    """A duration with the precision of an estimate: `about 40 s`, `about 6 min`."""
    if seconds < 90:
        return f"about {max(10, round(seconds / 10) * 10)} s"
    return f"about {round(seconds / 60)} min"


class BuildProgress:
    """The progress line of one build."""

    def __init__(
        self,
        stream: TextIO,
        jobs: int,
        *,
        portable: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.jobs = jobs
        self._stream = stream
        self._clock = clock
        self._prior = (PORTABLE_CPU_SECONDS if portable else CPU_SECONDS) / jobs
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
        text = f"compiling: {share:4.0%}, {about(left)} left" if left else "packing the wheel"
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
    measured = elapsed / share
    return (1 - share) * ((1 - share) * prior + share * measured)
