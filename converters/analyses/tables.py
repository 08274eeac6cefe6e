"""What the tables of all reports need: headings by unit, groups, and columns that are left out."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from dataclasses import replace
from typing import TYPE_CHECKING, TypeAlias, TypeVar

from llamacpp_instr.report.report import Column, Report, Unit, columns_of

if TYPE_CHECKING:
    from typing_extensions import Unpack

Headings: TypeAlias = "str | Column | tuple[Unit, Unpack[tuple[str, ...]]]"
"""a column of text, a column, or a unit and the names of columns that have it"""
Item = TypeVar("Item")
Key = TypeVar("Key", bound=Hashable)


def header(*parts: Headings) -> list[Column]:
    """The columns of a table: `header("op", ("ns", "time", "median"))` has one of text and two of
    ns."""
    columns: list[Column] = []
    for part in parts:
        if isinstance(part, tuple):
            unit, *names = part
            columns += columns_of(unit, *names)
        else:
            columns.append(part if isinstance(part, Column) else Column(part))
    return columns


def grouped(items: Iterable[Item], key: Callable[[Item], Key]) -> dict[Key, list[Item]]:
    """The items of each key, in the order in which the keys first occur."""
    groups: dict[Key, list[Item]] = {}
    for item in items:
        groups.setdefault(key(item), []).append(item)
    return groups


def layer_order(layer: int) -> tuple[bool, int]:
    """Sorts layers; what is in none, -1, comes last."""
    return layer < 0, layer


def without(report: Report, *names: str) -> Report:
    """The report without the columns of these names."""
    kept = [i for i, column in enumerate(report.columns) if column.name not in names]
    columns = [report.columns[i] for i in kept]
    rows = [[row[i] for i in kept] for row in report.rows]
    return replace(report, columns=columns, rows=rows)
