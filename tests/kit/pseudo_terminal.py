"""A program on a pseudo-terminal, and what a person sees there: pyte is the terminal."""

from __future__ import annotations

import fcntl
import os
import pty
import select
import struct
import subprocess
import termios
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import pyte

from tests.kit.native_kit import ROOT

PATIENCE_S = 300


class PseudoTerminal:
    """Runs a command with a terminal of `columns` × `rows` as its standard streams."""

    def __init__(
        self, command: Sequence[str], directory: Path, columns: int = 80, rows: int = 24
    ) -> None:
        self._ours, theirs = pty.openpty()
        self.before = termios.tcgetattr(theirs)
        self._theirs = theirs
        self.written = b""
        """all that the program wrote"""
        self._screen = pyte.Screen(columns, rows)
        self._stream = pyte.ByteStream(self._screen)
        self._lock = threading.Lock()
        self._resize(columns, rows)
        environment = {**os.environ, "TERM": "xterm-256color", "PYTHONPATH": str(ROOT)}
        del environment["COLUMNS"]  # it is as wide as this terminal
        self.process = subprocess.Popen(
            command, cwd=directory, stdin=theirs, stdout=theirs, stderr=theirs,
            start_new_session=True, env=environment,
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
        )  # fmt: skip
        self._listener = threading.Thread(target=self._listen, daemon=True)
        self._listener.start()

    def _listen(self) -> None:
        while True:
            select.select([self._ours], [], [])
            with self._lock:
                try:
                    piece = os.read(self._ours, 1 << 16)
                except OSError:  # closed
                    return
                self.written += piece
                self._stream.feed(piece)

    def _resize(self, columns: int, rows: int) -> None:
        fcntl.ioctl(self._ours, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))

    def resize(self, columns: int, rows: int) -> None:
        """As a person resizes the window."""
        with self._lock:
            self._screen.resize(rows, columns)
        self._resize(columns, rows)

    def press(self, keys: str) -> None:
        os.write(self._ours, keys.encode())

    @property
    def lines(self) -> list[str]:
        """What is on the screen."""
        with self._lock:
            return [line.rstrip() for line in self._screen.display]

    def wait_for(self, *texts: str) -> list[str]:
        """Wait until all `texts` are on the screen; returns its lines."""
        end = time.monotonic() + PATIENCE_S
        while True:
            is_over = self.process.poll() is not None
            if is_over:
                self._drain()
            lines = self.lines
            if all(text in "\n".join(lines) for text in texts):
                return lines
            assert time.monotonic() < end, "\n".join(lines)
            assert not is_over, "\n".join(lines)
            time.sleep(0.02)

    def wait(self) -> int:
        """Wait until the program ends; returns its exit status."""
        status = self.process.wait(PATIENCE_S)
        self._drain()
        return status

    def _drain(self) -> None:
        """Wait until the listener has read all that was written."""
        while select.select([self._ours], [], [], 0)[0]:
            time.sleep(0.01)
        with self._lock:
            pass

    @property
    def is_as_before(self) -> bool:
        """Whether echo, line editing and the others are as before the program."""
        return termios.tcgetattr(self._theirs) == self.before

    def __enter__(self) -> PseudoTerminal:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        os.close(self._theirs)
        self._listener.join(5)
        os.close(self._ours)
