"""Commands in this process, for tests of what a command does and not of how a process starts."""

from __future__ import annotations

import json
import resource
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from click.testing import CliRunner

from llamacpp_instr import cli


def instr_here(*words: object) -> subprocess.CompletedProcess[str]:
    """Like the fixture `instr`; an exception that the command does not handle is raised."""
    arguments = [*map(str, words)]
    done = CliRunner().invoke(cli.main, arguments, catch_exceptions=False)
    return subprocess.CompletedProcess(arguments, done.exit_code, done.stdout, done.stderr)


def tables_of(*words: object) -> list[dict[str, Any]]:
    """The tables that a command prints with --json."""
    done = instr_here(*words, "--json")
    assert done.returncode == 0, done.stderr
    return list(json.loads(done.stdout))


@contextmanager
def full_disk(room: int) -> Iterator[None]:
    """No file can become larger than `room` bytes."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (room, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
