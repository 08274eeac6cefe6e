"""The tests are the same for every user, terminal and place."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.kit.fixed_environment import FIXED, fix_environment

OTHERS = {
    "COLUMNS": "211", "FORCE_COLOR": "1", "GIT_DIR": "/elsewhere", "LANG": "de_DE.UTF-8",
    "LC_ALL": "tr_TR.UTF-8", "LC_TIME": "ja_JP.UTF-8", "LLAMA_INSTR_LOG": "a.log",
    "NO_COLOR": "1", "PYTHONWARNINGS": "error", "TERM": "dumb", "TZ": "Asia/Kolkata",
}  # fmt: skip
"""what a user may have set"""


def test_the_settings_of_a_user_are_gone_and_the_caches_remain() -> None:
    places = {"HOME": "/home/a", "LLAMACPP_INSTR_CACHE": "/cache", "PATH": "/bin", "CXX": "g++"}
    environment = {**OTHERS, **places, "no_proxy": "index.example"}
    fix_environment(environment)
    assert environment.pop("no_proxy") == "index.example,127.0.0.1,localhost"
    assert environment.pop("NO_PROXY") == "127.0.0.1,localhost"
    assert environment == {**FIXED, **places}


def test_this_process_has_it() -> None:
    assert FIXED.items() <= os.environ.items()
    assert os.environ.keys().isdisjoint(OTHERS.keys() - FIXED.keys())
    assert time.tzname == ("UTC", "UTC")
    mask = os.umask(0o022)
    assert mask == 0o022


@pytest.mark.native
def test_two_runs_collect_the_same_tests_in_the_same_order(tmp_path: Path) -> None:
    """`pytest` with other settings and hashes."""
    command = [
        sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider",
        "-p", "no:randomly", "tests/log", "tests/graph", "tests/report",
    ]  # fmt: skip
    collected = [
        subprocess.run(
            command, cwd=Path(__file__).parent.parent, check=True, capture_output=True, text=True,
            env={**os.environ, **OTHERS, "PYTHONHASHSEED": seed, "TMPDIR": str(tmp_path)},
        ).stdout.splitlines()[:-1]
        for seed in ("1", "2")
    ]  # fmt: skip
    assert len(collected[0]) > 500
    assert collected[0] == collected[1]
