"""Renders reports in all forms that commands write: text, JSON, CSV, Markdown, HTML.

Invariant: in every form, text from a log or a model never becomes markup and never controls the
terminal. No line of text is longer than the terminal is wide, unless a single number is.
"""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Literal

from llamacpp_instr.base.terminal import line_width, printable, render_json
from llamacpp_instr.report.charts import Chart, missing_note
from llamacpp_instr.report.page import Figure, Section, render_page
from llamacpp_instr.report.report import Column, Report, Unit, condensed, shown

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
    sections[1:1] = charts
    return render_page(title or (reports[0].title if reports else "Report"), sections)


def _cells(report: Report) -> list[list[str]]:
    units = [column.unit for column in report.columns]
    return [[shown(c, u).strip() for c, u in zip(row, units, strict=True)] for row in report.rows]


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _markdown(text: str) -> str:
    """Escapes the characters of Markdown's markup, and replaces line breaks by spaces."""
    return re.sub(r"([\\`*_{}\[\]<>#|~])", r"\\\1", printable(" ".join(text.splitlines())))


# --- text ---

FOLDED, WORD = 22, 40
"""width to which a column of text may be folded, and up to which its words stay whole"""

PROSE = 100
"""width of a note on a wide terminal"""


def render_text(reports: Sequence[Report], width: int | None = None) -> str:
    """The reports as text of at most `width` characters a line, by default those of the terminal.
    Columns that do not fit are shown in further tables, which repeat what names a row."""
    from rich.console import Console
    from rich.text import Text

    width = width or line_width()
    console = Console(width=width)

    def wrapped(text: str, width: int) -> list[str]:
        return [line.plain for line in Text(text).wrap(console, width, overflow="fold")]

    blocks = []
    for report in map(condensed, reports):
        lines = wrapped(printable(report.title), width)
        for at, piece in enumerate(_pieces(report, width - 2)):
            lines += [""] * (at > 0)
            for row in zip(*(cells for cells, _, _ in piece), strict=True):
                columns = [(wrapped(cell, wide), wide, right)
                           for cell, (_, wide, right) in zip(row, piece, strict=True)]  # fmt: skip
                for i in range(max(len(parts) for parts, _, _ in columns)):
                    line = "".join(
                        "  " + _padded(parts[i] if i < len(parts) else "", wide, right)
                        for parts, wide, right in columns
                    )
                    lines.append(line)
        for note in report.notes:
            lines += ["  " + line for line in wrapped(printable(note), min(width, PROSE) - 2)]
        blocks.append("".join(f"{line.rstrip()}\n" for line in lines))
    return "\n".join(blocks)


def _pieces(report: Report, width: int) -> list[list[tuple[list[str], int, bool]]]:
    """The tables that show a report, as columns: the cells, their width, whether they end at the
    right. Each has the columns that name a row, and as many others as fit. Where the names are
    not distinct or leave no room, the rows are numbered."""
    from rich.cells import cell_len

    if not report.rows:
        return []
    gap = 2
    columns, longest, needed = [], [], []
    for i, column in enumerate(report.columns):
        cells = [shown(row[i], column.unit) for row in report.rows]
        cells[:0] = [printable(column.heading)] * report.headed
        columns.append(cells)
        longest.append(max(map(cell_len, cells)))
        word = max(cell_len(word) for cell in cells for word in cell.split() or [""])
        folded = max(FOLDED, word if word <= WORD else 0)
        needed.append(min(longest[-1], folded) if column.unit == "text" else longest[-1])
    names = list(range(report.labels))
    named = sum(needed[i] + gap for i in names)
    tables: list[list[int]] = [[]]
    for i in range(report.labels, len(needed)):
        if named + sum(needed[j] + gap for j in (*tables[-1], i)) - gap > width and tables[-1]:
            tables.append([])
        tables[-1].append(i)
    if len(tables) > 1 and len(tables[-1]) == 1 and len(tables[-2]) > 2:
        tables[-1].insert(0, tables[-2].pop())  # no table with a single column
    distinct = len({tuple(row[: report.labels]) for row in report.rows}) == len(report.rows)
    if len(tables) > 1 and (not distinct or named > width / 2):
        rows = [[number, *row] for number, row in enumerate(report.rows, 1)]
        numbered = [Column("#", "count"), *report.columns]
        return _pieces(replace(report, columns=numbered, rows=rows, labels=1), width)
    pieces = []
    for table in tables:
        shown_columns = [*names, *table]
        spare = max(width - sum(needed[i] + gap for i in shown_columns) + gap, 0)
        wide = list(needed)
        for i in sorted(shown_columns, key=lambda i: longest[i] - needed[i]):
            wide[i] = min(longest[i], needed[i] + spare)
            spare -= wide[i] - needed[i]
        pieces.append(
            [(columns[i], wide[i], report.columns[i].align == "right") for i in shown_columns]
        )
    return pieces


def _padded(text: str, wide: int, right: bool) -> str:
    from rich.cells import cell_len

    gap = " " * (wide - cell_len(text))
    return gap + text if right else text + gap
