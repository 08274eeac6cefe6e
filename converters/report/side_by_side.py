"""The reports of several logs, one after the other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from converters.report.report import Column, Report


def named_by(log: str, reports: Sequence[Report]) -> list[Report]:
    """The reports with titles that begin with the log's name."""
    return [replace(report, title=f"{log}: {report.title}") for report in reports]


def side_by_side(
    named: Sequence[tuple[str, Sequence[Report], Report | None]],
) -> tuple[list[Report], Report | None]:
    """The reports of all logs, and their tables as one table.

    Each element is the name of a log, its reports, and the one of them that CSV shows. With several
    logs each title begins with the log's name, and the joined table has it as its first column. The
    joined table has every column that one of the tables has; None if there are no tables.
    """
    tables = [(name, table) for name, _, table in named if table is not None]
    if len(named) == 1:
        (_, reports, table) = named[0]
        return list(reports), table
    titled = [report for name, reports, _ in named for report in named_by(name, reports)]
    if not tables:
        return titled, None
    columns = list(dict.fromkeys(column for _, table in tables for column in table.columns))
    rows = [
        [name, *(dict(zip(table.columns, row, strict=True)).get(column) for column in columns)]
        for name, table in tables
        for row in table.rows
    ]
    return titled, replace(tables[0][1], columns=[Column("log"), *columns], rows=rows)
