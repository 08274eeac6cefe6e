"""TensorBoard with its profiler plugin, and Chromium that looks at all views."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.kit.ui_kit import run_script


@contextlib.contextmanager
def tensorboard(folder: Path) -> Iterator[str]:
    """The address of a TensorBoard that shows a folder."""
    command = ["--logdir", str(folder), "--port", "0", "--load_fast", "false"]
    with subprocess.Popen(
        [sys.executable, "-m", "tensorboard.main", *command], start_new_session=True,
        stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
    ) as process:  # fmt: skip
        assert process.stderr is not None
        try:
            yield next(
                found[1]
                for line in process.stderr
                if (found := re.search(r"(http://\S+?)/? \(Press", line))
            )
        finally:
            os.killpg(process.pid, signal.SIGKILL)


def views(folder: Path, pictures: Path | None = None) -> dict[str, Any]:
    """What `tests/ui/tensorboard.mjs` saw: the text of every view, and errors of the page."""
    with tensorboard(folder) as address:
        return run_script("tensorboard.mjs", address=address, pictures=str(pictures or ""))
