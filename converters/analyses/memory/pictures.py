"""The chart of a model's memory by kind."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from converters.report.page import Figure
from converters.report.plain_charts import Group, bars
from converters.report.report import Report


def draw_memory(reports: Sequence[Report]) -> Iterator[Figure]:
    """Bars of each report of a context's memory: what was measured, else predicted, by kind."""
    for report in reports:
        at = {column.name: i for i, column in enumerate(report.columns)}
        if not report.title.startswith("Memory") or "measured" not in at:
            continue
        rows = [row for row in report.rows if row[0] != "total"]
        for what in ("measured", "predicted"):
            values = [value for row in rows if isinstance(value := row[at[what]], int)]
            if values and len(values) == len(rows):
                names = [f"{row[0]}, {row[1]}" for row in rows]
                group = Group(what, values, "bytes")
                yield bars(f"{report.title} by kind", names, [group])
                break
