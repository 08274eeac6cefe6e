"""Commands in this process, for tests of what a command does and not of how a process starts."""

from __future__ import annotations

import json
import resource
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from click.testing import CliRunner

from llamacpp_instr.cli import main


def instr_here(*words: object) -> subprocess.CompletedProcess[str]:
    """Like the fixture `instr`; an exception that the command does not handle is raised."""
    arguments = [*map(str, words)]
    done = CliRunner().invoke(main, arguments, catch_exceptions=False)
    return subprocess.CompletedProcess(arguments, done.exit_code, done.stdout, done.stderr)


def printed(*words: object) -> str:
    """The output of a command that must succeed."""
    done = instr_here(*words)
    assert done.returncode == 0, done.stderr
    return done.stdout


def told(*words: object) -> list[dict[str, Any]]:
    """The reports of a command in JSON, which has no NaN and no infinity."""

    def refuse(name: str) -> None:
        raise AssertionError(f"{name} is not JSON")

    found: list[dict[str, Any]] = json.loads(printed(*words, "--json"), parse_constant=refuse)
    return found


def refusal(*words: object) -> str:
    """The only line that a command with wrong input prints."""
    done = instr_here(*words)
    assert (done.returncode, done.stdout) == (2, ""), done.stderr
    (line,) = done.stderr.splitlines()
    return line


@contextmanager
def full_disk(room: int) -> Iterator[None]:
    """No file can become larger than `room` bytes."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (room, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
