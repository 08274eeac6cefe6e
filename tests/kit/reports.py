"""Reports as tests read them: made by an analysis of a session, or printed by a command in this
process."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from click.testing import CliRunner, Result

from converters.report.report import Report
from llamacpp_instr import schema as s
from llamacpp_instr.cli import main
from llamacpp_instr.log.session import Session, load_session
from tests.kit.made_log import encode

Row = dict[str, Any]


def session_of(path: Path, events: Sequence[s.Event]) -> Session:
    """The session of these events, with their log at `path`."""
    path.write_bytes(encode([*events]))
    return load_session(path)


def column(report: Report, name: str) -> list[Any]:
    at = [column.name for column in report.columns].index(name)
    return [row[at] for row in report.rows]


def rows(report: Report) -> list[Row]:
    """The rows as JSON has them: by the names of their columns."""
    found: list[Row] = report.to_json()["rows"]
    return found


def by_title(reports: Iterable[Report]) -> dict[str, Report]:
    return {report.title: report for report in reports}


def instr(*words: object) -> Result:
    """What a command line does in this process, where only an error of ours may end it."""
    done = CliRunner().invoke(main, [str(word) for word in words])
    assert not isinstance(done.exception, Exception), done.exception
    return done


def printed(*words: object) -> str:
    """The output of a command line that must succeed."""
    done = instr(*words)
    assert done.exit_code == 0, done.output
    return done.stdout


def told(*words: object) -> list[Row]:
    """The reports of a command in JSON, which has no NaN and no infinity."""

    def refuse(name: str) -> None:
        raise AssertionError(f"{name} is not JSON")

    found: list[Row] = json.loads(printed(*words, "--json"), parse_constant=refuse)
    return found


def refusal(*words: object) -> str:
    """The only line that a command line with wrong input prints."""
    done = instr(*words)
    assert (done.exit_code, done.stdout) == (2, ""), done.output
    (line,) = done.stderr.splitlines()
    return line
