"""Two runs collect the same tests in the same order."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.kit.native_kit import ROOT
from tests.test_environment import OTHERS


@pytest.mark.native
def test_two_runs_collect_the_same_tests_in_the_same_order(tmp_path: Path) -> None:
    """`pytest` with other settings and hashes."""
    command = [
        sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider",
        "-p", "no:randomly", "tests/log", "tests/graph", "tests/report",
    ]  # fmt: skip
    collected = [
        subprocess.run(
            command, cwd=ROOT, check=True, capture_output=True, text=True,
            env={**os.environ, **OTHERS, "PYTHONHASHSEED": seed, "TMPDIR": str(tmp_path)},
        ).stdout.splitlines()[:-1]
        for seed in ("1", "2")
    ]  # fmt: skip
    assert len(collected[0]) > 500
    assert collected[0] == collected[1]
