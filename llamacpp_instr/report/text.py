"""Renders reports as text for a terminal, a pipe or a file.

Invariant: no line is longer than the terminal is wide, unless a single number is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from llamacpp_instr.base.terminal import line_width, printable
from llamacpp_instr.report.arrange import condensed
from llamacpp_instr.report.report import Column, Report, shown

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


def _padded(text: str, wide: int, right: bool) -> str:
    from rich.cells import cell_len

    gap = " " * (wide - cell_len(text))
    return gap + text if right else text + gap


def _pieces(report: Report, width: int) -> list[list[tuple[list[str], int, bool]]]:
    """The tables that show a report, as columns: the cells, their width, whether they end at the
    right. Each has the columns that name a row, and as many others as fit. Where the names differ
    in no place or leave no room, the rows are numbered."""
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
