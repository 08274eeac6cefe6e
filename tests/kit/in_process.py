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


def json_reports(*words: object) -> list[dict[str, Any]]:
    """The reports of a command in JSON, which has no NaN and no infinity."""

    def refuse(name: str) -> None:
        raise AssertionError(f"{name} is not JSON")

    return titled(json.loads(printed(*words, "--json"), parse_constant=refuse))


def titled(reports: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Reports in JSON, with titles in place of the names for scripts, as a reader sees them."""
    return list(map(_titled, reports))


def _titled(report: dict[str, Any]) -> dict[str, Any]:
    titles = {column["id"]: column["title"] for column in report["columns"]}
    assert len(titles) == len(report["columns"])
    rows = [{titles.get(key, key): cell for key, cell in row.items()} for row in report["rows"]]
    for row in rows:
        if "at_most" in row and "at_most" not in titles:
            row["at_most"] = [titles[key] for key in row["at_most"]]
    units = {column["title"]: column["unit"] for column in report["columns"]}
    figures = {
        of["title"]: {"value": of["value"], "unit": of["unit"]} for of in report["figures"].values()
    }
    return {**report, "units": units, "rows": rows, "figures": figures}


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
