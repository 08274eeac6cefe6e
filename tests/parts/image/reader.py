"""A user who reads a page and types its lines: without root, in a checkout, with a home."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import re
import select
import shutil
import signal
import subprocess
import termios
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from tests.kit.native_kit import DEMO, ROOT

UID, GID = 54321, 54322
"""ids without a name in the image and on this machine"""

SECONDS = 120
"""time limit for a line, and for a pattern on the screen"""


class Reader:
    """A home and a checkout in which the lines are typed; both contain `models/model.gguf`."""

    def __init__(self, place: Path, host: str, compose: Path, build_seconds: int) -> None:
        self.checkout, self._home = place / "checkout", place / "home"
        self._build_seconds = build_seconds
        copy_checkout(self.checkout)
        plugins = self._home / ".docker" / "cli-plugins"
        plugins.mkdir(parents=True)
        (plugins / "docker-compose").symlink_to(compose)
        for folder in (self._home, self.checkout):
            (folder / "models").mkdir()
            shutil.copyfile(DEMO, folder / "models" / "model.gguf")
        for path in (place, *place.rglob("*")):
            os.chown(path, UID, GID, follow_symlinks=False)
        dropped = ("DOCKER_", "COMPOSE_", "INSTR_", "MAKE", "MFLAGS", "ENGINE", "IMAGE")
        kept = {key: value for key, value in os.environ.items() if not key.startswith(dropped)}
        self._environment = {
            **kept,
            "HOME": str(self._home),
            "DOCKER_HOST": host,
            # BuildKit, if a client has it, does not run steps with the engine's runtime
            "DOCKER_BUILDKIT": "0",
        }

    def type(self, lines: Sequence[str], stdin: str = "") -> subprocess.CompletedProcess[str]:
        """Run lines without a terminal; returns the completed process."""
        with self._started(lines, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                           stderr=subprocess.PIPE, text=True) as process:  # fmt: skip
            out, err = process.communicate(stdin, timeout=self._build_seconds)
        return subprocess.CompletedProcess(lines, process.returncode, out, err)

    @contextlib.contextmanager
    def terminal(self, lines: Sequence[str]) -> Iterator[Terminal]:
        ours, theirs = pty.openpty()
        os.fchown(theirs, UID, GID)

        def control() -> None:
            fcntl.ioctl(0, termios.TIOCSCTTY, 0)

        try:
            with self._started(
                lines, stdin=theirs, stdout=theirs, stderr=theirs, preexec_fn=control
            ) as process:
                os.close(theirs)
                yield Terminal(ours, process)
        finally:
            os.close(ours)

    @contextlib.contextmanager
    def _started(self, lines: Sequence[str], **pipes: object) -> Iterator[subprocess.Popen[str]]:
        process: subprocess.Popen[str] = subprocess.Popen(  # type: ignore[call-overload]
            ["bash", "-c", "\n".join(["set -e", *lines])],
            cwd=self.checkout, env=self._environment, start_new_session=True,
            user=UID, group=GID, extra_groups=[], **pipes,
        )  # fmt: skip
        try:
            yield process
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()


class Terminal:
    """The screen and the keyboard of a running line."""

    def __init__(self, screen: int, process: subprocess.Popen[str]) -> None:
        self._screen, self._process = screen, process
        self.text = ""

    def wait_for(self, pattern: str) -> str:
        """The text that matches on the screen, once it appears."""
        until = time.monotonic() + SECONDS
        while (found := re.search(pattern, self.text)) is None:
            goes_on = self._read() and time.monotonic() < until
            assert goes_on, f"no {pattern} in:\n{self.text}"
        return found.group()

    def press_ctrl_c(self) -> None:
        os.write(self._screen, b"\x03")

    def end(self) -> int:
        """The exit status, without further keys."""
        until = time.monotonic() + SECONDS
        while self._read():
            assert time.monotonic() < until, f"does not end:\n{self.text}"
        return self._process.wait(timeout=SECONDS)

    def _read(self) -> bool:
        if not select.select([self._screen], [], [], 0.2)[0]:
            return True
        try:
            data = os.read(self._screen, 65536)
        except OSError:  # the other side is closed
            return False
        self.text += data.decode(errors="replace")
        return bool(data)


def copy_checkout(target: Path) -> None:
    """The files that a clone would have, as they are now."""
    listed = subprocess.check_output(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"], cwd=ROOT, text=True
    )
    for name in filter(None, listed.split("\0")):
        source = ROOT / name
        if source.is_file() or source.is_symlink():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, target / name, follow_symlinks=False)
