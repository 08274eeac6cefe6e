"""A report: a titled table with units and notes, how its cells are shown, and its rows in another
order, only the first or the largest of them, or equal ones once.

Invariant: cells hold unrounded numbers in nanoseconds, bytes, counts and shares. Only text shows
them rounded and in other units; JSON has them as they are.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, TypeAlias

from llamacpp_instr.base.errors import UsageError
from llamacpp_instr.base.terminal import counted, printable

Unit = Literal[
    "text", "count", "id", "ns", "bytes", "share", "fraction", "flop", "per_second", "rate",
    "flop_per_second", "bytes_per_second", "layer", "ratio", "bits", "number", "decibel", "cosine",
    "perplexity", "nats", "probability",
]  # fmt: skip
Cell: TypeAlias = "str | int | float | None"
"""None means not measured; text shows an empty cell"""


class AtMost(float):
    """An upper bound: text shows it with ≤, JSON lists its column in the row's `at_most`."""


BOUND = "≤: at most. It is not known what a mask hid from attention, or which experts were used."


def rate_of(amount: float, ns: float, bound: bool) -> float | None:
    """Amount per second, or None if there is none; an AtMost if the amount is an upper bound."""
    if not amount or not ns:
        return None
    rate = amount / ns * 1e9
    return AtMost(rate) if bound else rate


Figures: TypeAlias = dict[str, tuple[Cell, Unit]]
"""the numbers in the notes: name -> value and unit"""

MOST_ROWS = 5000
MANY_LAYERS = 12
"""rows above which equal layers are one row"""

BAR = 10
"""characters in a full bar"""


def key_of(title: str) -> str:
    """The name of a title for scripts: that of `Tokens/s, median` is tokens_per_s_median."""
    words = title.lower()
    for sign, word in (("/", "per"), ("%", "percent"), ("±", "error of")):
        words = words.replace(sign, f" {word} ")
    return "_".join(re.findall(r"[^\W_]+", words))


@dataclass(frozen=True)
class Column:
    """A column: its heading and the unit of its cells."""

    name: str
    unit: Unit = "text"
    key: str = ""
    """its name for scripts, which must not change with the heading; by default made from it"""

    def __post_init__(self) -> None:
        object.__setattr__(self, "key", self.key or key_of(self.name))

    @property
    def align(self) -> Literal["left", "right"]:
        return "left" if self.unit in ("text", "share") else "right"

    @property
    def heading(self) -> str:
        """The name where cells show their unit: `p50_ns` is p50 there."""
        return self.name.removesuffix("_ns") if self.unit == "ns" else self.name


def known(value: float | None) -> float | None:
    """The value; None for NaN."""
    return None if value is None or math.isnan(value) else value


def columns_of(unit: Unit, *names: str) -> list[Column]:
    """A column of this unit for each name."""
    return [Column(name, unit) for name in names]


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
    most: int = MOST_ROWS
    """rows that a form for people shows"""
    key: str = ""
    """its name for scripts, which must not change with the title; by default made from the first"""

    def __post_init__(self) -> None:
        self.key = self.key or key_of(self.title)

    def filled(self) -> Report:
        """The report without its empty columns; those that name a row stay."""
        cells = list(zip(*self.rows, strict=True))
        used = [any(cell is not None for cell in column) for column in cells]
        kept = [i for i in range(len(cells)) if i < self.labels or used[i]]
        columns = [self.columns[i] for i in kept]
        rows = [[row[i] for i in kept] for row in self.rows]
        return replace(self, columns=columns, rows=rows)

    def keys(self) -> list[str]:
        """The columns' names for scripts. A repeated one gets a number."""
        keys = [column.key for column in self.columns]
        return [
            f"{key}_{before + 1}" if (before := keys[:i].count(key)) else key
            for i, key in enumerate(keys)
        ]

    def to_json(self) -> dict[str, Any]:
        """The report for scripts: its parts have names that do not change with their titles.

        JSON has no infinity, so infinity is the text "inf" or "-inf"."""
        keys = self.keys()
        return {
            "id": self.key,
            "title": self.title,
            "columns": [
                {"id": key, "title": column.name, "unit": _unit_of(column.unit)}
                for key, column in zip(keys, self.columns, strict=True)
            ],
            "rows": [_row_of(keys, row) for row in self.rows],
            "figures": {
                key_of(name): {"title": name, "value": _plain(value), "unit": _unit_of(unit)}
                for name, (value, unit) in self.figures.items()
            },
            "notes": self.notes,
        }


