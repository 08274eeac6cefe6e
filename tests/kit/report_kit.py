"""`instr memory` for tests: its output as JSON, and edited logs."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.conftest import read_events
from tests.kit.in_process import json_reports, printed
from tests.kit.reports import Row


def report(*args: object) -> str:
    return printed("memory", *args)


def reported(*args: object) -> list[Row]:
    return json_reports("memory", *args)


def memory_of(reports: list[Row]) -> Row:
    """The only section about memory."""
    (found,) = (r for r in reports if r["title"].startswith("Memory"))
    return found


def edited(log: Path, edit: Callable[[dict[str, Any]], None]) -> Path:
    """Write the log with its events changed to a file beside it."""
    events = read_events(log)
    for event in events:
        edit(event)
    path = log.with_name("edited.log")
    path.write_text("".join(json.dumps(event) + "\n" for event in events))
    return path


def without_library(directory: Path, environment: dict[str, str]) -> dict[str, str]:
    """An environment in which `llama_cpp` does not load."""
    (directory / "llama_cpp").mkdir()
    (directory / "llama_cpp" / "__init__.py").write_text("raise ImportError('it is hidden')")
    return {**environment, "PYTHONPATH": f"{directory}{os.pathsep}{environment['PYTHONPATH']}"}
