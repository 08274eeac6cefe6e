"""The answer to a question about a data set, as a report."""

from __future__ import annotations

from datetime import date, datetime
from decimal import Decimal
from typing import TYPE_CHECKING, Any

from llamacpp_instr.converters.fleet.database import ask
from llamacpp_instr.converters.fleet.queries import QUERIES, QUESTION, REGRESSIONS, regressions
from llamacpp_instr.report.report import Cell, Column, Report, Unit

if TYPE_CHECKING:
    from duckdb import DuckDBPyConnection

NUMBERS = ("BIGINT", "INTEGER", "HUGEINT", "UBIGINT", "SMALLINT", "TINYINT", "DOUBLE", "FLOAT")


def answer(connection: DuckDBPyConnection, question: str) -> Report:
    """The rows of a named query or of SQL. A column whose name is `ns` or ends in `_ns` is a time,
    `share` is one of 1, and `_per_s` a rate. Raises UsageError for SQL that is wrong."""
    if question == REGRESSIONS:
        return regressions(connection)
    known = QUERIES.get(question)
    columns, rows = ask(connection, known.sql if known else question)
    units = [Column(name, _unit(name, kind), name) for name, kind in columns]
    cells = [[_cell(value) for value in row] for row in rows]
    labels = next((i for i, of in enumerate(units) if of.unit != "text"), len(units))
    title, key = (known.question, question) if known else ("Rows", "rows")
    return Report(title, units, cells, labels=max(1, labels), key=key)


def named_queries() -> Report:
    """Every named query, and what it answers."""
    rows: list[list[Cell]] = [[name, query.question] for name, query in QUERIES.items()]
    rows.append([REGRESSIONS, QUESTION])
    return Report("Named queries", [Column("name"), Column("question")], rows)


def _unit(name: str, kind: str) -> Unit:
    if not kind.startswith((*NUMBERS, "DECIMAL")):
        return "text"
    if name == "ns" or name.endswith("_ns"):
        return "ns"
    if name == "share" or name.endswith("_share"):
        return "fraction"
    if name.endswith("_per_s"):
        return "per_second"
    return "number" if kind.startswith(("DOUBLE", "FLOAT", "DECIMAL")) else "count"


def _cell(value: Any) -> Cell:
    if value is None or isinstance(value, str | int | float):
        return int(value) if isinstance(value, bool) else value
    if isinstance(value, Decimal):
        return float(value)
    if isinstance(value, datetime):
        return value.isoformat(" ", "milliseconds")
    if isinstance(value, date):
        return value.isoformat()
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)
