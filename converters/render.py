"""Reports as Markdown, CSV and HTML; as text for a terminal they are rendered in `report`.

Invariant: nothing that stands in a log can become markup.
"""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Sequence

from converters.page import render_page
from converters.report import Column, Report, Unit, printable, shown


def render_markdown(reports: Sequence[Report]) -> str:
    """The reports as Markdown with tables as code hosts understand them; numbers as shown."""
    parts = []
    for report in map(Report.filled, reports):
        lines = [f"## {_markdown(report.title)}", ""]
        if report.rows:
            heads = [_markdown(column.name) for column in report.columns]
            rules = ["---:" if _is_number(column) else "---" for column in report.columns]
            lines += [_row(heads), _row(rules)]
            lines += [_row([_markdown(cell) for cell in cells]) for cells in _cells(report)]
            lines.append("")
        for note in report.notes:
            lines += [_markdown(note), ""]
        parts.append("\n".join(lines))
    return "\n".join(parts)


def render_csv(report: Report) -> str:
    """One report's rows as CSV, numbers as they are: ns, bytes, shares from 0 to 1. A heading has
    its unit where its name has none; notes are left out."""
    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    units: dict[Unit, str] = {"ns": " (ns)", "bytes": " (bytes)"}
    writer.writerow(
        column.name if column.name == column.unit else column.name + units.get(column.unit, "")
        for column in report.columns
    )
    for row in report.rows:
        writer.writerow(printable(cell) if isinstance(cell, str) else cell for cell in row)
    return file.getvalue()


def render_html(reports: Sequence[Report]) -> str:
    """The reports as one page of HTML that needs nothing else; numbers as shown."""
    return render_page(reports[0].title if reports else "Report", reports)


def _cells(report: Report) -> list[list[str]]:
    units = [column.unit for column in report.columns]
    return [[shown(c, u).strip() for c, u in zip(row, units, strict=True)] for row in report.rows]


def _is_number(column: Column) -> bool:
    return column.unit not in ("text", "share")


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _markdown(text: str) -> str:
    """Characters that Markdown would take for markup are escaped; a line break is a space."""
    return re.sub(r"([\\`*_{}\[\]<>#|~])", r"\\\1", printable(" ".join(text.splitlines())))
