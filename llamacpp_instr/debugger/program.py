"""Runs a Python program in this process, as `python` would, so that its models can be stopped."""

from __future__ import annotations

import runpy
import sys
from collections.abc import Sequence
from pathlib import Path

from llamacpp_instr.base.errors import UsageError


def check_program(command: Sequence[str]) -> None:
    """Raise `UsageError` unless the command is `APP.py …` or `-m MODULE …`, perhaps after
    `python`."""
    command = _without_interpreter(command)
    if not command:
        raise UsageError("no program is given; write it after --, as -- app.py")
    if command[0] == "-m":
        if len(command) < 2:
            raise UsageError("-m needs the name of a module")
        return
    path = Path(command[0])
    if not path.is_file():
        raise UsageError(f"{path} is not a file; give a Python program, or -m MODULE")


def run_program(command: Sequence[str]) -> None:
    """Run a program that passed `check_program` to its end. Raises what it raises."""
    command = _without_interpreter(command)
    before = sys.argv, list(sys.path)
    try:
        if command[0] == "-m":
            sys.argv = list(command[1:])
            sys.path.insert(0, "")
            runpy.run_module(command[1], run_name="__main__", alter_sys=True)
        else:
            sys.argv = list(command)
            sys.path.insert(0, str(Path(command[0]).resolve().parent))
            runpy.run_path(command[0], run_name="__main__")
    finally:
        sys.argv, sys.path[:] = before


def _without_interpreter(command: Sequence[str]) -> Sequence[str]:
    is_python = command and Path(command[0]).name in ("python", "python3")
    return command[1:] if is_python else command
