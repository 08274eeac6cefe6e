"""The rows of a report in another order, the first or the largest of them, equal ones once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from llamacpp_instr.base.errors import UsageError
from llamacpp_instr.base.terminal import counted
from llamacpp_instr.report.report import Cell, Column, Report, shown

MANY_LAYERS = 12
"""rows from which on equal layers are one row"""


def arrange(report: Report, sort: str | None = None, top: int | None = None) -> Report:
    """The report with its rows by the column `sort`, and only the first `top` of them.

    Numbers are in descending order, texts in ascending order; cells that were not measured come
    last. A note says how many rows were left out. Raises UsageError for a column that the report
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


def condensed(report: Report) -> Report:
    """The report as forms for people have it: without empty columns, layers that look the same in
    one row, and of many rows the largest. Notes say what is missing."""
    return _largest(_alike(report.filled()))


def _largest(report: Report) -> Report:
    """At most `report.most` rows, in their order: the largest by the first times or bytes, else the
    first ones."""
    if len(report.rows) <= report.most:
        return report
    units = [column.unit for column in report.columns[report.labels :]]
    unit = next((unit for unit in units if unit in ("ns", "bytes")), None)
    at = [i for i, column in enumerate(report.columns) if column.unit == unit]
    sizes = [max((float(row[i] or 0) for i in at), default=0.0) for row in report.rows]
    kept = sorted(sorted(range(len(sizes)), key=sizes.__getitem__, reverse=True)[: report.most])
    note = f"Not shown: {counted(len(sizes) - report.most, 'more row')}."
    return replace(report, rows=[report.rows[i] for i in kept], notes=[note, *report.notes])


def _alike(report: Report) -> Report:
    """One row for all layers with the same figures, if there are many layers."""
    inside = sum(row[0] != -1 for row in report.rows)
    if inside <= MANY_LAYERS or report.columns[0].unit != "layer":
        return report
    kinds: dict[tuple[object, ...], list[int]] = {}
    for i, row in enumerate(report.rows):
        units = (column.unit for column in report.columns[1:])
        kinds.setdefault((row[0] == -1, *map(shown, row[1:], units)), []).append(i)
    if len(kinds) == len(report.rows):
        return report
    rows = [[_ranges([int(report.rows[i][0] or 0) for i in of]), *report.rows[of[0]][1:]]
            for of in kinds.values()]  # fmt: skip
    return replace(
        report,
        rows=rows,
        notes=["A row is one layer of each kind; --json has all layers.", *report.notes],
    )


def _ranges(numbers: list[int]) -> str:
    """`0-3, 6`; `none` for what belongs to no layer."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1] = [runs[-1][0], number]
        else:
            runs.append([number])
    return ", ".join("-".join(map(str, run)) if run != [-1] else "none" for run in runs)


def _place(cell: Cell) -> tuple[bool, float, str]:
    return (cell is None, 0.0, cell) if isinstance(cell, str) else (cell is None, -(cell or 0), "")


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
