"""A report: a titled table with units and notes, as text and as JSON.

Invariant: cells hold unrounded numbers in nanoseconds, bytes, counts and shares. Only text shows
them rounded and in other units; JSON has them as they are.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, TypeAlias

from llamacpp_instr.terminal import counted, line_width, printable

Unit = Literal[
    "text",
    "count",
    "ns",
    "bytes",
    "share",
    "fraction",
    "flop",
    "per_second",
    "flop_per_second",
    "bytes_per_second",
    "layer",
    "ratio",
    "bits",
    "number",
    "decibel",
    "cosine",
    "perplexity",
    "nats",
    "probability",
]
Cell: TypeAlias = "str | int | float | None"
"""None means not measured; text shows an empty cell"""


class AtMost(float):
    """An upper bound: text shows it with ≤, JSON lists its column in the row's `at_most`."""


BOUND = "≤: attention may have read fewer cells; how many the mask hid is not known."


def rate_of(amount: float, ns: float, bound: bool) -> float | None:
    """Amount per second, or None if there is none; an AtMost if the amount is an upper bound."""
    if not amount or not ns:
        return None
    rate = amount / ns * 1e9
    return AtMost(rate) if bound else rate


Figures: TypeAlias = dict[str, tuple[Cell, Unit]]
"""the numbers in the notes: name -> value and unit"""

FOLDED, WORD = 22, 40
"""width to which a column of text may be folded, and up to which its words stay whole"""

PROSE = 100
"""width of a note on a wide terminal"""

MOST_ROWS = 5000
"""rows that a form for people shows"""

BAR = 10
"""characters in a full bar"""


@dataclass(frozen=True)
class Column:
    """A column: its heading and the unit of its cells."""

    name: str
    unit: Unit = "text"

    @property
    def align(self) -> Literal["left", "right"]:
        return "left" if self.unit in ("text", "share") else "right"

    @property
    def heading(self) -> str:
        """The name where cells show their unit: `p50_ns` is p50 there."""
        return self.name.removesuffix("_ns") if self.unit == "ns" else self.name


@dataclass
class Report:
    """One table. Rows have a cell for each column; notes are complete sentences."""

    title: str
    columns: list[Column]
    rows: list[list[Cell]]
    notes: list[str] = field(default_factory=list)
    headed: bool = True
    """whether the columns' names are shown in text"""
    figures: Figures = field(default_factory=dict)
    """shown in JSON only"""
    labels: int = 1
    """the first columns, which name a row"""

    def filled(self) -> Report:
        """The report without its empty columns; those that name a row stay."""
        cells = list(zip(*self.rows, strict=True))
        kept = [
            i
            for i, column in enumerate(cells)
            if i < self.labels or any(c is not None for c in column)
        ]
        columns = [self.columns[i] for i in kept]
        rows = [[row[i] for i in kept] for row in self.rows]
        return replace(self, columns=columns, rows=rows)

    def largest(self, most: int = MOST_ROWS) -> Report:
        """The report with at most `most` rows, in their order: the largest by the first times or
        bytes, else the first ones. A note counts the rest."""
        if len(self.rows) <= most:
            return self
        units = [column.unit for column in self.columns[self.labels :]]
        unit = next((unit for unit in units if unit in ("ns", "bytes")), None)
        at = [i for i, column in enumerate(self.columns) if column.unit == unit]
        sizes = [max((float(row[i] or 0) for i in at), default=0.0) for row in self.rows]
        kept = sorted(sorted(range(len(sizes)), key=sizes.__getitem__, reverse=True)[:most])
        note = f"Not shown: {counted(len(sizes) - most, 'more row')}."
        return replace(self, rows=[self.rows[i] for i in kept], notes=[note, *self.notes])

    def to_json(self) -> dict[str, Any]:
        """The report for scripts: rows as objects by column name, the units, the figures.

        JSON has no infinity, so infinity is the text "inf" or "-inf"."""
        names = [column.name for column in self.columns]
        return {
            "title": self.title,
            "units": {column.name: column.unit for column in self.columns},
            "rows": [_row_of(names, row) for row in self.rows],
            "figures": {
                name: {"value": _plain(value), "unit": unit}
                for name, (value, unit) in self.figures.items()
            },
            "notes": self.notes,
        }