def _unit_of(unit: Unit) -> str:
    """As scripts know it: only a reader cares about bars and decimals."""
    return {"share": "fraction", "rate": "per_second"}.get(unit, unit)


def _row_of(names: list[str], row: list[Cell]) -> dict[str, Any]:
    bounds = [name for name, cell in zip(names, row, strict=True) if isinstance(cell, AtMost)]
    cells = dict(zip(names, map(_plain, row), strict=True))
    return cells | {"at_most": bounds} if bounds else cells


def _plain(cell: Cell) -> Cell:
    return str(cell) if isinstance(cell, float) and math.isinf(cell) else cell


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
    if unit in _SCALES:
        is_exact = unit in ("ns", "bytes")
        return _scaled(cell if is_exact else float(cell), *_SCALES[unit])
    if unit == "share":
        filled = round(min(max(cell, 0.0), 1.0) * BAR * 2)
        bar = "█" * (filled // 2) + "▌" * (filled % 2)
        return f"{100 * cell:5.1f} % {bar}"
    if unit == "per_second":
        return three_digits(cell)
    if unit == "id":
        return str(cell)
    if unit == "layer":
        return "none" if cell < 0 else str(cell)
    if unit in ("fraction", "probability"):
        cell *= 100
    text = _FORMATS.get(unit, "{:,}").format(cell)
    is_zero = unit in ("nats", "probability") and not text.strip("-0. %")
    return text.lstrip("-") if is_zero else text


_FORMATS: dict[str, str] = {
    "fraction": "{:.1f} %",
    "rate": "{:.2f}",
    "ratio": "{:.3f}",
    "bits": "{:.2f}",
    "number": "{:.5g}",
    "decibel": "{:.1f} dB",
    "cosine": "{:.6f}",
    "perplexity": "{:.4f}",
    "nats": "{:.6f}",
    "probability": "{:.3f} %",
}
_SCALES: dict[str, tuple[int, tuple[str, ...]]] = {
    "ns": (1000, ("ns", "µs", "ms", "s")),
    "bytes": (1024, ("B", "KiB", "MiB", "GiB", "TiB")),
    "flop": (1000, ("", "K", "M", "G", "T")),
    "flop_per_second": (1000, ("", "K", "M", "G", "T")),
    "bytes_per_second": (1000, ("B", "KB", "MB", "GB", "TB")),
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
            return f"{three_digits(number)} {unit}"
        number /= step
    return f"{three_digits(number)} {units[-1]}"


def three_digits(number: float) -> str:
    """With as many decimals as a measurement deserves."""
    if abs(number) >= 99.95:
        return f"{number:,.0f}"
    return f"{number:.1f}" if abs(number) >= 9.995 else f"{number:.2f}"


# --- the rows ---


def arrange(report: Report, sort: str | None = None, top: int | None = None) -> Report:
    """The report with its rows by the column `sort`, and only the first `top` of them.

    Numbers are in descending order, texts in ascending order; cells that were not measured come
    last. A note says how many rows were left out. Raises UsageError for a column that the report
    lacks.
    """
    rows, notes = list(report.rows), list(report.notes)
    if sort is not None:
        names = [column.name for column in report.columns]
        if sort not in names:
            raise UsageError(f"--sort {sort}: the columns are {', '.join(names)}")

        def place(row: list[Cell]) -> tuple[bool, float, str]:
            cell = row[names.index(sort)]
            number, text = (0.0, cell) if isinstance(cell, str) else (-(cell or 0), "")
            return cell is None, number, text

        rows.sort(key=place)
    if top is not None and len(rows) > top:
        notes.insert(0, f"Not shown: {counted(len(rows) - top, 'more row')} (--top {top}).")
        rows = rows[:top]
    return replace(report, rows=rows, notes=notes)


def condensed(report: Report) -> Report:
    """The report as forms for people show it: without empty columns, with layers that look the same
    in one row, and, if there are many rows, the largest. Notes say what is missing."""
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
