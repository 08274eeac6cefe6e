"""The rows of a report in another order, or the first of them."""

from __future__ import annotations

from dataclasses import replace

from converters.report.report import Cell, Report
from llamacpp_instr.errors import UsageError
from llamacpp_instr.terminal import counted


def arrange(report: Report, sort: str | None = None, top: int | None = None) -> Report:
    """The report with its rows by the column `sort`, and only the first `top` of them.

    Numbers are in descending order, texts in ascending order; cells that were not measured come
    last. A note tells how many rows were left out. Raises UsageError for a column that the report
    lacks.
    """
    rows = list(report.rows)
    names = [column.name for column in report.columns]
    if sort is not None and sort not in names:
        raise UsageError(f"--sort {sort}: the columns are {', '.join(names)}")
    if sort is not None:
        at = names.index(sort)
        rows.sort(key=lambda row: _place(row[at]))
    notes = list(report.notes)
    if top is not None and len(rows) > top:
        notes.insert(0, f"Not shown: {counted(len(rows) - top, 'more row')} (--top {top}).")
        rows = rows[:top]
    return replace(report, rows=rows, notes=notes)


def _place(cell: Cell) -> tuple[bool, float, str]:
    return (cell is None, 0.0, cell) if isinstance(cell, str) else (cell is None, -(cell or 0), "")
