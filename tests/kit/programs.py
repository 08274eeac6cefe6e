"""Programs that a test runs: Python code in a process of its own, and those of tests/native."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.kit.native_kit import ROOT, compile_program, installed_library


def python(code: str, *arguments: object) -> list[str]:
    """The command that runs code."""
    return [sys.executable, "-c", textwrap.dedent(code), *map(str, arguments)]


def run_python(
    code: str, *arguments: object, check: bool = False, **how: Any
) -> subprocess.CompletedProcess[str]:
    """Run code in a process of its own; with `check` it must exit with 0."""
    done = subprocess.run(
        python(code, *arguments), capture_output=True, text=True, timeout=300, check=False, **how
    )
    assert done.returncode == 0 or not check, done.stderr
    return done


def in_namespace(
    script: str, *arguments: str, cwd: Path | None = None
) -> subprocess.CompletedProcess[str]:
    """Run a shell script that may mount file systems, in its own namespace."""
    return subprocess.run(
        ["unshare", "--map-root-user", "--mount", "sh", "-ec", script, "sh", *arguments],
        capture_output=True, text=True, timeout=300, cwd=cwd,
    )  # fmt: skip


def native_program(
    name: str, into: Path, library: Path | None = None, flags: Sequence[str] = ()
) -> Path:
    """A program of tests/native, linked with the installed library or another one."""
    source = ROOT / "tests" / "native" / f"{name}.cpp"
    return compile_program(source, library or installed_library(), into, flags)


@contextmanager
def program(*words: object) -> Iterator[subprocess.Popen[str]]:
    """A Python program of ours; killed at the end if it still runs."""
    with subprocess.Popen(
        [sys.executable, *map(str, words)], cwd=ROOT, stdin=subprocess.PIPE,
        stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
    ) as process:  # fmt: skip
        try:
            yield process
        finally:
            process.kill()


def line(process: subprocess.Popen[str]) -> str:
    """The next line that a program prints."""
    assert process.stdout is not None
    text = process.stdout.readline()
    assert text, "it has ended"
    return text.strip()


def say(process: subprocess.Popen[str], what: object = "") -> None:
    """Write a line to its standard input."""
    assert process.stdin is not None
    process.stdin.write(f"{what}\n")
    process.stdin.flush()


@contextmanager
def recording(log: Path, *options: object) -> Iterator[None]:
    """`tests.kit.watched`, which records during the block."""
    with program("-m", "tests.kit.watched", log, *options) as process:
        assert line(process) == "recording"
        say(process)
        yield
