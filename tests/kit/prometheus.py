"""Prometheus's own checker for tests."""

from __future__ import annotations

import subprocess
from pathlib import Path


def promtool(*words: str | Path, given: bytes = b"") -> str:
    """What `promtool` prints; it must find nothing."""
    done = subprocess.run(
        ["promtool", *words], input=given, capture_output=True, check=False, timeout=100
    )
    assert (done.returncode, done.stderr) == (0, b"")
    return done.stdout.decode()


def check_metrics(text: bytes) -> None:
    """Names, units and help texts follow Prometheus's rules."""
    assert promtool("check", "metrics", given=text) == ""
