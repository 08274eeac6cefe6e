"""Renders reports in all forms that commands write: text, JSON, CSV, Markdown, HTML.

Invariant: in every form, text from a log or a model never becomes markup and never controls the
terminal.
"""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Literal

from llamacpp_instr.base.terminal import printable, render_json
from llamacpp_instr.report.arrange import condensed
from llamacpp_instr.report.charts import Chart, missing_note
from llamacpp_instr.report.page import Figure, Picture, Section, render_page
from llamacpp_instr.report.report import Report, Unit, shown
from llamacpp_instr.report.text import render_text

Form = Literal["text", "json", "csv", "md", "html"]
FORMS: tuple[Form, ...] = ("text", "json", "csv", "md", "html")
SUFFIXES: dict[str, Form] = {
    ".json": "json",
    ".csv": "csv",
    ".md": "md",
    ".html": "html",
    ".htm": "html",
}
"""of output files, and the form that each selects"""


def form_of(flag: str | None, output: str) -> Form:
    """The form that `flag` names; else the one of the suffix of `output`; else text."""
    if flag is not None:
        assert flag in FORMS
        return flag
    return SUFFIXES.get(Path(output).suffix.lower(), "text")


def render(
    form: Form,
    reports: Sequence[Report],
    *,
    table: Report | None = None,
    charts: Sequence[Chart | Figure] = (),
    title: str | None = None,
    width: int | None = None,
) -> str:
    """The reports in a form. CSV has only `table`, by default the first report. Only HTML has
    charts and a title, by default the first report's; see `render_html`. `width` is that of text,
    by default the terminal's."""
    if form == "json":
        return render_json([report.to_json() for report in reports])
    if form == "csv":
        return render_csv(table or reports[0])
    if form == "md":
        return render_markdown(reports)
    if form == "html":
        return render_html(reports, charts, title)
    return render_text(reports, width)


def render_markdown(reports: Sequence[Report]) -> str:
    """The reports as GitHub Flavored Markdown, with rounded numbers."""
    parts = []
    for report in map(condensed, reports):
        lines = [f"## {_markdown(report.title)}", ""]
        if report.rows:
            heads = [_markdown(column.heading) for column in report.columns]
            rules = ["---:" if column.align == "right" else "---" for column in report.columns]
            lines += [_row(heads), _row(rules)]
            lines += [_row([_markdown(cell) for cell in cells]) for cells in _cells(report)]
            lines.append("")
        for note in report.notes:
            lines += [_markdown(note), ""]
        parts.append("\n".join(lines))
    return "\n".join(parts)


def render_csv(report: Report) -> str:
    """The rows of one report as CSV, without its notes. Numbers are not rounded: ns, bytes, shares
    from 0 to 1. A heading has its unit unless its name is the unit. Control characters are
    escaped."""
    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    units: dict[Unit, str] = {"ns": " (ns)", "bytes": " (bytes)"}
    writer.writerow(
        printable(column.name)
        if column.name == column.unit
        else printable(column.heading) + units.get(column.unit, "")
        for column in report.columns
    )
    for row in report.rows:
        writer.writerow(printable(cell) if isinstance(cell, str) else cell for cell in row)
    return file.getvalue()


def render_html(
    reports: Sequence[Report], charts: Sequence[Chart | Figure] = (), title: str | None = None
) -> str:
    """The reports as one self-contained HTML page, with rounded numbers. The charts come after the
    first report; without matplotlib, only figures do, and a note there says that charts need it."""
    sections: list[Section] = list(reports)
    note = missing_note() if any(isinstance(chart, Chart) for chart in charts) else None
    if note is not None:
        sections[0] = replace(reports[0], notes=[*reports[0].notes, note])
        charts = [chart for chart in charts if isinstance(chart, Figure)]
    sections[1:1] = [
        Picture(chart.title, chart.svg()) if isinstance(chart, Chart) else chart for chart in charts
    ]
    return render_page(title or (reports[0].title if reports else "Report"), sections)


def _cells(report: Report) -> list[list[str]]:
    units = [column.unit for column in report.columns]
    return [[shown(c, u).strip() for c, u in zip(row, units, strict=True)] for row in report.rows]


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _markdown(text: str) -> str:
    """Escapes the characters of Markdown's markup, and replaces line breaks by spaces."""
    return re.sub(r"([\\`*_{}\[\]<>#|~])", r"\\\1", printable(" ".join(text.splitlines())))
