"""Reports of sessions, as tests read them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from llamacpp_instr.log import schema as s
from llamacpp_instr.log.session import Session, load_session
from llamacpp_instr.report.report import Report
from tests.kit.in_process import titled
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
    found: list[Row] = titled([report.to_json()])[0]["rows"]
    return found


def by_title(reports: Iterable[Report]) -> dict[str, Report]:
    return {report.title: report for report in reports}
