"""Prometheus's own checker for tests. Without it they are skipped; in CI that is a failure."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest


def promtool(*words: str | Path, given: bytes = b"") -> str:
    """What `promtool` prints; it must find nothing."""
    program = shutil.which("promtool")
    if program is None:
        missing = "promtool is not installed (Debian: apt install prometheus)"
        if os.environ.get("CI"):
            pytest.fail(missing)
        pytest.skip(missing)
    done = subprocess.run(
        [program, *words], input=given, capture_output=True, check=False, timeout=100
    )
    assert (done.returncode, done.stderr) == (0, b"")
    return done.stdout.decode()


def check_metrics(text: bytes) -> None:
    """Names, units and help texts follow Prometheus's rules."""
    assert promtool("check", "metrics", given=text) == ""
