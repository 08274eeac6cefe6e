"""Runs `instr` in the environment of the peers."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path


def instr(*words: object, cwd: Path) -> str:
    """What it prints."""
    done = subprocess.run(
        [sys.executable, "-m", "llamacpp_instr", *map(str, words)],
        cwd=cwd, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout
