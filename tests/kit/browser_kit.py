"""Chromium that a test drives step by step, and `instr debug --page` for it."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.kit import ui_kit
from tests.kit.native_kit import ROOT

WAIT = 300
"""seconds that a program may take to end on a busy machine"""


class Browser:
    """A page in Chromium; `tests/ui/drive.mjs` has its actions."""

    def do(self, action: str, value: object, **more: object) -> Any:
        """The answer to an action."""
        return ui_kit.run_script("drive.mjs", **{action: value}, **more)

    def click(self, selector: str) -> None:
        self.do("click", selector)

    def wait(self, expression: str) -> None:
        """Until it is true in the page."""
        self.do("wait", expression)

    def read(self, expression: str) -> Any:
        return self.do("read", expression)

    def text(self, selector: str) -> str:
        found: str = self.read(f"document.querySelector({json.dumps(selector)}).textContent")
        return found

    def texts(self, selector: str) -> list[str]:
        found: list[str] = self.read(
            f"[...document.querySelectorAll({json.dumps(selector)})].map((of) => of.textContent)"
        )
        return found


@contextlib.contextmanager
def browser() -> Iterator[Browser]:
    """Chromium without a page; at the end nothing may have gone wrong in it, and it must have asked
    no other host."""
    opened = Browser()
    opened.do("open", True)
    try:
        yield opened
        assert opened.do("seen", True) == {"errors": [], "console": [], "foreign": []}
    finally:
        opened.do("close", True)


@dataclass
class Debugged:
    """`instr debug --page`, whose page is at `address`."""

    address: str
    process: subprocess.Popen[str]

    def ended(self) -> str:
        """What it printed to standard error, once it has ended well."""
        assert self.process.stderr is not None
        stderr = self.process.stderr.read()
        assert self.process.wait(WAIT) == 0, stderr
        return stderr


@contextlib.contextmanager
def debugged(folder: Path, *words: object) -> Iterator[Debugged]:
    """`instr debug --page --no-browser WORDS` in a folder; it is interrupted if it still runs."""
    with subprocess.Popen(
        [sys.executable, "-m", "llamacpp_instr", "debug", "--page", "--no-browser",
         *map(str, words)],
        cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    ) as process:  # fmt: skip
        assert process.stdout is not None
        assert process.stderr is not None
        try:
            address = process.stdout.readline().strip()
            assert address, process.stderr.read()
            yield Debugged(address, process)
        finally:
            if process.poll() is None:
                process.send_signal(signal.SIGINT)
