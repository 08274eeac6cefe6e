"""Which share of the time the definitions of a data set cover."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from llamacpp_instr.base.errors import UsageError
from llamacpp_instr.converters.exports.flashinfer.workloads import Found
from llamacpp_instr.report.report import Cell, Column, Report, columns_of, shown

NOT_FOUND = "definition not found"


def load_definitions(dataset: Path) -> dict[str, dict[str, int]]:
    """The constant axes of each definition of a data set, by name. Raises `UsageError` for a folder
    that is not one, and for a file that is not a definition."""
    folder = dataset / "definitions"
    files = sorted(folder.rglob("*.json")) if folder.is_dir() else []
    if not files:
        raise UsageError(f"{dataset} is not a data set of flashinfer-bench: it has no definitions")
    found = {}
    for file in files:
        try:
            whole: Any = json.loads(file.read_bytes())
            axes = {name: of["value"] for name, of in whole["axes"].items() if "value" in of}
            found[str(whole["name"])] = axes
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            raise UsageError(f"{file} is not a definition of flashinfer-bench") from None
    return found


def coverage_report(found: Found, there: dict[str, dict[str, int]] | None) -> Report:
    """A row for each definition, and for each op without one, with its share of the time of all
    kernels. `there` are the definitions of another data set, for the last column."""
    described = sum(of.ns for of in found.workloads.values())
    total = described + sum(of.ns for of in found.undescribed.values())
    rows: list[list[Cell]] = []
    covered = 0
    for definition in found.catalog:
        workloads = [of for of in found.workloads.values() if of.name == definition.name]
        ns = sum(of.ns for of in workloads)
        row: list[Cell] = [
            definition.name, definition.op_type, len(workloads), sum(of.times for of in workloads),
            ns, ns / total if total else None,
        ]  # fmt: skip
        if there is not None:
            axes = there.get(definition.name)
            status = NOT_FOUND
            if axes is not None:
                differ = sorted(
                    name for name, n in definition.fixed.items() if axes.get(name, n) != n
                )
                status = f"{', '.join(differ)} differ" if differ else "found"
            covered += ns if status == "found" else 0
            row.append(status)
        rows.append(row)
    for op, of in found.undescribed.items():
        rows.append(
            [op, None, None, of.times, of.ns, of.ns / total if total else None]
            + [NOT_FOUND] * (there is not None)
        )
    rows.sort(key=lambda row: -(row[4] if isinstance(row[4], int) else 0))
    columns = [
        *columns_of("text", "definition", "type"),
        *columns_of("count", "workloads", "times"),
        Column("time", "ns"),
        Column("share", "fraction"),
    ]
    if there is not None:
        columns.append(Column("in the data set"))
    report = Report("Definitions", columns, rows)
    report.figures = {
        "time of all kernels": (total, "ns"),
        "described": (described / total if total else 0, "fraction"),
    }
    if there is not None:
        share = covered / total if total else 0.0
        report.figures["covered"] = (share, "fraction")
        report.notes.append(
            f"The data set has a definition for {shown(share, 'fraction')} of the time."
        )
    if found.undescribed:
        report.notes.append("Rows without a type are ops that no definition describes.")
    if any(of.at_most for of in found.workloads.values()):
        report.notes.append(
            "The log does not record what some masks showed: their workloads see all cells."
        )
    report.notes += found.notes
    return report