def _row_of(names: list[str], row: list[Cell]) -> dict[str, Any]:
    bounds = [name for name, cell in zip(names, row, strict=True) if isinstance(cell, AtMost)]
    cells = dict(zip(names, map(_plain, row), strict=True))
    return cells | {"at_most": bounds} if bounds else cells


def _plain(cell: Cell) -> Cell:
    return str(cell) if isinstance(cell, float) and math.isinf(cell) else cell


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
    for report in (report.filled().largest() for report in reports):
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
        folded = max(FOLDED, min(word, WORD))
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
        piece = []
        for i in shown_columns:
            wide = min(longest[i], needed[i] + spare)
            spare -= wide - needed[i]
            piece.append((columns[i], wide, report.columns[i].align == "right"))
        pieces.append(piece)
    return pieces


def shown(cell: Cell, unit: Unit) -> str:
    """A cell as it is shown, with its unit."""
    if cell is None:
        return ""
    if isinstance(cell, str):
        return printable(cell)
    if isinstance(cell, AtMost):
        return f"≤ {shown(float(cell), unit)}"
    if math.isinf(cell):
        return "∞" if cell > 0 else "-∞"
    if unit in ("ns", "bytes"):
        return _scaled(cell, *_SCALES[unit])
    if unit in ("flop", "flop_per_second"):
        return _scaled(float(cell), *_SCALES["flop"])
    if unit == "bytes_per_second":
        return _scaled(float(cell), 1000, ("B", "KB", "MB", "GB", "TB"))
    if unit == "share":
        filled = round(min(max(cell, 0.0), 1.0) * BAR * 2)
        bar = "█" * (filled // 2) + "▌" * (filled % 2)
        return f"{100 * cell:5.1f} % {bar}"
    if unit == "fraction":
        return f"{100 * cell:.1f} %"
    if unit == "per_second":
        return _three_digits(cell)
    if unit == "ratio":
        return f"{cell:.3f}"
    if unit == "bits":
        return f"{cell:.2f}"
    if unit == "number":
        return f"{cell:.5g}"
    if unit == "decibel":
        return f"{cell:.1f} dB"
    if unit == "cosine":
        return f"{cell:.6f}"
    if unit == "layer":
        return "none" if cell < 0 else str(cell)
    if unit == "perplexity":
        return f"{cell:.4f}"
    if unit == "nats":
        return _without_minus_zero(f"{cell:.6f}")
    if unit == "probability":
        return _without_minus_zero(f"{100 * cell:.3f}") + " %"
    return f"{cell:,}"


_SCALES: dict[str, tuple[int, tuple[str, ...]]] = {
    "ns": (1000, ("ns", "µs", "ms", "s")),
    "bytes": (1024, ("B", "KiB", "MiB", "GiB", "TiB")),
    "flop": (1000, ("", "K", "M", "G", "T")),
}


def scale_of(unit: Literal["ns", "bytes", "flop"]) -> dict[str, Any]:
    """How a page's script shows amounts of this unit: the step from one unit to the next."""
    step, units = _SCALES[unit]
    return {"step": step, "units": units}


def _scaled(value: float, step: int, units: Sequence[str]) -> str:
    if abs(value) < step and isinstance(value, int):
        return f"{value} {units[0]}"
    number = float(value)
    for unit in units[:-1]:
        # 999.96 would be rounded to 1000
        if abs(number) < step * 0.9995:
            return f"{_three_digits(number)} {unit}"
        number /= step
    return f"{_three_digits(number)} {units[-1]}"


def _without_minus_zero(number: str) -> str:
    return number if number.strip("-0.") else number.lstrip("-")


def _three_digits(number: float) -> str:
    if abs(number) >= 99.95:
        return f"{number:,.0f}"
    return f"{number:.1f}" if abs(number) >= 9.995 else f"{number:.2f}"
